"""Traces and their accounting, on traces made by hand: overlap, gaps, graph replays, launches that are missing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.bench import flame
from freetoken.bench.profile import ProfiledBatch, Taken, accounted, report
from freetoken.errors import StartupError
from freetoken.profiling import accounting, summary, trace, traffic
from freetoken.profiling.accounting import BY_NAME, BY_RANGE, BY_REPLAY, UNKNOWN
from freetoken.profiling.roles import ROLES, role_of_weight
from freetoken.profiling.traffic import Facts


class Maker:
    """Writes trace events as torch.profiler does."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def span(self, name: str, start: float, end: float, category: str = "user_annotation", tid: int = 1) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "pid": 9, "tid": tid}
        self.events.append(event)

    def launch(self, start: float, name: str = "cudaLaunchKernel", category: str = "cuda_runtime") -> int:
        self.correlation += 1
        self.span(name, start, start + 0.5, category)
        self.events[-1]["args"] = {"correlation": self.correlation}
        return self.correlation

    def kernel(self, name: str, start: float, end: float, correlation: int | None, category: str = "kernel") -> None:
        self.span(name, start, end, category, tid=7)
        self.events[-1]["args"] = {"stream": 7} | ({} if correlation is None else {"correlation": correlation})

    def trace(self, **facts: Any) -> trace.Trace:
        return trace.parse({"traceEvents": self.events, "freetoken": facts})


def sums(found: accounting.Account, step: int) -> dict[str, float]:
    result: dict[str, float] = {}
    for piece in found.pieces:
        if piece.step == step:
            result[piece.role] = result.get(piece.role, 0.0) + piece.us
            result["gaps"] = result.get("gaps", 0.0) + piece.gap
    return result


def test_overlap_and_gaps_add_up_to_the_step() -> None:
    m = Maker()
    m.span("step:decode requests=1 tokens=1 chained=0", 100, 120)
    m.span("role:norms", 101, 103)
    m.span("role:down", 103, 108)
    first, second, third = m.launch(102), m.launch(104), m.launch(109)
    m.kernel("norm", 110, 115, first)
    m.kernel("gemm", 113, 140, second)  # begins before the norm has ended
    m.kernel("inside", 120, 130, second)  # wholly under the other
    m.kernel("copy", 150, 151, third, "gpu_memcpy")
    found = accounting.account(m.trace())
    assert sums(found, 0) == {"norms": 5, "down": 25, "other": 1, "gaps": 20}
    assert found.whole == [True] and found.on_gpu
    (profile,) = summary.profiles(m.trace())
    # From the launch of the step to the end of its last kernel.
    assert profile.step_us == 51 and profile.gap_us == 20 and profile.busy == pytest.approx(31 / 51)
    assert (profile.launches, profile.host_launches, profile.guessed) == (4, 3, 0)
    assert [(row.role, row.us, row.gap_us, row.launches, row.hidden_us) for row in profile.roles] == [
        ("norms", 5, 10, 1, 0),
        ("down", 25, 0, 2, 12),
        ("other", 1, 10, 1, 0),
    ]
    assert profile.hidden_us == 12 and profile.run_us == 51
    assert {k.name: (k.us, k.hidden_us) for k in profile.kernels}["inside"] == (0, 10)
    text = summary.table(profile)
    assert "kernels run under others for 12.00 us a step" in text
    assert any(line.split() == ["0.00", "10.00", "1", "down", "inside"] for line in text.splitlines())


class Simulated(ProfiledBatch):
    """A GPU whose steps of ``step`` us start 1 us before their launch of ``launch`` us returns, or behind the step before."""

    def __init__(self, launch: float, step: float) -> None:
        self.launch_us, self.step_us = launch, step
        self.config = SimpleNamespace(device="cuda")  # type: ignore[assignment]
        self.maker = Maker()

    def _run(self, batches: Sequence[Any]) -> list[float]:
        clock, ends, stamps = 0.0, [0.0], []
        for number, name in enumerate(batches):
            self.maker.span(f"step:decode requests=1 chained={int(number > 0)}", clock, clock + self.launch_us)
            key = self.maker.launch(clock + 1, "cudaGraphLaunch")
            clock += self.launch_us
            start = max(ends[-1], clock - 1)
            ends.append(start + self.step_us)
            self.maker.kernel(f"{name}a", start, start + self.step_us, key)
            self.maker.kernel(f"{name}b", start + 2, ends[-1] - 1, key)  # wholly under the other
            if number:
                clock = max(clock, ends[-2])
                stamps.append(clock / 1e6)
        return [*stamps, max(clock, ends[-1]) / 1e6]


@pytest.mark.parametrize(("launch", "step"), [(50, 30), (30, 50), (50, 49), (400, 20)])
def test_the_clock_is_of_the_same_time_as_the_sum(launch: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.bench.profile.time.perf_counter", lambda: 0.0)
    simulated = Simulated(launch, step)
    clock = simulated._timed(["k"] * 9, None, None)  # type: ignore[list-item]
    (profile,) = summary.profiles(simulated.maker.trace())
    # Without launches in the way a step takes its own time, else that of a launch.
    assert clock.step * 1e6 == pytest.approx(max(launch, step)) == pytest.approx(profile.step_us)
    taken = Taken("x", Path("x"), clock.step * 1e6, run_us=clock.run * 1e6)
    assert accounted(taken, profile) == pytest.approx(1, abs=1e-6)
    assert profile.steps == 8 and profile.hidden_us == step - 3
    assert "100.0% accounted for" in report(taken, profile, 3)


def replayed(steps: int, *, reference: bool, odd: int | None = None) -> Maker:
    """Chained steps of one replay each of ``a b a c`` (roles down, norms, attn, head); in step ``odd`` the kernel ``x`` is between."""
    m = Maker()
    time = 0.0
    for number in range(steps):
        m.span(f"step:decode requests=3 tokens=3 bucket=4 chained={int(number > 0)}", time, time + 2)
        key = m.launch(time + 1, "cudaGraphLaunch")
        names = "abxac" if number == odd else "abac"
        for place, name in enumerate(names):
            m.kernel(name, time + 5 + 10 * place, time + 13 + 10 * place, key)
        time += 100
    if reference:
        m.span("reference:4", time, time + 50)
        for place, (name, role) in enumerate(zip("abac", ("down", "norms", "attn", "head"))):
            m.span(f"role:{role}", time + 10 * place, time + 10 * place + 9)
            m.kernel(
                name,
                time + 60 + 10 * place,
                time + 64 + 10 * place,
                m.launch(time + 10 * place + 3, category="cuda_driver"),
            )
    return m


def test_a_replay_takes_the_roles_of_the_reference_run() -> None:
    found = accounting.account(replayed(3, reference=True).trace())
    assert {piece.how for piece in found.pieces} == {BY_REPLAY} and len(found.pieces) == 12
    roles = {"down": 8.0, "norms": 8.0, "attn": 8.0, "head": 8.0}
    # The first begins at its launch, a chained one at the end of the kernel before: 43 + 62 to its first kernel at 105.
    assert sums(found, 0) == {**roles, "gaps": 5 + 3 * 2} and sums(found, 1) == {**roles, "gaps": 62 + 3 * 2}
    (profile,) = summary.profiles(replayed(3, reference=True).trace())
    assert profile.steps == 2 and profile.step_us == 100 and profile.host_launches == 1 and profile.launches == 4
    assert profile.values["bucket"] == 4


def test_a_replay_that_differs_is_aligned_by_name() -> None:
    found = accounting.account(replayed(2, reference=True, odd=1).trace())
    assert [(p.role, p.how) for p in found.pieces if p.step == 1] == [
        ("down", BY_REPLAY),
        ("norms", BY_REPLAY),
        ("other", UNKNOWN),
        ("attn", BY_REPLAY),
        ("head", BY_REPLAY),
    ]
    (profile,) = summary.profiles(replayed(2, reference=True, odd=1).trace())
    assert profile.guessed == pytest.approx(1 / 5)


def test_without_a_reference_names_vote() -> None:
    m = replayed(2, reference=False)
    m.span("step:prefill requests=1 tokens=9 chained=0", 300, 340)
    for place, (name, role) in enumerate((("a", "down"), ("a", "down"), ("a", "attn"), ("b", "norms"))):
        m.span(f"role:{role}", 301 + 5 * place, 305 + 5 * place)
        m.kernel(name, 310 + 5 * place, 314 + 5 * place, m.launch(302 + 5 * place))
    found = accounting.account(m.trace())
    assert [(p.role, p.how) for p in found.pieces if p.step == 1] == [
        ("down", BY_NAME),
        ("norms", BY_NAME),
        ("down", BY_NAME),
        ("other", UNKNOWN),
    ]
    assert {p.how for p in found.pieces if p.step == 2} == {BY_RANGE}
    assert [p.kind for p in summary.profiles(m.trace())] == ["decode", "prefill"]


def test_a_kernel_without_a_launch_stays_in_the_step_around_it() -> None:
    m = Maker()
    m.span("step:prefill requests=1 tokens=9 chained=0", 0, 20)
    m.span("role:down", 1, 9)
    m.kernel("gemm", 30, 40, m.launch(2))
    m.kernel("gemm", 45, 50, None)
    m.kernel("lost", 50, 60, 999)
    m.kernel("gemm", 60, 64, m.launch(3))
    found = accounting.account(m.trace())
    assert [(p.step, p.role, p.how) for p in found.pieces] == [
        (0, "down", BY_RANGE),
        (0, "down", BY_NAME),
        (0, "other", UNKNOWN),
        (0, "down", BY_RANGE),
    ]
    assert sum(p.us + p.gap for p in found.pieces) == 64


def test_work_between_steps_and_idle_time_is_of_no_step() -> None:
    m = Maker()
    m.kernel("before", 0, 5, m.launch(-10))
    for start in (10, 1000):
        m.span("step:decode requests=1 chained=0", start, start + 4)
        m.kernel("a", start + 6, start + 8, m.launch(start + 1))
    found = accounting.account(m.trace())
    assert [sums(found, n) for n in (0, 1)] == [{"other": 2, "gaps": 6}] * 2
    # A trace that begins in the middle: the first chained step has no beginning.
    m = replayed(3, reference=True)
    m.events = [event for event in m.events if event["ts"] >= 100]
    found = accounting.account(m.trace())
    assert found.whole == [False, True]


def test_masked_draws_belong_to_the_step_before() -> None:
    m = Maker()
    m.span("step:decode requests=1 chained=0", 0, 10)
    m.span("draw:masked", 20, 30)
    m.span("role:sampler", 21, 29)
    m.kernel("pick", 40, 44, m.launch(22))
    assert sums(accounting.account(m.trace()), 0) == {"sampler": 4, "gaps": 40}
    m.events = [event for event in m.events if event["cat"] == "user_annotation"]
    assert sums(accounting.account(m.trace()), 0) == {"other": 12, "sampler": 8, "gaps": 0}


def test_on_a_cpu_ranges_take_what_is_not_of_those_inside() -> None:
    m = Maker()
    m.span("aten::outside", -5, -1, "cpu_op")
    m.span("step:prefill requests=1 chained=0", 0, 100)
    m.span("role:experts", 10, 60)
    m.span("aten::mm", 15, 25, "cpu_op")
    m.span("role:router", 30, 50)
    m.span("aten::topk", 30, 50.001, "cpu_op")  # rounded beyond its range
    m.span("aten::copy_", 70, 75, "cpu_op")
    m.span("aten::elsewhere", 0, 100, "cpu_op", tid=2)
    (profile,) = summary.profiles(m.trace(device="cpu"))
    assert {row.role: row.us for row in profile.roles} == pytest.approx(
        {"router": 20, "experts": 30, "other": 50}, abs=0.01
    )
    assert profile.step_us == pytest.approx(100, abs=0.01) and profile.gap_us == 0
    assert {(k.role, k.name): k.us for k in profile.kernels}["experts", "aten::mm"] == 10


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=30))
def test_the_sum_is_the_step_whatever_overlaps(pieces: list[tuple[int, int, int]]) -> None:
    m = Maker()
    m.span("step:decode requests=1 chained=0", 0, 50)
    for place, role in enumerate(ROLES[:3]):
        m.span(f"role:{role}", 1 + 10 * place, 9 + 10 * place)
    time, end = 60, 0
    covered: set[int] = set()
    for apart, length, place in pieces:
        time += apart
        m.kernel(f"k{place}", time, time + length, m.launch(2 + 10 * place))
        end = max(end, time + length)
        covered |= set(range(time, time + length))
    account = accounting.account(m.trace())
    found = sums(account, 0)
    gaps = found.pop("gaps")
    assert sum(found.values()) == len(covered) and sum(found.values()) + gaps == end
    assert sum(p.us + p.hidden for p in account.pieces) == sum(length for _, length, _ in pieces)


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    event = '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "ts": 1, "dur": 2, "name": "%s"}]}'
    broken = (
        '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}',
        *(event % name for name in ("step:", "step:a b=c", "reference:x")),
    )
    for text in ("", "[]", "{}", *broken):
        path = tmp_path / "t.json"
        path.write_text(text)
        with pytest.raises(StartupError, match="no trace"):
            trace.read(path)
    with pytest.raises(StartupError, match="cannot read"):
        trace.read(tmp_path / "missing.json")
    with pytest.raises(StartupError, match="no whole step"):
        summary.profiles(trace.parse({"traceEvents": []}))


def test_traffic_of_experts_head_and_memory() -> None:
    weights = {"experts": 900, "head": 64, "embedding": 64, "down": 10, "gdn step": 5}
    facts = Facts(
        "cuda",
        card="a card",
        weights=weights,
        matrices={"experts": 900, "head": 32, "embedding": 32, "down": 5},
        embedding_row=4,
        kv_token=2,
        state_request=7,
        pair_ops=3,
        rule_ops=11,
        experts=8,
        top_k=2,
        joined=1,
    )
    values = {"requests": 2, "tokens": 2, "sampled": 2, "read": 100, "pairs": 100}
    moved = traffic.step_bytes(facts, values)
    # Each of eight is left out by both tokens with (6/8)^2; the ninth is always read.
    assert moved.pop("experts") == pytest.approx(900 * (8 * (1 - 0.5625) + 1) / 9)
    assert moved == {"head": 64, "embedding": 8, "down": 10, "gdn step": 5 + 28, "rotation": 4, "attn": 200}
    done = traffic.step_operations(facts, values)
    assert done == {"experts": 2 * 2 * 300, "head": 128, "down": 20, "attn": 300, "gdn step": 22}
    assert "head" not in traffic.step_bytes(facts, values | {"sampled": 0})
    assert Facts.of(facts.public() | {"later": 1}) == facts


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.3.self_attn.v_proj.bias", "attn qkv"),
        ("model.layers.3.self_attn.o_proj.weight_scale_inv", "attn out"),
        ("model.layers.3.self_attn.k_norm.weight", "rotation"),
        ("model.layers.3.linear_attn.in_proj_ba.weight", "gdn in"),
        ("model.layers.3.linear_attn.norm.weight", "gdn step"),
        ("model.layers.3.linear_attn.out_proj.weight", "gdn out"),
        ("model.layers.3.mlp.up_proj.weight", "gate+up"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.experts.down_proj", "experts"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "shared expert"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.3.post_attention_layernorm.weight", "norms"),
        ("model.norm.weight", "norms"),
        ("lm_head.weight", "head"),
        ("rotary.inv_freq", "other"),
    ],
)
def test_roles_of_weights(name: str, role: str) -> None:
    assert role_of_weight(name) == role


def test_table_and_drawing_hold_every_role() -> None:
    facts = {
        "device": "cuda",
        "weights": {"down": 4_000_000, "head": 8_000, "norms": 100},
        "bandwidth": 1e12,
        "rate": 1e14,
    }
    m = replayed(3, reference=True)
    (profile,) = summary.profiles(m.trace(**facts))
    text = summary.table(profile)
    for role in ("down", "norms", "attn", "head", "gaps"):
        assert f"\n{role} " in text
    (down,) = [row for row in profile.roles if row.role == "down"]
    # 4 MB at 10^12 bytes a second are 4 us of the 8 it takes.
    assert down.share == pytest.approx(0.5) and "50.0%" in text
    # A norm's weights are the least of what it moves.
    assert [(row.bytes, row.share) for row in profile.roles if row.role == "norms"] == [(100, None)]
    assert json.loads(json.dumps(profile.public()))["roles"][0]["share"] is None
    drawing = ET.fromstring(flame.draw(profile))
    titles = [node.text or "" for node in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert (
        any(t.startswith("gaps: 68.00 us") for t in titles) and sum(t.startswith("down: 8.00 us") for t in titles) == 1
    )
    widths = {
        group[0].text.split(":")[0]: float(group[1].get("width") or 0)
        for group in drawing.iter("{http://www.w3.org/2000/svg}g")
        if group[0].text and float(group[1].get("y") or 0) == flame.TOP + flame.BAR + 2
    }
    assert sum(widths.values()) == pytest.approx(flame.WIDTH - 2 * flame.MARGIN, abs=0.1)
