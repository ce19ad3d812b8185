"""Steps that could not be computed for some of their requests: those end with one error, and leave nothing to others."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_runner import FakeRunner, Harness, _Work, alone, make_config

from freetoken.scheduler.request import StepResult
from freetoken.scheduler.scheduler import Scheduler


class FailingRunner(FakeRunner):
    """Steps that reach the position given for a request leave garbage in its KV and state, and say so."""

    fail: dict[str, int]

    def _execute(self, work: _Work, result: StepResult) -> None:
        end = work.start + work.length
        if end <= self.fail.get(work.rid, end):
            super()._execute(work, result)
            return
        for position in range(work.start, end):
            self.store[work.pages[position // self.size] * self.size + position % self.size] = -1
        if self.has_state:
            self.states[work.row] = (end, -1)
        result.failed[work.rid] = "the disk is gone"
        if work.sample:
            row = self.rows[work.row]
            if row.arrival == work.arrival:
                row.tokens.append(0)
            result.ids.append(0)
            assert result.logprobs is not None
            result.logprobs.append(None)


def harness(fail: dict[str, int], *, pages: int, blocks: int | None, **flags: Any) -> Harness:
    h = Harness(make_config(**flags), num_pages=pages, max_rows=5, state_blocks=blocks)
    runner = FailingRunner(h.config, pages, 5, blocks)
    runner.fail = fail
    h.runner = runner
    h.scheduler.runner = runner
    assert isinstance(h.scheduler, Scheduler)
    return h


def requests(seed: int) -> list[list[int]]:
    """Prompts that begin alike, long enough for states to be kept inside them."""
    draw = random.Random(seed)
    stem = [draw.randrange(50) for _ in range(140)]
    return [stem[: draw.choice((70, 140))] + [draw.randrange(50) for _ in range(draw.randint(1, 40))] for _ in range(8)]


@pytest.mark.parametrize("blocks", [None, 20])
@pytest.mark.parametrize("flags", [{}, {"overlap": False}, {"disable_radix_cache": True}, {"chunked_prefill_size": 32}])
@pytest.mark.parametrize("seed", range(4))
def test_failures_end_their_requests_alone(seed: int, flags: dict[str, Any], blocks: int | None) -> None:
    draw = random.Random(seed)
    prompts = requests(seed)
    fail = {f"r{i}": draw.randrange(len(prompts[i]) + 10) for i in draw.sample(range(8), 3)}
    h = harness(fail, pages=draw.choice((90, 400)), blocks=blocks, **flags)
    for index, prompt in enumerate(prompts):
        h.add(f"r{index}", prompt, max_new_tokens=12, ignore_eos=True)
        for _ in range(draw.randint(0, 3)):
            h.step()
        if draw.random() < 0.2:
            h.scheduler.abort(f"r{draw.randrange(index + 1)}")
    h.run()
    for index in range(8):
        rid = f"r{index}"
        finish = h.finish(rid)
        if finish.kind != "error":
            h.check_text(rid)
            continue
        assert rid in fail and (finish.status, finish.code, finish.message) == (500, "step_failed", "the disk is gone")
        request = h.requests[rid]
        right, _, _ = alone(request.ids, request.sampling, 3, h.config, h.pool_tokens, h.runner.has_state)
        assert h.ids(rid) == right[: len(h.ids(rid))]
    h.runner.fail = {}  # type: ignore[attr-defined]
    for index, prompt in enumerate(prompts):
        h.add(f"again{index}", prompt, max_new_tokens=12, ignore_eos=True)
    h.run()
    for index in range(8):
        h.check_text(f"again{index}")
    assert h.scheduler.flush_cache()


def test_an_aborted_request_whose_last_step_fails_leaves_nothing() -> None:
    """Its terminal message is out when the step is drained; its pages must not enter the tree all the same."""
    h = harness({"r": 0}, pages=60, blocks=8)
    prompt = requests(1)[0]
    h.add("r", prompt, max_new_tokens=4)
    h.step()
    h.scheduler.abort("r")
    h.run()
    assert h.finish("r").kind == "abort"
    h.add("again", prompt, max_new_tokens=4)
    h.run()
    h.check_text("again")
    assert h.outputs["again"][0].cached_tokens == 0
