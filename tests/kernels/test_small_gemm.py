"""Small products: kernels against torch, reference against scalar Python, settings by shape."""

from __future__ import annotations

import math

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels import launch as early_launch
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import (
    MAX_TOKENS,
    GemmConfig,
    SmallGemm,
    candidates,
    configs,
    host,
    max_tokens,
    pick_config,
    reference,
    triton,
)
from freetoken.kernels.small_gemm.host import HostProduct

GEMV = [
    GemmConfig(4, 64, 1),
    GemmConfig(2, 32, 1, unroll=2),
    GemmConfig(1, 128, 2, unroll=4),
    GemmConfig(8, 32, 1, split_k=3),
    GemmConfig(4, 16, 1, unroll=2, split_k=2),
    GemmConfig(2, 32, 1, ahead=2),
    GemmConfig(4, 16, 1, split_k=2, ahead=3),
]
GEMM = [
    GemmConfig(16, 32, 4, num_stages=3),
    GemmConfig(32, 64, 4, num_stages=2, split_k=2),
    GemmConfig(16, 16, 2, split_k=4),
    GemmConfig(16, 32, 4, num_stages=2, split_k=3),
]
FRAGMENTS = [
    GemmConfig(16, 64, 2, unroll=2, kind="fragments"),
    GemmConfig(16, 128, 4, split_k=3, kind="fragments"),
    GemmConfig(16, 32, 1, unroll=2, split_k=2, kind="fragments"),
]


def scratch_for(config: GemmConfig, n: int, halves: int, rows: int = 32) -> triton.Scratch:
    scratch = triton.Scratch()
    scratch.reserve(n, config, rows, halves, DEVICE)
    if scratch.parts is not None:
        scratch.parts.fill_(float("nan"))
    return scratch


def typical_size(x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """RMS a product of such rows has when signs are random: a single output may lie near zero by cancellation."""
    squares = x.double().square() @ weight.double().square().t()
    if offset is not None:
        squares = squares + offset.double().square()
    sizes = squares.sqrt()
    if silu:
        sizes = sizes[:, : sizes.shape[1] // 2] * sizes[:, sizes.shape[1] // 2 :]
    return sizes.square().mean().sqrt()


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (7, 33), (50, 200), (1, 8)])
@pytest.mark.parametrize(
    ("m", "config"), [*[(1, c) for c in GEMV], *[(m, c) for m, c in zip((2, 16, 5, 19), GEMM, strict=True)]], ids=str
)
def test_kernel_equals_reference(
    m: int, config: GemmConfig, n: int, k: int, bias: bool, silu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = 2 if silu else 1
    x = torch.randn(m, k, device=DEVICE)
    weight = torch.randn(n * halves, k, device=DEVICE) * k**-0.5
    offset = torch.randn(n * halves, device=DEVICE) if bias else None
    scratch = scratch_for(config, n, halves)
    for dtype in (torch.float32, torch.float16):
        inputs = [x.to(dtype), weight.to(dtype), None if offset is None else offset.to(dtype)]
        with poisoned_outputs(monkeypatch):
            if silu:
                actual = triton.linear_silu_mul(*inputs, config=config, scratch=scratch)
            else:
                actual = triton.linear(*inputs, config=config, scratch=scratch)
        expected = (reference.linear_silu_mul if silu else reference.linear)(*inputs)
        assert actual.shape == (m, n) and actual.dtype == dtype
        size = torch.maximum(typical_size(*inputs, silu), expected.double().square().mean().sqrt())
        error = (actual.double() - expected.double()).square().mean().sqrt()
        assert error <= checking.RELATIVE_RMS[dtype] * size
        if config.split_k > 1:
            assert not scratch.arrivals.any()


@pytest.mark.parametrize(("n", "k"), [(16, 64), (7, 160), (50, 224), (1, 32)])
@pytest.mark.parametrize(
    ("m", "config"), [*zip((2, 17, 32), FRAGMENTS, strict=True), (9, FRAGMENTS[1]), (1, FRAGMENTS[2])], ids=str
)
def test_fragments_equal_reference(m: int, config: GemmConfig, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    offset = torch.randn(n, device=DEVICE) if n % 2 else None
    scratch = scratch_for(config, n, 1, m)
    for dtype, wide, under in ((torch.float16, torch.float32, True), (torch.bfloat16, None, False)):
        inputs = [x.to(dtype), weight.to(dtype), None if offset is None else offset.to(dtype)]
        with poisoned_outputs(monkeypatch):
            actual = triton.linear(*inputs, wide, config=config, scratch=scratch, under=under)
        assert actual.shape == (m, n) and actual.dtype == (wide or dtype)
        exact = inputs[0].double() @ inputs[1].double().t()
        exact = exact if offset is None else exact + inputs[2].double()
        error = (actual.double() - exact).square().mean().sqrt()
        assert error <= checking.RELATIVE_RMS[dtype] * typical_size(*inputs, False)
        assert scratch.arrivals is None or not scratch.arrivals.any()


SQUASHING = [(1, GEMV[3]), (1, GEMV[5]), (1, FRAGMENTS[1]), (5, FRAGMENTS[0]), (19, FRAGMENTS[2])]


@pytest.mark.parametrize(("n", "squashed"), [(20, 16), (33, 7), (5, 5)])
@pytest.mark.parametrize(("m", "config"), SQUASHING, ids=str)
def test_squashed_columns(m: int, config: GemmConfig, n: int, squashed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first columns through ``silu(y / 3)``, the others as they are, with the roundings of the separate ops."""
    x, weight = torch.randn(m, 160, device=DEVICE).half(), (torch.randn(n, 160, device=DEVICE) / 4).half()
    scratch = scratch_for(config, n, 1, m)
    with poisoned_outputs(monkeypatch):
        actual = triton.linear(x, weight, config=config, scratch=scratch, squash=(squashed, 3))
    expected = reference.linear_squashed(x, weight, squashed, 3)
    size = torch.maximum(typical_size(x, weight, None, False), expected.double().square().mean().sqrt())
    error = (actual.double() - expected.double()).square().mean().sqrt()
    assert actual.shape == (m, n) and error <= checking.RELATIVE_RMS[torch.float16] * size


def test_squash_of_the_reference_is_the_scalar_rule() -> None:
    x, weight = torch.randn(2, 6), torch.randn(4, 6)
    plain, squashed = reference.linear(x, weight).tolist(), reference.linear_squashed(x, weight, 3, 4).tolist()
    for before, after in zip(plain, squashed, strict=True):
        wanted = [y / 4 / (1 + math.exp(-y / 4)) for y in before[:3]] + before[3:]
        assert after == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("n", "dtype"), [(40, torch.float16), (160, torch.float16), (40, torch.float32)])
def test_which_products_squash(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row always, more where fragments take them; whatever cannot be one kernel gives the same."""
    gemm = SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "reference")))
    weight = (torch.randn(n, 64, device=DEVICE) / 8).to(dtype)
    gemm.reserve(weight, silu=False)
    for m in (0, 1, 2, 16, 32, 33):
        x = torch.randn(m, 64, device=DEVICE).to(dtype)
        assert gemm.squashes(x, weight) == (m == 1 or (n == 40 and dtype == torch.float16 and 1 < m <= 32))
        with poisoned_outputs(monkeypatch):
            actual = gemm.linear_squashed(x, weight, 32, 4)
        assert actual.shape == (m, n) and actual.dtype == dtype
        assert relative_rms(actual, reference.linear_squashed(x, weight, 32, 4)) <= checking.RELATIVE_RMS[dtype]
    plain = SmallGemm(choice("small_gemm", "reference"), SiluMul(choice("silu_mul", "reference")))
    assert not plain.squashes(weight[:1], weight)
    assert torch.equal(plain.linear_squashed(x, weight, 32, 4), reference.linear_squashed(x, weight, 32, 4))


def test_measured_fragments_are_not_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {(24, 64, 1): FRAGMENTS[1]}
    monkeypatch.setitem(configs.CONFIGS, configs.HOPPER, one)
    monkeypatch.setattr(early_launch, "capability", lambda _: configs.HOPPER)
    gemm = SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "reference")))
    weight = torch.randn(24, 64, device=DEVICE)
    for dtype in (torch.float32, torch.float16):
        gemm.reserve(weight.to(dtype), silu=False)
        x = torch.randn(1, 64, device=DEVICE).to(dtype)
        actual = gemm.linear(x, weight.to(dtype))
        assert relative_rms(actual, reference.linear(x, weight.to(dtype))) <= checking.RELATIVE_RMS[dtype]


def test_tiles_do_not_squash() -> None:
    x = torch.ones(2, 16, device=DEVICE).half()
    with pytest.raises(ValueError, match="cannot squash"):
        triton.linear(x, x, config=GEMM[0], squash=(1, 2))


def test_fragments_refuse_what_they_cannot_read() -> None:
    config = FRAGMENTS[0]
    for dtype, k in ((torch.float32, 64), (torch.float16, 48)):
        with pytest.raises(ValueError, match="cannot run"):
            triton.linear(torch.ones(2, k, dtype=dtype), torch.ones(4, k, dtype=dtype), config=config)
    x, weight = torch.ones(2, 64).half(), torch.ones(4, 64).half()
    with pytest.raises(ValueError, match="with the activation"):
        triton.linear_silu_mul(x, weight, config=config)


def test_empty_and_widened_outputs() -> None:
    weight = torch.randn(6, 8, device=DEVICE).half()
    assert triton.linear(torch.empty(0, 8, device=DEVICE).half(), weight).shape == (0, 6)
    assert triton.linear_silu_mul(torch.empty(0, 8, device=DEVICE).half(), weight).shape == (0, 3)
    x = torch.randn(1, 8, device=DEVICE).half()
    wide = triton.linear(x, weight, None, torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide, triton.linear(x, weight).float())


def test_reference_equals_scalar_python() -> None:
    x = [[1.0, -2.0, 0.5], [3.0, 0.0, -1.0]]
    weight = [[0.5, 1.0, -1.0], [2.0, 0.25, 4.0], [1.0, 1.0, 1.0], [-1.0, 0.0, 2.0]]
    bias = [0.1, -0.2, 0.3, 0.0]
    for rows in (x[:1], x):
        plain = reference.linear(torch.tensor(rows), torch.tensor(weight), torch.tensor(bias))
        gated = reference.linear_silu_mul(torch.tensor(rows), torch.tensor(weight), torch.tensor(bias))
        for i, row in enumerate(rows):
            sums = [sum(a * b for a, b in zip(row, w, strict=True)) + c for w, c in zip(weight, bias, strict=True)]
            for j in range(4):
                assert math.isclose(float(plain[i, j]), sums[j], rel_tol=1e-6, abs_tol=1e-6)
            for j in range(2):
                silu = sums[j] / (1 + math.exp(-sums[j]))
                assert math.isclose(float(gated[i, j]), silu * sums[2 + j], rel_tol=1e-5, abs_tol=1e-6)


@pytest.mark.parametrize(("m", "n"), [(1, 32), (2, 32), (16, 32), (17, 32), (32, 32), (33, 32), (16, 160), (17, 160)])
@pytest.mark.parametrize("k", [48, 64])
def test_op_routes_by_rows(m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "reference")))
    weight = torch.randn(n, k, device=DEVICE).half()
    gemm.reserve(weight, silu=True)
    gemm.reserve(weight, silu=False)
    x = torch.randn(m, k, device=DEVICE).half()
    launched = []
    launch = triton._launch
    monkeypatch.setattr(triton, "_launch", lambda *args: (launched.append(m), launch(*args)))
    assert relative_rms(gemm.linear(x, weight), reference.linear(x, weight)) < 2e-3
    assert relative_rms(gemm.linear_silu_mul(x, weight), reference.linear_silu_mul(x, weight)) < 2e-3
    assert len(launched) == (2 if m <= max_tokens(n) else 0)
    assert max_tokens(n) == (32 if n == 32 else MAX_TOKENS)


def test_what_can_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "reference")))
    weight = torch.randn(32, 64, device=DEVICE).half()
    monkeypatch.setattr(early_launch, "early", lambda _: False)
    assert not gemm.hides(weight[:2], weight)
    assert torch.equal(gemm.linear_under(weight[:3], weight), gemm.linear(weight[:3], weight))
    monkeypatch.setattr(early_launch, "early", lambda _: True)
    assert [gemm.hides(weight.repeat(2, 1)[:m], weight) for m in (0, 1, 2, 32, 33)] == [False, False, True, True, False]
    assert not gemm.hides(weight[:17], weight.repeat(5, 1)) and not gemm.hides(weight[:2].float(), weight.float())
    plain = SmallGemm(choice("small_gemm", "reference"), SiluMul(choice("silu_mul", "reference")))
    assert not plain.hides(weight[:2], weight)
    monkeypatch.setenv("FREETOKEN_HIDE_SMALL_GEMM", "0")
    off = SmallGemm(choice("small_gemm", "triton"), SiluMul(choice("silu_mul", "reference")))
    assert not off.hides(weight[:2], weight)
    assert gemm.joins(weight[:1], weight) and not gemm.joins(weight[:2], weight)
    assert not gemm.joins(weight[:1], weight.repeat(5, 1)) and not off.joins(weight[:1], weight)
    checked = SmallGemm(choice("small_gemm", "check"), SiluMul(choice("silu_mul", "reference")))
    assert not plain.joins(weight[:1], weight) and not checked.joins(weight[:1], weight)


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = SmallGemm(choice("small_gemm", "check"), SiluMul(choice("silu_mul", "reference")))
    x, weight = torch.randn(1, 16, device=DEVICE), torch.randn(8, 16, device=DEVICE)
    torch.testing.assert_close(gemm.linear(x, weight), x @ weight.t())
    assert gemm.linear(x, weight, None, torch.float32).dtype == torch.float32
    gemm.linear_silu_mul(x, weight)
    gemm.linear_squashed(x, weight, 3, 2)
    monkeypatch.setattr(triton, "linear", lambda x, weight, *_, **__: x @ weight.t() + 0.1)
    for call in (lambda: gemm.linear(x, weight), lambda: gemm.linear_squashed(x, weight, 3, 2)):
        with pytest.raises(KernelCheckError, match="small_gemm: the output differs"):
            call()


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("m", [0, 1, 2, 5, 8, 9])
def test_few_rows_on_the_cpu_are_the_same_either_way(
    m: int, pays: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostProduct, "_slicing_pays", lambda self, rows: pays)
    gemm = SmallGemm(choice("small_gemm", "host"), SiluMul(choice("silu_mul", "reference")))
    x, weight, offset = torch.randn(m, 24), torch.randn(16, 24), torch.randn(16) if bias else None
    gemm.reserve(weight, silu=False)
    calls = []
    monkeypatch.setattr(host, "sliced", lambda *args, real=host.sliced: (calls.append(1), real(*args))[1])
    torch.testing.assert_close(gemm.linear(x, weight, offset), reference.linear(x, weight, offset))
    torch.testing.assert_close(gemm.linear_silu_mul(x, weight), reference.linear_silu_mul(x, weight))
    assert len(calls) == (2 if pays and 0 < m <= host.MAX_ROWS else 0)


def test_rows_that_do_not_divide_are_not_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostProduct, "_slicing_pays", lambda self, rows: True)
    x, weight = torch.randn(2, 24), torch.randn(10, 24)
    torch.testing.assert_close(HostProduct().linear(x, weight), x @ weight.t())


def test_the_faster_way_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    product = HostProduct()
    product.register(torch.randn(8, 16))
    clock = iter([0.0, 1.0, 1.0, 4.0] * host.ROUNDS)
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    assert product._slicing_pays(1)
    clock = iter([0.0, 1.0, 1.0, 2.0] * host.ROUNDS)
    assert not product._slicing_pays(1)


def test_a_split_without_scratch_is_refused() -> None:
    with pytest.raises(ValueError, match="scratch"):
        triton.linear(torch.ones(1, 8), torch.ones(4, 8), config=GemmConfig(4, 8, 1, split_k=2))


QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)]


@pytest.mark.parametrize(("n", "k"), [*QWEN3_8B, (960, 576), (8, 8), (96, 5120), (128, 2048), (96, 4640)])
@pytest.mark.parametrize("m", [1, 2, 16, 32])
def test_candidates_start_with_the_default_and_are_legal(n: int, k: int, m: int) -> None:
    found = candidates(n, k, m)
    assert found[0] == pick_config(n, k, m)
    assert len(found) == len(set(found)) and (len(found) > 20 or k < 1024)
    for config in found:
        for value in (config.block_n, config.block_k, config.num_warps):
            assert value & (value - 1) == 0 and value > 0
        if m > 1:
            assert config.block_n >= 16 and config.block_k >= 16
        if config.kind == "fragments":
            assert m > 1 and config.block_k == 32 * config.num_warps and config.block_n == 16
    if m > 1 and n in (96, 128):
        config = found[0]
        assert config.kind == "fragments" and config.split_k * config.unroll * config.block_k <= k + 256
        assert pick_config(n, k, m, silu=True).kind == "tiles"
