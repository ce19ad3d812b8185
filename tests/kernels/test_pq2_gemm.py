"""Products of many tokens with two-bit weights: kernels against reference, reference against scalar Python."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.environ import EnvironmentValueError
from freetoken.kernels import pq2_gemv
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.pq2_gemm import (
    DenseConfig,
    GemmConfig,
    PQ2Gemm,
    candidates,
    default_config,
    m_class,
    pick_config,
    pick_form,
    pick_slice,
    slice_candidates,
    triton,
)
from freetoken.kernels.pq2_gemm import config as settings
from freetoken.kernels.pq2_gemv import PQ2Product, PQ2Weight, QuantisedActivation, group_for, pq2_linear, reference
from freetoken.kernels.pq2_gemv.activation import quantise_reference

SMALL = GemmConfig(64, 32, num_stages=2)


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card that nobody has measured."""
    monkeypatch.setattr(settings, "_measured", lambda capability: settings.Table())


def weight_of(n: int, k: int, group: int = 128) -> PQ2Weight:
    """All four codes, scales of both signs."""
    codes = torch.randint(0, 256, (n, k // 4), dtype=torch.uint8, device=DEVICE)
    return PQ2Weight(codes, (torch.rand(n, k // group, device=DEVICE) - 0.3).half(), group)


def fused(form: str, impl: str = "triton") -> PQ2Gemm:
    return PQ2Gemm(choice("pq2_gemm", impl), form)


@pytest.mark.parametrize(
    ("m", "n", "k", "group_x", "group_w", "split", "signed"),
    [
        (17, 70, 128, 128, 128, 1, True),
        (33, 65, 384, 128, 128, 2, True),
        (33, 65, 384, 128, 128, 2, False),
        (5, 64, 256, 64, 128, 1, False),
        (32, 130, 256, 32, 64, 3, True),
        (18, 65, 640, 32, 64, 1, False),
        (40, 64, 256, 128, 64, 2, False),
    ],
)
def test_integers(
    m: int, n: int, k: int, group_x: int, group_w: int, split: int, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, activation = weight_of(n, k, group_w), quantise_reference(torch.randn(m, k, device=DEVICE), group_x)
    config = GemmConfig(64, 32, num_stages=2, split_k=split, signed=signed)
    with poisoned_outputs(monkeypatch):
        out = torch.empty(m, n, device=DEVICE)
        triton.int8_linear(activation, weight, out, config)
        again = torch.empty(m, n, device=DEVICE)
        triton.int8_linear(activation, weight, again, config)
    assert relative_rms(out, reference.linear(activation, weight, torch.float32)) < 1e-6
    assert torch.equal(out, again), "the parts of a split product are added in a fixed order"
    assert not triton.scratch_of(out.device).arrivals.any()


def test_one_group_is_exact() -> None:
    """With one group and scales of 1 the result is the integer itself."""
    m, n, k = 18, 66, 128
    weight = PQ2Weight(
        torch.randint(0, 256, (n, k // 4), dtype=torch.uint8, device=DEVICE), torch.ones(n, 1).half().to(DEVICE)
    )
    x = torch.randint(-127, 128, (m, k), device=DEVICE).float()
    x[:, 0] = 127
    activation = quantise_reference(x * 3, 128)
    plain = QuantisedActivation(activation.values, torch.ones(m, 1, device=DEVICE), activation.sums, 128)
    out = torch.empty(m, n, device=DEVICE)
    triton.int8_linear(plain, weight, out, SMALL)
    codes, q = weight.codes.tolist(), x.long().tolist()
    for row, token in [(random.randrange(n), random.randrange(m)) for _ in range(20)] + [(n - 1, m - 1)]:
        expected = sum(((codes[row][j // 4] >> 2 * (j % 4) & 3) - 1) * q[token][j] for j in range(k))
        assert out[token, row] == expected


@pytest.mark.parametrize("form", ["float", "dense"])
@pytest.mark.parametrize(("m", "n", "k", "group"), [(19, 70, 384, 128), (33, 257, 128, 64)])
def test_floats(form: str, m: int, n: int, k: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(n, k, group), torch.randn(m, k, device=DEVICE).half()
    monkeypatch.setattr(triton, "pick_slice", lambda *shape: DenseConfig(100))
    monkeypatch.setattr(triton, "pick_config", lambda *shape: GemmConfig(64, 32, num_stages=2, split_k=2))
    with poisoned_outputs(monkeypatch):
        out = fused(form).linear(x, weight, torch.float16)
        wide = fused(form).linear(x, weight, torch.float32)
    assert relative_rms(out, reference.float_linear(x, weight, torch.float16)) < 1e-3
    assert wide.dtype == torch.float32 and relative_rms(wide, reference.float_linear(x, weight, torch.float32)) < 1e-3


@pytest.mark.parametrize("group", [64, 128])
def test_decoded_rows_are_those_of_the_scalar_decoder(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(21, 640, group)
    with poisoned_outputs(monkeypatch):
        rows = torch.empty(13, 640, device=DEVICE)
        triton.decode_rows(weight, 7, 13, rows)
        halves = torch.empty(21, 640, device=DEVICE).half()
        triton.decode_rows(weight, 0, 21, halves)
    assert torch.equal(halves, weight.dequantise(torch.float16))
    codes, scales = weight.codes.tolist(), weight.scales.float().tolist()
    for row in range(13):
        for column in random.sample(range(640), 40):
            code = codes[row + 7][column // 4] >> 2 * (column % 4) & 3
            assert rows[row, column] == (code - 1) * scales[row + 7][column // group]


@pytest.mark.usefixtures("_unmeasured")
def test_forms_follow_the_activation_and_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("int8_linear", "float_linear", "dense_linear"):
        monkeypatch.setattr(triton, name, lambda x, weight, out, name=name: called.append(name))
    weight = weight_of(8, 128)
    for form, tokens, float_form in (
        ("auto", 40, "float_linear"),
        ("auto", 4096, "dense_linear"),
        ("int8", 4096, "float_linear"),
        ("dense", 20, "dense_linear"),
        ("float", 4096, "float_linear"),
    ):
        called.clear()
        op, x = fused(form), torch.zeros(tokens, 128, device=DEVICE, dtype=torch.float16)
        op.linear(x, weight, torch.float16)
        op.linear(quantise_reference(x, 128), weight, torch.float16)
        op.linear(x, weight, torch.float32)
        assert called == [float_form, "int8_linear", "float_linear"]
    assert fused("auto").activation_group(40, 64, torch.device("cpu")) == 64
    assert fused("auto").activation_group(4096, 64, torch.device("cpu")) == 0
    assert fused("float").activation_group(40, 64, torch.device("cpu")) == 0
    assert fused("dense", "reference").activation_group(4096, 64, torch.device("cpu")) == 64


def test_reference_float32_inputs_and_empty_batches() -> None:
    weight, x = weight_of(12, 128), torch.randn(3, 128, device=DEVICE)
    exact = reference.float_linear(x, weight, torch.float32)
    assert torch.equal(fused("dense").linear(x, weight, torch.float32), exact)
    assert fused("int8").linear(quantise_reference(x[:0], 128), weight, torch.float16).shape == (0, 12)
    activation, out = quantise_reference(x, 64), torch.empty(3, 12, device=DEVICE)
    plain = fused("auto", "reference")
    assert plain.linear(activation, weight, torch.float32, out) is out
    assert torch.equal(out, reference.linear(activation, weight, torch.float32))


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op, weight, x = fused("float", "check"), weight_of(16, 128), torch.randn(3, 128, device=DEVICE)
    op.linear(quantise_reference(x, 128), weight, torch.float16)
    op.linear(x.half(), weight, torch.float16)
    for name in ("linear", "float_linear"):
        plain = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda *arguments, plain=plain: plain(*arguments) * 1.05)
    for activation in (quantise_reference(x, 128), x.half()):
        with pytest.raises(KernelCheckError, match=r"pq2_gemm: the output differs"):
            op.linear(activation, weight, torch.float16)


def test_refusals() -> None:
    with pytest.raises(EnvironmentValueError, match="FREETOKEN_PQ2_GEMM_FORM='fp8': use auto, int8, float, dense"):
        fused("fp8")
    with pytest.raises(ValueError, match="width 256 for a weight of 128"):
        fused("float").linear(torch.zeros(2, 256).half(), weight_of(4, 128), torch.float16)


def test_settings() -> None:
    shapes = [(34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (64, 128)]
    for form in ("int8", "float"):
        for n, k in shapes:
            for m in (17, 64, 300, 4096):
                config = pick_config(form, n, k, m)
                assert config.fits_scratch(m, n) and k // config.split_k >= 128
                found = candidates(form, n, k, m)
                assert found[0] == config and all(each.fits_scratch(m, n) for each in found)
    assert [m_class(m) for m in (17, 33, 4096, 9999)] == [32, 64, 4096, 4096]
    assert pick_form(17) == "int8" and pick_form(4096) == "dense"


def test_measured_settings_are_read_and_bad_tables_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "TABLES", tmp_path)
    path = settings.table_path((9, 7))
    found = {("int8", 64, 128, 32): SMALL, ("float", 64, 128, 64): GemmConfig(128, 64)}
    table = settings.Table(100, {**found, ("dense", 64, 128, 64): DenseConfig(32)})
    settings.write_table(path, "A card", table)
    assert settings.read_table(path) == table
    assert pick_form(100, (9, 7)) == "dense" and pick_form(99, (9, 7)) == "int8"
    assert pick_config("int8", 64, 128, 20, (9, 7)) == SMALL != pick_config("int8", 64, 128, 20)
    assert pick_config("int8", 64, 128, 40, (9, 7)) == default_config("int8", 64, 128, 40)
    assert pick_slice(64, 128, 64, (9, 7)) == DenseConfig(32) and pick_slice(64, 128, 64) == DenseConfig(256)
    text = path.read_text()
    for old, new in (
        ('"dense_from": 100', '"dense_from": "many"'),
        ('"int8"', '"int4"'),
        ('"block_n": 64', '"block_n": 63'),
        ('"rows": 32', '"rows": 100000000'),
        ('"split_k"', '"split"'),
        ("{", "["),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(settings.TableError, match=r"sm_97\.json"):
            settings.read_table(path)


def test_slices_fit_and_are_even() -> None:
    for n, k in ((34816, 5120), (5120, 17408), (16384, 5120), (100, 128), (7, 2**24)):
        found = slice_candidates(n, k, 4096)
        assert found[0] == pick_slice(n, k, 4096)
        for config in found:
            assert config.fits_scratch(k) and (config.rows % 256 == 0 or n < 256)
    assert pick_slice(34816, 5120, 4096).rows == 17408 and pick_slice(5120, 17408, 4096).rows == 5120
    with pytest.raises(ValueError, match="larger than the scratch memory"):
        triton.dense_linear(torch.zeros(1, 128).half(), weight_of(4, 128), torch.empty(1, 4).half(), DenseConfig(2**20))


@pytest.mark.usefixtures("_unmeasured")
def test_the_public_call_takes_many_tokens_and_floats_here(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(66, 128), torch.randn(36, 128, device=DEVICE)
    chosen = (choice("pq2_gemv", "triton"), choice("pq2_single", "triton"), fused("auto"))
    monkeypatch.setattr(pq2_gemv, "_product", lambda device: PQ2Product(*chosen))
    called: list[int] = []
    plain = triton.int8_linear
    monkeypatch.setattr(triton, "int8_linear", lambda *rest: called.append(rest[0].tokens) or plain(*rest))
    for tokens in (32, 33, 36):
        activation = quantise_reference(x[:tokens], 128)
        y = pq2_linear(activation, weight, torch.float32)
        assert relative_rms(y, reference.linear(activation, weight, torch.float32)) < 1e-6
    assert called == [33, 36]
    halves = pq2_linear(x[:2].half(), weight, torch.float16)
    assert relative_rms(halves, reference.float_linear(x[:2].half(), weight, torch.float16)) < 1e-3
    where = torch.device(DEVICE)
    assert [group_for(tokens, 64, where) for tokens in (1, 32, 33, 4096)] == [64, 64, 64, 0]
    assert group_for(4096, 0, where) == 0
