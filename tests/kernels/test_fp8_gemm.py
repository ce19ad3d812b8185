"""Dense products with FP8 weights: the op against dequantised torch, dequantisation against scalar Python."""

from __future__ import annotations

import pytest
import torch
from expert_inputs import make_weight, scalar_weight
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import block_fp8, fp8_gemm
from freetoken.kernels.block_fp8 import Fp8Weight, dequantise
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.fp8_gemm import Fp8Gemm, reference, triton
from freetoken.kernels.moe_gemm import triton as experts
from freetoken.kernels.silu_mul import SiluMul


def make_op(impl: str = "triton") -> Fp8Gemm:
    return Fp8Gemm(choice("fp8_gemm", impl), SiluMul(choice("silu_mul", "reference")))


@pytest.mark.parametrize("rows", [1, 2, 17, 20])
@pytest.mark.parametrize(("parts", "k"), [((16,), 40), ((7, 7), 130)])
def test_products(rows: int, parts: tuple[int, ...], k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, tiles, and more rows than tiles take; groups of 16 rows and of 1."""
    monkeypatch.setattr(fp8_gemm, "MAX_TOKENS", 17)
    weight = make_weight("fp8", sum(parts), k, parts=parts)
    assert isinstance(weight, Fp8Weight) and weight.rows in (16, 1)
    bias = torch.randn(sum(parts), device=DEVICE)
    op = make_op()
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        x = torch.randn(rows, k, device=DEVICE).to(dtype)
        for offset in (None, bias.to(dtype)):
            with poisoned_outputs(monkeypatch):
                plain, gated = op.linear(x, weight, offset), op.linear_silu_mul(x, weight, offset)
            assert plain.dtype == gated.dtype == dtype
            assert relative_rms(plain, reference.linear(x, weight, offset)) <= bound
            assert relative_rms(gated, reference.linear_silu_mul(x, weight, offset)) <= bound


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", [(33, 130), (1, 7), (128, 256)])
def test_dequantise_equals_reference(shape: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight("fp8", *shape)
    assert isinstance(weight, Fp8Weight)
    for dtype in (torch.float32, torch.float16):
        with poisoned_outputs(monkeypatch):
            actual = triton.dequantise(weight, dtype, native=native)
        assert torch.equal(actual, dequantise(weight, dtype))


def test_reference_equals_scalar_python() -> None:
    weight = make_weight("fp8", 2, 6, 131)
    wanted = torch.tensor(scalar_weight(weight), dtype=torch.float64, device=DEVICE)
    assert isinstance(weight, Fp8Weight) and weight.rows == 2
    assert relative_rms(dequantise(weight, torch.float32), wanted) < 1e-7
    assert torch.equal(block_fp8.plain(block_fp8.part(weight, 1), torch.float32), dequantise(weight, torch.float32)[1])


def test_groups_divide_every_part() -> None:
    assert block_fp8.group_rows(256, 1280) == 128
    assert block_fp8.group_rows(640, 48) == 16 and block_fp8.group_rows(7) == 1
    made = block_fp8.empty((3, 48, 130), 16, torch.device("cpu"))
    assert made.scale.shape == (3, 3, 2) and made.rows == 16


def test_no_rows() -> None:
    weight = make_weight("fp8", 8, 16)
    assert isinstance(weight, Fp8Weight)
    assert make_op().linear(torch.empty(0, 16, device=DEVICE), weight).shape == (0, 8)
    assert make_op().linear_silu_mul(torch.empty(0, 16, device=DEVICE), weight).shape == (0, 4)


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op, weight = make_op("check"), make_weight("fp8", 8, 16)
    assert isinstance(weight, Fp8Weight)
    x = torch.randn(1, 16, device=DEVICE)
    op.linear(x, weight)
    op.linear_silu_mul(x, weight)
    monkeypatch.setattr(experts, "down_routes", lambda x, *_: torch.ones(1, 8, device=DEVICE))
    with pytest.raises(KernelCheckError, match="fp8_gemm: the output differs"):
        op.linear(x, weight)
