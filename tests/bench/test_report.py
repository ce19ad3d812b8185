"""Statistics of a serving run, against small cases worked out by hand and slow oracles."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.bench import report
from freetoken.bench.report import Outcome

FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert report.percentile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)


def test_no_values() -> None:
    assert math.isnan(report.percentile([], 0.5))
    assert set(report.summary([]).values()) == {None}


@given(st.lists(FLOATS, min_size=1, max_size=50))
def test_summary(values: list[float]) -> None:
    found = report.summary(values)
    assert found["mean"] == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found["median"] == pytest.approx(statistics.median(values), abs=1e-9)
    assert found["max"] == max(values)


def test_gaps_spread_over_pieces_that_came_together() -> None:
    assert report.inter_token_gaps([1.0, 3.0, 3.0, 4.0]) == [1.0, 1.0, 1.0]
    assert report.inter_token_gaps([1.0]) == []
    assert report.inter_token_gaps([2.0, 2.0, 2.0]) == [0.0, 0.0]


@given(st.lists(st.integers(0, 20), min_size=2, max_size=30))
def test_gaps_sum_to_the_whole(stamps: list[int]) -> None:
    events = sorted(float(stamp) for stamp in stamps)
    gaps = report.inter_token_gaps(events)
    assert len(gaps) == len(events) - 1
    assert sum(gaps) == pytest.approx(events[-1] - events[0])


def stream(start: float, step: float, count: int, tokens: int | None = None) -> Outcome:
    events = [start + step * i for i in range(count)]
    return Outcome(
        sent=start - 1, prompt_tokens=10, output_tokens=tokens or count, events=events, ended=events[-1] + 0.5
    )


def test_decode_rate_is_that_of_the_window_in_which_all_decode() -> None:
    rate, seconds = report.decode_rate([stream(0.0, 1.0, 11), stream(5.0, 1.0, 11)], 2)
    assert seconds == 5.0
    assert rate == pytest.approx(2.0)


def test_decode_rate_leaves_out_time_with_fewer_streams() -> None:
    slow, fast = stream(0.0, 1.0, 101), stream(50.0, 0.5, 21)
    rate, seconds = report.decode_rate([slow, fast], 2)
    assert seconds == 10.0
    assert rate == pytest.approx(3.0)
    assert report.decode_rate([slow, fast], 3) == (None, 0.0)


def test_decode_rate_counts_tokens_not_pieces() -> None:
    rate, _ = report.decode_rate([stream(0.0, 1.0, 10, tokens=20)], 1)
    assert rate == pytest.approx(2.0)


def test_two_waves_are_two_windows() -> None:
    rate, seconds = report.decode_rate([stream(0.0, 1.0, 5), stream(100.0, 1.0, 5)], 1)
    assert seconds == 8.0
    assert rate == pytest.approx(1.0)


def test_report_of_a_known_run() -> None:
    good = [stream(1.0, 0.1, 11), stream(1.0, 0.1, 11)]
    bad = Outcome(sent=0.0, ended=1.0, error="HTTP 503: full")
    found = report.report([*good, bad], 4.0, 2)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"HTTP 503: full": 1})
    assert (found["input_tokens"], found["output_tokens"]) == (20, 22)
    assert found["output_tok_s"] == pytest.approx(5.5)
    assert found["total_tok_s"] == pytest.approx(10.5)
    assert found["ttft_ms"]["mean"] == pytest.approx(1000)
    assert found["tpot_ms"]["median"] == pytest.approx(100)
    assert found["itl_ms"]["max"] == pytest.approx(100)
    assert found["e2e_ms"]["p99"] == pytest.approx(2500)
    assert found["concurrency"] == pytest.approx(5.0 / 4.0)
    assert found["decode_tok_s"] == pytest.approx(20.0)
    json.dumps(found, allow_nan=False)
    shown = report.text(found)
    assert "1 x error: HTTP 503: full" in shown


def test_report_of_nothing_but_errors() -> None:
    found = report.report([Outcome(sent=0.0, ended=1.0, error="x")], 1.0, 1)
    assert found["decode_tok_s"] is None
    json.dumps(found, allow_nan=False)
    report.text(found)
