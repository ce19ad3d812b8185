"""The decoder's ops on a GPU: bfloat16 at the shapes of Qwen3-8B, and replay of a captured chain."""

from __future__ import annotations

import pytest
import torch
from poison import choice

from freetoken.kernels import checking
from freetoken.kernels.checking import relative_rms
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.rms_norm import reference as norm_reference
from freetoken.kernels.rope_kv import RopeKv
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.silu_mul import reference as silu_reference
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.kernels.small_gemm import reference as gemm_reference

pytestmark = pytest.mark.gpu

BOUND = checking.RELATIVE_RMS[torch.bfloat16]
HIDDEN, FFN, EPS = 4096, 12288, 1e-6
DECODER_SHAPES = [(6144, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN), (151936, HIDDEN)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def fused_gemm() -> SmallGemm:
    return SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "triton")))


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_norm_and_activation(tokens: int) -> None:
    norm, act = RmsNorm(choice("rms_norm", "triton")), SiluMul(choice("silu_mul", "triton"))
    x, residual, weight, gate_up = (
        random(tokens, HIDDEN),
        random(tokens, HIDDEN),
        random(HIDDEN),
        random(tokens, 2 * FFN),
    )
    y, total = norm.add(x, weight, EPS, residual)
    expected_y, expected_total = norm_reference.rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, expected_total) and relative_rms(y, expected_y) < BOUND
    assert relative_rms(act(gate_up), silu_reference.silu_mul(gate_up)) < BOUND


@pytest.mark.parametrize(("n", "k"), DECODER_SHAPES)
@pytest.mark.parametrize("m", [1, 2, 5, 16])
def test_products(m: int, n: int, k: int) -> None:
    gemm, x, weight = fused_gemm(), random(m, k), random(n, k) * k**-0.5
    gemm.reserve(weight, silu=n == 2 * FFN)
    assert relative_rms(gemm.linear(x, weight), gemm_reference.linear(x, weight)) < BOUND
    if n == 2 * FFN:
        assert relative_rms(gemm.linear_silu_mul(x, weight), gemm_reference.linear_silu_mul(x, weight)) < BOUND


@pytest.mark.parametrize(("n", "k"), [(96, 5120), (128, 2048), (7, 96), (40, 72)])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 24, 31, 32])
def test_narrow_products(m: int, n: int, k: int) -> None:
    gemm, x, weight, bias = fused_gemm(), random(m, k), random(n, k) * k**-0.5, random(n)
    gemm.reserve(weight, silu=False)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = [x.to(dtype), weight.to(dtype), bias.to(dtype)]
        for more in ([], [inputs[2]]):
            expected = gemm_reference.linear(*(part.float() for part in (*inputs[:2], *more)))
            # Sums that nearly cancel keep the error of their terms.
            assert (gemm.linear(*inputs[:2], *more).float() - expected).square().mean().sqrt() < BOUND


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_rope_kv(tokens: int) -> None:
    angles = torch.rand(4096, 64, device="cuda") * 6
    table = torch.cat([angles.cos(), angles.sin()], -1)
    qkv, q_norm, k_norm = random(tokens, 48 * 128), random(128), random(128)
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    slots = torch.randperm(2048, device="cuda")[:tokens] + 16
    slots[tokens // 2 + 1 :: 5] = -1
    found = []
    for impl in ("triton", "reference"):
        pools = [torch.full((130, 8, 16, 128), -7.0, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        rope = RopeKv(choice("rope_kv", impl), table)
        found.append((rope(qkv, *pools, rope.prepare(positions, slots, 16), q_norm, k_norm, EPS), *pools))
    for ours, theirs in zip(*found, strict=True):
        assert relative_rms(ours, theirs) < BOUND
    assert torch.equal(found[0][2], found[1][2])


def test_a_captured_chain_replays_bit_for_bit() -> None:
    """Norm, product, activation and product, early launches included, on changing inputs."""
    gemm, norm = fused_gemm(), RmsNorm(choice("rms_norm", "triton"))
    up, down, weight = random(2 * FFN, HIDDEN) * HIDDEN**-0.5, random(HIDDEN, FFN) * FFN**-0.5, random(HIDDEN)
    x = random(1, HIDDEN)

    def chain() -> torch.Tensor:
        hidden, residual = norm(x, weight, EPS), x
        for _ in range(4):
            hidden, residual = norm.add(gemm.linear(gemm.linear_silu_mul(hidden, up), down), weight, EPS, residual)
        return hidden

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        x.copy_(random(1, HIDDEN))
        eager = chain()
        graph.replay()
        assert torch.equal(captured, eager) and bool(torch.isfinite(eager).all())
