"""RMSNorm: kernel against reference, reference against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.rms_norm import RmsNorm, reference, triton

EPS = 1e-6


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (5, 1), (3, 7), (2, 576), (4, 1000), (0, 16)])
def test_kernel_equals_reference(
    shape: tuple[int, int], dtype: torch.dtype, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (torch.randn(shape) * 3).to(DEVICE, dtype)
    weight = torch.randn(shape[1]).to(DEVICE, dtype)
    other = torch.randn(shape).to(DEVICE, dtype) if residual else None
    kept = [tensor.clone() for tensor in (x, weight, *([other] if other is not None else []))]
    expected = reference.rms_norm(x, weight, EPS, other)
    with poisoned_outputs(monkeypatch):
        actual = triton.rms_norm(x, weight, EPS, other)
    if other is not None:
        assert torch.equal(actual[1], expected[1])
        actual, expected = actual[0], expected[0]
        assert torch.equal(other, kept[2])
    assert actual.dtype == dtype and actual.shape == shape
    assert relative_rms(actual, expected) <= checking.RELATIVE_RMS[dtype] / 10
    assert torch.equal(x, kept[0]) and torch.equal(weight, kept[1])


def test_reference_equals_scalar_python() -> None:
    x, other = [[1.0, -2.0, 3.5], [0.0, 0.25, -8.0]], [[0.5, 0.5, -1.5], [0.0, 0.0, 8.0]]
    weight = [2.0, -1.0, 0.5]
    y, total = reference.rms_norm(torch.tensor(x), torch.tensor(weight), 0.1, torch.tensor(other))
    for row in range(2):
        sums = [a + b for a, b in zip(x[row], other[row], strict=True)]
        root = math.sqrt(sum(value * value for value in sums) / 3 + 0.1)
        assert total[row].tolist() == sums
        for column in range(3):
            assert math.isclose(float(y[row, column]), weight[column] * sums[column] / root, rel_tol=1e-6)


def test_half_precision_rounds_where_the_models_do() -> None:
    x, weight = torch.randn(3, 40).half(), torch.randn(40).half()
    wide = x.float()
    normal = (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).half()
    assert relative_rms(reference.rms_norm(x, weight, EPS), weight * normal) < 1e-4


@pytest.mark.parametrize("residual", [False, True])
def test_a_float32_weight_rounds_the_product_alone(residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 40).to(DEVICE).half(), 1 + torch.randn(40, device=DEVICE) / 8
    other = torch.randn(3, 40).to(DEVICE).half() if residual else None
    wide = (x if other is None else x + other).float()
    expected = (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight).half()
    with poisoned_outputs(monkeypatch):
        fused = triton.rms_norm(x, weight, EPS, other)
    plain = reference.rms_norm(x, weight, EPS, other)
    for y in (fused, plain):
        y = y[0] if isinstance(y, tuple) else y
        assert y.dtype == torch.float16
        assert relative_rms(y, expected) < 1e-5, "one rounding to half precision more would be 3e-4"


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RmsNorm(choice("rms_norm", "check"))
    x, weight, other = (
        torch.randn(2, 8, device=DEVICE),
        torch.randn(8, device=DEVICE),
        torch.randn(2, 8, device=DEVICE),
    )
    torch.testing.assert_close(norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(norm.add(x, weight, EPS, other)[1], x + other)
    monkeypatch.setattr(reference, "rms_norm", lambda x, weight, eps, residual=None: x * 1.01)
    with pytest.raises(KernelCheckError, match=r"rms_norm: the output differs .* relative RMS"):
        norm(x, weight, EPS)


def test_check_mode_refuses_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RmsNorm(choice("rms_norm", "check"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelCheckError, match=r"FREETOKEN_RMS_NORM=check .* add --disable-cuda-graph"):
        norm(torch.ones(1, 4), torch.ones(4), EPS)


def test_relative_rms_sees_nan_and_zero() -> None:
    ones = torch.ones(4)
    assert relative_rms(torch.zeros(4), torch.zeros(4)) == 0
    assert relative_rms(ones, torch.zeros(4)) == 1
    with pytest.raises(KernelCheckError):
        checking.require_close("op", "y", ones * float("nan"), ones)
    with pytest.raises(KernelCheckError):
        checking.require_close("op", "y", ones, torch.zeros(4))
