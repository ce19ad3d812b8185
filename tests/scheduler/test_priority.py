"""Priorities: the order of the queue, who makes way, and that nobody does in vain."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import Harness, make_config
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freetoken.sampling_params import SamplingParams
from freetoken.scheduler import policy, preemption
from freetoken.scheduler.policy import Standing
from freetoken.scheduler.queue import WaitingQueue
from freetoken.scheduler.request import Req


def harness(*, pages: int = 40, rows: int = 8, **flags: Any) -> Harness:
    config = make_config(page_size=1, enable_priority_scheduling=True, **flags)
    return Harness(config, num_pages=pages + 1, max_rows=rows)


def running(h: Harness) -> list[str]:
    return [r.rid for r in h.scheduler.resident.values() if r.rid in h.scheduler.live]


def request(rid: str, priority: int, arrival: int) -> Req:
    return Req(rid, [1, 2], 2, SamplingParams(), 5, frozenset(), 0, arrival=arrival, priority=priority)


# --- pure ------------------------------------------------------------------------------------------------------------


def test_victims_are_the_lowest_and_of_them_the_youngest() -> None:
    items = [Standing(1, 5), Standing(0, 2), Standing(0, 7), Standing(2, 9), Standing(1, 6)]
    assert policy.victims(items) == [2, 1, 4, 0, 3]
    assert policy.victims(items, below=2) == [2, 1, 4, 0]
    assert policy.victims(items, below=0) == []


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 9)), max_size=8), st.integers(-3, 3))
def test_nobody_makes_way_for_an_equal(found: list[tuple[int, int]], below: int) -> None:
    items = [Standing(priority, arrival) for priority, arrival in found]
    chosen = policy.victims(items, below)
    assert sorted(chosen) == [i for i, item in enumerate(items) if item.priority < below]
    assert [items[i].priority for i in chosen] == sorted(items[i].priority for i in chosen)


def test_longest_prefix_order_is_within_a_priority() -> None:
    items = [policy.Waiting(0, False, 9, 0, 0), policy.Waiting(1, False, 0, 0, 1), policy.Waiting(2, True, 0, 0, -1)]
    assert policy.longest_prefix_order(items) == [1, 0, 2]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.booleans()), max_size=25))
def test_the_queue_against_a_sorted_list(steps: list[tuple[int, bool, bool]]) -> None:
    queue = WaitingQueue(False, lambda req: 0)
    model: list[Req] = []
    for number, (priority, first, remove) in enumerate(steps):
        req = request(f"r{number}", priority, number)
        queue.add(req, first=first)
        model.insert(0 if first else len(model), req)
        if remove:
            gone = model.pop(number % len(model))
            queue.remove(gone)
            assert gone.rid not in queue
        expected = sorted(model, key=lambda r: -r.priority)
        assert list(queue) == [r.rid for r in expected] and list(queue.values()) == expected
        assert queue.order() == queue.window() == expected[: policy.QUEUE_WINDOW]
        assert len(queue) == len(model) and queue.tokens == 2 * len(model)
        assert all(queue[r.rid] is r for r in model)


# --- the scheduler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
def test_higher_ones_are_admitted_first(order: str) -> None:
    h = harness(rows=1, schedule_policy=order)
    for rid, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 1)):
        h.add(rid, [1, 2, 3], priority, max_new_tokens=3, ignore_eos=True)
    h.run()
    assert list(h.outputs) == ["b", "d", "a", "c"]
    assert h.scheduler.stats().retractions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_batch_makes_room_for_a_higher_one(overlap: bool) -> None:
    h = harness(rows=3, overlap=overlap, pages=200)
    for i, priority in enumerate((1, 0, 0)):
        h.add(f"r{i}", [i + 1] * 3, priority, max_new_tokens=20, ignore_eos=True)
    for _ in range(6):
        h.step()
    h.add("equal", [9] * 3, 0, max_new_tokens=4, ignore_eos=True)
    h.step()
    assert running(h) == ["r0", "r1", "r2"]
    h.add("high", [8] * 3, 2, max_new_tokens=4, ignore_eos=True)
    h.step()
    assert set(running(h)) == {"r0", "r1", "high"}
    assert list(h.scheduler.waiting) == ["r2", "equal"]
    h.run()
    assert h.scheduler.stats().retractions == 1
    for rid in ("r0", "r1", "r2", "equal", "high"):
        h.check_text(rid)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("radix", [False, True])
def test_memory_is_taken_from_as_few_as_it_takes(overlap: bool, radix: bool) -> None:
    h = harness(pages=60, overlap=overlap, disable_radix_cache=not radix)
    for i in range(4):
        h.add(f"r{i}", [i + 1] * 10, 0, max_new_tokens=4 + i, ignore_eos=True)
    h.step()
    assert len(running(h)) == 4
    h.add("high", [9] * 25, 1, max_new_tokens=2, ignore_eos=True)
    h.step()
    assert set(running(h)) >= {"r0", "r1", "high"} and "r3" in h.scheduler.waiting
    h.run()
    for rid in ("r0", "r1", "r2", "r3", "high"):
        h.check_text(rid)


def test_nothing_is_taken_in_vain() -> None:
    h = harness(pages=40)
    h.add("peer", [1] * 30, 1, max_new_tokens=8, ignore_eos=True)
    h.add("low", [2] * 3, 0, max_new_tokens=3, ignore_eos=True)
    h.step()
    assert running(h) == ["peer", "low"]
    h.add("high", [3] * 20, 1, max_new_tokens=3, ignore_eos=True)
    h.step()
    assert preemption.victims(h.scheduler) == []
    assert running(h) == ["peer", "low"]
    h.run()
    assert h.scheduler.stats().retractions == 0
    for rid in ("peer", "low", "high"):
        h.check_text(rid)


def test_one_that_waits_for_a_prefix_being_computed_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "SHARED_PREFIX_TOKENS", 8)
    h = harness(rows=2, pages=100, chunked_prefill_size=8, max_prefill_tokens=8)
    h.add("low", [1] * 3, 0, max_new_tokens=30, ignore_eos=True)
    h.step()
    h.add("first", list(range(20)), 1, max_new_tokens=30, ignore_eos=True)
    h.step()
    h.add("second", list(range(20)), 1, max_new_tokens=3, ignore_eos=True)
    h.step()
    assert "low" in running(h)
    h.run()
    for rid in ("low", "first", "second"):
        h.check_text(rid)


def test_lower_ones_wait_as_long_as_higher_ones_come_and_then_run() -> None:
    h = harness(rows=1)
    h.add("low", [1] * 3, -5, max_new_tokens=6, ignore_eos=True)
    for i in range(10):
        h.add(f"high{i}", [2] * 3, 5, max_new_tokens=2, ignore_eos=True)
        h.step()
        h.step()
    assert "low" in h.scheduler.live and len(h.ids("low") if "low" in h.outputs else []) < 6
    h.run()
    h.check_text("low")


def test_a_request_alone_that_grows_past_memory_is_the_lowest_last() -> None:
    h = harness(pages=30)
    h.add("low", [1] * 5, 0, max_new_tokens=24, ignore_eos=True)
    h.add("high", [2] * 5, 1, max_new_tokens=24, ignore_eos=True)
    h.run()
    assert h.scheduler.stats().retractions > 0
    low, high = (h.outputs[rid] for rid in ("low", "high"))
    assert low[-1].finish is not None and high[-1].finish is not None
    for rid in ("low", "high"):
        h.check_text(rid)


def test_without_the_flag_a_priority_is_refused() -> None:
    h = Harness(make_config())
    h.add("r", [1], 3)
    h.run()
    assert (h.finish("r").status, h.finish("r").param) == (400, "priority")


@settings(max_examples=40, deadline=None)
@example([(1, 0, 3), (1, 0, 3), (13, 0, 3), (1, 0, 3)], (6, 1), 30, 4, False)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=6),
    head=st.tuples(st.integers(1, 28), st.integers(1, 3)),
    pages=st.integers(30, 60),
    rows=st.integers(1, 6),
    shared=st.booleans(),
)
def test_victims_let_the_next_one_run_and_none_could_be_spared(
    sizes: list[tuple[int, int, int]], head: tuple[int, int], pages: int, rows: int, shared: bool
) -> None:
    h = harness(pages=pages, rows=rows, chunked_prefill_size=512, max_prefill_tokens=512)
    for i, (length, priority, new) in enumerate(sizes):
        prompt = [1] * length if shared else [i + 2] * length
        h.add(f"r{i}", prompt, priority, seed=i, max_new_tokens=new, ignore_eos=True)
    h.step()
    h.step()
    h.scheduler.drain()
    h.add("head", [1] * head[0], head[1], max_new_tokens=3, ignore_eos=True)
    chosen = preemption.victims(h.scheduler)
    residents = [r for r in h.scheduler.resident.values() if r.rid in h.scheduler.live]
    next_up = next(iter(h.scheduler.waiting.values()))
    if chosen:
        assert all(victim.priority < next_up.priority for victim in chosen)
        spared = [r for r in residents if r not in chosen]
        assert all((r.priority, -r.arrival) >= (chosen[-1].priority, -chosen[-1].arrival) for r in spared)
        assert preemption._fewest(h.scheduler, next_up, residents, chosen[:-1]) == []
    before = h.scheduler.stats().retractions
    # A prompt that ends in the same step may take more than was foreseen.
    certain = not h.scheduler.prefilling
    h.step()
    if chosen and certain:
        assert next_up.rid not in h.scheduler.waiting
        assert h.scheduler.stats().retractions >= before + len(chosen)
    h.scheduler.check()
