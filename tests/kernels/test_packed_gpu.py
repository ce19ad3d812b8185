"""Rotation and products of many tokens on a GPU: bfloat16 at the shapes of the 27B, and replay of a captured chain."""

from __future__ import annotations

import pytest
import torch
from poison import choice

from freetoken.bench.pq2 import random_weight
from freetoken.kernels import checking, launch
from freetoken.kernels.checking import relative_rms
from freetoken.kernels.hadamard import Activation, Hadamard, RotateConfig, Rotation, reference, triton
from freetoken.kernels.pq2_gemm import FORMS, PQ2Gemm
from freetoken.kernels.pq2_gemv import PQ2Product, QuantisedActivation, TiledActivation
from freetoken.kernels.pq2_gemv import reference as product
from freetoken.kernels.pq2_gemv.activation import quantise_reference
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import SmallGemm

pytestmark = pytest.mark.gpu

HIDDEN, FFN, HEADS, HEAD, EPS = 5120, 17408, 48, 128, 1e-6
SHAPES = [(34816, HIDDEN), (16384, HIDDEN), (14336, HIDDEN), (HIDDEN, FFN), (HIDDEN, HEADS * HEAD)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def rotation(width: int) -> Rotation:
    return Rotation(1024, (torch.randint(0, 2, (width,), device="cuda") * 2 - 1).to(torch.int8))


def off_by_one(actual: Activation, expected: Activation) -> float:
    """Share of integers that differ, none by more than one."""
    assert not isinstance(actual, torch.Tensor) and not isinstance(expected, torch.Tensor)
    actual, expected = actual.rows(), expected.rows()
    off = (actual.natural().int() - expected.natural().int()).abs()
    assert int(off.max()) <= 1
    assert torch.equal(actual.sums, actual.natural().int().view(*actual.sums.shape, -1).sum(-1, dtype=torch.int32))
    assert relative_rms(actual.scales, expected.scales) < 1e-5
    return float(off.float().mean())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_producers(tokens: int, group: int) -> None:
    op, plain = (Hadamard(choice("hadamard", impl)) for impl in ("triton", "reference"))
    hidden, ffn, inner = rotation(HIDDEN), rotation(FFN), rotation(HEADS * HEAD)
    x, residual, weight = random(tokens, HIDDEN), random(tokens, HIDDEN), torch.rand(HIDDEN, device="cuda") + 0.5
    pair, o, z = random(tokens, 2 * FFN), random(tokens, HEADS, HEAD), random(tokens, 16384)[:, 10240:]
    head = torch.rand(HEAD, device="cuda") + 0.5
    exact = op.rotate(x, hidden, group)
    assert isinstance(exact, TiledActivation if tokens == 7 else QuantisedActivation)
    for part in ("values", "scales", "sums"):
        assert torch.equal(getattr(exact.rows(), part), getattr(plain.rotate(x, hidden, group), part))
    ours = op.norm(x, weight, EPS, hidden, group, residual, plain=True)
    theirs = plain.norm(x, weight, EPS, hidden, group, residual, plain=True)
    assert torch.equal(ours.residual, theirs.residual)
    assert ours.plain is not None and theirs.plain is not None
    assert relative_rms(ours.plain, theirs.plain) < checking.RELATIVE_RMS[torch.bfloat16]
    for actual, expected in (
        (ours.activation, theirs.activation),
        (op.silu_mul(pair, ffn, group), plain.silu_mul(pair, ffn, group)),
        (op.sigmoid_mul(o.flatten(1), z, inner, group), plain.sigmoid_mul(o.flatten(1), z, inner, group)),
        (op.gated_norm(o, z, head, EPS, inner, group), plain.gated_norm(o, z, head, EPS, inner, group)),
    ):
        assert off_by_one(actual, expected) < 1e-3


def test_settings_of_the_norm_do_not_change_its_result() -> None:
    x, weight, signs = random(3, HIDDEN), torch.rand(HIDDEN, device="cuda"), rotation(HIDDEN).signs
    found = [
        triton.norm(x, weight, EPS, signs, 1024, 128, config=RotateConfig(4, tiles)).activation for tiles in (1, 2, 0)
    ]
    for other in found[1:]:
        assert isinstance(other, TiledActivation) and isinstance(found[0], TiledActivation)
        assert torch.equal(other.rows().values, found[0].rows().values)


def test_floats_and_embedding_rows() -> None:
    op, turned = Hadamard(choice("hadamard", "triton")), rotation(HIDDEN)
    x, table = random(5, HIDDEN), random_weight(1000, HIDDEN, "cuda").row_order()
    assert torch.equal(op.rotate(x, turned, 0), reference.rotate(x, turned.signs, 1024))
    assert torch.equal(op.unrotate(x, turned), reference.unrotate(x, turned.signs, 1024))
    ids = torch.tensor([999, 0, 17], device="cuda")
    rows = op.embed(ids, table, turned, torch.bfloat16)
    assert torch.equal(rows, reference.embed(ids, table, turned.signs, 1024, torch.bfloat16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", [17, 64, 300, 2048])
def test_products(tokens: int, n: int, k: int, form: str) -> None:
    op, weight, x = PQ2Gemm(choice("pq2_gemm", "triton"), form), random_weight(n, k, "cuda"), random(tokens, k)
    for group in (128, 32) if form == "int8" and tokens < 100 else (128,):
        activation = quantise_reference(x, group) if form == "int8" else x
        out = torch.full((tokens, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        op.linear(activation, weight, torch.bfloat16, out)
        if isinstance(activation, QuantisedActivation):
            expected = product.linear(activation, weight, torch.bfloat16)
            wide = op.linear(activation, weight, torch.float32)
            assert relative_rms(wide, product.linear(activation, weight, torch.float32)) < 1e-5
        else:
            expected = product.float_linear(x, weight, torch.bfloat16)
        assert relative_rms(out, expected) < checking.RELATIVE_RMS[torch.bfloat16]


@pytest.mark.parametrize(("tokens", "form"), [(32, "int8"), (600, "dense"), (100, "float")])
def test_a_captured_chain_replays_bit_for_bit(tokens: int, form: str) -> None:
    """A whole feed-forward block, early launches, split products and slices included, on changing inputs. The library behind the
    dense form may choose another algorithm in a graph."""
    rotate, gemm = Hadamard(choice("hadamard", "triton")), PQ2Gemm(choice("pq2_gemm", "triton"), form)
    gemm.reserve(torch.device("cuda"))
    up, down = random_weight(2 * FFN, HIDDEN, "cuda"), random_weight(HIDDEN, FFN, "cuda")
    hidden, ffn, weight = rotation(HIDDEN), rotation(FFN), torch.rand(HIDDEN, device="cuda") + 0.5
    x, group = random(tokens, HIDDEN), 128 if form == "int8" else 0

    def chain() -> torch.Tensor:
        y, residual = x, x
        for _ in range(3):
            normed = rotate.norm(y, weight, EPS, hidden, group, residual)
            residual = normed.residual
            pair = gemm.linear(normed.activation, up, torch.bfloat16)
            y = gemm.linear(rotate.silu_mul(pair, ffn, group), down, torch.bfloat16)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(10):
        x.copy_(random(tokens, HIDDEN))
        eager = chain()
        graph.replay()
        assert bool(torch.isfinite(eager).all())
        assert torch.equal(captured, eager) or (form == "dense" and relative_rms(captured, eager) < 1e-2)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 32])
def test_a_product_under_another_replays_bit_for_bit(tokens: int) -> None:
    """Norm, two-bit product, dense product under it and a kernel that takes both, in a chain whose buffers are used again and again:
    against the same chain one after the other, eager and captured. Only what the order of kernels changes may differ, so nothing."""
    rotate, gemm = (
        Hadamard(choice("hadamard", "triton")),
        SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "triton"))),
    )
    packed = PQ2Product(choice("pq2_gemv", "triton"), choice("pq2_single", "triton"))
    layers = [
        (random_weight(16384, HIDDEN, "cuda"), random(128, HIDDEN) * HIDDEN**-0.5, random_weight(HIDDEN, 128, "cuda"))
        for _ in range(6)
    ]
    for _, gates, _ in layers:
        gemm.reserve(gates, silu=False)
    turned, weight, x = rotation(HIDDEN), torch.rand(HIDDEN, device="cuda") + 0.5, random(tokens, HIDDEN)
    if not launch.early(x):
        pytest.skip("kernels of this GPU do not start early")

    def chain(under: bool) -> torch.Tensor:
        y, residual = x, x
        for wide, gates, back in layers:
            normed = rotate.norm(y, weight, EPS, turned, 128, residual, plain=True)
            residual = normed.residual
            assert packed.leads(normed.activation) and normed.plain is not None
            if under:
                z = packed.linear(normed.activation, wide, torch.bfloat16, late=True)
                b = gemm.linear_under(normed.plain, gates)
            else:
                b = gemm.linear(normed.plain, gates)
                z = packed.linear(normed.activation, wide, torch.bfloat16)
            mixed = rotate.sigmoid_mul(z[:, -128:], b, Rotation(), 128)
            y = packed.linear(mixed, back, torch.bfloat16)
        return y

    chain(True)
    graphs, outputs = [], []
    for under in (True, False):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(chain(under))
        graphs.append(graph)
    for _ in range(50):
        x.copy_(random(tokens, HIDDEN))
        expected = chain(False)
        eager = chain(True)
        for graph in graphs:
            graph.replay()
        assert bool(torch.isfinite(expected).all())
        for actual in (eager, *outputs):
            assert torch.equal(actual, expected)


def test_a_chain_of_norms_that_make_the_product_beside() -> None:
    """One token: replays equal eager calls with ever new inputs, and the product that of a kernel of its own."""
    rotate, packed = Hadamard(choice("hadamard", "triton")), PQ2Product(*(choice("pq2", "triton") for _ in range(2)))
    gemm = SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "reference")))
    layers = [
        (random_weight(16384, HIDDEN, "cuda"), random(128, HIDDEN) * HIDDEN**-0.5, random_weight(HIDDEN, 128, "cuda"))
        for _ in range(6)
    ]
    turned, weight, x = rotation(HIDDEN), torch.rand(HIDDEN, device="cuda") + 0.5, random(1, HIDDEN)
    assert rotate.joins(x, turned) and gemm.joins(x, layers[0][1])

    def chain() -> torch.Tensor:
        y, residual, made = x, x, []
        for wide, gates, back in layers:
            normed = rotate.norm(y, weight, EPS, turned, 128, residual, beside=gates)
            residual = normed.residual
            assert normed.beside is not None
            z = packed.linear(normed.activation, wide, torch.bfloat16)
            mixed = rotate.sigmoid_mul(z[:, -128:], normed.beside, Rotation(), 128)
            y = packed.linear(mixed, back, torch.bfloat16)
            made.append(normed.beside)
        return torch.cat([*made, residual], 1)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain()
    for _ in range(50):
        x.copy_(random(1, HIDDEN))
        expected = chain()
        output.fill_(float("nan"))
        graph.replay()
        assert bool(torch.isfinite(expected).all()) and torch.equal(output, expected)
    alone = rotate.norm(x, weight, EPS, turned, 128, x, plain=True)
    joined = rotate.norm(x, weight, EPS, turned, 128, x, beside=layers[0][1])
    assert alone.plain is not None and joined.beside is not None
    assert relative_rms(joined.beside, gemm.linear(alone.plain, layers[0][1])) < checking.RELATIVE_RMS[x.dtype]
