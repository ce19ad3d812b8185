"""Signs, rotation and its producers: reference against scalar Python, kernels against reference."""

from __future__ import annotations

import math
import random

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.gdn_prefill import reference as gdn
from freetoken.kernels.hadamard import (
    Activation,
    Hadamard,
    RotateConfig,
    Rotation,
    candidates,
    pick_config,
    reference,
    rotate,
    tile_of,
    triton,
    unrotate,
)
from freetoken.kernels.pq2_gemv.activation import QuantisedActivation, TiledActivation, quantise_reference
from freetoken.kernels.pq2_gemv.weight import PQ2Weight
from freetoken.kernels.rms_norm import reference as rms
from freetoken.kernels.silu_mul import reference as silu

EPS = 1e-6
SHAPES = [(3, 1024, 1024), (2, 384, 128), (2, 1280, 256), (3, 640, 32), (2, 256, 1), (1, 128, 2), (0, 256, 64)]
"""Tokens, width, block: one tile and two, tiles that end past the row, several blocks a group and groups a block."""


def scalar_transform(values: list[float], block: int) -> list[float]:
    """Row by row of ``H[r, c] = (-1)^popcount(r & c) / sqrt(block)``."""
    out = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        for row in range(block):
            terms = (-value if bin(row & column).count("1") % 2 else value for column, value in enumerate(part))
            out.append(math.fsum(terms) / math.sqrt(block))
    return out


def close(actual: torch.Tensor, expected: list[float]) -> bool:
    return actual.dtype == torch.float64 and torch.allclose(
        actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("width", "block"), [(8, 8), (12, 4), (6, 2), (5, 1), (192, 64), (16, 16)])
def test_reference_equals_scalar_python(width: int, block: int) -> None:
    values = [random.gauss(0, 1) for _ in range(width)]
    signs = [random.choice((-1, 1)) for _ in range(width)]
    x, s = torch.tensor(values, dtype=torch.float64), torch.tensor(signs, dtype=torch.int8)
    signed = [a * b for a, b in zip(values, signs)]
    assert close(rotate(x, s, block), scalar_transform(signed, block))
    assert close(rotate(x, None, block), scalar_transform(values, block))
    after = [a * b for a, b in zip(scalar_transform(values, block), signs)]
    assert close(unrotate(x, s, block), after)
    assert close(unrotate(x, None, block), scalar_transform(values, block))


def test_unrotate_undoes_rotate_and_a_folded_weight_gives_the_plain_product() -> None:
    width, block = 96, 32
    x = torch.randn(3, 2, width, dtype=torch.float64)
    signs = torch.randint(0, 2, (width,)) * 2 - 1
    torch.testing.assert_close(unrotate(rotate(x, signs, block), signs, block), x)
    weight = torch.randn(7, width, dtype=torch.float64)
    folded = reference.transform(weight * signs, block)
    torch.testing.assert_close(rotate(x, signs, block) @ folded.mT, x @ weight.mT)
    torch.testing.assert_close(unrotate(folded, signs, block), weight)
    assert not torch.allclose(rotate(x, None, block) @ folded.mT, x @ weight.mT)


def test_types() -> None:
    x = torch.randn(2, 64).half()
    signs = (torch.randint(0, 2, (64,)) * 2 - 1).to(torch.int8)
    wide = rotate(x, signs, 16, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, rotate(x.float(), signs, 16))
    assert torch.equal(rotate(x, signs, 16), wide.half())
    assert torch.equal(unrotate(x, signs, 16), unrotate(x.float(), signs, 16).half())


@pytest.mark.parametrize(
    ("width", "signs", "block", "reason"),
    [(12, 12, 8, "no multiple"), (12, 12, 6, "power of two"), (12, 12, 0, "power of two"), (8, 4, 8, "8 wide")],
)
def test_shapes_that_do_not_fit_are_refused(width: int, signs: int, block: int, reason: str) -> None:
    for call in (rotate, unrotate):
        with pytest.raises(ValueError, match=reason):
            call(torch.ones(2, width), torch.ones(signs), block)


def signs_of(width: int) -> torch.Tensor:
    return (torch.randint(0, 2, (width,)) * 2 - 1).to(DEVICE, torch.int8)


def integers(activation: Activation) -> QuantisedActivation:
    assert not isinstance(activation, torch.Tensor)
    return activation.rows()


def same_integers(actual: Activation, expected: Activation) -> bool:
    actual, expected = integers(actual), integers(expected)
    assert actual.group == expected.group
    parts = ("values", "scales", "sums")
    return all(torch.equal(getattr(actual, part), getattr(expected, part)) for part in parts)


def nearly_same_integers(actual: Activation, expected: Activation) -> bool:
    """At most one in a thousand off, and by one: what a sum in another order does to values that lie on an edge."""
    actual, expected = integers(actual), integers(expected)
    off = (actual.natural().int() - expected.natural().int()).abs()
    within = actual.natural().view(*actual.scales.shape, actual.group).sum(-1)
    return (
        int(off.amax()) <= 1
        and int(off.sum()) <= max(2, off.numel() // 1000)
        and relative_rms(actual.scales, expected.scales) < 1e-6
        and torch.equal(actual.sums, within)
    )


@pytest.mark.parametrize("tokens", [2, 13])
def test_kernels_give_the_same_in_tiles(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, other = (torch.randn(tokens, 1280, device=DEVICE) for _ in range(2))
    signs, weight = signs_of(1280), torch.rand(1280, device=DEVICE)
    for group in (32, 128):
        made = []
        for tiles in (False, True):
            monkeypatch.setattr(triton, "tiles_for", lambda *_, tiles=tiles: tiles)
            with poisoned_outputs(monkeypatch):
                norm = triton.norm(x, weight, EPS, signs, 256, group, other)
                made.append((triton.rotate(x, signs, 256, group, kind="silu_mul", other=other), norm.activation))
        for rows, tiled in zip(*made, strict=True):
            assert isinstance(tiled, TiledActivation) and not isinstance(rows, TiledActivation)
            assert same_integers(tiled, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "width", "block"), SHAPES)
def test_rotate_kernel_gives_the_integers_of_the_reference(
    tokens: int, width: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = (torch.randn(tokens, width + 16) * 3).to(DEVICE, dtype)
    x, signs = wide[:, :width], signs_of(width)
    if tokens > 1:
        x[0, :128] = 0
    kept = x.clone()
    with poisoned_outputs(monkeypatch):
        for group in (32, 64, 128):
            assert same_integers(triton.rotate(x, signs, block, group), reference.produce(x, signs, block, group))
        floats = triton.rotate(x, None, block, 0)
        rounded = triton.rotate(x, signs, block, 0, out_dtype=torch.float32)
        back = triton.rotate(x, signs, block, 0, inverse=True)
    assert isinstance(floats, torch.Tensor) and floats.dtype == dtype
    assert torch.equal(floats, reference.rotate(x, None, block))
    assert isinstance(rounded, torch.Tensor) and torch.equal(rounded, reference.rotate(x, signs, block, torch.float32))
    assert isinstance(back, torch.Tensor) and torch.equal(back, reference.unrotate(x, signs, block))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("tokens", "width", "block"), [(2, 1280, 256), (3, 384, 128), (0, 256, 64)])
def test_norm_kernel(tokens: int, width: int, block: int, residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, weight_type in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float16,) * 2):
        x = (torch.randn(tokens, width) * 3).to(DEVICE, dtype)
        other = torch.randn(tokens, width).to(DEVICE, dtype) if residual else None
        weight, signs = torch.randn(width).to(DEVICE, weight_type), signs_of(width)
        expected = reference.norm(x, weight, EPS, signs, block, 64, other, plain=True)
        for config in (RotateConfig(4, 1), RotateConfig(2, 0)):
            with poisoned_outputs(monkeypatch):
                actual = triton.norm(x, weight, EPS, signs, block, 64, other, plain=True, config=config)
                floats = triton.norm(x, weight, EPS, None, block, 0, other, config=config)
            assert tokens == 0 or nearly_same_integers(actual.activation, expected.activation)
            assert torch.equal(actual.residual, expected.residual)
            assert actual.plain is not None and expected.plain is not None and actual.plain.dtype == dtype
            assert relative_rms(actual.plain, expected.plain) < checking.RELATIVE_RMS[dtype] / 10
            unsigned = reference.norm(x, weight, EPS, None, block, 0, other).activation
            assert isinstance(floats.activation, torch.Tensor) and isinstance(unsigned, torch.Tensor)
            assert floats.plain is None and relative_rms(floats.activation, unsigned) < checking.RELATIVE_RMS[dtype]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("tokens", "width", "block", "rows"), [(1, 1280, 256, 5), (2, 384, 128, 3), (1, 256, 1, 1)])
def test_norm_kernel_with_a_product_beside(
    tokens: int, width: int, block: int, rows: int, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is rotated is what it is without, bit for bit; the product is that of the plain output, in float64."""
    for dtype, weight_type in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float16,) * 2):
        x = (torch.randn(tokens, width) * 3).to(DEVICE, dtype)
        other = torch.randn(tokens, width).to(DEVICE, dtype) if residual else None
        weight, signs = torch.randn(width).to(DEVICE, weight_type), signs_of(width)
        narrow = torch.randn(rows, width).to(DEVICE, dtype)
        plain = reference.norm(x, weight, EPS, signs, block, 64, other, plain=True).plain
        assert plain is not None
        wanted = plain.double() @ narrow.double().t()
        slow = reference.norm(x, weight, EPS, signs, block, 64, other, beside=narrow)
        assert slow.plain is None and slow.beside is not None and slow.beside.dtype == dtype
        assert relative_rms(slow.beside, wanted) < checking.RELATIVE_RMS[dtype]
        for config in (RotateConfig(4, 1), RotateConfig(2, 0)):
            without = triton.norm(x, weight, EPS, signs, block, 64, other, config=config)
            with poisoned_outputs(monkeypatch):
                found = triton.norm(x, weight, EPS, signs, block, 64, other, beside=narrow, config=config)
            assert same_integers(found.activation, without.activation)
            assert torch.equal(found.residual, without.residual) and found.plain is None and without.beside is None
            assert found.beside is not None and found.beside.shape == (tokens, rows) and found.beside.dtype == dtype
            assert relative_rms(found.beside, wanted) < checking.RELATIVE_RMS[dtype]


def test_what_joins() -> None:
    """One token whose row a program can hold; anything else goes to the reference, with the same result."""
    op, slow = (Hadamard(choice("hadamard", impl)) for impl in ("triton", "reference"))
    few = Hadamard(choice("hadamard", "triton"), RotateConfig(1, 1))
    x = torch.randn(2, 5120, device=DEVICE)
    turned, plain = Rotation(1024, signs_of(5120)), Rotation()
    assert (
        op.joins(x[:1], turned) and op.joins(x[:1], plain) and not op.joins(x, turned) and not op.joins(x[:0], turned)
    )
    assert not slow.joins(x[:1], turned) and not few.joins(x[:1], turned) and few.joins(x[:1, :2048], plain)
    assert not op.joins(torch.randn(1, 16384, device=DEVICE), Rotation(16384))
    weight, narrow = torch.rand(5120, device=DEVICE), torch.randn(2, 5120, device=DEVICE)
    made = op.norm(x, weight, EPS, turned, 128, plain=True, beside=narrow)
    assert made.plain is not None and made.beside is not None and torch.equal(made.beside, made.plain @ narrow.t())


@pytest.mark.parametrize(("heads", "head", "block"), [(10, 128, 256), (3, 128, 128), (24, 16, 32)])
def test_gated_kernels(heads: int, head: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width = 2, heads * head
    pair = (torch.randn(tokens, 2 * width) * 2).to(DEVICE, torch.float16)
    o, z = torch.randn(tokens, heads, head).to(DEVICE, torch.float16), pair[:, width:]
    weight, signs = torch.randn(head).to(DEVICE), signs_of(width)
    op, plain = (Hadamard(choice("hadamard", impl)) for impl in ("triton", "reference"))
    turned = Rotation(block, signs)
    for group in (128, 0):
        with poisoned_outputs(monkeypatch):
            found = (
                op.gated_norm(o, z, weight, EPS, turned, group),
                op.silu_mul(pair, turned, group),
                op.sigmoid_mul(o.flatten(1), z, turned, group),
                op.rotate(z, turned, group),
            )
        expected = (
            plain.gated_norm(o, z, weight, EPS, turned, group),
            plain.silu_mul(pair, turned, group),
            plain.sigmoid_mul(o.flatten(1), z, turned, group),
            plain.rotate(z, turned, group),
        )
        for actual, wanted in zip(found, expected, strict=True):
            if group:
                assert nearly_same_integers(actual, wanted)
            else:
                assert isinstance(actual, torch.Tensor) and isinstance(wanted, torch.Tensor)
                assert actual.dtype == torch.float16 and relative_rms(actual, wanted) < 1e-3
    assert torch.equal(op.unrotate(z, turned), plain.unrotate(z, turned))


def test_producers_are_the_ops_of_the_unfused_model_and_a_rotation() -> None:
    """In float32, where those ops round nothing in between."""
    tokens, width, block, group = 3, 256, 64, 64
    x, other, gate_up = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(tokens, 2 * width)
    weight, signs = torch.randn(width), signs_of(width).cpu()

    def quantised(y: torch.Tensor) -> QuantisedActivation:
        return quantise_reference(rotate(y, signs, block), group)

    y, total = rms.rms_norm(x, weight, EPS, other)
    normed = reference.norm(x, weight, EPS, signs, block, group, other, plain=True)
    assert torch.equal(normed.residual, total) and normed.plain is not None
    torch.testing.assert_close(normed.plain, y)
    assert nearly_same_integers(normed.activation, quantised(y))
    assert nearly_same_integers(reference.silu_mul(gate_up, signs, block, group), quantised(silu.silu_mul(gate_up)))
    assert nearly_same_integers(reference.sigmoid_mul(x, other, signs, block, group), quantised(x * other.sigmoid()))
    o, head = x.view(tokens, 4, 64), torch.randn(64)
    assert nearly_same_integers(
        reference.gated_norm(o, other, head, EPS, signs, block, group),
        quantised(gdn.gated_norm(o, other, head, EPS)),
    )


def test_heads_and_blocks_that_no_kernel_takes_go_to_the_reference() -> None:
    op = Hadamard(choice("hadamard", "triton"))
    o, z, weight = torch.randn(2, 4, 96), torch.randn(2, 384), torch.randn(96)
    assert same_integers(
        op.gated_norm(o, z, weight, EPS, Rotation(64), 128), reference.gated_norm(o, z, weight, EPS, None, 64, 128)
    )
    x, large = torch.randn(1, 16384), Rotation(16384)
    assert torch.equal(op.unrotate(x, large), reference.unrotate(x, None, 16384))
    assert same_integers(
        op.norm(x, x[0], EPS, large, 128).activation, reference.norm(x, x[0], EPS, None, 16384, 128).activation
    )


def test_rows_of_an_interleaved_table_are_refused() -> None:
    """They lie in pieces: the kernel would take others."""
    codes, scales = torch.zeros(8, 32, dtype=torch.uint8, device=DEVICE), torch.ones(8, 1, device=DEVICE).half()
    table = PQ2Weight(codes, scales, interleaved=True)
    with pytest.raises(ValueError, match="not interleaved"):
        triton.embed(torch.tensor([1], device=DEVICE), table, None, 1, torch.float32)


@pytest.mark.parametrize(("width", "block", "group"), [(384, 128, 128), (256, 1, 64), (1280, 256, 64)])
def test_embedding_rows(width: int, block: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 256, (9, width // 4), dtype=torch.uint8, device=DEVICE)
    table = PQ2Weight(codes, torch.rand(9, width // group, device=DEVICE).half(), group)
    ids = torch.tensor([8, 0, 3, 3], device=DEVICE)
    op, rotation = Hadamard(choice("hadamard", "triton")), Rotation(block, signs_of(width))
    with poisoned_outputs(monkeypatch):
        rows = op.embed(ids, table, rotation, torch.float32)
        halves = op.embed(ids, table, Rotation(block), torch.float16)
        none = op.embed(ids[:0], table, rotation, torch.float16)
    assert torch.equal(rows, reference.embed(ids, table, rotation.signs, block, torch.float32))
    assert torch.equal(halves, reference.embed(ids, table, None, block, torch.float16))
    assert none.shape == (0, width)
    folded = table.dequantise()[ids]
    assert torch.equal(rows, unrotate(folded, rotation.signs, block))


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op, turned = Hadamard(choice("hadamard", "check")), Rotation(64)
    x, weight = torch.randn(2, 128, device=DEVICE), torch.randn(128, device=DEVICE)
    op.rotate(x, turned, 128), op.rotate(x, turned, 0), op.norm(x, weight, EPS, turned, 128, x, plain=True)
    op.norm(x[:1], weight, EPS, turned, 128, beside=x)
    linear = torch.nn.functional.linear
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda x, weight: linear(x, weight) * 1.01)
        with pytest.raises(KernelCheckError, match="hadamard: the product beside differs"):
            op.norm(x[:1], weight, EPS, turned, 128, beside=x)
    transform = reference.transform
    monkeypatch.setattr(reference, "transform", lambda x, block: transform(x, block) * 1.01)
    calls = (
        lambda: op.rotate(x, turned, 128),
        lambda: op.norm(x, weight, EPS, turned, 0),
        lambda: op.unrotate(x, turned),
    )
    for call in calls:
        with pytest.raises(KernelCheckError, match=r"hadamard: the activation differs .* relative RMS"):
            call()


def test_settings() -> None:
    assert tile_of(5120, 1024, 128) == 1024 and tile_of(384, 128, 128) == 512 and tile_of(4096, 2048, 128) == 2048
    assert pick_config(1, 5120, 1024) == RotateConfig(4, 1) and pick_config(4096, 5120, 1024) == RotateConfig(2, 0)
    assert candidates(1, 5120, 1024)[0] == pick_config(1, 5120, 1024)
    x, weight = torch.randn(1, 1280, device=DEVICE), torch.randn(1280, device=DEVICE)
    plain, other = (Hadamard(choice("hadamard", "triton"), config) for config in (None, RotateConfig(2, 0)))
    turned = Rotation(256, signs_of(1280))
    assert same_integers(plain.rotate(x, turned, 128), other.rotate(x, turned, 128))
    assert same_integers(
        plain.norm(x, weight, EPS, turned, 64).activation, other.norm(x, weight, EPS, turned, 64).activation
    )
