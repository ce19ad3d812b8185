"""The draw: reference against a slow oracle, fused kernels against the reference, both against the distribution asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.kernels import sample
from freetoken.kernels.sample import reference
from freetoken.kernels.sample import triton as fused
from freetoken.kernels.sample.hashing import exponential, hash_words, row_keys
from kernels import sample_oracle as oracle
from kernels.sample_oracle import make_params

HERE = Path(__file__).parent
SEEDS = [0, 1, 2, 12345, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def scaled_row(logits: torch.Tensor, row: int, heat: float, sample_vocab: int) -> np.ndarray:
    return (logits[row, :sample_vocab] * torch.tensor(1.0 / heat, dtype=torch.float32)).numpy()


def random_rows(count: int, generator: np.random.Generator, vocab: int) -> list[dict[str, float]]:
    pick = generator.choice
    return [
        {
            "temperature": float(pick([0.0, 0.5, 1.0, 1.0, 2.0])),
            "top_k": int(pick([sample.TOP_K_OFF, sample.TOP_K_OFF, 2, 3, 50, 200, vocab - 1])),
            "top_p": float(pick([1.0, 1.0, 0.05, 0.5, 0.9, 0.999])),
            "min_p": float(pick([0.0, 0.0, 0.1, 0.5])),
        }
        for _ in range(count)
    ]


def random_logits(rows: int, vocab: int, generator: np.random.Generator) -> torch.Tensor:
    logits = generator.normal(size=(rows, vocab)) * generator.choice([0.1, 3.0, 10.0])
    if generator.random() < 0.4:
        logits = np.round(logits * 2) / 2  # many ties
    return torch.from_numpy(logits.astype(np.float32))


# --- the generator ---------------------------------------------------------------------------------------------------


@triton.jit
def _noise_kernel(counter_ptr, out_ptr, low, high, N: tl.constexpr):
    at = tl.arange(0, N)
    key_low = tl.full([], 0, tl.uint32) + low.to(tl.uint32)
    key_high = tl.full([], 0, tl.uint32) + high.to(tl.uint32)
    tl.store(out_ptr + at, fused._noise(tl.load(counter_ptr + at), key_low, key_high))


def test_hash_is_bit_exact_against_python_integers() -> None:
    counters = [0, 1, 2, 257, 151_935, 2**31, 2**31 + 7, 2**32 - 1]
    for out_index in (0, 1, 31, 4096):
        keys = row_keys(np.array(SEEDS, np.uint64), np.full(len(SEEDS), out_index))
        expected_keys = [oracle.key_words(seed, out_index) for seed in SEEDS]
        assert list(zip(*keys.view(np.uint32).tolist())) == expected_keys
        words = hash_words(
            torch.from_numpy(keys)[:, :, None], torch.from_numpy(np.array(counters, np.uint32).view(np.int32))
        )
        expected = [[oracle.hash_word(key, c) for c in counters] for key in expected_keys]
        assert words.numpy().view(np.uint32).tolist() == expected


def test_noise_matches_the_scalar_gumbel_in_torch_and_triton() -> None:
    key = oracle.key_words(7, 3)
    counters = torch.arange(512, dtype=torch.int32)
    expected = torch.tensor([oracle.gumbel(key, int(c)) for c in counters], dtype=torch.float64)
    words = hash_words(torch.from_numpy(row_keys(np.array([7], np.uint64), np.array([3])))[:, :, None], counters)
    torch.testing.assert_close(-torch.log(exponential(words))[0].double(), expected, atol=2e-6, rtol=2e-6)
    out = torch.full((512,), float("nan"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    counters, out = counters.to(device), out.to(device)
    _noise_kernel[(1,)](counters, out, key[0], key[1], N=512)
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-6, rtol=2e-6)


def test_variates_stay_finite_and_fine_at_both_ends() -> None:
    edges = torch.tensor([0, 1, 2, 3, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    values = exponential(edges)
    assert torch.isfinite(values).all() and (values > 0).all()
    assert values[0] == pytest.approx(0.5 * 2.0**-31, rel=1e-6)
    assert values[4] == pytest.approx(24 * math.log(2), rel=1e-3)


def test_words_look_uniform_and_rows_unrelated() -> None:
    keys = torch.from_numpy(row_keys(np.arange(64, dtype=np.uint64), np.arange(64)))
    words = hash_words(keys[:, :, None], torch.arange(4096, dtype=torch.int32)).numpy().view(np.uint32)
    for shift in (0, 8, 16, 24):
        counts = np.bincount((words >> np.uint32(shift) & 255).ravel(), minlength=256)
        expected = words.size / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * math.sqrt(2 * 255)
    uniform = words.astype(np.float64) / 2**32 - 0.5
    correlation = np.corrcoef(uniform)
    assert np.abs(correlation - np.eye(64)).max() < 6 / math.sqrt(4096)


# --- filters ---------------------------------------------------------------------------------------------------------


def fused_thresholds(scaled: torch.Tensor, params: sample.SampleParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused kernels' kept sets in the form of ``reference.thresholds``, from values that are scaled already."""
    params = dataclasses.replace(params, inv_temperature=torch.ones_like(params.inv_temperature))
    stats = torch.full((3, scaled.shape[0], scaled.shape[1] // reference.TILE), float("nan"))
    fused.tile_stats(scaled, params.inv_temperature, scaled.shape[1], stats, None, False)
    bounds = fused.kept_bounds(scaled, params, scaled.shape[1], stats, 16, 512)
    return bounds[0][:, None], bounds[1].view(torch.int32)[:, None]


def check_filters(logits: torch.Tensor, rows: list[dict[str, float]], vocab: int, *more: Callable[..., Any]) -> None:
    params = make_params(rows)
    for method in (reference._thresholds_on_host, reference._thresholds_on_device, *more):
        scaled = reference.scaled_tiles(logits, vocab, params.inv_temperature)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "thresholds", method)
            kept = reference.apply_filters(scaled, params)
        assert kept.shape[1] % reference.TILE == 0 and (kept[:, vocab:] == float("-inf")).all()
        for at, row in enumerate(rows):
            heat = row.get("temperature", 1.0)
            if heat == 0.0:
                continue
            values = scaled_row(logits, at, heat, vocab)
            expected, margin = oracle.kept_ids(
                values, int(row.get("top_k", vocab)), row.get("top_p", 1.0), row.get("min_p", 0.0)
            )
            if margin > 1e-5:
                assert set(torch.isfinite(kept[at]).nonzero().squeeze(1).tolist()) == expected, (method, at, row)


@pytest.mark.parametrize("vocab", [257, 1000, 2048])
def test_filters_match_the_oracle(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    for _ in range(8):
        count = int(generator.integers(1, 6))
        check_filters(
            random_logits(count, vocab + 3, generator), random_rows(count, generator, vocab), vocab, fused_thresholds
        )


def test_filters_at_a_real_vocabulary() -> None:
    generator = np.random.default_rng(0)
    rows = [{"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.02}, {"top_k": 1500, "top_p": 0.7, "temperature": 0.7}, {}]
    check_filters(torch.from_numpy(generator.normal(size=(5, 49_152)).astype(np.float32)) * 2, rows, 49_152)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from([1.0, 0.3, 0.5, 0.75, 0.9]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_filters_under_heavy_ties(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    # min-p exactly at a value's ratio is a rounding question: the oracle's float64 and float32 may differ there.
    logits = torch.tensor([values], dtype=torch.float32)
    check_filters(logits, [{"top_k": min(top_k, len(values)), "top_p": top_p, "min_p": min_p}], len(values))


def test_neutral_rows_keep_everything_beside_filtered_ones() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    params = make_params([{}, {"top_k": 3}, {"temperature": 0.0}])
    kept = reference.apply_filters(reference.scaled_tiles(logits, 5000, params.inv_temperature), params)
    assert torch.isfinite(kept).sum(1).tolist() == [5000, 3, 5000] or torch.isfinite(kept).sum(1).tolist() == [
        5000,
        3,
        1,
    ]


# --- the draw --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [257, 3001])
def test_draws_match_the_scalar_oracle(vocab: int) -> None:
    generator = np.random.default_rng(vocab + 1)
    checked = 0
    for step in range(8):
        rows = random_rows(4, generator, vocab)
        logits = random_logits(4, vocab, generator)
        ids = reference.sample_ids(logits, make_params(rows, SEEDS[:4], step), vocab)
        for at, row in enumerate(rows):
            values = scaled_row(logits, at, row["temperature"] or 1.0, vocab)
            if row["temperature"] == 0.0:
                assert ids[at] == int(values.argmax())
                continue
            kept, margin = oracle.kept_ids(values, int(row["top_k"]), row["top_p"], row["min_p"])
            expected, gap = oracle.draw(values, kept, oracle.key_words(SEEDS[at], step))
            if margin > 1e-5 and gap > 1e-4:
                checked += 1
                assert int(ids[at]) == expected
    assert checked > 10


def chi_square(ids: np.ndarray, expected: np.ndarray) -> None:
    """Cells with an expectation under 8 are joined; the statistic must lie within 5 sigma of its mean."""
    counts = np.bincount(ids, minlength=len(expected)).astype(float)
    total = expected * counts.sum()
    large = total >= 8
    counts = np.append(counts[large], counts[~large].sum())
    total = np.append(total[large], total[~large].sum())
    counts, total = counts[total > 0], total[total > 0]
    degrees = len(total) - 1
    statistic = ((counts - total) ** 2 / total).sum()
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 5, (statistic, degrees)


@pytest.mark.parametrize(
    ("over", "row"),
    [
        ("seeds", {}),
        ("outputs", {}),
        ("seeds", {"temperature": 0.6}),
        ("outputs", {"top_k": 40}),
        ("seeds", {"top_p": 0.8}),
        ("outputs", {"min_p": 0.05}),
    ],
)
def test_draws_follow_the_distribution(over: str, row: dict[str, float]) -> None:
    vocab, count = 1300, 2000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * 3
    heat = row.get("temperature", 1.0)
    values = scaled_row(logits, 0, heat, vocab)
    kept, _ = oracle.kept_ids(values, int(row.get("top_k", vocab)), row.get("top_p", 1.0), row.get("min_p", 0.0))
    weights = np.zeros(vocab)
    weights[sorted(kept)] = np.exp(values[sorted(kept)].astype(np.float64) - values.max())
    ids = []
    for block in range(4):
        at = np.arange(500) + 500 * block
        params = make_params([row] * 500)
        key = row_keys(at.astype(np.uint64), at * 0) if over == "seeds" else row_keys(at.astype(np.uint64) * 0, at)
        params = dataclasses.replace(params, key=torch.from_numpy(key))
        ids.append(reference.sample_ids(logits.expand(500, -1), params, vocab).numpy())
    drawn = np.concatenate(ids)
    assert len(drawn) == count and set(drawn.tolist()) <= kept
    chi_square(drawn, weights / weights.sum())


def test_a_flat_row_favours_no_end_of_a_large_vocabulary() -> None:
    vocab, rows = 49_152, 32
    ids = []
    for block in range(8):
        params = make_params([{}] * rows, [block * rows + n for n in range(rows)])
        ids.append(reference.sample_ids(torch.zeros(rows, vocab), params, vocab).numpy())
    drawn = np.concatenate(ids)
    chi_square(drawn * 16 // vocab, np.full(16, 1 / 16))
    chi_square(drawn % 16, np.full(16, 1 / 16))


# --- fused against reference -----------------------------------------------------------------------------------------


def poisoned_empty(*args: object, **kwargs: object) -> torch.Tensor:
    out = torch.zeros(*args, **kwargs)
    return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min)


@pytest.mark.parametrize("sizes", [(16, 1024), (64, 256), (4096, 4096)])
def test_fused_ids_equal_the_reference(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(sizes[0])
    for _ in range(5):
        count, vocab = int(generator.integers(1, 4)), int(generator.choice([257, 1000, 2049, 3100]))
        logits = random_logits(count, vocab, generator)
        known = vocab - int(generator.choice([0, 3, 100]))
        params = make_params(random_rows(count, generator, known), SEEDS[:count])
        expected = reference.sample_ids(logits, params, known)
        with monkeypatch.context() as patch:
            patch.setattr(fused.torch, "empty", poisoned_empty)
            ids = fused.sample_ids(logits, params, known, cap=sizes[0], chunk=sizes[1])
            best = fused.argmax_ids(logits, known)
        assert ids.tolist() == expected.tolist()
        assert best.tolist() == logits[:, :known].numpy().argmax(-1).tolist()


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 700,  # one tie wider than the gathered block
        [1.0] * 300 + [1.0 + 2.0**-23] * 300 + [-5.0] * 100,  # neighbouring floats
        [0.0, -0.0] * 350,  # two zeros that compare equal
        [3.0] + [float("-inf")] * 699,
        [1e30] * 5 + [-1e30] * 695,
    ],
)
@pytest.mark.parametrize("row", [{"top_k": 290}, {"top_p": 0.37}, {"top_k": 550, "top_p": 0.61}, {"min_p": 1.0}])
def test_fused_bisection_on_hard_rows(values: list[float], row: dict[str, float]) -> None:
    logits = torch.tensor([values])
    params = make_params([row], [3])
    expected = reference.sample_ids(logits, params, 700)
    assert fused.sample_ids(logits, params, 700, cap=16, chunk=256).tolist() == expected.tolist()
    # A drawn id seldom meets the edge of the kept set, so compare the set as well.
    scaled = reference.scaled_tiles(logits, 700, params.inv_temperature)
    kept = reference.apply_filters(scaled.clone(), params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "thresholds", fused_thresholds)
        assert torch.equal(reference.apply_filters(scaled, params), kept)


def bad_rows() -> torch.Tensor:
    nan, inf = float("nan"), float("inf")
    rows = torch.zeros(7, 1500)
    rows[0] = nan
    rows[1] = -inf
    rows[2] = inf
    rows[3, ::2] = nan
    rows[4, 1300] = inf
    rows[5] = torch.finfo(torch.float32).max
    rows[6, 1450:] = 50.0  # surplus ids alone are likely
    return rows


@pytest.mark.parametrize("impl", ["reference", "fused"])
@pytest.mark.parametrize("row", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.5}, {"top_p": 0.9, "min_p": 0.1}])
def test_bad_rows_give_valid_ids(row: dict[str, float], impl: str) -> None:
    params = make_params([row] * 7)
    draw = reference.sample_ids if impl == "reference" else fused.sample_ids
    greedy = reference.argmax_ids if impl == "reference" else fused.argmax_ids
    for ids in (draw(bad_rows(), params, 1450), greedy(bad_rows(), 1450)):
        assert ((ids >= 0) & (ids < 1450)).all()
        assert ids[3] % 2 == 1 and ids[4] == 1300
        assert ids[:2].tolist() == [0, 0]


@pytest.mark.parametrize("impl", ["reference", "fused"])
@pytest.mark.parametrize("places", [(0, 1), (5, 1030), (1023, 1024), (2047, 2999)])
def test_greedy_ties_go_to_the_lower_id(places: tuple[int, int], impl: str) -> None:
    logits = torch.full((1, 3000), -1.0)
    logits[0, list(places)] = 2.0
    for rows in ([{"temperature": 0.0}], [{"top_k": 1}]):
        draw = reference.sample_ids if impl == "reference" else fused.sample_ids
        assert draw(logits, make_params(rows), 3000).tolist() == [places[0]]
    greedy = reference.argmax_ids if impl == "reference" else fused.argmax_ids
    assert greedy(logits, 3000).tolist() == [places[0]]


def test_fused_rows_may_be_strided_and_empty() -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(3))
    params = make_params([{"top_k": 7}] * 2)
    part = logits[::2, :1200]
    assert fused.sample_ids(part, params, 1100).tolist() == reference.sample_ids(part, params, 1100).tolist()
    assert fused.argmax_ids(logits[:0], 1100).shape == (0,)
    assert reference.argmax_ids(logits[:0], 1100).shape == (0,)
    with pytest.raises(ValueError, match="float32"):
        fused.argmax_ids(logits.half(), 3000)
    with pytest.raises(ValueError, match="does not fit"):
        fused.argmax_ids(logits, 3001)


def test_check_mode_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    params = make_params([{"top_p": 0.9}, {"top_k": 4}, {"temperature": 0.0}])
    assert (
        sample.sample_ids(logits, params, 600, "check").tolist() == reference.sample_ids(logits, params, 600).tolist()
    )
    assert sample.argmax_ids(logits, 600, "check").tolist() == reference.argmax_ids(logits, 600).tolist()
    right = reference.sample_ids(logits, params, 600)
    monkeypatch.setattr(fused, "sample_ids", lambda *_: right + torch.tensor([0, 1, 0]))
    with pytest.raises(RuntimeError, match="row 1 drew"):
        sample.sample_ids(logits, params, 600, "check")


def test_choice_says_why_sgl_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sample.FLAG, raising=False)
    assert sample.choice("cpu").impl == "reference"
    chosen = sample.choice("cuda")
    assert chosen.impl == "triton" and "per-request seeds" in chosen.why
    monkeypatch.setenv(sample.FLAG, "0")
    assert sample.choice("cuda").impl == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151_936, 49_152, 257])
def test_fused_ids_equal_the_reference_on_a_gpu(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    for spread in (0.5, 3.0, 8.0):
        logits = torch.from_numpy(generator.normal(size=(32, vocab)).astype(np.float32) * spread)
        params = make_params(random_rows(32, generator, vocab), list(range(32)))
        on_gpu = type(params)(**{n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in vars(params).items()})
        sample.sample_ids(logits.cuda(), on_gpu, vocab, "check")
        sample.argmax_ids(logits.cuda(), vocab, "check")
