"""The scheduler against requests running alone, on a runner that notices every fault in pages, positions and ids."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runner import EOS, Harness, make_config

from freetoken.messages import AddRequest
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler import invariants, policy
from freetoken.scheduler.invariants import InvariantError
from freetoken.scheduler.request import ScheduleBatch, StepResult
from freetoken.scheduler.scheduler import Scheduler

CONFIGS = [
    {"overlap": overlap, "chunked_prefill_size": chunk, "page_size": page, "schedule_policy": order}
    for overlap in (False, True)
    for chunk in (1, 7, 64)
    for page in (1, 4, 16)
    for order in ("fcfs", "lpm")
]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(50) for _ in range(length)]


@pytest.mark.parametrize("flags", CONFIGS, ids=lambda f: "-".join(str(v) for v in f.values()))
@pytest.mark.parametrize("pool_tokens", [96, 2048])
@pytest.mark.parametrize("blocks", [None, 4], ids=["dense", "state"])
def test_text_is_that_of_running_alone(
    flags: dict, pool_tokens: int, blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Expecting no output at all admits until nothing is left, so that the small pool must retract.
    monkeypatch.setattr(policy, "RATIO_START", 0.0)
    monkeypatch.setattr(policy, "RATIO_FLOOR", 0.0)
    monkeypatch.setattr(policy, "RATIO_RISE", 0.0)
    monkeypatch.setattr(policy, "CHECKPOINT_TOKENS", 1)
    monkeypatch.setattr(policy, "CHECKPOINT_SHARE", 1)
    rng = random.Random(str(flags))
    config = make_config(max_prefill_tokens=64, state_checkpoint_interval=16, **flags)
    h = Harness(config, num_pages=pool_tokens // flags["page_size"] + 1, state_blocks=blocks)
    shared = prompt(rng, 24)
    for i in range(14):
        ids = shared[: rng.randrange(25)] + prompt(rng, rng.randrange(1, 20))
        endless = pool_tokens == 96 or i % 3 == 0
        h.add(f"r{i}", ids, max_new_tokens=rng.randrange(1, 40), ignore_eos=endless, min_new_tokens=i % 2)
        if i % 4 == 0:
            h.step()
    h.run()
    for i in range(14):
        h.check_text(f"r{i}")
    if pool_tokens == 96:
        assert h.scheduler.stats().retractions > 0


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("radix", "blocks"), [(False, None), (True, None), (False, 5), (True, 0), (True, 1), (True, 5), (True, 100)]
)
def test_stress(order: str, overlap: bool, radix: bool, blocks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 requests, aborts, stops and a pool of 160 tokens: one terminal message each, and nothing leaks."""
    monkeypatch.setattr(policy, "CHECKPOINT_TOKENS", 4)
    monkeypatch.setattr(policy, "CHECKPOINT_SHARE", 1)
    if blocks is not None:
        monkeypatch.setattr(policy, "SHARED_PREFIX_TOKENS", 16)
    rng = random.Random(f"{order} {overlap} {radix}")
    config = make_config(
        overlap=overlap,
        schedule_policy=order,
        disable_radix_cache=not radix,
        chunked_prefill_size=16,
        max_prefill_tokens=48,
        max_running_requests=6,
        max_queued_requests=54,
        state_checkpoint_interval=16,
    )
    h = Harness(config, num_pages=41, max_rows=6, state_blocks=blocks)
    stems = [prompt(rng, 40) for _ in range(4)]
    added = 0
    while added < 500 or h.scheduler.has_work:
        # Mostly as fast as they are served, now and then a burst that fills the queue.
        arriving = rng.choice((0, 1, 3)) if len(h.scheduler.waiting) < 20 else rng.random() < 0.002 and 50
        for _ in range(min(arriving, 500 - added)):
            ids = rng.choice(stems)[: rng.randrange(41)] + prompt(rng, rng.randrange(1, 12))
            h.add(
                f"r{added}",
                ids,
                max_new_tokens=rng.randrange(1, 60),
                ignore_eos=rng.random() < 0.7,
                stop_token_ids=(rng.randrange(50),),
                min_new_tokens=rng.choice((0, 0, 1)),
            )
            added += 1
        if rng.random() < 0.08:
            h.scheduler.abort(f"r{rng.randrange(max(1, added))}")
        h.step()
    kinds = {}
    for i in range(added):
        finish = h.finish(f"r{i}")
        kinds[finish.kind] = kinds.get(finish.kind, 0) + 1
        if finish.kind == "error":
            assert finish.code == "queue_full" and finish.status == 503
        else:
            h.check_text(f"r{i}")
    assert set(kinds) >= {"stop", "length", "abort"} and kinds.get("error", 0) < 200
    stats = h.scheduler.stats()
    assert stats.retractions > 0
    assert (stats.running, stats.queued, stats.used_tokens, stats.rows_used) == (0, 0, 0, 0)
    if blocks is not None:
        assert (stats.state_hits > 0) == (radix and blocks > 0)
    assert h.scheduler.flush_cache()
    assert h.scheduler.pages.free_count == 40
    assert h.scheduler.prefix.checkpoints.blocks.used_count == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_does_not_stop_streams(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap, chunked_prefill_size=16, max_prefill_tokens=64), num_pages=512)
    rng = random.Random(0)
    for i in range(4):
        h.add(f"s{i}", prompt(rng, 5), max_new_tokens=300, ignore_eos=True)
    for _ in range(4):
        h.step()
    h.add("long", prompt(rng, 600), max_new_tokens=5, ignore_eos=True)
    steps = 0
    while "long" not in h.outputs:
        rids = sorted(output.rid for output in h.step() if output.rid != "long")
        assert rids == ["s0", "s1", "s2", "s3"]
        steps += 1
    assert 600 // 12 <= steps <= 600 // 12 + 3
    assert max(tokens for decodes, tokens in h.runner.batches if decodes) == 16
    h.run()
    h.check_text("long")


def test_without_streams_the_larger_budget_applies_and_prompts_share_a_step() -> None:
    h = Harness(make_config(overlap=False, chunked_prefill_size=16, max_prefill_tokens=64))
    rng = random.Random(1)
    for i in range(3):
        h.add(f"r{i}", prompt(rng, 25), max_new_tokens=2)
    h.step()
    assert h.runner.batches == [(0, 64)]
    h.step()
    assert h.runner.batches[1] == (2, 2 + 11)
    h.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_cached_tokens_are_whole_pages_and_leave_one_to_compute(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap))
    rng = random.Random(2)
    ids = prompt(rng, 16)
    for rid, more in (("first", []), ("same", []), ("longer", [1, 2]), ("parts", None)):
        h.add(rid, ids[:10] if more is None else ids + more, max_new_tokens=4, ignore_eos=True)
        h.run()
        h.check_text(rid)
    cached = {rid: {output.cached_tokens for output in h.outputs[rid]} for rid in h.outputs}
    assert cached == {"first": {0}, "same": {12}, "longer": {16}, "parts": {8}}
    stats = h.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generation_tokens) == (60, 36, 16)
    assert h.runner.prefill_tokens == 60 - 36


def test_output_enters_the_cache_for_the_next_turn() -> None:
    h = Harness(make_config())
    h.add("a", prompt(random.Random(3), 10), max_new_tokens=9, ignore_eos=True)
    h.run()
    turn = h.requests["a"].ids + h.ids("a")
    h.add("b", [*turn, 1, 2, 3], max_new_tokens=2)
    h.run()
    # 18 of the 19 tokens were computed: the last one was only sampled.
    assert h.outputs["b"][0].cached_tokens == 16
    h.check_text("b")


def test_a_running_request_shares_its_prompt() -> None:
    h = Harness(make_config())
    ids = prompt(random.Random(4), 20)
    h.add("a", ids, max_new_tokens=200, ignore_eos=True)
    for _ in range(5):
        h.step()
    h.add("b", [*ids, 3], max_new_tokens=3, ignore_eos=True)
    h.run()
    assert h.outputs["b"][0].cached_tokens == 20
    h.check_text("a")
    h.check_text("b")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_shared_prefix_is_computed_once(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap, max_prefill_tokens=2000), num_pages=1000)
    rng = random.Random(5)
    stem = prompt(rng, 600)
    for i in range(8):
        h.add(f"r{i}", stem + prompt(rng, 10), max_new_tokens=5, ignore_eos=True)
    h.add("other", prompt(rng, 300), max_new_tokens=5, ignore_eos=True)
    h.step()
    assert len(h.scheduler.resident) == 2, "only the first of the family, and the stranger behind it"
    h.run()
    for rid in h.requests:
        h.check_text(rid)
    assert h.runner.prefill_tokens == 610 + 7 * 10 + 300


def test_lpm_prefers_the_cached_and_never_starves() -> None:
    h = Harness(make_config(overlap=False, schedule_policy="lpm"), max_rows=1)
    rng = random.Random(6)
    stem = prompt(rng, 20)
    h.add("warm", stem, max_new_tokens=1)
    h.run()
    h.add("cold", prompt(rng, 8), max_new_tokens=1)
    order = []
    for i in range(policy.MAX_BYPASS + 5):
        h.add(f"hit{i}", [*stem, i % 50], max_new_tokens=1)
        order += [output.rid for output in h.step() if output.finish]
    h.run()
    assert order.index("cold") == policy.MAX_BYPASS


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_tokens(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap))
    base = {"max_new_tokens": 60, "ignore_eos": True}
    ids = prompt(random.Random(7), 6)
    h.add("free", ids, **base)
    h.run()
    text = h.ids("free")
    stop = text[5]
    first = text.index(stop)
    h.add("stop", ids, **base, stop_token_ids=(stop,))
    h.add("later", ids, **base, stop_token_ids=(stop,), min_new_tokens=first + 1)
    h.run()
    assert h.ids("stop") == text[: first + 1]
    assert (h.finish("stop").kind, h.finish("stop").matched) == ("stop", stop)
    assert len(h.ids("later")) > first + 1
    h.check_text("later")


class ConstantRunner:
    """Samples one id for ever, whatever is banned."""

    num_pages = 50
    max_rows = 4

    def launch(self, batch: ScheduleBatch) -> ScheduleBatch:
        return batch

    def collect(self, handle: ScheduleBatch) -> StepResult:
        return StepResult([EOS] * len(handle.sampled))


def test_no_stop_before_min_new_tokens_whatever_the_sampler_gives() -> None:
    scheduler = Scheduler(make_config(), ConstantRunner(), check_invariants=True)
    scheduler.add(AddRequest("r", [1], SamplingParams(max_new_tokens=20, min_new_tokens=4)))
    outputs = []
    while scheduler.has_work:
        outputs += scheduler.step()
    assert [output.finish and output.finish.kind for output in outputs] == [None] * 4 + ["stop"]


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
def test_a_retracted_request_overtakes_those_that_waited(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RATIO_START", 0.0)
    monkeypatch.setattr(policy, "RATIO_FLOOR", 0.0)
    h = Harness(make_config(schedule_policy=order), num_pages=11, max_rows=2)
    for i in range(4):
        h.add(f"r{i}", [i] * 8, max_new_tokens=24, ignore_eos=True)
    while h.scheduler.stats().retractions == 0:
        h.step()
    assert list(h.scheduler.waiting) == ["r1", "r2", "r3"]
    h.run()
    assert list(h.outputs) == ["r0", "r1", "r2", "r3"]
    for rid in h.requests:
        h.check_text(rid)


def test_eos_ends_a_request_unless_ignored() -> None:
    h = Harness(make_config(eos=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)))
    h.add("eos", [1], max_new_tokens=100)
    h.add("ignored", [1], max_new_tokens=100, ignore_eos=True)
    h.run()
    assert h.finish("eos").kind == "stop" and h.finish("ignored").kind == "length"
    assert len(h.ids("ignored")) == 100


@pytest.mark.parametrize("overlap", [False, True])
def test_length_ends_are_never_overscheduled(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap))
    h.add("one", [1, 2, 3], max_new_tokens=1, ignore_eos=True)
    h.add("five", [4, 5, 6], max_new_tokens=5, ignore_eos=True)
    h.run()
    assert h.finish("one").kind == h.finish("five").kind == "length"
    assert sum(tokens for _, tokens in h.runner.batches) == 3 + 3 + 4


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_every_state(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap, chunked_prefill_size=8, max_prefill_tokens=8), max_rows=2)
    rng = random.Random(8)
    h.add("decoding", prompt(rng, 4), max_new_tokens=50, ignore_eos=True)
    h.step()
    h.add("partial", prompt(rng, 60), max_new_tokens=50)
    h.add("waiting", prompt(rng, 4), max_new_tokens=50)
    for _ in range(3):
        h.step()
    assert h.scheduler.prefilling and list(h.scheduler.waiting) == ["waiting"]
    for rid in ("decoding", "partial", "waiting", "decoding", "unknown"):
        h.scheduler.abort(rid)
        h.scheduler.check()
    assert h.scheduler.has_work
    h.step()
    assert not h.scheduler.has_work
    for rid in ("decoding", "partial", "waiting"):
        assert h.finish(rid).kind == "abort"
        h.check_text(rid)
    assert "unknown" not in h.outputs


def test_abort_of_all_frees_pages_once_the_running_step_is_drained() -> None:
    h = Harness(make_config(disable_radix_cache=True))
    for i in range(12):
        h.add(f"r{i}", [i, i, i], max_new_tokens=100, ignore_eos=True)
    for _ in range(5):
        h.step()
    h.scheduler.abort(None)
    assert h.scheduler.pages.used_count > 0, "the step in flight still uses them"
    h.step()
    assert h.scheduler.pages.used_count == 0 and not h.scheduler.has_work
    assert all(h.finish(f"r{i}").kind == "abort" for i in range(12))


def test_an_ended_id_may_be_used_again_while_the_old_one_is_in_flight() -> None:
    h = Harness(make_config())
    h.add("r", [1, 2, 3], max_new_tokens=50, ignore_eos=True)
    for _ in range(3):
        h.step()
    h.scheduler.abort("r")
    h.step()
    h.outputs.clear()
    h.add("r", [4, 5, 6], max_new_tokens=5, ignore_eos=True)
    h.run()
    h.check_text("r")


@pytest.mark.parametrize(
    ("ids", "sampling", "status", "code", "words"),
    [
        ([], {}, 400, "empty_prompt", "empty"),
        ([1, 50], {}, 400, "invalid_token_id", "50 ids"),
        ([-1], {}, 400, "invalid_token_id", "-1"),
        ([1] * 200, {}, 400, "context_length_exceeded", "--context-length"),
        ([1] * 100, {}, 400, "kv_cache_exceeded", "--max-total-tokens"),
        ([1], {"n": 2}, 400, "invalid_value", "n=2"),
        ([1], {"stop_token_ids": (50,)}, 400, "invalid_value", "stop_token_ids"),
        ([1], {"logit_bias": {77: 1.0}}, 400, "invalid_value", "logit_bias"),
    ],
)
def test_refusals(ids: list[int], sampling: dict, status: int, code: str, words: str) -> None:
    h = Harness(make_config(context_length=200), num_pages=26)
    h.add("bad", ids, **sampling)
    assert h.scheduler.has_work
    h.run()
    finish = h.finish("bad")
    assert (finish.kind, finish.status, finish.code) == ("error", status, code)
    assert finish.message is not None and words in finish.message
    assert h.runner.batches == []


def test_the_longest_prompt_that_fits_is_served() -> None:
    h = Harness(make_config(context_length=200), num_pages=26)
    h.add("full", [1] * 99, ignore_eos=True)
    h.run()
    assert len(h.ids("full")) == 1 and h.finish("full").kind == "length"


def test_a_duplicate_id_is_refused() -> None:
    h = Harness(make_config())
    h.add("r", [1], max_new_tokens=3, ignore_eos=True)
    h.add("r", [1], max_new_tokens=3, ignore_eos=True)
    finish = h.step()[0].finish
    assert finish is not None and (finish.kind, finish.param) == ("error", "rid")
    h.run()


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    h = Harness(make_config(max_running_requests=2, max_queued_requests=1, max_queued_tokens=50), num_pages=200)
    h.add("large", [1] * 60, max_new_tokens=1)
    h.add("over", [1], max_new_tokens=1)
    h.scheduler.abort("large")
    for rid in "abcd":
        h.add(rid, [1], max_new_tokens=1)
    h.run()
    assert {rid: (h.finish(rid).kind, h.finish(rid).status) for rid in ("over", "d")} == {
        "over": ("error", 503),
        "d": ("error", 503),
    }
    assert "--max-queued-tokens" in h.finish("over").message and "--max-queued-requests" in h.finish("d").message
    assert all(h.finish(rid).kind != "error" for rid in "abc")


def test_seeds_are_kept_or_derived() -> None:
    h = Harness(make_config())
    h.add("given", [1], seed=-5)
    h.add("derived", [1], seed=None)
    seeds = {rid: req.seed for rid, req in h.scheduler.live.items()}
    assert seeds["given"] == -5
    again = Harness(make_config())
    again.add("x", [2], seed=9)
    again.add("y", [3], seed=None)
    assert again.scheduler.live["y"].seed == seeds["derived"]


@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs_compute_the_whole_prompt(chunk: int) -> None:
    h = Harness(make_config(chunked_prefill_size=chunk, max_prefill_tokens=chunk))
    ids = prompt(random.Random(9), 14)
    h.add("warm", ids, max_new_tokens=1)
    h.run()
    h.add("scored", ids, max_new_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    h.run()
    first, *rest = h.outputs["scored"]
    assert first.cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert [entry.id for entry in first.prompt_logprobs] == ids
    assert [entry.logprob for entry in first.prompt_logprobs] == [None, *(-float(p) for p in range(1, 14))]
    assert all(output.prompt_logprobs is None for output in rest)
    assert [output.logprobs[0].id for output in h.outputs["scored"]] == h.ids("scored")
    assert h.outputs["warm"][0].logprobs is None


def test_queue_time_comes_with_the_first_output_only() -> None:
    now = 10.0
    h = Harness(make_config(overlap=False), max_rows=1, clock=lambda: now)
    h.add("a", [1], max_new_tokens=3, ignore_eos=True)
    h.add("b", [2], max_new_tokens=2, ignore_eos=True)
    h.step()
    now = 12.5
    h.run()
    assert [output.queue_seconds for output in h.outputs["a"]] == [0.0, None, None]
    assert [output.queue_seconds for output in h.outputs["b"]] == [2.5, None]


def test_flush_is_refused_while_requests_run() -> None:
    h = Harness(make_config())
    h.add("r", [1] * 20, max_new_tokens=10)
    h.step()
    assert not h.scheduler.flush_cache()
    h.run()
    assert h.scheduler.stats().cached_pool_tokens > 0
    assert h.scheduler.flush_cache()
    assert h.scheduler.stats().cached_pool_tokens == 0
    h.scheduler.check()


def test_drain_collects_without_launching() -> None:
    h = Harness(make_config())
    h.add("r", [1, 2], max_new_tokens=5, ignore_eos=True)
    assert h.step() == []
    assert [output.rid for output in h.scheduler.drain()] == ["r"]
    assert len(h.runner.batches) == 1 and h.scheduler.has_work


def test_out_of_memory_ends_the_request_instead_of_looping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cannot happen to a request that was clipped to the pool; the guards are shown by taking pages away."""
    monkeypatch.setattr(invariants, "check_idle", lambda scheduler: None)
    h = Harness(make_config(), num_pages=9)
    h.scheduler._check_invariants = False
    h.add("running", [1] * 10, max_new_tokens=20, ignore_eos=True)
    h.step()
    h.scheduler.pages.allocate(h.scheduler.pages.free_count - 1)
    h.run(100)
    h.add("waiting", [2] * 30, max_new_tokens=1)
    h.run(100)
    for rid in ("running", "waiting"):
        finish = h.finish(rid)
        assert (finish.kind, finish.code) == ("error", "out_of_memory") and "--mem-fraction-static" in finish.message
    assert len(h.ids("running")) > 0 and h.ids("waiting") == []


def test_a_wrong_count_of_ids_is_a_fault_of_ours() -> None:
    h = Harness(make_config(overlap=False))
    h.add("r", [1], max_new_tokens=5)
    collect = h.runner.collect

    def short(handle: int) -> StepResult:
        result = collect(handle)
        result.ids.pop()
        return result

    h.runner.collect = short  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="0 ids for 1"):
        h.step()


def test_imports_without_torch() -> None:
    names = [
        "admission",
        "allocator",
        "checkpoints",
        "invariants",
        "meter",
        "policy",
        "prefix",
        "radix",
        "request",
        "scheduler",
    ]
    code = "import sys; " + "".join(f"import freetoken.scheduler.{name}; " for name in names)
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    path = str(Path(__file__).parents[2] / "python")
    assert subprocess.run([sys.executable, "-c", code], cwd=path, check=False).returncode == 0
