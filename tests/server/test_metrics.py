"""The names that dashboards know: what is served, what the documentation lists, what the Grafana dashboard asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from freetoken.messages import SchedulerStats
from freetoken.server.metrics import Metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
STATS = SchedulerStats(
    running=3,
    queued=2,
    used_tokens=50,
    cached_pool_tokens=30,
    total_tokens=200,
    rows_used=3,
    rows_total=8,
    steps=77,
    graph_replays={"4": 9, "8": 1},
    graph_misses=6,
    state_blocks_used=5,
    state_blocks_total=20,
    state_hits=11,
    state_evictions=2,
    state_block_bytes=1000,
    decode_step_ms=12.5,
    prefill_step_ms=80.0,
)


def served() -> dict[str, float]:
    """Every sample after some traffic, by name with labels."""
    metrics = Metrics()
    metrics.set_stats(STATS)
    metrics.set_kernels({"kernels": [{"op": "rms_norm", "impl": "triton"}, {"op": "sample", "impl": "reference"}]})
    metrics.started(10, 4)
    lines = metrics.text().decode().splitlines()
    return {n: float(v) for n, _, v in (line.rpartition(" ") for line in lines if line and line[0] != "#")}


def names() -> set[str]:
    return {name.partition("{")[0] for name in served()}


def test_values() -> None:
    found = served()
    wanted = {
        "num_running_reqs": 3, "num_queue_reqs": 2, "token_usage": 0.25, "num_cached_tokens": 30,
        "max_total_num_tokens": 200, "state_slots_used": 3, "state_slots": 8, "state_checkpoint_bytes": 5000,
        "state_checkpoint_capacity_bytes": 20000, "state_checkpoint_hits_total": 11,
        "state_checkpoint_evictions_total": 2, "num_steps_total": 77, "decode_step_seconds": 0.0125,
        "prefill_step_seconds": 0.08, 'graph_replays_total{bucket="4"}': 9, "graph_misses_total": 6,
        'kernel_path{impl="triton",op="rms_norm"}': 1, "cache_hit_rate": 0.4,
    }  # fmt: skip
    for name, value in wanted.items():
        assert found[f"freetoken:{name}"] == value, name


def test_no_sample_of_when_a_counter_was_made() -> None:
    assert not [name for name in names() if name.endswith("_created")]


def test_the_documentation_lists_every_metric_and_no_other() -> None:
    page = (DOCS / "metrics.md").read_text()
    listed = set()
    for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        listed |= {name.partition("{")[0] for name in re.findall(r"`([^`]+)`", row)}
    parts = re.compile(r"_(bucket|sum|count)$")
    assert listed == {parts.sub("", name.removeprefix("freetoken:")) for name in names()}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
    return found


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board, known = dashboard(), names()
    asked: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            found = set(re.findall(r"[a-zA-Z_]+:[a-zA-Z0-9_]+", target["expr"]))
            assert found and found <= known, (panel["title"], found - known)
            assert target["expr"].count("(") == target["expr"].count(")")
            asked |= found
    for variable in board["templating"]["list"]:
        assert set(re.findall(r"freetoken:\w+", str(variable.get("query", "")))) <= known
    # Each metric has a place on the board, a histogram at least its buckets.
    missing = {name for name in known - asked if not re.search(r"_(sum|count|bucket)$", name)}
    assert missing == set()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


@pytest.mark.parametrize("labels", ["bucket", "op", "impl"])
def test_labels_that_legends_name_exist(labels: str) -> None:
    legends = " ".join(t["legendFormat"] for p in dashboard()["panels"] for t in p["targets"])
    assert f"{{{{{labels}}}}}" in legends and any(f'{labels}="' in name for name in served())
