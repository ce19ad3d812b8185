"""Token masks of constrained output: where each request stands in its grammar, and what may come next (torch-free).

A mask depends on every token before it, and with overlap the last of them is still on the device when the next step is
launched. So a step with constrained rows is launched in two parts: its forward pass first; then, while that runs, the step
before is drained, its tokens move the matchers on, worker threads fill the masks, and the draw is enqueued behind the
forward pass. The forward pass of one step is thus always enqueued before the step before it has been waited for.

A thinking budget is kept by one such mask, for the draw that would be the last of the thoughts.

A matcher stands exactly behind the request's tokens on the host, so a retraction leaves it as it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from llguidance import LLExecutor, LLMatcher

from freetoken.errors import RequestError
from freetoken.grammar.compiler import GrammarCompiler
from freetoken.grammar.schema import one_line
from freetoken.messages import Finish
from freetoken.scheduler.request import Req, Status

logger = logging.getLogger("freetoken.scheduler")

COMPILE_THREADS = 2
COMPILE_SECONDS = 30.0
"""A request that waits longer for its grammar is refused: one grammar takes well under a second, so hundreds are ahead."""

FILL_THREADS = 8
"""Threads that fill masks, at most half the cores. One mask takes tens of microseconds, and now and then milliseconds."""

FILL_ALONE = 3
"""So few masks are filled by the scheduler's own thread: waking others takes as long."""


class Constraint:
    """Where one request's output stands in its grammar.

    ``ready`` turns true when the grammar is compiled; with ``failed`` set it never will be. ``stopped`` says that the grammar is
    satisfied and nothing but the end can follow.
    """

    def __init__(self, template: LLMatcher | Future[LLMatcher], req: Req, deadline: float) -> None:
        grammar = req.sampling.grammar
        assert grammar is not None
        self.param = grammar.param
        self.failed: Finish | None = None
        self.deadline = deadline
        self.building: Future[LLMatcher] | None = None
        self._after = grammar.after
        self._matcher: LLMatcher | None = None
        if isinstance(template, LLMatcher):
            self._matcher = template.deep_copy()
        else:
            self.building = template

    def ready(self, now: float) -> bool:
        """Whether the request can run; sets ``failed`` when its grammar cannot be compiled or takes too long."""
        if self._matcher is not None or self.building is None:
            return self.failed is None
        if not self.building.done():
            if now > self.deadline:
                self.building.cancel()
                self.building = None
                self.failed = self._failure("the grammar was not compiled in time; try again", 503, "grammar_timeout")
            return False
        building, self.building = self.building, None
        error = building.exception()
        if isinstance(error, RequestError):
            self.failed = Finish("error", None, error.message, error.status, error.code, error.param)
        elif error is not None:
            # A fault of ours or of the library, which is no reason to end the requests that have no part in it.
            logger.error("a grammar could not be compiled", exc_info=error)
            self.failed = self._failure(f"{self.param}: the grammar could not be compiled", 500, "internal_error")
        else:
            self._matcher = building.result().deep_copy()
        return self.failed is None

    @property
    def free(self) -> bool:
        """Whether the grammar does not govern the output yet."""
        return self._after is not None

    @property
    def stopped(self) -> bool:
        return self._after is None and self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher

    def accept(self, token: int) -> Finish | None:
        """Move on by a token; what ends the request if it cannot go on."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return None
        if self.matcher.consume_token(token):
            return None
        return self.broken()

    def broken(self) -> Finish:
        """The terminal message for a matcher in its error state."""
        reason = one_line(self.matcher.get_error())
        return self._failure(
            f"{self.param}: the grammar cannot be followed any further: {reason}", 400, "grammar_failed"
        )

    def _failure(self, message: str, status: int, code: str) -> Finish:
        return Finish("error", None, message, status, code, self.param)


class Grammars:
    """The constraints of one scheduler: compiled on threads of their own, masks filled on others.

    All methods are called by the scheduler's thread.
    """

    def __init__(self, compiler: GrammarCompiler, clock: Callable[[], float] = time.monotonic) -> None:
        self.compiler = compiler
        self.eos_ids = frozenset(compiler.eos_ids)
        self._clock = clock
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="freetoken-grammar")
        self._fill_threads = min(FILL_THREADS, len(os.sched_getaffinity(0)) // 2)
        self._fillers: LLExecutor | None = None
        self._masks = np.empty((0, compiler.mask_words), np.uint32)

    def attach(self, req: Req) -> None:
        """Give ``req``, whose sampling has a grammar, its constraint; compiling starts now if it has to."""
        grammar = req.sampling.grammar
        assert grammar is not None
        template = self.compiler.kept(grammar) or self._pool.submit(self.compiler.compile, grammar)
        req.constraint = Constraint(template, req, self._clock() + COMPILE_SECONDS)

    def ready(self, req: Req) -> bool:
        """Whether nothing about a grammar keeps ``req`` from running."""
        return req.constraint is None or req.constraint.ready(self._clock())

    def wait(self, reqs: Sequence[Req], seconds: float) -> None:
        """Sleep until a grammar of ``reqs`` is compiled, at most ``seconds``; not at all if none is being compiled."""
        building = [
            r.constraint.building for r in reqs if r.constraint is not None and r.constraint.building is not None
        ]
        if building:
            wait(building, timeout=seconds, return_when=FIRST_COMPLETED)

    def finish(self, req: Req, token: int) -> Finish | None:
        """Account for a drawn token of a constrained request; why it ends with it, if it does.

        An end-of-sequence or stop token was drawn only if the grammar allowed it, whatever the minimum length.
        """
        constraint = req.constraint
        assert constraint is not None
        if token in req.stop_ids or token in self.eos_ids:
            return Finish("stop", token)
        return constraint.accept(token) or (Finish("stop") if constraint.stopped else None)

    def fill(self, reqs: Sequence[Req], indices: Sequence[int]) -> tuple[np.ndarray, list[tuple[Req, Finish]]]:
        """``(masks [len(reqs), mask_words] int32, requests that end here instead of drawing)``.

        ``indices`` number the tokens about to be drawn among each request's outputs. A row of a request that has ended allows
        everything; that of one whose thoughts must end here, their end alone. The array is overwritten by the next call.
        """
        if len(reqs) > len(self._masks):
            self._masks = np.empty((len(reqs), self.compiler.mask_words), np.uint32)
        masks = self._masks[: len(reqs)]
        jobs: list[tuple[LLMatcher, int]] = []
        for place, req in enumerate(reqs):
            if req.status is Status.RUNNING and req.constraint is not None and not req.constraint.free:
                jobs.append((req.constraint.matcher, place))
            else:
                masks[place] = 0xFFFFFFFF
        self._run(jobs, masks)
        ended: list[tuple[Req, Finish]] = []
        for place, (req, index) in enumerate(zip(reqs, indices)):
            if req.status is not Status.RUNNING:
                continue
            end = _end_of_thoughts(req, index)
            if end is not None:
                masks[place] = 0
                masks[place, end >> 5] = 1 << (end & 31)
            elif req.constraint is not None:
                finish = self._settle(req, index, masks[place])
                if finish is not None:
                    masks[place] = 0xFFFFFFFF
                    ended.append((req, finish))
        return masks.view(np.int32), ended

    def _run(self, jobs: list[tuple[LLMatcher, int]], masks: np.ndarray) -> None:
        width = masks.shape[1] * 4
        if len(jobs) <= FILL_ALONE or self._fill_threads < 2:
            for matcher, place in jobs:
                matcher.unsafe_compute_mask_ptr(masks.ctypes.data + place * width, width)
            return
        if self._fillers is None:
            self._fillers = LLExecutor(self._fill_threads)
        self._fillers.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, width, len(masks))

    def _settle(self, req: Req, index: int, mask: np.ndarray) -> Finish | None:
        """Take the ends out of a filled mask that must not come yet; why the request ends if nothing can be drawn."""
        constraint = req.constraint
        assert constraint is not None
        if not constraint.free and constraint.matcher.is_error():
            return constraint.broken()
        early = index < req.sampling.min_new_tokens
        kept_out = set(req.stop_ids) if early or constraint.free else set()
        if kept_out or req.sampling.ignore_eos or constraint.free:
            _keep_out(mask, [*kept_out, *self.eos_ids])
        if not self.eos_ids and not constraint.free:
            # The end has an id that cannot be drawn: where it is all that may come, the output is complete.
            end = self.compiler.vocab_size
            mask[end >> 5] &= np.uint32(~(1 << (end & 31)) & 0xFFFFFFFF)
            if not mask.any():
                return Finish("stop")
        return None


def _end_of_thoughts(req: Req, index: int) -> int | None:
    """The token that must come as output ``index`` because the thoughts have used up their budget, if one must."""
    budget = req.sampling.thinking_budget
    if budget is None or index != budget.tokens - 1 or budget.end in req.ids[req.prompt_len :]:
        return None
    return budget.end


def _keep_out(mask: np.ndarray, ids: Sequence[int]) -> None:
    """Clear the bits of ``ids`` in ``mask [words] uint32``, unless nothing would be left."""
    words = [token >> 5 for token in ids]
    kept = mask[words]
    for token, word in zip(ids, words):
        mask[word] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    if not mask.any():
        mask[words] = kept
