"""Two-bit products: planes and activations against scalar Python, kernels against the reference, routing, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from poison import DEVICE, poisoned_outputs

from freetoken.kernels import pq2_gemv as op
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.pq2_gemv import (
    PQ2Config,
    PQ2Product,
    PQ2Weight,
    QuantisedActivation,
    configs,
    quantiser,
    reference,
)
from freetoken.kernels.pq2_gemv import triton as launcher
from freetoken.kernels.pq2_gemv.activation import SMALLEST, TiledActivation, quantise_reference, transpose_runs

SHAPES_27B = [(34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (248320, 5120)]


def random_weight(n: int, k: int, group: int = 128) -> PQ2Weight:
    codes = torch.randint(0, 256, (n, k // 4), dtype=torch.uint8)
    return PQ2Weight(codes.to(DEVICE), torch.randn(n, k // group).half().to(DEVICE), group)


def copy_of(weight: PQ2Weight) -> PQ2Weight:
    return PQ2Weight(weight.codes.clone(), weight.scales.clone(), weight.group)


def random_activation(m: int, k: int, group: int = 128) -> QuantisedActivation:
    return quantise_reference((torch.randn(m, k) * torch.randn(m, k).exp()).to(DEVICE), group)


def scalar_codes(row: list[int]) -> list[int]:
    """The codes of one packed row, by the statement of the format alone."""
    return [row[j // 4] >> 2 * (j % 4) & 3 for j in range(4 * len(row))]


def scalar_product(activation: QuantisedActivation, weight: PQ2Weight) -> list[list[float]]:
    """In Python integers and floats, element by element."""
    values, x_scales = activation.values.tolist(), activation.scales.tolist()
    packed, w_scales = weight.codes.tolist(), weight.scales.tolist()
    result = []
    for token in range(activation.tokens):
        q = [values[token][j // 16 * 16 + 4 * (j % 4) + j % 16 // 4] for j in range(activation.width)]
        line = []
        for n in range(weight.out_features):
            codes = scalar_codes(packed[n])
            total = 0.0
            for j in range(activation.width):
                d = w_scales[n][j // weight.group] * x_scales[token][j // activation.group]
                total += d * ((codes[j] - 1) * q[j])
            line.append(total)
        result.append(line)
    return result


@pytest.mark.parametrize("w_group", [64, 128])
@pytest.mark.parametrize("x_group", [32, 64, 128])
def test_reference_equals_scalar_python(w_group: int, x_group: int) -> None:
    weight, activation = random_weight(5, 256, w_group), random_activation(2, 256, x_group)
    expected = torch.tensor(scalar_product(activation, weight), dtype=torch.float64)
    assert relative_rms(reference.linear(activation, weight, torch.float32).cpu(), expected) < 1e-6
    dequantised = activation.dequantise().double() @ weight.dequantise().double().t()
    assert relative_rms(dequantised.cpu(), expected) < 1e-6


def test_planes_hold_all_four_values() -> None:
    weight = PQ2Weight(torch.tensor([[0b11100100, *[0x55] * 31]], dtype=torch.uint8), torch.full((1, 1), 0.5).half())
    assert weight.dequantise()[0].tolist() == [-0.5, 0.0, 0.5, 1.0, *[0.0] * 124]
    assert (weight.out_features, weight.in_features, weight.nbytes) == (1, 128, 34)
    other = random_weight(6, 256, 64)
    assert other.unpack().tolist() == [scalar_codes(row) for row in other.codes.tolist()]
    picked = other.rows(torch.tensor([4, 1, 4], device=DEVICE))
    assert torch.equal(picked.dequantise(), other.dequantise()[[4, 1, 4]])
    assert other.dequantise(torch.float16).dtype == torch.float16


@pytest.mark.parametrize(("n", "k", "group"), [(8, 128, 128), (24, 640, 64)])
def test_interleaved_rows_lie_as_stated(n: int, k: int, group: int) -> None:
    weight = random_weight(n, k, group)
    other = copy_of(weight)
    changed = other.interleave()
    assert changed.codes is other.codes and changed.scales is other.scales and changed.interleave() is changed
    codes, scales = changed.codes.view(-1).tolist(), changed.scales.view(-1).tolist()
    for row in range(n):
        eighth, inner = divmod(row, 8)
        for byte in range(k // 4):
            place = ((eighth * (k // 128) + byte // 32) * 8 + inner) * 32 + byte % 32
            assert codes[place] == weight.codes[row, byte].item()
        for place in range(k // group):
            assert scales[(eighth * (k // group) + place) * 8 + inner] == weight.scales[row, place].item()
    back = changed.row_order()
    assert not back.interleaved and back.row_order() is back
    assert torch.equal(back.codes, weight.codes) and torch.equal(back.scales, weight.scales)
    assert torch.equal(changed.dequantise(), weight.dequantise()) and torch.equal(changed.unpack(), weight.unpack())
    index = torch.tensor([n - 1, 2], device=DEVICE)
    assert torch.equal(changed.rows(index).dequantise(), weight.rows(index).dequantise())
    activation = random_activation(2, k)
    assert torch.equal(
        reference.linear(activation, changed, torch.float32), reference.linear(activation, weight, torch.float32)
    )


def test_rows_that_are_no_multiple_of_eight_stay_as_they_are() -> None:
    weight = random_weight(12, 128)
    assert weight.interleave() is weight and not weight.interleaved
    with pytest.raises(ValueError, match="12 rows"):
        PQ2Weight(weight.codes, weight.scales, interleaved=True)


@pytest.mark.parametrize(
    ("codes", "scales", "group", "message"),
    [
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1).half(), 32, "group"),
        (torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2, 1).half(), 128, "uint8"),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1), 128, "float16"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1).half(), 64, "multiple"),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1).half(), 64, "scales of shape"),
        (torch.zeros(32, 2, dtype=torch.uint8).t(), torch.zeros(2, 1).half(), 128, "contiguous"),
    ],
)
def test_planes_that_do_not_fit_are_refused(codes: Any, scales: Any, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PQ2Weight(codes, scales, group)


def test_activations_that_do_not_fit_are_refused() -> None:
    good = quantise_reference(torch.randn(2, 128), 64)
    for parts, message in (
        ((good.values, good.scales, good.sums, 16), "group"),
        ((good.values, good.scales, good.scales, 64), "int32"),
        ((good.values[:, :64], good.scales, good.sums, 64), "multiple"),
        ((good.values, good.scales, good.sums, 32), "scales of shape"),
        ((good.values.t().contiguous().t(), good.scales, good.sums, 64), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantisedActivation(*parts)


def test_a_word_of_codes_meets_four_neighbours() -> None:
    weight, activation = random_weight(1, 128), random_activation(1, 128)
    q, codes = activation.natural()[0].tolist(), scalar_codes(weight.codes[0].tolist())
    words = weight.codes.cpu().numpy().view("<u4")[0].tolist()
    stored = activation.values[0].tolist()
    total = 0
    for t, word in enumerate(words):
        for i in range(4):
            masked = word >> 2 * i & 0x03030303
            total += sum((masked >> 8 * b & 0xFF) * stored[16 * t + 4 * i + b] for b in range(4))
    assert total == sum(a * b for a, b in zip(codes, q, strict=True))


@pytest.mark.parametrize(("m", "group"), [(1, 128), (11, 32)])
def test_tiles_hold_the_rows_as_stated(m: int, group: int) -> None:
    rows = random_activation(m, 384, group)
    tiles = rows.tiled()
    assert tiles is tiles.tiled() and rows is rows.rows()
    assert (tiles.tokens, tiles.width, tiles.group) == (m, 384, group)
    words, beside = tiles.words.tolist(), tiles.beside.tolist()
    stored, scales = rows.values.view(torch.int32).tolist(), rows.scales.view(torch.int32).tolist()
    for token in range(m):
        half, g = divmod(token, 8)
        for block in range(3):
            found = [words[block][half][p][4 * g + t][i] for t in range(4) for p in range(2) for i in range(4)]
            assert found == stored[token][32 * block : 32 * block + 32]
        for k in range(384 // group):
            assert beside[k][token] == [scales[token][k], rows.sums[token, k].item()]
    for what in ("values", "scales", "sums"):
        assert torch.equal(getattr(tiles.rows(), what), getattr(rows, what))
    assert torch.equal(tiles.dequantise(), rows.dequantise())
    with pytest.raises(ValueError, match="tiles of shapes"):
        TiledActivation(tiles.words, tiles.beside[1:], m, group)
    with pytest.raises(ValueError, match="tokens"):
        TiledActivation(tiles.words, tiles.beside, 17, group)


def test_quantising_equals_scalar_python() -> None:
    x = torch.randn(3, 128) * torch.tensor([[1.0], [1e-20], [1e20]])
    done = quantise_reference(x, 32)
    one_127th = np.float32(1 / 127)
    for m, row in enumerate(x.numpy()):
        natural = done.natural()[m].tolist()
        for g in range(4):
            part = row[32 * g : 32 * g + 32]
            largest = np.abs(part).max()
            inverse = np.float32(127) / largest
            expected = [round(float(min(max(value * inverse, -127), 127))) for value in part]
            assert natural[32 * g : 32 * g + 32] == expected
            assert done.scales[m, g].item() == float(largest * one_127th)
            assert done.sums[m, g].item() == sum(expected)


def test_halves_go_to_even_and_small_groups_to_zero() -> None:
    x = torch.zeros(3, 128)
    x[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    x[1, 0], x[2, 5] = SMALLEST, SMALLEST * (1 - 2**-24)
    done = quantise_reference(x, 128)
    assert done.natural()[0, :6].tolist() == [127, 0, 2, 2, 0, -2]
    assert done.natural()[1].tolist() == [127, *[0] * 127]
    assert not done.values[2].any() and done.scales[2].item() == 0.0


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 1152), (2, 2048), (0, 256), (11, 256)])
def test_quantiser_equals_the_reference(m: int, k: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(m, k + 32, device=DEVICE) * torch.randn(m, k + 32, device=DEVICE).mul(4).exp()
    x = wide[:, :k]
    if m > 1:
        x[0, :128], x[1, 1:128], x[1, 0] = 0.0, 1.0, 3e38
        x[m - 1, k - 32 :] *= 1e-38
    for dtype in (torch.float32, torch.float16):
        values = x.to(dtype).clamp(-6e4, 6e4)
        with poisoned_outputs(monkeypatch):
            actual = quantiser.quantise(values, group)
            tiled = quantiser.quantise(values, group, tiles=True) if 0 < m <= 32 else actual
        expected = quantise_reference(values, group)
        for what in ("values", "scales", "sums"):
            assert torch.equal(getattr(actual, what), getattr(expected, what)), (what, dtype)
            assert torch.equal(getattr(tiled.rows(), what), getattr(expected, what)), (what, dtype)


def test_columns_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        quantiser.quantise(torch.randn(128, 2).t(), 128)


SINGLE, FRAGMENTS = "single", "fragments"
CASES = [
    (1, 13, 128, 128, 128, PQ2Config(SINGLE, 8, 1, 1)),
    (1, 13, 640, 128, 128, PQ2Config(SINGLE, 16, 2, 1)),
    (1, 24, 640, 64, 128, PQ2Config(SINGLE, 8, 3, 1)),
    (1, 16, 384, 64, 64, PQ2Config(SINGLE, 8, 1, 2)),
    (1, 20, 640, 128, 64, PQ2Config(SINGLE, 16, 1, 2, row_warps=2)),
    (1, 6, 384, 128, 32, PQ2Config(SINGLE, 8, 2, 1)),
    (1, 8, 256, 64, 32, PQ2Config(SINGLE, 8, 1, 1)),
    (1, 8, 17408, 128, 128, PQ2Config(SINGLE, 8, 6, 4)),
    (1, 72, 1152, 128, 128, PQ2Config(SINGLE, 32, 2, 4, row_warps=2)),
    (1, 21, 128, 128, 128, PQ2Config(FRAGMENTS, 16, 1, 1)),
    (2, 21, 640, 128, 128, PQ2Config(FRAGMENTS, 32, 2, 2)),
    (3, 7, 640, 64, 128, PQ2Config(FRAGMENTS, 16, 3, 1)),
    (8, 16, 384, 64, 64, PQ2Config(FRAGMENTS, 16, 1, 4)),
    (9, 5, 256, 128, 64, PQ2Config(FRAGMENTS, 16, 1, 2)),
    (16, 17, 256, 128, 128, PQ2Config(FRAGMENTS, 32, 2, 1)),
    (5, 10, 256, 128, 32, PQ2Config(FRAGMENTS, 16, 2, 1)),
    (13, 10, 128, 64, 32, PQ2Config(FRAGMENTS, 16, 1, 1)),
    (3, 8, 5120, 128, 128, PQ2Config(FRAGMENTS, 16, 2, 8)),
    (8, 72, 640, 128, 128, PQ2Config(FRAGMENTS, 32, 2, 4, row_warps=2)),
    (20, 67, 384, 128, 128, PQ2Config(FRAGMENTS, 64, 1, 2, row_warps=2)),
    (32, 40, 384, 64, 128, PQ2Config(FRAGMENTS, 64, 2, 4, row_warps=4)),
    (25, 24, 256, 128, 32, PQ2Config(FRAGMENTS, 32, 1, 4, row_warps=2)),
]


def case_name(case: Any) -> str:
    m, n, k, w_group, x_group, config = case
    return f"{config.kind}-m{m}-n{n}-k{k}-g{w_group}-{x_group}-a{config.ahead}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_kernel_equals_reference(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved rows, where they can be, and then one row after the other."""
    m, n, k, w_group, x_group, config = case
    weight, activation = random_weight(n, k, w_group), random_activation(m, k, x_group)
    weight.scales[0] = 0.0
    activation.scales[m - 1, 0] = activation.sums[m - 1, 0] = 0
    activation.values[m - 1, :x_group] = 0
    if config.kind == FRAGMENTS:
        # What belongs to no token may be anything.
        activation = tiles = activation.tiled()
        tiles.words.view(-1, tiles.words.shape[1], 2, 8, 4, 4)[:, -1, :, (m - 1) % 8 + 1 :] = -1
        tiles.beside[:, m:] = 0x7FC00000
    interleaved = copy_of(weight).interleave()
    assert interleaved.interleaved == (n % 8 == 0)
    with poisoned_outputs(monkeypatch):
        actual = launcher.linear(activation, interleaved, torch.float32, config=config)
        if interleaved.interleaved:
            rows = launcher.linear(activation, weight, torch.float32, config=config)
            assert torch.equal(rows, actual)
    expected = reference.linear(activation, weight, torch.float32)
    assert actual.shape == (m, n)
    assert not actual[:, 0].any()
    # By the sizes of the terms, which a sum of a few thousand of them does not reach.
    terms = activation.dequantise().abs() @ weight.dequantise().abs().t()
    assert ((actual - expected).abs() <= 2e-6 * terms).all()


@pytest.mark.parametrize(
    "case", [CASES[1], CASES[5], CASES[8], CASES[11], CASES[13], CASES[14], CASES[18], CASES[19]], ids=case_name
)
def test_integers_are_exact(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all scales one the result is an integer below 2^24, of the largest codes and values there are."""
    m, n, k, w_group, x_group, config = case
    weight, activation = random_weight(n, k, w_group), random_activation(m, k, x_group)
    weight.scales.fill_(1.0)
    weight.codes[0] = 0xFF
    q = activation.natural()
    q[0] = 127
    q[m - 1] = torch.where(torch.arange(k, device=DEVICE) % 3 > 0, -127, q[m - 1])
    sums = q.view(m, -1, x_group).sum(2).int()
    ones = torch.ones_like(activation.scales)
    activation = QuantisedActivation(transpose_runs(q), ones, sums, x_group)
    expected = q.double() @ (weight.unpack().double() - 1).t()
    with poisoned_outputs(monkeypatch):
        actual = launcher.linear(activation, weight, torch.float32, config=config)
    assert torch.equal(actual.double(), expected)
    assert torch.equal(reference.linear(activation, weight, torch.float32).double(), expected)


def test_huge_and_tiny_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(12, 256)
    weight.scales[:, 0], weight.scales[:, 1] = 60000.0, 6e-8
    activation = quantise_reference(
        torch.randn(2, 256, device=DEVICE) * torch.tensor([[1e25], [1e-25]], device=DEVICE), 128
    )
    for tokens, config in ((slice(0, 1), PQ2Config(SINGLE, 8, 1, 1)), (slice(0, 2), PQ2Config(FRAGMENTS, 16, 1, 2))):
        part = QuantisedActivation(
            activation.values[tokens], activation.scales[tokens], activation.sums[tokens], activation.group
        )
        with poisoned_outputs(monkeypatch):
            actual = launcher.linear(part, weight, torch.float32, config=config)
        expected = reference.linear(part, weight, torch.float32)
        for row in range(actual.shape[0]):
            assert relative_rms(actual[row], expected[row]) < 1e-5


def product(fused: str, single: str = "triton") -> PQ2Product:
    return PQ2Product(
        Choice("pq2_gemv", "FREETOKEN_PQ2_FUSED_GEMV", fused, "the test says so"),
        Choice("pq2_single", "FREETOKEN_PQ2_SINGLE_GEMV", single, "the test says so"),
    )


@pytest.mark.parametrize(
    ("m", "fused", "single", "kind"),
    [
        (1, "triton", "triton", SINGLE),
        (1, "triton", "check", SINGLE),
        (1, "triton", "reference", FRAGMENTS),
        (1, "check", "reference", FRAGMENTS),
        (1, "reference", "triton", None),
        (2, "triton", "triton", FRAGMENTS),
        (2, "check", "triton", FRAGMENTS),
        (2, "reference", "triton", None),
        (32, "triton", "triton", FRAGMENTS),
        (33, "triton", "triton", None),
        (0, "triton", "triton", None),
    ],
)
def test_routing(m: int, fused: str, single: str, kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    real = launcher._kernel
    monkeypatch.setattr(launcher, "_kernel", lambda config: (launched.append(config.kind), real(config))[1])
    weight, activation = random_weight(20, 128), random_activation(m, 128)
    y = product(fused, single).linear(activation, weight, torch.float16)
    assert launched == ([kind] if kind else [])
    assert y.dtype == torch.float16 and y.shape == (m, 20)
    assert relative_rms(y, reference.linear(activation, weight, torch.float16)) < 2e-3
    out = torch.full((m, 20), float("nan"), device=DEVICE)
    assert product(fused, single).linear(activation, weight, torch.float32, out) is out
    assert relative_rms(out, reference.linear(activation, weight, torch.float32)) < 1e-5


@pytest.mark.parametrize(
    ("m", "fused", "single", "name"), [(1, "triton", "check", "pq2_single"), (3, "check", "triton", "pq2_gemv")]
)
def test_check_compares_every_call(m: int, fused: str, single: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = product(fused, single)
    weight, activation = random_weight(20, 128), random_activation(m, 128)
    wrong = reference.linear(activation, weight, torch.float32) * 1.001
    monkeypatch.setattr(launcher, "linear", lambda *_, **__: wrong)
    with pytest.raises(KernelCheckError, match=f"{name}: the output differs"):
        checked.linear(activation, weight, torch.float32)


def test_check_compares_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, x = product("check"), torch.randn(2, 128, device=DEVICE)
    done = checked.quantise(x, 64).rows()
    wrong = QuantisedActivation(done.values, done.scales, done.sums + 1, 64)
    monkeypatch.setattr(quantiser, "quantise", lambda *_, **__: wrong)
    with pytest.raises(KernelCheckError, match="the sums of an activation"):
        checked.quantise(x, 64)


def test_public_calls() -> None:
    weight, x = random_weight(20, 256), torch.randn(3, 256, device=DEVICE)
    activation = op.quantise(x, op.activation_group())
    expected = x.double() @ weight.dequantise().double().t()
    assert relative_rms(op.pq2_linear(activation, weight, torch.float32), expected) < 0.03
    assert relative_rms(op.pq2_linear(x, weight, torch.float32), expected) < 1e-5
    out = torch.empty(3, 20, device=DEVICE)
    assert op.pq2_linear(x, weight, torch.float32, out) is out and relative_rms(out, expected) < 1e-5
    with pytest.raises(ValueError, match="width"):
        op.pq2_linear(activation, random_weight(4, 128), torch.float32)


def test_settings_that_cannot_run_are_refused() -> None:
    weight = random_weight(8, 256)
    for m, config in (
        (2, PQ2Config(SINGLE, 8, 1, 1)),
        (33, PQ2Config(FRAGMENTS, 16, 1, 1)),
        (8, PQ2Config(FRAGMENTS, 32, 1, 2, row_warps=4)),
        (8, PQ2Config(FRAGMENTS, 16, 1, 2, row_warps=2)),
        (1, PQ2Config(SINGLE, 8, 2, 1)),
        (1, PQ2Config(SINGLE, 4, 1, 1)),
        (1, PQ2Config(FRAGMENTS, 8, 1, 1)),
    ):
        with pytest.raises(ValueError, match="cannot run"):
            launcher.linear(random_activation(m, 256), weight, torch.float32, config=config)


@pytest.mark.parametrize(("n", "k"), [*SHAPES_27B, (1024, 2048), (8, 128), (96, 384)])
@pytest.mark.parametrize("m", [1, 2, 8, 16, 32])
def test_candidates_are_legal(n: int, k: int, m: int) -> None:
    found = configs.candidates(n, k, m)
    assert found[0] == configs.pick_config(n, k, m)
    assert len(found) == len(set(found)) and (len(found) > 5 or k < 1024)
    assert all(config.legal(k) and (config.kind == SINGLE) == (m == 1) for config in found)


def test_tables_round_trip_and_lies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "sm_10.json"
    settings = {(n, k, m): configs.candidates(n, k, m)[-1] for n, k in SHAPES_27B for m in configs.CLASSES}
    configs.write_table(path, 'a "card"', settings)
    assert configs.read_table(path) == settings
    assert json.loads(path.read_text())["card"] == 'a "card"'
    row = {"n": 8, "k": 128, "tokens": 1, "kind": SINGLE, "rows": 8, "ahead": 1, "num_warps": 1}
    for change in (
        {"rows": 3},
        {"ahead": 9},
        {"kind": "many"},
        {"row_warps": 2},
        {"k": "x"},
        {"speed": 1},
    ):
        path.write_text(json.dumps({"settings": [row | change]}))
        with pytest.raises(configs.TableError):
            configs.read_table(path)
    for text in ("", "[]", '{"settings": 3}', '{"settings": [3]}', '{"settings": [{}]}'):
        path.write_text(text)
        with pytest.raises(configs.TableError):
            configs.read_table(path)


def test_a_table_is_used_for_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "TABLES", tmp_path)
    configs.forget_tables()
    chosen = PQ2Config(SINGLE, 32, 1, 1)
    configs.write_table(configs.table_path((9, 0)), "card", {(8, 128, 1): chosen})
    assert configs.pick_config(8, 128, 1, (9, 0)) == chosen
    assert configs.pick_config(8, 128, 1, (8, 0)) == configs.default_config(8, 128, 1)
    assert configs.pick_config(8, 128, 1) == configs.default_config(8, 128, 1)
    configs.forget_tables()


def test_tables_in_the_package_are_good() -> None:
    for path in configs.TABLES.glob("*.json"):
        assert configs.read_table(path)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES_27B)
def test_true_shapes_in_a_replayed_graph(n: int, k: int) -> None:
    """Every number of tokens: against the reference, and a replay with changed inputs against an eager call."""
    weight = random_weight(n, k).interleave()
    torch.manual_seed(n + k)
    for m in (*range(1, 17), 24, 31, 32):
        activation, other = random_activation(m, k), random_activation(m, k)
        parts = ("values", "scales", "sums") if m == 1 else ("words", "beside")
        if m > 1:
            activation, other = activation.tiled(), other.tiled()
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        op.pq2_linear(activation, weight, torch.bfloat16, out)
        assert relative_rms(out, reference.linear(activation, weight, torch.float32)) < 4e-3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.pq2_linear(activation, weight, torch.bfloat16, out)
        eager = op.pq2_linear(other, weight, torch.bfloat16)
        for what in parts:
            getattr(activation, what).copy_(getattr(other, what))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager), m


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [(128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32)])
def test_every_kernel_is_exact_on_the_gpu(groups: tuple[int, int]) -> None:
    """Fragments and lanes are laid out as the instructions want them: integers with unit scales, every kind of settings."""
    k = 1280
    for m in (1, 4, 16, 32):
        weight, activation = random_weight(130, k, groups[0]), random_activation(m, k, groups[1])
        weight.scales.fill_(1.0)
        activation.scales.fill_(1.0)
        expected = activation.natural().double() @ (weight.unpack().double() - 1).t()
        found = configs.candidates(130, k, m)
        for config in dict.fromkeys([*found[:: max(1, len(found) // 2)], configs.default_config(130, k, 2)]):
            actual = launcher.linear(activation, weight, torch.float32, config=config)
            assert torch.equal(actual.double(), expected), config
            some = copy_of(weight.rows(torch.arange(128, device=DEVICE))).interleave()
            actual = launcher.linear(activation, some, torch.float32, config=config)
            assert torch.equal(actual.double(), expected[:, :128]), config


@pytest.mark.gpu
def test_a_chain_of_early_launches_is_ordered() -> None:
    """Quantise, multiply, quantise, ... in one graph: each kernel starts early and must still see what the one before wrote."""
    weights = [random_weight(2048, 2048).interleave() for _ in range(12)]
    for m in (1, 8, 32):
        start = torch.randn(m, 2048, device="cuda").bfloat16()

        def run(start: torch.Tensor, multiply: Any = op.pq2_linear, quantise: Any = op.quantise) -> torch.Tensor:
            x = start
            for weight in weights:
                x = multiply(quantise(x, 128), weight, torch.bfloat16)
                x = x / x.float().square().mean(1, keepdim=True).sqrt().bfloat16()
            return x

        run(start)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = run(start)
        for _ in range(20):
            start.copy_(torch.randn(m, 2048, device="cuda"))
            graph.replay()
            assert torch.equal(x, run(start))
        assert relative_rms(x, run(start, reference.linear, quantise_reference)) < 0.1
