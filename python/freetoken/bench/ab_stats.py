"""Is B faster than A, and is the difference larger than the noise? Statistics of paired runs (torch-free).

Times enter as pairs that ran side by side, turn by turn where they took turns, so that what drifts cancels in their ratio: a machine that
others share is often either fast or slow for a second. Ratios are compared as logarithms: twice as slow and twice as fast are
then equally far from no difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["faster", "slower", "not resolved"]

CONFIDENCE = 0.99
_T99 = (
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947,
    2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750,
)  # fmt: skip
"""Two-sided 99 % quantiles of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A ratio with its 99 % confidence interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """Two runs side by side: the median of each, and the ratio b / a."""

    a: float
    b: float
    ratio: float

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> Pair:
        """From what each turn measured (all above 0): the median of the turns' ratios, or where one run had more turns, the ratio of the
        medians."""
        medians = statistics.median(a), statistics.median(b)
        same = len(a) == len(b)
        return cls(*medians, statistics.median(y / x for x, y in zip(a, b)) if same else medians[1] / medians[0])


@dataclass(frozen=True)
class Comparison:
    """One metric of an experiment. ``a`` and ``b`` are medians in the metric's unit, ``effect`` the ratio b / a, ``control`` the
    ratio of two runs of A, ``floor`` how far from 1 (as a factor of at least 1) a ratio must lie to be told from the control."""

    metric: str
    a: float
    b: float
    effect: Interval
    control: Interval
    floor: float
    verdict: Verdict


def interval(ratios: Sequence[float]) -> Interval:
    """Geometric mean of ``ratios`` (two or more, all above 0) with its confidence interval; ``ValueError`` otherwise."""
    if len(ratios) < 2 or not all(r > 0 and math.isfinite(r) for r in ratios):
        raise ValueError("a confidence interval needs two or more positive ratios")
    logs = [math.log(r) for r in ratios]
    mean = statistics.fmean(logs)
    degrees = len(logs) - 1
    quantile = _T99[degrees - 1] if degrees <= len(_T99) else _T99[-1]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def compare(metric: str, control: Sequence[Pair], pairs: Sequence[Pair], *, lower_is_better: bool) -> Comparison:
    """Judge ``pairs`` of A and B against ``control`` pairs of A and A; two or more of each.

    A difference is resolved when its interval excludes 1 and its estimate lies outside the interval of the control, taken to
    both sides.
    """
    effect = interval([pair.ratio for pair in pairs])
    noise = interval([pair.ratio for pair in control])
    floor = max(1 / noise.low, noise.high)
    outside = effect.ratio > floor or effect.ratio < 1 / floor
    verdict: Verdict = "not resolved"
    if outside and not effect.low <= 1 <= effect.high:
        verdict = "faster" if (effect.ratio < 1) == lower_is_better else "slower"
    return Comparison(
        metric,
        statistics.median(pair.a for pair in pairs),
        statistics.median(pair.b for pair in pairs),
        effect,
        noise,
        floor,
        verdict,
    )
