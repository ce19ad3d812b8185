"""Layers of experts: kernels against torch, torch against scalar Python, which kernels run when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_inputs import make_routes, make_weight, scalar_experts
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking, moe_gemm
from freetoken.kernels.block_fp8 import part, plain
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.moe_gemm import MoeGemm, config, reference, triton
from freetoken.kernels.moe_gemm.config import RouteConfig, TileConfig
from freetoken.kernels.moe_route import MoeRoute
from freetoken.kernels.moe_route.reference import group_by_expert
from freetoken.kernels.small_gemm.reference import linear_silu_mul
from freetoken.runner.memory import MOE_SLICE_TOKENS

CASES: list[tuple[int, int, int, int, int, str, torch.dtype | str]] = [
    (1, 2, 5, 33, 7, "even", torch.float32),
    (1, 2, 5, 18, 24, "holes", "fp8"),
    (2, 3, 40, 12, 6, "one", torch.float16),
    (2, 2, 16, 40, 9, "skewed", "fp8"),
    (9, 2, 4, 65, 40, "holes", torch.float32),
    (21, 1, 6, 40, 17, "one", torch.float16),
    (19, 3, 6, 136, 24, "skewed", "fp8"),
    (9, 3, 3, 20, 7, "even", "fp8"),
]


def activations(kind: torch.dtype | str) -> torch.dtype:
    return torch.float32 if kind == "fp8" else kind


def make_layer(kind: torch.dtype | str, experts: int, hidden: int, width: int) -> tuple[Any, Any]:
    gate_up = make_weight(kind, experts, 2 * width, hidden, parts=(width, width))
    return gate_up, make_weight(kind, experts, hidden, width)


def make_shared(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An output, and logits that lie in a column of a wider matrix."""
    return torch.randn(tokens, hidden, device=DEVICE).to(dtype), torch.randn(tokens, 5, device=DEVICE).to(dtype)[:, 3]


def make_op() -> MoeGemm:
    return MoeGemm(choice("moe_gemm", "triton"), MoeRoute(choice("moe_route", "triton")))


@pytest.mark.parametrize(("tokens", "top_k", "experts", "hidden", "width", "routes", "kind"), CASES)
def test_layer_equals_reference(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    width: int,
    routes: str,
    kind: torch.dtype | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either path as the op takes it (one token or few routes: by route), with a shared expert and without."""
    dtype = activations(kind)
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    ids, weights = make_routes(routes, tokens, top_k, experts)
    gate_up, down = make_layer(kind, experts, hidden, width)
    op = make_op()
    for shared in (None, make_shared(tokens, hidden, dtype)):
        with poisoned_outputs(monkeypatch):
            actual = op(x, ids, weights, gate_up, down, shared)
        expected = reference.experts(x, ids, weights, gate_up, down, shared)
        assert actual.shape == (tokens, hidden) and actual.dtype == dtype
        assert relative_rms(actual, expected) <= checking.RELATIVE_RMS[dtype]


ROUTE_SETTINGS = [
    (RouteConfig(4, 32, 1), "fp8", False),
    (RouteConfig(2, 256, 4, unroll=2), "fp8", True),
    (RouteConfig(8, 128, 2, unroll=3), torch.float16, True),
]


@pytest.mark.parametrize(("settings", "kind", "native"), ROUTE_SETTINGS, ids=str)
@pytest.mark.parametrize("rows", [8, 5])
def test_route_settings(
    settings: RouteConfig, kind: torch.dtype | str, native: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product by itself, over two blocks of columns; scale groups of 8 rows and of 1; activations of 16 bits."""
    x = torch.randn(2, 140, device=DEVICE).half()
    ids, weights = make_routes("even", 2, 2, 3)
    gate_up, down = make_weight(kind, 3, 2 * rows, 140, parts=(rows, rows)), make_weight(kind, 3, rows, 140)
    hidden = torch.randn(4, 140, device=DEVICE).half()
    with poisoned_outputs(monkeypatch):
        first = triton.gate_up_routes(x, ids, gate_up, settings, native=native)
        second = triton.down_routes(hidden, (ids, weights), down, None, settings, native=native)
    chosen = ids.flatten().tolist()
    rows_of = x.repeat_interleave(2, 0)
    wanted = [linear_silu_mul(rows_of[i : i + 1], plain(part(gate_up, e), x.dtype)) for i, e in enumerate(chosen)]
    assert relative_rms(first, torch.cat(wanted)) <= 4e-3
    each = torch.stack([plain(part(down, expert), torch.float16).float() for expert in chosen])
    products = (each @ hidden[:, :, None].float()).view(2, 2, rows)
    assert relative_rms(second, (products * weights[:, :, None]).sum(1)) <= 4e-3


TILE_SETTINGS = [
    (TileConfig(16, 32, 64, 4, 2), "fp8", False),
    (TileConfig(32, 16, 128, 4, 1), "fp8", True),
    (TileConfig(16, 16, 32, 4, 1), torch.float16, True),
]


@pytest.mark.parametrize(("settings", "kind", "native"), TILE_SETTINGS, ids=str)
def test_tile_settings(
    settings: TileConfig, kind: torch.dtype | str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(21, 140, device=DEVICE).half()
    ids, weights = make_routes("skewed", 21, 2, 3)
    gate_up, down = make_layer(kind, 3, 140, 24)
    groups = group_by_expert(ids, 3, settings.block_m)
    with poisoned_outputs(monkeypatch):
        hidden = triton.tiles(x, groups, gate_up, settings, routes=42, silu=True, native=native)
        parts = triton.tiles(hidden, groups, down, settings, routes=42, silu=False, native=native)
        out = triton.combine(parts, ids, weights, None)
    assert relative_rms(out, reference.experts(x, ids, weights, gate_up, down)) <= 2e-3


@pytest.mark.parametrize("native", [True, False])
def test_every_fp8_value_is_exact(native: bool) -> None:
    """All 254 numbers of e4m3, subnormals among them, through both kernels."""
    values = torch.arange(256, dtype=torch.uint8)
    data = values[(values & 0x7F) != 0x7F].to(DEVICE).view(torch.float8_e4m3fn)[:, None].repeat(1, 16)
    weight = triton.Fp8Weight(data, torch.full((127, 1), 0.5, device=DEVICE))
    x = torch.zeros(2, 16, device=DEVICE)
    x[:, 3] = torch.tensor([1.0, -4.0])
    wanted = x @ data.float().t() * 0.5
    by_tile = triton.tiles(x, None, weight, TileConfig(16, 32, 16, 4, 1), routes=2, silu=False, native=native)
    by_route = triton.down_routes(x, None, weight, None, RouteConfig(4, 16, 1), native=native)
    assert torch.equal(by_tile, wanted) and torch.equal(by_route, wanted)


@pytest.mark.parametrize("kind", [torch.float32, "fp8"])
@pytest.mark.parametrize("routes", ["even", "holes"])
def test_reference_equals_scalar_python(kind: torch.dtype | str, routes: str) -> None:
    x = torch.randn(3, 20, device=DEVICE)
    ids, weights = make_routes(routes, 3, 2, 3)
    gate_up, down = make_layer(kind, 3, 20, 6)
    actual = reference.experts(x, ids, weights, gate_up, down)
    expected = torch.tensor(scalar_experts(x, ids, weights, gate_up, down), device=DEVICE)
    assert relative_rms(actual, expected) < 1e-6
    output, logits = make_shared(3, 20, torch.float32)
    gated = reference.experts(x, ids, weights, gate_up, down, (output, logits))
    expected = torch.tensor(
        [
            [a + b / (1 + 2.718281828459045 ** -float(g)) for a, b in zip(line, row)]
            for line, row, g in zip(actual.tolist(), output.tolist(), logits)
        ]
    )
    assert relative_rms(gated.cpu(), expected) < 1e-6


def test_captured_reference_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph every expert sees every token; what it adds is the same."""

    class OnCuda(torch.Tensor):
        is_cuda = True

    x = torch.randn(4, 12)
    ids, weights = (part.cpu() for part in make_routes("skewed", 4, 2, 5))
    gate_up, down = torch.randn(5, 6, 12), torch.randn(5, 12, 3)
    expected = reference.experts(x, ids, weights, gate_up, down)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    actual = reference.experts(x.as_subclass(OnCuda), ids, weights, gate_up, down)
    torch.testing.assert_close(actual.as_subclass(torch.Tensor), expected)


def test_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token or few routes go one by one; long inputs in slices."""
    seen: list[str] = []
    for name in ("gate_up_routes", "tiles"):
        real = getattr(triton, name)
        monkeypatch.setattr(triton, name, lambda *a, real=real, name=name, **k: (seen.append(name), real(*a, **k))[1])
    monkeypatch.setattr(moe_gemm, "SLICE_TOKENS", 5)
    op = make_op()
    gate_up, down = make_layer(torch.float32, 16, 8, 4)
    wanted = {1: ["gate_up_routes"], 2: ["gate_up_routes"], 3: ["tiles"] * 2, 12: ["tiles"] * 6}
    for tokens, calls in wanted.items():
        seen.clear()
        x = torch.randn(tokens, 8, device=DEVICE)
        ids, weights = make_routes("even", tokens, 2, 16)
        shared = make_shared(tokens, 8, torch.float32)
        actual = op(x, ids, weights, gate_up, down, shared)
        assert seen == calls
        assert relative_rms(actual, reference.experts(x, ids, weights, gate_up, down, shared)) < 1e-5


def test_no_tokens() -> None:
    ids, weights = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
    assert make_op()(torch.empty(0, 8), ids, weights, torch.ones(4, 6, 8), torch.ones(4, 8, 3)).shape == (0, 8)


def test_padding_lanes_do_not_reach_others() -> None:
    """A lane of NaN beside real ones, as a padded batch may hold."""
    gate_up, down = make_layer(torch.float32, 4, 16, 8)
    x = torch.randn(9, 16, device=DEVICE)
    ids, weights = make_routes("even", 9, 2, 4)
    op = make_op()
    whole = op(x, ids, weights, gate_up, down)
    x[4] = float("nan")
    weights[4] = float("nan")
    spoiled = op(x, ids, weights, gate_up, down)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[others], whole[others]) and spoiled[4].isnan().all()


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op = MoeGemm(choice("moe_gemm", "check"), MoeRoute(choice("moe_route", "reference")))
    gate_up, down = make_layer(torch.float32, 4, 16, 8)
    x = torch.randn(3, 16, device=DEVICE)
    ids, weights = make_routes("even", 3, 2, 4)
    torch.testing.assert_close(op(x, ids, weights, gate_up, down), reference.experts(x, ids, weights, gate_up, down))
    monkeypatch.setattr(triton, "combine", lambda parts, *_: parts[:3] * 1.01)
    with pytest.raises(KernelCheckError, match="moe_gemm: the output differs"):
        op(x, ids, weights, gate_up, down)


def test_tiles_follow_density() -> None:
    sizes = [config.block_m(routes, 512) for routes in (640, 512 * 12, 512 * 13, 512 * 24, 512 * 48, 512 * 96)]
    assert sizes == [16, 16, 32, 32, 64, 128]
    assert config.route_by_route(1, 10, 8) and config.route_by_route(12, 10, 512)
    assert not config.route_by_route(13, 10, 512)
    assert config.SLICE_TOKENS == MOE_SLICE_TOKENS, "memory is planned for other slices than there are"


def test_a_weight_alone_is_cut_until_all_multiprocessors_work() -> None:
    for outputs, wanted in ((2560, 16), (5000, 32), (16384, 64), (10, 16)):
        assert config.pick_tile(16, 2560, 2, gated=False, alone=outputs).block_n == wanted
    assert config.pick_tile(128, 2560, 2, gated=False, alone=10).block_n == 128


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("k", [16, 640, 2560])
def test_settings_are_legal(k: int, size: int) -> None:
    for m in (16, 32, 64, 128):
        for gated in (True, False):
            found = config.candidates_tile(m, k, size, gated=gated)
            assert found[0] == config.pick_tile(m, k, size, gated=gated)
            step = (m + found[0].block_n * (2 if gated else 1)) * found[0].block_k * size
            assert step * found[0].num_stages <= config.SHARED_BYTES
            for tile in found:
                assert tile.block_k <= 128 and min(tile.block_n, tile.block_k) >= 16
    for default in (config.pick_gate_up_route(k, size), config.pick_down_route(k, size), config.pick_dense_route(k, k)):
        found_routes = config.candidates_route(default, k)
        assert found_routes[0] == default and len(found_routes) == len(set(found_routes))
        assert default.block_k * default.block_n >= 32 * default.num_warps
