"""Prefix hits of a model with recurrent state: where its state is kept, found again, given up and freed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from fake_runner import Harness, make_config

from freetoken.scheduler import policy

BOTH = pytest.mark.parametrize("overlap", [False, True])


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


def harness(*, blocks: int = 64, pages: int = 1000, rows: int = 16, **flags: Any) -> Harness:
    return Harness(make_config(**flags), num_pages=pages, max_rows=rows, state_blocks=blocks)


def serve(h: Harness, rid: str, ids: list[int], **sampling: Any) -> int:
    """Run one more request to the end of everything; returns its cached tokens."""
    h.add(rid, ids, **{"max_new_tokens": 3, "ignore_eos": True, **sampling})
    h.run()
    h.check_text(rid)
    return cached(h, rid)


def cached(h: Harness, rid: str) -> int:
    return h.outputs[rid][0].cached_tokens


def kept(h: Harness, rid: str) -> list[int]:
    return [position for name, position in h.runner.snapshots if name == rid]


@BOTH
def test_the_end_of_a_prompt_is_kept_for_the_next_turn(overlap: bool) -> None:
    h = harness(overlap=overlap)
    ids = prompt(0, 150)
    assert serve(h, "first", ids, max_new_tokens=30) == 0
    assert h.runner.snapshots == [("first", 148)]
    assert [tokens for _, tokens in h.runner.batches[:2]] == [148, 2]
    assert serve(h, "same", ids) == 148
    turn = ids + h.ids("first") + prompt(1, 80)
    assert serve(h, "turn", turn) == 148
    assert h.runner.restored == [("same", 148), ("turn", 148)]
    # Nothing parts from the stored path at the end of the first reply, so only the end is kept.
    assert kept(h, "turn") == [256]
    stats = h.scheduler.stats()
    assert (stats.state_hits, stats.state_blocks_used, stats.state_blocks_total) == (2, 2, 64)
    assert h.scheduler.flush_cache()
    assert h.scheduler.stats().state_blocks_used == 0


def test_a_prompt_that_ends_on_a_page_border_leaves_a_token_to_compute() -> None:
    h = harness()
    assert serve(h, "first", prompt(0, 152)) == 0
    assert serve(h, "same", prompt(0, 152)) == 148
    assert serve(h, "longer", [*prompt(0, 152), 1]) == 148


def test_short_prompts_and_short_gains_are_not_worth_a_checkpoint() -> None:
    h = harness()
    least = policy.CHECKPOINT_TOKENS
    assert serve(h, "short", prompt(0, least)) == 0
    assert h.runner.snapshots == []
    assert serve(h, "enough", prompt(1, least + 1)) == 0
    assert serve(h, "little more", prompt(1, least + 40)) == least
    assert h.runner.snapshots == [("enough", least)]


def test_on_a_gpu_the_end_of_a_short_prompt_is_not_worth_a_pass() -> None:
    h = Harness(replace(make_config(), device="cuda"), num_pages=1000, max_rows=16, state_blocks=64)
    least = policy.END_TOKENS
    assert serve(h, "short", prompt(0, least)) == 0
    assert h.runner.snapshots == []
    assert serve(h, "parts", [*prompt(0, 128), 1, 2]) == 0
    assert h.runner.snapshots == [("parts", 128)]
    assert serve(h, "enough", prompt(1, least + 1)) == 0
    assert h.runner.snapshots[1:] == [("enough", least)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("length", "hit"), [(460, 456), (452, 200)])
def test_equal_prompts_wait_where_only_a_junction_lies_before_their_end(device: str, length: int, hit: int) -> None:
    """A stored path of which no state is kept shares 200 tokens with four equal prompts: the first computes all of it, and the others start
    where it left a checkpoint, at the end if that spares enough."""
    h = Harness(replace(make_config(), device=device), num_pages=2000, max_rows=16, state_blocks=64)
    stem = prompt(0, 200)
    assert serve(h, "before", [*stem, *prompt(1, 100)]) == 0
    same = [*stem, *prompt(2, length - 200)]
    for index in range(4):
        h.add(f"s{index}", same, max_new_tokens=3, ignore_eos=True)
    h.run()
    assert [cached(h, f"s{index}") for index in range(4)] == [0, hit, hit, hit]


@BOTH
def test_the_third_request_hits_where_the_second_parted_from_the_first(overlap: bool) -> None:
    h = harness(overlap=overlap)
    stem = prompt(0, 201)
    assert serve(h, "first", stem + prompt(1, 100)) == 0
    assert serve(h, "second", stem + prompt(2, 100)) == 0
    assert kept(h, "second") == [200, 300]
    assert serve(h, "third", stem + prompt(3, 100)) == 200
    assert kept(h, "third") == [300]
    for name, seed in (("first", 1), ("second", 2), ("third", 3)):
        assert serve(h, f"{name} again", stem + prompt(seed, 100)) == 300
    # The pages computed again took the place of those that were there.
    assert h.scheduler.tree.total_pages == 50 + 3 * 25


@BOTH
def test_a_junction_with_a_running_request(overlap: bool) -> None:
    """The stem's pages are in use by the first, so the second keeps copies, and its own tail until it ends."""
    h = harness(overlap=overlap)
    stem = prompt(0, 201)
    ids = stem + prompt(2, 100)
    h.add("first", stem + prompt(1, 100), max_new_tokens=400, ignore_eos=True)
    for _ in range(6):
        h.step()
    h.add("second", ids, max_new_tokens=60, ignore_eos=True)
    for _ in range(6):
        h.step()
    second = h.scheduler.live["second"]
    assert second.keep_private and [position for position, _ in second.held] == [300]
    assert not h.scheduler.prefix.computing
    h.add("third", stem + prompt(3, 20), max_new_tokens=5, ignore_eos=True)
    h.add("second's sibling", [*ids, 1, 2], max_new_tokens=5, ignore_eos=True)
    while "second" in h.scheduler.live:
        h.step()
    assert (cached(h, "third"), cached(h, "second's sibling")) == (200, 200)
    h.add("after", [*ids, 1, 2], max_new_tokens=5, ignore_eos=True)
    h.run()
    assert cached(h, "after") == 300
    for rid in h.requests:
        h.check_text(rid)


@BOTH
def test_nobody_waits_for_pages_that_stay_private(overlap: bool) -> None:
    h = harness(overlap=overlap, chunked_prefill_size=128)
    stem, tail = prompt(0, 401), prompt(2, 1500)
    h.add("first", stem + prompt(1, 100), max_new_tokens=400, ignore_eos=True)
    for _ in range(8):
        h.step()
    h.add("second", stem + tail, max_new_tokens=5, ignore_eos=True)
    for _ in range(3):
        h.step()
    second = h.scheduler.live["second"]
    assert second.keep_private and second in h.scheduler.prefix.computing
    assert second.computed < 400
    h.add("stem only", stem + prompt(3, 100), max_new_tokens=5, ignore_eos=True)
    h.add("tail too", stem + tail[:800] + prompt(4, 100), max_new_tokens=5, ignore_eos=True)
    waits = h.scheduler.prefix.waits
    stem_only, tail_too = h.scheduler.waiting["stem only"], h.scheduler.waiting["tail too"]
    assert waits(stem_only) and waits(tail_too), "the state at the junction is on its way"
    while h.scheduler.tree.measure(stem)[1] < 100:
        h.step()
    assert second.computed < 1200
    assert not waits(stem_only) and not waits(tail_too)
    h.run()
    assert (cached(h, "stem only"), cached(h, "tail too")) == (400, 400)
    for rid in h.requests:
        h.check_text(rid)


@BOTH
@pytest.mark.parametrize("chunk", [16, 1024])
def test_state_is_kept_every_interval_of_a_prefill(overlap: bool, chunk: int) -> None:
    h = harness(overlap=overlap, state_checkpoint_interval=71, chunked_prefill_size=chunk, max_prefill_tokens=chunk)
    assert h.config.state_checkpoint_interval == 68
    ids = prompt(0, 350)
    assert serve(h, "first", ids) == 0
    assert kept(h, "first") == [68, 136, 204, 272, 348]
    assert serve(h, "middle", ids[:150] + prompt(1, 20)) == 136
    assert serve(h, "border", ids[:205]) == 204
    assert serve(h, "below", ids[:204]) == 136


def test_a_long_prompt_takes_a_quarter_of_the_blocks() -> None:
    h = harness(blocks=8, state_checkpoint_interval=64)
    serve(h, "long", prompt(0, 1001))
    assert kept(h, "long") == [512, 1000]


@BOTH
def test_a_hit_below_evicted_pages(overlap: bool) -> None:
    h = harness(overlap=overlap, state_checkpoint_interval=68)
    ids = prompt(0, 350)
    serve(h, "first", ids)
    assert h.scheduler.stats().state_blocks_used == 5
    # 352 tokens were computed, so this leaves 240: checkpoints at 68, 136 and 204.
    h.scheduler.pages.free(h.scheduler.tree.evict(28))
    h.scheduler.check()
    assert h.scheduler.stats().state_blocks_used == 3
    assert serve(h, "again", ids) == 204
    assert kept(h, "again") == [272, 348]


@BOTH
def test_blocks_are_given_up_least_recently_used_first_and_apart_from_pages(overlap: bool) -> None:
    h = harness(blocks=2, overlap=overlap)
    a, b, c = (prompt(seed, 101) for seed in range(3))
    for rid, ids in (("a", a), ("b", b)):
        serve(h, rid, ids)
    assert serve(h, "a again", a) == 100
    serve(h, "c", c)
    stats = h.scheduler.stats()
    assert (stats.state_blocks_used, stats.state_evictions) == (2, 1)
    assert h.scheduler.tree.measure(b) == (25, 0)
    assert serve(h, "a once more", a) == 100
    assert serve(h, "b again", b) == 0
    assert serve(h, "b once more", b) == 100
    assert h.scheduler.stats().retractions == 0


@BOTH
def test_without_a_block_the_state_is_not_kept(overlap: bool) -> None:
    h = harness(blocks=1, overlap=overlap)
    a, b = prompt(0, 101), prompt(1, 101)
    for rid, ids in (("a", a), ("b", b)):
        h.add(rid, ids, max_new_tokens=3, ignore_eos=True)
    h.run()
    assert h.runner.snapshots == [("a", 100)]
    # The one block is read in the step that would have it written.
    for rid, ids in (("a again", a), ("b again", b)):
        h.add(rid, ids, max_new_tokens=3, ignore_eos=True)
    h.run()
    assert (cached(h, "a again"), cached(h, "b again")) == (100, 0)
    assert h.runner.snapshots == [("a", 100)]
    for rid in h.requests:
        h.check_text(rid)


@BOTH
@pytest.mark.parametrize("order", ["fcfs", "lpm"])
def test_without_blocks_everything_is_computed_and_nobody_waits(overlap: bool, order: str) -> None:
    h = harness(blocks=0, overlap=overlap, schedule_policy=order, max_prefill_tokens=4000)
    stem = prompt(0, 600)
    for i in range(5):
        h.add(f"r{i}", stem + prompt(i, 10), max_new_tokens=4, ignore_eos=True)
    h.step()
    assert len(h.scheduler.resident) == 5
    h.run()
    assert serve(h, "later", stem) == 0
    assert h.runner.prefill_tokens == 5 * 610 + 600
    assert h.scheduler.stats().cached_tokens == 0
    for rid in h.requests:
        h.check_text(rid)


@BOTH
def test_a_disabled_prefix_cache_keeps_no_state(overlap: bool) -> None:
    h = harness(overlap=overlap, disable_radix_cache=True)
    for rid in ("first", "second"):
        assert serve(h, rid, prompt(0, 300)) == 0
    assert h.runner.snapshots == [] and h.scheduler.stats().state_blocks_total == 0


def test_an_abort_while_the_state_is_being_kept() -> None:
    h = harness()
    ids = prompt(0, 150)
    h.add("r", ids, max_new_tokens=30, ignore_eos=True)
    h.step()
    states = h.scheduler.prefix.checkpoints
    assert h.runner.snapshots == [("r", 148)] and len(states.in_flight) == 1
    h.scheduler.abort("r")
    h.scheduler.check()
    h.run()
    assert not states.in_flight and states.blocks.used_count == len(states.stored) == 1
    # Its pages went into the tree when the step had ended, and the state with them.
    assert serve(h, "again", ids) == 148


@BOTH
def test_aborts_at_every_step_leave_no_block_behind(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "CHECKPOINT_TOKENS", 4)
    stem = prompt(0, 40)
    for steps in range(14):
        h = harness(
            blocks=8, overlap=overlap, chunked_prefill_size=9, max_prefill_tokens=18, state_checkpoint_interval=8
        )
        h.add("running", stem + prompt(1, 10), max_new_tokens=60, ignore_eos=True)
        for _ in range(4):
            h.step()
        h.add("aborted", stem + prompt(2, 20), max_new_tokens=10, ignore_eos=True)
        for _ in range(steps):
            h.step()
        h.scheduler.abort("aborted")
        h.scheduler.check()
        h.run()
        for rid in h.requests:
            h.check_text(rid)
        assert h.scheduler.flush_cache() and h.scheduler.prefix.checkpoints.blocks.free_count == 8


@BOTH
@pytest.mark.parametrize("blocks", [0, 8])
def test_a_retracted_request_goes_on_from_its_state(
    overlap: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "RATIO_START", 0.0)
    monkeypatch.setattr(policy, "RATIO_FLOOR", 0.0)
    h = harness(overlap=overlap, blocks=blocks, pages=101)
    for i in range(2):
        h.add(f"r{i}", prompt(i, 121), max_new_tokens=90, ignore_eos=True)
    while h.scheduler.stats().retractions == 0:
        h.step()
    done = len(h.scheduler.waiting["r1"].ids)
    assert done > 121
    before = h.runner.prefill_tokens
    h.run()
    assert h.runner.restored == ([("r1", 120)] if blocks else [])
    assert h.runner.prefill_tokens - before == done - (120 if blocks else 0)
    for rid in h.requests:
        h.check_text(rid)
        assert cached(h, rid) == 0


@BOTH
def test_a_shared_stem_is_computed_once_and_its_state_kept_where_the_prompts_part(overlap: bool) -> None:
    h = harness(overlap=overlap, max_prefill_tokens=2000, rows=12)
    stem = prompt(0, 600)
    for i in range(8):
        h.add(f"r{i}", stem + prompt(i, 10), max_new_tokens=5, ignore_eos=True)
    h.add("other", prompt(9, 300), max_new_tokens=5, ignore_eos=True)
    h.step()
    assert [req.rid for req in h.scheduler.resident.values()] == ["r0", "other"]
    h.run()
    for rid in h.requests:
        h.check_text(rid)
    assert h.runner.prefill_tokens == 610 + 7 * 10 + 300
    assert kept(h, "r0") == [600]


@BOTH
def test_a_junction_is_added_to_a_prefill_under_way_until_it_has_passed(overlap: bool) -> None:
    h = harness(overlap=overlap, chunked_prefill_size=256, max_prefill_tokens=256)
    ids = prompt(0, 1500)
    h.add("first", ids, max_new_tokens=5, ignore_eos=True)
    h.step()
    h.step()
    assert h.scheduler.live["first"].computed == 512
    h.add("passed", ids[:400] + prompt(1, 300), max_new_tokens=5, ignore_eos=True)
    h.add("ahead", ids[:1000] + prompt(2, 300), max_new_tokens=5, ignore_eos=True)
    waits = h.scheduler.prefix.waits
    assert not waits(h.scheduler.waiting["passed"])
    assert waits(h.scheduler.waiting["ahead"])
    h.run()
    assert kept(h, "first") == [1000, 1496]
    assert cached(h, "ahead") == 1000
    for rid in h.requests:
        h.check_text(rid)


@BOTH
def test_one_prompt_sampled_several_times_in_a_later_turn(overlap: bool) -> None:
    """The reply before has pages without state: they are computed again once, for all samples."""
    h = harness(overlap=overlap)
    ids = prompt(0, 150)
    serve(h, "turn", ids, max_new_tokens=300)
    again = ids + h.ids("turn") + prompt(1, 200)
    before = h.runner.prefill_tokens
    for i in range(4):
        h.add(f"s{i}", again, max_new_tokens=5, ignore_eos=True, seed=i)
    h.run()
    assert [cached(h, f"s{i}") for i in range(4)] == [148, 648, 648, 648]
    assert h.runner.prefill_tokens - before == 650 - 148 + 3 * 2
    for rid in h.requests:
        h.check_text(rid)


def test_prompts_cut_for_their_state_share_their_steps() -> None:
    h = harness(overlap=False)
    for i in range(8):
        h.add(f"r{i}", prompt(i, 98), max_new_tokens=2, ignore_eos=True)
    h.step()
    h.step()
    assert [tokens for _, tokens in h.runner.batches] == [8 * 96, 8 * 2]
    h.run()


def test_prompt_logprobs_neither_use_nor_keep_state() -> None:
    h = harness()
    ids = prompt(0, 150)
    serve(h, "warm", ids)
    assert serve(h, "scored", ids, prompt_logprobs=0) == 0
    assert kept(h, "scored") == [] and h.runner.restored == []
    assert serve(h, "again", ids) == 148


def test_lpm_goes_by_what_is_usable() -> None:
    h = harness(overlap=False, schedule_policy="lpm", rows=1)
    long, short = prompt(0, 300), prompt(1, 100)
    serve(h, "long", long)
    serve(h, "short", short)
    # 200 tokens of the first are stored without state there, all of the second with it.
    h.add("stored", long[:200] + prompt(2, 20), max_new_tokens=1)
    h.add("usable", [*short, 1, 2], max_new_tokens=1)
    order = []
    while h.scheduler.has_work:
        order += [output.rid for output in h.step() if output.finish]
    assert order == ["usable", "stored"]
    assert (cached(h, "usable"), cached(h, "stored")) == (96, 0)
