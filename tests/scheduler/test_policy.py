"""The rules of what runs next, on plain numbers."""

from __future__ import annotations

import pytest

from freetoken.scheduler import policy
from freetoken.scheduler.admission import derive_seed
from freetoken.scheduler.meter import Meter


@pytest.mark.parametrize(("decodes", "expected"), [(0, 8192), (1, 2047), (100, 1948), (2047, 1), (2048, 1), (4000, 1)])
def test_budget(decodes: int, expected: int) -> None:
    assert policy.prefill_budget(decodes, 2048, 8192) == expected


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages(tokens: int, pages: int) -> None:
    assert policy.pages_for(tokens, 4) == pages


def test_expected_pages() -> None:
    assert policy.expected_pages(10, 100, 3, 0.5, 4) == 12
    assert policy.expected_pages(10, 0, 3, 0.5, 4) == 0
    assert policy.expected_pages(10, 0, 5, 0.5, 4) == 0
    assert policy.expected_pages(0, 10**9, 0, 1.0, 1) == policy.EXPECTED_NEW_TOKENS_CAP


def test_ratio_falls_to_its_floor_and_rises_on_a_retraction() -> None:
    ratio = policy.NewTokenRatio()
    seen = [ratio.value]
    for _ in range(policy.RATIO_DECAY_STEPS + 10):
        ratio.decoded()
        seen.append(ratio.value)
    assert seen == sorted(seen, reverse=True) and seen[0] == policy.RATIO_START
    assert ratio.value == policy.RATIO_FLOOR
    ratio.retracted()
    assert ratio.value == pytest.approx(policy.RATIO_FLOOR + policy.RATIO_RISE)
    for _ in range(10):
        ratio.retracted()
    assert ratio.value == 1.0


def test_longest_prefix_order() -> None:
    items = [
        policy.Waiting(arrival=5, retracted=False, cached_pages=0, bypassed=0),
        policy.Waiting(arrival=6, retracted=False, cached_pages=9, bypassed=0),
        policy.Waiting(arrival=7, retracted=False, cached_pages=0, bypassed=policy.MAX_BYPASS),
        policy.Waiting(arrival=9, retracted=True, cached_pages=0, bypassed=0),
        policy.Waiting(arrival=8, retracted=True, cached_pages=0, bypassed=0),
        policy.Waiting(arrival=4, retracted=False, cached_pages=9, bypassed=policy.MAX_BYPASS - 1),
    ]
    assert policy.longest_prefix_order(items) == [4, 3, 2, 5, 1, 0]


def test_the_youngest_is_retracted() -> None:
    assert policy.victims([policy.Standing(0, a) for a in (3, 9, 4)]) == [1, 2, 0]


def test_derived_seeds_are_spread_and_repeatable() -> None:
    seeds = [derive_seed(1, arrival) for arrival in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [derive_seed(1, arrival) for arrival in range(1000)]
    assert set(seeds).isdisjoint(derive_seed(2, arrival) for arrival in range(1000))


def test_meter_reports_windows_and_forgets_idle_time() -> None:
    now = 0.0
    meter = Meter(lambda: now)
    assert meter.rate() == 0.0
    meter.count(1)
    now = 0.5
    meter.count(4)
    assert meter.rate() == pytest.approx(8.0)
    now = 2.0
    meter.count(5)
    assert meter.rate() == pytest.approx(4.5)
    now = 2.5
    assert meter.rate() == pytest.approx(4.5)
    meter.stop()
    assert meter.rate() == 0.0
    now = 100.0
    meter.count(64)
    assert meter.rate() == 0.0
    now = 100.001
    assert meter.rate() == 0.0
    meter.count(3)
    now = 101.0
    assert meter.rate() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("start", "end", "junction", "interval", "blocks", "expected"),
    [
        (0, 1000, 0, 256, 100, [256, 512, 768, 1000]),
        (0, 1000, 0, 256, 0, []),
        (256, 1000, 0, 256, 100, [512, 768, 1000]),
        (300, 1000, 320, 256, 100, [512, 768, 1000]),
        (0, 1000, 400, 256, 100, [256, 400, 512, 768, 1000]),
        (0, 1000, 500, 256, 100, [256, 500, 768, 1000]),
        (0, 1000, 960, 256, 100, [256, 512, 768, 960]),
        (0, 1000, 1000, 2048, 100, [1000]),
        (0, 832, 0, 256, 100, [256, 512, 768, 832]),
        (0, 828, 0, 256, 100, [256, 512, 828]),
        (0, 63, 0, 16, 100, []),
        (0, 64, 0, 16, 100, [64]),
        (0, 200, 0, 16, 100, [64, 128, 200]),
        (0, 1000, 0, 100, 8, [500, 1000]),
        (0, 1000, 0, 100, 1, [1000]),
    ],
)
def test_checkpoint_positions(
    start: int, end: int, junction: int, interval: int, blocks: int, expected: list[int]
) -> None:
    assert policy.checkpoint_positions(start, end, junction, interval, blocks) == expected


@pytest.mark.parametrize(
    ("start", "end", "junction", "end_tokens", "expected"),
    [
        (0, 255, 0, 256, []),
        (0, 256, 0, 256, [256]),
        (0, 112, 0, 32, [112]),
        (0, 63, 0, 32, []),
        (512, 767, 0, 256, []),
        (512, 768, 0, 256, [768]),
        (0, 300, 100, 256, [100]),
        (0, 1200, 0, 256, [1024, 1200]),
        (0, 1272, 1024, 256, [1024]),
        (900, 1040, 0, 256, []),
        (0, 1280, 1024, 256, [1024, 1280]),
    ],
)
def test_the_end_of_a_prompt_may_have_to_spare_more(
    start: int, end: int, junction: int, end_tokens: int, expected: list[int]
) -> None:
    assert policy.checkpoint_positions(start, end, junction, 1024, 100, end_tokens) == expected
