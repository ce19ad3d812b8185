"""Rotation and products of many tokens with two-bit weights compile for every GPU generation we name, without spilling."""

from __future__ import annotations

import importlib.util

import pytest
from compile_tool import ARCHITECTURES, compile_cases

SHARED_LIMIT = 99 * 1024
"""The least that a served GPU gives a program: defaults stay within it everywhere."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
@pytest.mark.slow
@pytest.mark.parametrize("module", ["hadamard_cases", "pq2_gemm_cases"])
def test_kernels_compile_without_spills(module: str) -> None:
    compiled = compile_cases(module)
    assert {result.arch for result in compiled} == set(ARCHITECTURES)
    assert [result for result in compiled if result.spill_bytes > 0] == []
    assert [result for result in compiled if result.shared_bytes > SHARED_LIMIT] == []
