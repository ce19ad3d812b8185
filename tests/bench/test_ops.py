"""The rows of ``bench.ops``: every op has one, its small cases pass their check, and a wrong kernel is caught."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from freetoken.bench import ops
from freetoken.bench.op_cases import SMALL, Case, Sizes
from freetoken.bench.op_rows import OPS
from freetoken.bench.ops import OpCheckError


def test_the_command_line_knows_every_row() -> None:
    assert tuple(OPS) == ops.NAMES


@pytest.mark.parametrize("name", [name for name in OPS if not name.startswith("attn")])
def test_small_cases_are_green(name: str) -> None:
    torch.manual_seed(1)
    for case in OPS[name]("cpu", SMALL):
        # These have no outputs but of two bytes.
        short = name == "pq2_gemm_dense" or "rank" in case.shape
        assert ops.check(name, case) < (2e-3 if short else 1e-5)
        assert case.bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_full_cases_are_green(name: str) -> None:
    with torch.inference_mode():
        for case in OPS[name]("cuda", Sizes()):
            ops.check(name, case)


def test_slow_calls_are_timed_less_often() -> None:
    assert [ops.repeats_in(0.1, once, 30) for once in (0.0, 1e-4, 0.01, 0.5)] == [30, 30, 10, 5]


@pytest.mark.parametrize("exact", [False, True])
def test_a_wrong_kernel_is_red(exact: bool) -> None:
    good = torch.arange(8.0)
    wrong = good.clone()
    wrong[3] += 1
    case = Case({"tokens": 8}, lambda: (wrong,), lambda: (good,), 1.0, exact=exact)
    with pytest.raises(OpCheckError, match="tokens"):
        ops.check("x", case)
    assert ops.check("x", dataclasses.replace(case, fused=lambda: (good.clone(),))) == 0.0


def test_a_hole_is_red() -> None:
    good = torch.ones(4)
    poisoned = good.clone()
    poisoned[1] = float("nan")
    with pytest.raises(OpCheckError):
        ops.check("x", Case({}, lambda: (poisoned,), lambda: (good,), 1.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["all"]) == 1
    assert "GPU" in capsys.readouterr().err
