"""What a call costs outside a CUDA graph: wall time, time the GPU is busy with it, launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken import environ

PROFILED_CALLS = 50


@dataclass(frozen=True)
class Cost:
    """Of one call: wall microseconds, microseconds of its kernels and copies on the GPU, and how many of them there are."""

    wall_us: float
    busy_us: float
    launches: float


def wall_microseconds(call: Callable[[], object], *, repeats: int = 7, iterations: int = 300) -> float:
    """Median over ``repeats`` of the mean over ``iterations`` calls in a row, until the GPU has run them all."""
    import torch

    for _ in range(10):
        call()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / iterations)
    return statistics.median(seconds) * 1e6


def device_work(events: Iterable[Any], calls: int) -> tuple[float, float]:
    """``(microseconds, pieces of work)`` a call on the GPU, from the profiler's events of ``calls`` calls."""
    spans = [event.time_range.elapsed_us() for event in events if event.device_type.name == "CUDA"]
    return sum(spans) / calls, len(spans) / calls


def profiled(call: Callable[[], object]) -> tuple[float, float]:
    """As :func:`device_work`, of ``call``. The tracing tools then stay in the process: taken down between profiles that follow soon, beside
    graphs that were captured in the meantime, they can bring the process down at its end."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    environ.keep_profiler_tools()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
    return device_work(profiler.events() or (), PROFILED_CALLS)


def measure(calls: Sequence[Callable[[], object]]) -> list[Cost]:
    """The cost of each call. Nothing should be timed in this process afterwards: the profiler's tools slow launches down."""
    walls = [wall_microseconds(call) for call in calls]
    return [Cost(wall, *profiled(call)) for wall, call in zip(walls, calls)]
