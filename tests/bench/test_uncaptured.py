"""Counting a call's work on the GPU in what the profiler saw."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from freetoken.bench import ops, uncaptured


def event(device: str, microseconds: float) -> SimpleNamespace:
    return SimpleNamespace(
        device_type=SimpleNamespace(name=device), time_range=SimpleNamespace(elapsed_us=lambda: microseconds)
    )


def test_only_the_device_counts() -> None:
    events = [event("CUDA", 1.5), event("CPU", 100), event("CUDA", 0.5), event("CUDA", 2), event("CUDA", 4)]
    assert uncaptured.device_work(events, 2) == (4.0, 2.0)
    assert uncaptured.device_work([], 2) == (0.0, 0.0)


def test_both_sides_are_printed() -> None:
    figure = {"wall_us": 15.0, "busy_us": 1.25, "launches": 1.0}
    figure |= {f"reference_{key}": 10 * value for key, value in figure.items()}
    text = ops._sides(figure)
    assert text.startswith("fused 15.00 us of wall time, GPU busy 1.25 us, 1 launches; reference 150.00 us")


@pytest.mark.gpu
def test_launches_are_counted_on_a_gpu() -> None:
    x = torch.ones(1000, device="cuda")
    cost = uncaptured.measure(lambda: x.add_(1).mul_(2))
    assert cost.launches == 2 and 0 < cost.busy_us < cost.wall_us * 2
