"""Experts and FP8 products on a GPU: bfloat16 at the widths of qwen4_exp, replay of a captured block, both forms of FP8."""

from __future__ import annotations

import pytest
import torch
from expert_inputs import make_routes, make_weight
from poison import choice

from freetoken.kernels import checking, launch
from freetoken.kernels.checking import relative_rms
from freetoken.kernels.fp8_gemm import Fp8Gemm
from freetoken.kernels.fp8_gemm import reference as fp8_reference
from freetoken.kernels.moe_gemm import MoeGemm, config, fragments, reference, triton
from freetoken.kernels.moe_route import MoeRoute
from freetoken.kernels.moe_route import reference as route_reference
from freetoken.kernels.silu_mul import SiluMul

pytestmark = pytest.mark.gpu

BOUND = checking.RELATIVE_RMS[torch.bfloat16]
EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 10, 2560, 640


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def make_layer(kind: torch.dtype | str) -> tuple[object, object]:
    gate_up = make_weight(kind, EXPERTS, 2 * WIDTH, HIDDEN, parts=(WIDTH,))
    return gate_up, make_weight(kind, EXPERTS, HIDDEN, WIDTH)


def make_op(impl: str = "triton") -> MoeGemm:
    return MoeGemm(choice("moe_gemm", impl), MoeRoute(choice("moe_route", impl)))


@pytest.mark.parametrize("routes", ["even", "skewed", "one", "holes"])
@pytest.mark.parametrize("kind", [torch.bfloat16, "fp8"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 300, 2048])
def test_layer(tokens: int, kind: torch.dtype | str, routes: str) -> None:
    """Every tile size and the route-by-route kernels, by density."""
    gate_up, down = make_layer(kind)
    ids, weights = make_routes(routes, tokens, TOP_K, EXPERTS)
    x, shared = random(tokens, HIDDEN), (random(tokens, HIDDEN), random(tokens))
    actual = make_op()(x, ids, weights, gate_up, down, shared)
    assert relative_rms(actual, reference.experts(x, ids, weights, gate_up, down, shared)) < BOUND


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("m", [16, 32, 64, 128])
def test_both_forms_of_fp8(m: int, native: bool) -> None:
    if native and not triton.has_fp8(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 type")
    gate_up, down = make_layer("fp8")
    ids, weights = make_routes("skewed", 40, TOP_K, EXPERTS)
    x = random(40, HIDDEN)
    groups = route_reference.group_by_expert(ids, EXPERTS, m)
    first, second = (config.pick_tile(m, k, 2, gated=gated) for k, gated in ((HIDDEN, True), (WIDTH, False)))
    hidden = triton.tiles(x, groups, gate_up, first, routes=ids.numel(), silu=True, native=native)
    parts = triton.tiles(hidden, groups, down, second, routes=ids.numel(), silu=False, native=native)
    wanted = reference.experts(x, ids, weights, gate_up, down)
    assert relative_rms(triton.combine(parts, ids, weights, None), wanted) < BOUND
    by_route = triton.gate_up_routes(x, ids, gate_up, config.pick_gate_up_route(HIDDEN, 1), native=native)
    out = triton.down_routes(by_route, (ids, weights), down, None, config.pick_down_route(WIDTH, 1), native=native)
    assert relative_rms(out, wanted) < BOUND


@pytest.mark.parametrize("tokens", [1, 2048])
def test_routing(tokens: int) -> None:
    route, logits = MoeRoute(choice("moe_route", "triton")), random(tokens, 513)
    for renormalise in (True, False):
        ids, weights = route(logits, 512, 10, renormalise)
        wanted, expected = route_reference.choose_experts(logits, 512, 10, renormalise)
        assert torch.equal(ids, wanted) and relative_rms(weights, expected) < 1e-5
    for block in (16, 128):
        order, experts = route.group(ids, 512, block)
        places, owners = route_reference.group_by_expert(ids, 512, block)
        used = (owners >= 0).repeat_interleave(block)
        assert torch.equal(experts, owners) and torch.equal(order[used], places[used])


@pytest.mark.parametrize("rows", [1, 8, 40, 128, 300])
def test_dense_fp8(rows: int) -> None:
    op = Fp8Gemm(choice("fp8_gemm", "triton"), SiluMul(choice("silu_mul", "triton")))
    weight, x = make_weight("fp8", 4096, HIDDEN), random(rows, HIDDEN)
    assert relative_rms(op.linear(x, weight), fp8_reference.linear(x, weight)) < BOUND
    assert relative_rms(op.linear_silu_mul(x, weight), fp8_reference.linear_silu_mul(x, weight)) < BOUND


DENSE = [(16384, HIDDEN), (13312, HIDDEN), (HIDDEN, 6144), (6144, HIDDEN)]


@pytest.mark.parametrize(("n", "k"), DENSE)
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fragments_of_dense_weights(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    weight, x = make_weight("fp8", n, k, parts=(n // 2,)), random(rows, k).to(dtype)
    op = Fp8Gemm(choice("fp8_gemm", "triton"), SiluMul(choice("silu_mul", "triton")))
    assert fragments.fits(x, weight) and fragments.fits(x, weight, silu=True)
    limit = checking.RELATIVE_RMS[dtype]
    assert relative_rms(op.linear(x, weight), fp8_reference.linear(x, weight)) <= limit
    assert relative_rms(op.linear_silu_mul(x, weight), fp8_reference.linear_silu_mul(x, weight)) <= limit


@pytest.mark.parametrize("routes", ["even", "one", "holes"])
@pytest.mark.parametrize("tokens", [1, 4, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fragments_of_routes(tokens: int, routes: str, dtype: torch.dtype) -> None:
    gate_up, down = make_layer("fp8")
    ids, weights = make_routes(routes, tokens, TOP_K, EXPERTS)
    x, shared = random(tokens, HIDDEN).to(dtype), (random(tokens, HIDDEN).to(dtype), random(tokens).to(dtype))
    first = config.pick_fragments(WIDTH, HIDDEN, ids.numel(), gated=True)
    hidden = fragments.rows(x, ids, gate_up, first, silu=True)
    out = fragments.routes_down(hidden, (ids, weights), down, shared, config.pick_down_fragments(WIDTH, TOP_K))
    wanted = reference.experts(x, ids, weights, gate_up, down, shared)
    assert relative_rms(out, wanted) <= checking.RELATIVE_RMS[dtype]


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_replayed_fragments_are_eager_ones(rows: int) -> None:
    """A chain of products launched early: each waits for what it reads, and none writes what another still reads."""
    op = Fp8Gemm(choice("fp8_gemm", "triton"), SiluMul(choice("silu_mul", "triton")))
    gate_up, down, x = (
        make_weight("fp8", 6144, HIDDEN, parts=(3072,)),
        make_weight("fp8", HIDDEN, 3072),
        random(rows, HIDDEN),
    )

    def chain() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = op.linear(op.linear_silu_mul(y, gate_up), down)
            y = (y / y.float().square().mean().sqrt()).bfloat16()
        return op.linear(op.linear_silu_mul(op.linear(op.linear_silu_mul(y, gate_up), down), gate_up), down)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(3):
        x.copy_(random(rows, HIDDEN))
        graph.replay()
        assert torch.equal(out, chain()) and out.float().std() > 0


@pytest.mark.parametrize("experts", [EXPERTS, 512])
def test_layers_launched_early_are_those_that_are_not(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice and both products of layer after layer, each token with experts of its own: weights asked for too early would be others'."""
    tokens = experts // (4 * TOP_K)
    gate_up = make_weight("fp8", experts, 2 * WIDTH, HIDDEN, parts=(WIDTH,))
    down, x = make_weight("fp8", experts, HIDDEN, WIDTH), random(tokens, HIDDEN)
    op, route = make_op(), MoeRoute(choice("moe_route", "triton"))

    def layers() -> torch.Tensor:
        y = x
        for _ in range(3):
            ids, weights = route(y[:, :experts], experts, TOP_K, True)
            y = op(y, ids, weights, gate_up, down)
        return y

    with monkeypatch.context() as patch:
        patch.setattr(launch, "EARLY_LAUNCH", False)
        layers()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(5):
        x.copy_(random(tokens, HIDDEN))
        graph.replay()
        with monkeypatch.context() as patch:
            patch.setattr(launch, "EARLY_LAUNCH", False)
            plain = layers()
        assert torch.equal(out, plain) and torch.equal(layers(), plain) and out.float().std() > 0


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_replay_follows_its_inputs(tokens: int, impl: str) -> None:
    """Captured once, then replayed for other tokens that choose other experts: a grid or a table baked in would show."""
    gate_up, down = make_layer("fp8")
    op, route = make_op(impl), MoeRoute(choice("moe_route", impl))
    x, logits = random(tokens, HIDDEN), random(tokens, EXPERTS)

    def layer() -> torch.Tensor:
        ids, weights = route(logits, EXPERTS, TOP_K, True)
        return op(x, ids, weights, gate_up, down)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        x.copy_(random(tokens, HIDDEN))
        logits.copy_(random(tokens, EXPERTS))
        graph.replay()
        ids, weights = route_reference.choose_experts(logits, EXPERTS, TOP_K, True)
        assert relative_rms(out, reference.experts(x, ids, weights, gate_up, down)) < BOUND
