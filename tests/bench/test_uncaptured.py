"""Counting a call's work on the GPU in what the profiler saw."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freetoken.bench import ops, uncaptured
from freetoken.bench.op_rows import Case


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
    one, two = uncaptured.measure([lambda: x.add_(1), lambda: x.add_(1).mul_(2)])
    assert (one.launches, two.launches) == (1, 2) and one.busy_us > 0 and two.wall_us > 0


def test_every_case_gets_both_sides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case({"tokens": n}, lambda n=n: (n, "fused"), lambda n=n: (n, "plain"), 1.0) for n in (1, 2)]  # type: ignore[misc]

    def measure(calls: list[Callable[[], tuple[int, str]]]) -> list[uncaptured.Cost]:
        return [uncaptured.Cost(n * (10.0 if side == "plain" else 1.0), n, 3) for n, side in (c() for c in calls)]

    monkeypatch.setattr(uncaptured, "measure", measure)
    timed: list[dict[str, Any]] = [{"what": "op ple_hash"}, {"what": "op ple_hash"}]
    ops.add_uncaptured(list(zip(timed, cases)))
    assert timed[1] == {
        "what": "op ple_hash",
        "wall_us": 2,
        "busy_us": 2,
        "launches": 3,
        "reference_wall_us": 20,
        "reference_busy_us": 2,
        "reference_launches": 3,
    }
    assert "ple_hash" in capsys.readouterr().out.splitlines()[1]


ENDS_WELL = """
import torch
from freetoken.bench import uncaptured
x = torch.ones(1000, device="cuda")
for size in range(6):
    uncaptured.profiled(lambda: x.add_(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_process_that_profiles_beside_graphs_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_WELL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_tools_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", "")
    monkeypatch.delenv("TEARDOWN_CUPTI")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen: list[str | None] = []
    uncaptured.profiled(lambda: seen.append(os.environ.get("TEARDOWN_CUPTI")))
    assert set(seen) == {"0"} and len(seen) == uncaptured.PROFILED_CALLS


@pytest.mark.parametrize(("profiled", "said"), [(True, ["written"]), (False, ["written", "taken down"])])
def test_a_process_with_the_tools_in_place_ends_at_once(profiled: bool, said: list[str]) -> None:
    """What would take them down at its end does not run; what was written is there, and so is the exit status."""
    code = f"""
import atexit
from freetoken import environ
from freetoken.bench import cli
atexit.register(print, "taken down")
if {profiled}:
    environ.keep_profiler_tools()
print("written")
cli.leave(3)
"""
    path = {name: value for name, value in os.environ.items() if name != "TEARDOWN_CUPTI"}
    path["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (3, said), done.stderr
