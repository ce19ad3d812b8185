"""The kernels of ``qwen4_exp`` compile for every GPU generation we name, without spilling and within its shared memory."""

from __future__ import annotations

import importlib.util

import pytest
from compile_tool import ARCHITECTURES, compile_cases

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
@pytest.mark.slow
def test_qwen4_exp_kernels_compile_without_spills() -> None:
    compiled = compile_cases("qwen4_exp_cases")
    assert {result.arch for result in compiled} == set(ARCHITECTURES)
    assert [result for result in compiled if result.spill_bytes > 0] == []
    assert [result for result in compiled if result.shared_bytes > SHARED_LIMIT[result.arch]] == []
