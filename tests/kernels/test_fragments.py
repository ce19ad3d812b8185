"""FP8 products through fragments: kernels against torch and scalar Python, which products go through them.

Triton's interpreter cuts bfloat16 off instead of rounding it, so random products are compared in float16 here, and on a GPU in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from expert_inputs import make_routes, make_weight, scalar_experts, scalar_weight
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.block_fp8 import Fp8Weight
from freetoken.kernels.checking import relative_rms
from freetoken.kernels.fp8_gemm import FRAGMENT_TOKENS, Fp8Gemm
from freetoken.kernels.fp8_gemm import reference as dense_reference
from freetoken.kernels.moe_gemm import MoeGemm, fragments, reference
from freetoken.kernels.moe_gemm.config import FragmentConfig, pick_down_fragments, pick_fragments
from freetoken.kernels.moe_route import MoeRoute
from freetoken.kernels.silu_mul import SiluMul

BOUND = checking.RELATIVE_RMS[torch.float16]


def fp8_weight(*shape: int, parts: tuple[int, ...] = ()) -> Fp8Weight:
    weight = make_weight("fp8", *shape, parts=parts)
    assert isinstance(weight, Fp8Weight) and weight.rows % 16 == 0
    return weight


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).half()


def whole_numbers(n: int, k: int, m: int, dtype: torch.dtype) -> tuple[torch.Tensor, Fp8Weight]:
    """Inputs whose products are whole numbers up to 128: exact in every type."""
    weight = torch.randint(-4, 5, (n, k)).float().to(DEVICE, torch.float8_e4m3fn)
    scale = torch.randint(1, 3, (n // 16, -(-k // 128))).float().to(DEVICE)
    places = torch.rand(m, k).argsort(1)[:, :16]
    x = torch.zeros(m, k).scatter_(1, places, torch.randint(0, 2, (m, 16)) * 2.0 - 1.0)
    return x.to(DEVICE, dtype), Fp8Weight(weight, scale)


CONFIGS = [FragmentConfig(1, 1), FragmentConfig(2, 2), FragmentConfig(4, 3), FragmentConfig(8, 1)]
"""Rounds that end with the columns, and that end beyond them."""


@pytest.mark.parametrize(("n", "k"), [(16, 64), (32, 192), (16, 320)])
@pytest.mark.parametrize(("rows", "config"), [*zip((1, 7, 8, 16), CONFIGS, strict=True), (9, CONFIGS[1])], ids=str)
def test_dense_products(rows: int, config: FragmentConfig, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 16 and of 32 rows, a last scale of half its columns; gate and up of as many rows each."""
    x = halves(rows, k)
    for silu, weight in ((False, fp8_weight(n, k)), (True, fp8_weight(2 * n, k, parts=(n,)))):
        assert fragments.fits(x, weight, silu=silu)
        with poisoned_outputs(monkeypatch):
            actual = fragments.rows(x, None, weight, config, silu=silu)
        wanted = (dense_reference.linear_silu_mul if silu else dense_reference.linear)(x, weight)
        assert actual.shape == (rows, n) and actual.dtype == torch.float16
        assert relative_rms(actual, wanted) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "rows"), [(32, 192, 3), (16, 448, 13)])
def test_whole_numbers_are_exact(n: int, k: int, rows: int, dtype: torch.dtype) -> None:
    """A column, a row or a token in another's place would show in single outputs."""
    x, weight = whole_numbers(n, k, rows, dtype)
    wanted = dense_reference.linear(x.float(), weight)
    assert wanted.abs().max() <= 128
    assert torch.equal(fragments.rows(x, None, weight, FragmentConfig(2, 2), silu=False).float(), wanted)
    ids, shares = make_routes("even", rows, 1, 2)
    both = Fp8Weight(torch.stack((weight.data, weight.data.flip(0))), torch.stack((weight.scale, weight.scale)))
    down = fragments.routes_down(x, (ids, shares.fill_(1.0)), both, None, FragmentConfig(4, 1))
    each = torch.stack([dense_reference.linear(x.float(), Fp8Weight(both.data[e], both.scale[e])) for e in range(2)])
    assert torch.equal(down.float(), each[ids[:, 0].long(), torch.arange(rows, device=DEVICE)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_fp8_value_is_exact(dtype: torch.dtype) -> None:
    """All 254 numbers of e4m3, subnormals among them, in every place of a word."""
    values = torch.arange(256, dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0
    data = values.to(DEVICE).view(torch.float8_e4m3fn)[:, None].repeat(1, 64)
    weight = Fp8Weight(data, torch.full((16, 1), 0.5, device=DEVICE))
    x = torch.zeros(4, 64, device=DEVICE, dtype=dtype)
    for token, (column, factor) in enumerate(((3, 1.0), (16, -4.0), (33, 2.0), (62, 0.5))):
        x[token, column] = factor
    wanted = x.float() @ data.float().t() * 0.5
    assert torch.equal(fragments.rows(x, None, weight, FragmentConfig(1, 1), silu=False).float(), wanted)


LAYERS = [
    (1, 2, 5, "even", CONFIGS[1]),
    (3, 2, 4, "holes", CONFIGS[3]),
    (2, 3, 6, "one", CONFIGS[2]),
    (3, 1, 7, "skewed", CONFIGS[0]),
]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "routes", "config"), LAYERS, ids=str)
def test_layers_of_experts(
    tokens: int, top_k: int, experts: int, routes: str, config: FragmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a shared expert and without; of a negative id nothing is written and nothing read."""
    hidden, width = 64, 64 if routes == "one" else 128
    x = halves(tokens, hidden)
    ids, shares = make_routes(routes, tokens, top_k, experts)
    gate_up, down = fp8_weight(experts, 2 * width, hidden, parts=(width,)), fp8_weight(experts, hidden, width)
    none = ids.flatten() < 0
    shares.view(-1)[none] = float("nan")
    beside = halves(tokens, hidden), halves(tokens, 5)[:, 3]
    for shared in (None, beside):
        with poisoned_outputs(monkeypatch):
            inner = fragments.rows(x, ids, gate_up, config, silu=True)
            out = fragments.routes_down(inner, (ids, shares), down, shared, config)
        assert inner[none].isnan().all() and not inner[~none].isnan().any()
        expected = reference.experts(x, ids, shares.nan_to_num(), gate_up, down, shared)
        assert out.shape == x.shape and relative_rms(out, expected) <= BOUND


def test_scalar_python() -> None:
    """Without the references: value by value, with no rounding in between."""
    x, weight = halves(2, 128), fp8_weight(1, 32, 128)
    lines = torch.tensor(scalar_weight(weight)[0], dtype=torch.float64)
    alone = Fp8Weight(weight.data[0], weight.scale[0])
    actual = fragments.rows(x, None, alone, FragmentConfig(2, 1), silu=False)
    assert relative_rms(actual.cpu(), x.cpu().double() @ lines.t()) <= BOUND
    ids, shares = make_routes("even", 2, 2, 3)
    gate_up, down = fp8_weight(3, 128, 128, parts=(64,)), fp8_weight(3, 128, 64)
    inner = fragments.rows(x, ids, gate_up, FragmentConfig(4, 1), silu=True)
    actual = fragments.routes_down(inner, (ids, shares), down, None, FragmentConfig(2, 1))
    assert relative_rms(actual.cpu(), torch.tensor(scalar_experts(x, ids, shares, gate_up, down))) <= BOUND


@pytest.mark.parametrize("value", [float("nan"), 6e4])
def test_lanes_do_not_reach_others(value: float) -> None:
    """A lane of whatever a padded batch holds, beside real ones."""
    weight, x = fp8_weight(32, 128), halves(11, 128)
    whole = fragments.rows(x, None, weight, CONFIGS[1], silu=False)
    x[6] = value
    spoiled = fragments.rows(x, None, weight, CONFIGS[1], silu=False)
    others = torch.arange(11) != 6
    assert torch.equal(spoiled[others], whole[others])


def test_what_fits() -> None:
    x = halves(1, 128)
    assert fragments.fits(x, fp8_weight(32, 128)) and fragments.fits(x.bfloat16(), fp8_weight(32, 128))
    assert not fragments.fits(x.float(), fp8_weight(32, 128))
    assert not fragments.fits(x, torch.randn(32, 128, device=DEVICE).half())
    assert not fragments.fits(x, fp8_weight(32, 96))
    assert not fragments.fits(x, fp8_weight(48, 128), silu=True)
    for parts in ((24,), (8, 16)):
        weight = make_weight("fp8", 24, 128, parts=parts)
        assert isinstance(weight, Fp8Weight) and not fragments.fits(x, weight)


@pytest.mark.parametrize(
    ("rows", "k", "dtype"),
    [
        (1, 64, torch.float16),
        (16, 64, torch.float16),
        (17, 64, torch.float16),
        (1, 96, torch.float16),
        (3, 64, torch.float32),
    ],
)
def test_which_dense_products(rows: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_calls(monkeypatch)
    op = Fp8Gemm(choice("fp8_gemm", "triton"), SiluMul(choice("silu_mul", "reference")))
    weight, x = fp8_weight(32, k, parts=(16,)), halves(rows, k).to(dtype)
    for product, wanted in (
        (op.linear, dense_reference.linear),
        (op.linear_silu_mul, dense_reference.linear_silu_mul),
    ):
        assert relative_rms(product(x, weight), wanted(x, weight)) <= BOUND
    assert taken == (["rows"] * 2 if rows <= FRAGMENT_TOKENS and k % 64 == 0 and dtype == torch.float16 else [])


@pytest.mark.parametrize(
    ("tokens", "width", "kind"),
    [(1, 64, "fp8"), (2, 64, "fp8"), (3, 64, "fp8"), (1, 48, "fp8"), (1, 64, torch.float16)],
)
def test_which_layers(tokens: int, width: int, kind: str | torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes one by one in FP8, where both products fit."""
    taken = count_calls(monkeypatch)
    op = MoeGemm(choice("moe_gemm", "triton"), MoeRoute(choice("moe_route", "triton")))
    gate_up, down = make_weight(kind, 16, 2 * width, 64, parts=(width,)), make_weight(kind, 16, 64, width)
    ids, shares = make_routes("even", tokens, 2, 16)
    x = halves(tokens, 64)
    assert relative_rms(op(x, ids, shares, gate_up, down), reference.experts(x, ids, shares, gate_up, down)) <= BOUND
    assert taken == (["rows", "routes_down"] if tokens <= 2 and width == 64 and kind == "fp8" else [])


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    for name in ("rows", "routes_down"):
        real = getattr(fragments, name)
        monkeypatch.setattr(
            fragments, name, lambda *a, real=real, name=name, **k: (seen.append(name), real(*a, **k))[1]
        )
    return seen


@pytest.mark.parametrize("top_k", [1, 2, 8, 11])
@pytest.mark.parametrize("k", [64, 192, 640, 2560, 6144])
def test_settings_are_legal(k: int, top_k: int) -> None:
    found = [(pick_down_fragments(k, top_k), k // 64 * top_k)]
    for n in (16, 640, 2560, 16384):
        found += [(pick_fragments(n, k, top_k, gated=gated), k // 64) for gated in (False, True)]
    for config, chunks in found:
        assert config.num_warps in (1, 2, 4, 8, 16) and config.num_warps <= max(1, 2 * chunks - 1)
        assert 1 <= config.unroll <= 7 and config.num_warps * (config.unroll - 1) < chunks
