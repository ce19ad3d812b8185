"""Statistics of a serving run from the client's clock: latencies, rates, and the decode rate of a full house (torch-free)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """One request as the client saw it. Times are seconds of one monotonic clock.

    ``events`` are the arrival times of the pieces of output, ``output_tokens`` the server's own count (``usage``), which
    may differ from the number of events: half characters are held back, and one event may carry several tokens.
    ``error`` is ``None`` for a request that ended properly.
    """

    sent: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    events: list[float] = field(default_factory=list)
    ended: float = 0.0
    error: str | None = None

    @property
    def first(self) -> float:
        return self.events[0]

    @property
    def last(self) -> float:
        return self.events[-1]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; ``share`` in [0, 1]. NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, p99 and max; ``None`` each where there is no value."""
    if not values:
        return {"mean": None, "median": None, "p99": None, "max": None}
    return {
        "mean": sum(values) / len(values),
        "median": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


def inter_token_gaps(events: Sequence[float]) -> list[float]:
    """Gaps between pieces of output; pieces that arrived together share the gap before them evenly."""
    gaps: list[float] = []
    index = 1
    while index < len(events):
        end = index
        while end + 1 < len(events) and events[end + 1] == events[index]:
            end += 1
        together = end - index + 1
        gaps.extend([(events[index] - events[index - 1]) / together] * together)
        index = end + 1
    return gaps


def decode_rate(outcomes: Sequence[Outcome], concurrency: int) -> tuple[float | None, float]:
    """``(tokens a second, seconds)`` over the time in which exactly ``concurrency`` streams are between their first and
    their last token: what the server decodes with a full batch and no prompt in between.

    The rate is ``None`` where there is no such time. A stream's pieces are weighted so that they sum to its token count.
    """
    streams = [o for o in outcomes if o.error is None and len(o.events) > 1]
    edges = sorted([(o.first, 1) for o in streams] + [(o.last, -1) for o in streams])
    spans: list[tuple[float, float]] = []
    active, since = 0, math.nan
    for when, change in edges:
        if active == concurrency and when > since:
            spans.append((since, when))
        active += change
        since = when
    seconds = sum(end - start for start, end in spans)
    if seconds <= 0:
        return None, 0.0
    tokens = 0.0
    for stream in streams:
        weight = max(stream.output_tokens, 1) / len(stream.events)
        for start, end in spans:
            tokens += weight * (bisect_right(stream.events, end) - bisect_right(stream.events, start))
    return tokens / seconds, seconds


def report(outcomes: Sequence[Outcome], duration: float, concurrency: int) -> dict[str, Any]:
    """The run's numbers as a JSON-ready dictionary. Latencies are milliseconds, rates are per second.

    ``duration`` is the seconds from the first request sent to the last one ended; ``concurrency`` the number of streams
    meant to run at once. Failed requests are counted, by message, and enter no other number.
    """
    good = [o for o in outcomes if o.error is None]
    errors = Counter(o.error for o in outcomes if o.error is not None)
    input_tokens = sum(o.prompt_tokens for o in good)
    output_tokens = sum(o.output_tokens for o in good)
    seconds = max(duration, 1e-9)
    streamed = [o for o in good if o.events]
    rate, window = decode_rate(good, concurrency)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(errors.most_common(10)),
        "duration_s": duration,
        "input_tokens": input_tokens,
        "cached_tokens": sum(o.cached_tokens for o in good),
        "output_tokens": output_tokens,
        "request_s": len(good) / seconds,
        "input_tok_s": input_tokens / seconds,
        "output_tok_s": output_tokens / seconds,
        "total_tok_s": (input_tokens + output_tokens) / seconds,
        "concurrency": sum(o.ended - o.sent for o in good) / seconds,
        "decode_tok_s": rate,
        "decode_window_s": window,
    }
    tpot = [(o.last - o.first) / (o.output_tokens - 1) for o in streamed if o.output_tokens > 1 and len(o.events) > 1]
    series = {
        "e2e_ms": [o.ended - o.sent for o in good],
        "ttft_ms": [o.first - o.sent for o in streamed],
        "tpot_ms": tpot,
        "itl_ms": [gap for o in streamed for gap in inter_token_gaps(o.events)],
    }
    for name, values in series.items():
        result[name] = summary([value * 1000 for value in values])
    return result


def text(result: dict[str, Any]) -> str:
    """The report as a table for a terminal."""

    def cell(value: float | int | None) -> str:
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"

    rows = (
        ("Requests completed", "completed"),
        ("Requests failed", "failed"),
        ("Duration (s)", "duration_s"),
        ("Input tokens", "input_tokens"),
        ("  of these from the prefix cache", "cached_tokens"),
        ("Output tokens", "output_tokens"),
        ("Request throughput (req/s)", "request_s"),
        ("Input throughput (tok/s)", "input_tok_s"),
        ("Output throughput (tok/s)", "output_tok_s"),
        ("Total throughput (tok/s)", "total_tok_s"),
        ("Mean concurrency", "concurrency"),
        ("Decode rate, all streams busy (tok/s)", "decode_tok_s"),
    )
    lines = ["", f"{' Serving benchmark ':=^78}"]
    lines += [f"{label:<44}{cell(result[key]):>34}" for label, key in rows]
    lines.append(f"{'':-^78}")
    lines.append(f"{'Latency (ms)':<22}" + "".join(f"{name:>14}" for name in ("mean", "median", "p99", "max")))
    names = {"e2e_ms": "End to end", "ttft_ms": "First token (TTFT)", "tpot_ms": "Per token (TPOT)", "itl_ms": "ITL"}
    for key, label in names.items():
        lines.append(f"{label:<22}" + "".join(f"{cell(value):>14}" for value in result[key].values()))
    lines += [f"{count} x error: {message}" for message, count in result["errors"].items()]
    lines.append("=" * 78)
    return "\n".join(lines)
