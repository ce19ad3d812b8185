"""The SwiGLU activation: kernel against reference, reference against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.silu_mul import SiluMul, reference, triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 2048), (2, 3074), (0, 8)])
def test_kernel_equals_reference(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = (torch.randn(shape) * 4).to(DEVICE, dtype)
    kept = gate_up.clone()
    with poisoned_outputs(monkeypatch):
        actual = triton.silu_mul(gate_up)
    assert actual.dtype == dtype and actual.shape == (shape[0], shape[1] // 2)
    assert relative_rms(actual, reference.silu_mul(gate_up)) <= checking.RELATIVE_RMS[dtype] / 5
    assert torch.equal(gate_up, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 14), (2, 1024), (2, 1537), (0, 8)])
def test_gate_by_a_sigmoid(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both as views into wider rows."""
    wide = (torch.randn(shape[0], 2 * shape[1] + 3) * 4).to(DEVICE, dtype)
    x, gate, kept = wide[:, : shape[1]], wide[:, shape[1] + 3 :], wide.clone()
    for impl in ("triton", "check", "reference"):
        with poisoned_outputs(monkeypatch):
            actual = SiluMul(choice("silu_mul", impl)).sigmoid_mul(x, gate)
        assert actual.dtype == dtype and actual.shape == shape and actual.is_contiguous()
        assert relative_rms(actual, reference.sigmoid_mul(x, gate)) <= checking.RELATIVE_RMS[dtype] / 2
    assert torch.equal(wide, kept)


def test_extreme_gates_stay_finite() -> None:
    x, gate = torch.tensor([[2.0, 3.0, 4.0]], device=DEVICE), torch.tensor([[-1e4, 1e4, 0.0]], device=DEVICE)
    assert triton.sigmoid_mul(x, gate).tolist() == [[0.0, 3.0, 2.0]]
    gate_up = torch.tensor([[-1e4, 1e4, -100.0, 2.0, 3.0, 4.0]], device=DEVICE)
    assert triton.silu_mul(gate_up).tolist() == [[0.0, 3e4, 0.0]]


def test_reference_equals_scalar_python() -> None:
    gates, ups = [0.0, 1.0, -2.5, 7.0], [3.0, -1.0, 0.5, 2.0]
    result = reference.silu_mul(torch.tensor([gates + ups]))[0].tolist()
    for gate, up, value in zip(gates, ups, result, strict=True):
        assert math.isclose(value, gate / (1 + math.exp(-gate)) * up, rel_tol=1e-6)
    result = reference.sigmoid_mul(torch.tensor([ups]), torch.tensor([gates]))[0].tolist()
    for gate, up, value in zip(gates, ups, result, strict=True):
        assert math.isclose(value, up / (1 + math.exp(-gate)), rel_tol=1e-6)


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    act = SiluMul(choice("silu_mul", "check"))
    gate_up = torch.randn(2, 8, device=DEVICE)
    torch.testing.assert_close(act(gate_up), reference.silu_mul(gate_up))
    monkeypatch.setattr(reference, "silu_mul", lambda gate_up: gate_up[:, :4])
    with pytest.raises(KernelCheckError, match="silu_mul: the output differs"):
        act(gate_up)
    act.sigmoid_mul(gate_up, gate_up)
    monkeypatch.setattr(reference, "sigmoid_mul", lambda x, gate: x)
    with pytest.raises(KernelCheckError, match="silu_mul: the gated output differs"):
        act.sigmoid_mul(gate_up, gate_up)
