"""Constants of the n-gram hash from their seed, and geometries that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.errors import StartupError
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from freetoken.models.parse import _Reader
from freetoken.models.ple_config import HashConstants, parse_ple, splitmix64
from ple_geometry import PRODUCTION, SMALL

ABOVE = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
KINDS = (LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION)


def test_production_constants() -> None:
    found = PRODUCTION.constants(0)
    assert found.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert found.vocab_sizes == tuple(20_000_000 + step for step in ABOVE)
    assert found.offsets[:3] == (0, 20000003, 40000026) and found.offsets[-1] == 300001275
    assert found.used_rows == 320_001_446 and PRODUCTION.table_rows(0) == 320_001_536
    assert PRODUCTION.table_rows(0) == 128 * 2_500_012
    assert (PRODUCTION.heads, PRODUCTION.row_width, PRODUCTION.channels, PRODUCTION.history) == (16, 160, 10_240, 9)


def test_small_model_constants() -> None:
    found = SMALL.constants(0)
    assert found.multipliers == (4295158889763781, 17440218147737327, 1270917961434445)
    assert (found.vocab_sizes, found.offsets) == ((1009, 1013, 1019, 1021), (0, 1009, 2022, 3041))
    assert (found.used_rows, SMALL.table_rows(0)) == (4062, 4064)


def test_another_seed_or_layer_gives_other_constants() -> None:
    """Negative controls: seed 0 and the next ordinals look as plausible."""
    right = PRODUCTION.constants(0)
    for other in (replace(PRODUCTION, seed=0).constants(0), PRODUCTION.constants(1), PRODUCTION.constants(2)):
        assert not set(other.multipliers) & set(right.multipliers)
    assert PRODUCTION.constants(1).vocab_sizes[0] == 20_000_213
    assert PRODUCTION.constants(1).offsets[0] == 0


def test_splitmix64_of_the_published_sequence() -> None:
    """The generator seeded with 1234567 gives these first values in its author's test vector."""
    step, values = 0x9E3779B97F4A7C15, []
    for index in range(3):
        values.append(splitmix64((1234567 + index * step) % 2**64))
    assert values == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=40, deadline=None)
@given(base=st.integers(2, 60), ordinal=st.integers(0, 2))
def test_head_sizes_are_the_next_primes(base: int, ordinal: int) -> None:
    config = replace(SMALL, vocab_base=base)
    primes = [p for p in range(base, 400) if all(p % d for d in range(2, p))]
    found = config.constants(ordinal)
    assert list(found.vocab_sizes) == primes[4 * ordinal : 4 * ordinal + 4]
    assert list(found.offsets) == [sum(found.vocab_sizes[:head]) for head in range(4)]
    assert all(factor % 2 == 1 and factor * 511 < 2**63 for factor in found.multipliers)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layers": (2,)}, r"layer 3 is full_attention; only linear_attention"),
        ({"layers": (3,)}, r"4 is not one of the 3 layers"),
        ({"layers": (-1,)}, r"0 is not one of the 3 layers"),
        ({"layers": (1, 0)}, r"rise"),
        ({"ngram_size": 1}, r"ngram_size must be from 2"),
        ({"ngram_size": 17}, r"ngram_size must be from 2"),
        ({"embed_dim": 63}, r"63 does not divide over 4"),
        ({"heads_per_ngram": 0}, r"does not divide"),
        ({"conv_width": 1}, r"ple_conv_kernel_size"),
        ({"boundary_id": 512}, r"512 lies outside the vocabulary of 512"),
        ({"vocab_base": 1}, r"ngram_vocab_size_base must be at least 2"),
        ({"divisible_by": 0}, r"at least 1"),
        ({"vocab_base": 2**50}, r"too many rows"),
    ],
)
def test_geometries_that_are_refused(change: dict, match: str) -> None:
    SMALL.check(KINDS)
    with pytest.raises(StartupError, match=match):
        replace(SMALL, **change).check(KINDS)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"multipliers": (4295158889763781, 17440218147737329, 1270917961434445)},
            r"multipliers\[1\] is 174402181477373",
        ),
        ({"vocab_sizes": (1009, 1013, 1019, 1031)}, r"vocab_sizes\[3\] is 1031, .* give 1021"),
        ({"offsets": (0, 1009, 2022)}, r"3 offsets are stored, but the config asks for 4"),
    ],
)
def test_stored_constants_are_held_against_the_derived(change: dict, match: str) -> None:
    right = SMALL.constants(0)
    SMALL.check_constants(0, right, "x.safetensors")
    with pytest.raises(StartupError, match=r"x\.safetensors.*" + match):
        SMALL.check_constants(0, HashConstants(**{**vars(right), **change}), "x.safetensors")


PUBLISHED = {
    "ple_layer_ids": [2],
    "hc_count": 4,
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "eos_token_id": [248_044, 248_046],
}


def parse(values: dict, vocab_size: int = 248_320) -> object:
    return parse_ple(_Reader(values, "config.json"), layer_types=KINDS, hidden_size=2560, vocab_size=vocab_size)


def test_a_published_configuration() -> None:
    assert parse(PUBLISHED) == PRODUCTION
    short = {key: PUBLISHED[key] for key in ("ple_layer_ids", "eos_token_id")}
    assert parse(short) == PRODUCTION, "the rest are defaults"
    assert parse({}) is None and parse({"ple_layer_ids": None}) is None
    several = parse({**PUBLISHED, "ple_layer_ids": [2, 1, 2], "seed": 0})
    assert several == replace(PRODUCTION, layers=(0, 1), seed=0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ple_layer_ids": 2}, "ple_layer_ids must be a list"),
        ({"ple_layer_ids": [True]}, "ple_layer_ids must be a list"),
        ({"ple_layer_ids": [3]}, "layer 3 is full_attention; only linear_attention"),
        ({"ple_layer_ids": [0]}, "0 is not one of the 3 layers"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"ple_embed_dim": 2561}, "2561 does not divide over 16"),
        ({"ngram_size": "3"}, "ngram_size must be an integer"),
    ],
)
def test_configurations_that_are_refused(change: dict, match: str) -> None:
    with pytest.raises(StartupError, match=match):
        parse({**PUBLISHED, **change})
