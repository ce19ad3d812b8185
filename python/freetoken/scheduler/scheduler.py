"""The step loop: plan a step, launch it, drain the one before it (torch-free).

With overlap one step is in flight while the next is planned: what it will have done to lengths is known, the ids it
sampled are not. A request that turns out to have ended on a stop token may therefore sit in one step more; that step's
token is thrown away. Whatever a launched step reads or writes stays where it is until that step has been drained.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from freetoken.errors import RequestError
from freetoken.messages import AddRequest, Finish, RequestOutput, SchedulerStats, TokenLogprob
from freetoken.scheduler import invariants, policy, preemption
from freetoken.scheduler.admission import build_request, check_queue
from freetoken.scheduler.allocator import page_allocator, row_allocator
from freetoken.scheduler.grammar import Grammars
from freetoken.scheduler.growth import Growth
from freetoken.scheduler.meter import Meter
from freetoken.scheduler.prefix import PrefixCache
from freetoken.scheduler.queue import WaitingQueue
from freetoken.scheduler.radix import as_key
from freetoken.scheduler.request import Req, ScheduleBatch, Slice, Status, StepResult
from freetoken.scheduler.runner import Flight, Runner
from freetoken.server_args import Config

COMPILE_WAIT_SECONDS = 0.01
"""With nothing to run but requests whose grammar is being compiled, messages are looked at this often."""


class Scheduler:
    """Continuous batching over one runner. Not thread-safe: one loop calls everything.

    :meth:`add` and :meth:`abort` never raise for what a client sent; their answers come out of the next :meth:`step`.
    Every request added gives exactly one output with ``finish`` set.
    """

    def __init__(
        self,
        config: Config,
        runner: Runner,
        *,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
        check_invariants: bool = False,
    ) -> None:
        self.config = config
        self.runner = runner
        self.grammars = grammars
        self.pages = page_allocator(runner.num_pages)
        self.rows = row_allocator(runner.max_rows)
        self.prefix = PrefixCache(
            config,
            self.pages,
            has_state=getattr(runner, "has_state", False),
            state_blocks=getattr(runner, "state_blocks", 0),
        )
        self.tree = self.prefix.tree
        self.waiting = WaitingQueue(config.schedule_policy == "lpm", self.prefix.usable_pages)
        self.resident: dict[int, Req] = {}
        """Requests that hold a row and pages, by arrival, in order of admission; ended ones until they are drained."""
        self.decoding: list[Req] = []
        """Resident requests with another token to schedule after their prefill."""
        self.prefilling: list[Req] = []
        """Resident requests whose prefill is under way, in order of admission."""
        self.growth = Growth(config.page_size)
        self.flights: deque[Flight] = deque()
        self.live: dict[str, Req] = {}
        """Requests whose terminal message is still to come."""
        self._clock = clock
        self._check_invariants = check_invariants
        self._page_size = config.page_size
        self._outputs: list[RequestOutput] = []
        self._arrivals = 0
        self._stats = SchedulerStats(
            total_tokens=self.pages.total * config.page_size,
            rows_total=runner.max_rows,
            state_blocks_total=self.prefix.checkpoints.total,
        )
        self._meter = Meter(clock)

    # --- what the process calls --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do, undelivered outputs included."""
        return bool(self.live or self.flights or self._outputs)

    def add(self, message: AddRequest) -> None:
        """Queue a request, or refuse it with one terminal output."""
        try:
            if message.rid in self.live:
                raise RequestError(f"a request with id {message.rid!r} is already running", param="rid")
            check_queue(len(message.ids), len(self.live), self.waiting.tokens, self.config)
            pool_tokens = self.pages.total * self._page_size
            req = build_request(message, self.config, pool_tokens, self._arrivals, self._clock())
            grammar = req.sampling.grammar
            if self.grammars is None and req.sampling.needs_masks:
                where = "thinking_budget" if grammar is None else grammar.param
                raise RequestError("structured output is not served here", param=where)
            if self.grammars is not None and grammar is not None:
                self.grammars.attach(req)
        except RequestError as error:
            finish = Finish("error", None, error.message, error.status, error.code, error.param)
            self._outputs.append(RequestOutput(message.rid, [], len(message.ids), 0, 0, finish))
            return
        self._arrivals += 1
        self.live[req.rid] = req
        self.waiting.add(req)

    def abort(self, rid: str | None) -> None:
        """End one request, or all with ``None``; nothing for an id that is not live."""
        chosen = list(self.live.values()) if rid is None else [self.live[rid]] if rid in self.live else []
        for req in chosen:
            self._end(req, Finish("abort", message="the request was aborted"))
        self._forget_ended()

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step, drain what is due, and return all outputs since the last call."""
        batch = self._plan()
        if batch is not None:
            self.flights.append(Flight(batch, self.runner.launch(batch)))
            self.prefix.checkpoints.launched()
            self._stats.steps += 1
            if batch.masked:
                self._draw_masked()
        elif not self.flights and self.grammars is not None:
            self.grammars.wait(self.waiting.window(), COMPILE_WAIT_SECONDS)
        due = len(self.flights) - (1 if batch is not None and self.config.overlap else 0)
        for _ in range(due):
            self._drain_oldest()
        if self._check_invariants:
            self.check()
        elif not self.live and not self.flights:
            invariants.check_idle(self)
        if not self.live:
            self._meter.stop()
        return self._take_outputs()

    def drain(self) -> list[RequestOutput]:
        """Wait for every launched step without launching another, and return the outputs."""
        while self.flights:
            self._drain_oldest()
        return self._take_outputs()

    def flush_cache(self) -> bool:
        """Empty the prefix cache; ``False`` and no change while any request is waiting or running."""
        if self.live or self.flights:
            return False
        self.pages.free(self.tree.clear())
        return True

    def force_retraction(self) -> None:
        """Put one of several resident requests back in the queue although there is room for it: a fault for tests."""
        while self.flights:
            self._drain_oldest()
        if len(self.resident) > 1:
            self._retract_youngest()

    def stats(self) -> SchedulerStats:
        """A fresh snapshot. ``used_tokens`` counts pages held by requests, ``cached_pool_tokens`` those that the
        tree alone holds."""
        stats = self._stats
        stats.running = len(self.live) - len(self.waiting)
        stats.queued = len(self.waiting)
        stats.used_tokens = (self.pages.used_count - self.tree.evictable_pages) * self._page_size
        stats.cached_pool_tokens = self.tree.evictable_pages * self._page_size
        stats.rows_used = self.rows.used_count
        checkpoints = self.prefix.checkpoints
        stats.state_blocks_used = checkpoints.blocks.used_count
        stats.state_hits = checkpoints.restored
        stats.state_evictions = checkpoints.evicted
        stats.gen_throughput = self._meter.rate()
        return msgspec.structs.replace(stats)

    def check(self) -> None:
        """The invariant battery; :class:`~freetoken.scheduler.invariants.InvariantError` names what does not add up."""
        invariants.check(self)

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan(self) -> ScheduleBatch | None:
        if self.config.priority_scheduling:
            self._preempt()
        retractions = self._stats.retractions
        batch = ScheduleBatch(self._stats.steps, self._plan_decodes(), [])
        # What a retraction freed is for the streams: admitting in the same step would take it away again.
        if self._stats.retractions == retractions:
            self._plan_prefills(batch)
        return batch if batch.decodes or batch.prefills else None

    def _plan_decodes(self) -> list[Slice]:
        self._make_room_for_decodes()
        if not self.decoding:
            return []
        self.growth.ratio.decoded()
        slices = []
        exhausted = False
        for req in self.decoding:
            start = req.computed
            index = len(req.ids) + req.in_flight - req.prompt_len
            slices.append(Slice(req, start, 1, True, True, index))
            req.computed = start + 1
            req.in_flight += 1
            req.pending += 1
            exhausted = exhausted or index + 1 >= req.max_new_tokens
        if exhausted:
            self.decoding = [r for r in self.decoding if r.num_output < r.max_new_tokens]
        return slices

    def _make_room_for_decodes(self) -> None:
        """Give every decoding request the page its next position lies in; drain and retract where memory is short."""
        size = self._page_size
        while True:
            growing = [r for r in self.decoding if r.computed == len(r.pages) * size]
            if self._reserve(len(growing)):
                break
            if self.flights:
                # A retraction needs the sampled ids on the host, and the drained step may end requests anyway.
                self._drain_oldest()
            else:
                self._retract_youngest()
        for req, page in zip(growing, self.pages.allocate(len(growing))):
            req.pages.append(page)

    def _reserve(self, count: int) -> bool:
        """Have ``count`` pages free, out of the prefix cache if need be; ``False`` and no change if that is not enough."""
        short = count - self.pages.free_count
        if short > self.tree.evictable_pages:
            return False
        if short > 0:
            self.pages.free(self.tree.evict(short))
        return True

    def _retract_youngest(self) -> None:
        """Take back the memory of the youngest resident request of the lowest priority. Only with no step in flight."""
        residents = list(self.resident.values())
        req = residents[policy.victims([policy.Standing(r.priority, r.arrival) for r in residents])[0]]
        if len(residents) == 1:
            self._end(req, self._out_of_memory(req))
            self._forget_ended()
            return
        self.growth.ratio.retracted()
        self._retract(req)

    def _retract(self, req: Req) -> None:
        """Put a resident request back in the queue. Only with no step in flight."""
        self._stats.retractions += 1
        self._release(req)
        self.decoding = [r for r in self.decoding if r is not req]
        self.prefilling = [r for r in self.prefilling if r is not req]
        req.status = Status.WAITING
        req.computed = 0
        req.retractions += 1
        req.key = as_key(req.ids)
        if req.num_output == 0:
            req.prompt_logprobs = None
        self.waiting.add(req, first=True)

    def _out_of_memory(self, req: Req) -> Finish:
        message = (
            f"the KV cache of {self.pages.total * self._page_size} tokens is too small for this request's "
            f"{len(req.ids)} tokens; raise --max-total-tokens or --mem-fraction-static"
        )
        return Finish("error", None, message, 500, "out_of_memory", None)

    def _plan_prefills(self, batch: ScheduleBatch) -> None:
        config = self.config
        budget = policy.prefill_budget(len(batch.decodes), config.chunked_prefill_size, config.max_prefill_tokens)
        for req in self.prefilling[:]:
            budget -= self._add_piece(req, budget, batch)
            if budget <= 0:
                return
        if not self.waiting or not self.rows.free_count:
            return
        expected = self.growth.of_running(self.resident.values())
        for req in self.waiting.order():
            if req.constraint is not None and not self._compiled(req):
                continue
            if self.prefix.waits(req):
                continue
            if self.resident:
                expected += self.growth.of_waiting(req)
            if not self._admit(req, expected, batch):
                if not self.resident:
                    # Nobody will ever give memory back.
                    self._end(req, self._out_of_memory(req))
                break
            self.prefix.plan_junctions(req, self.waiting.window())
            budget -= self._add_piece(req, budget, batch)
            if budget <= 0 or not self.rows.free_count:
                break
        if batch.new_rows:
            self.waiting.count_bypassed(batch.new_rows)

    def _compiled(self, req: Req) -> bool:
        """Whether the grammar of a waiting request is there; one that cannot be had ends the request."""
        assert self.grammars is not None and req.constraint is not None
        if self.grammars.ready(req):
            return True
        if req.constraint.failed is not None:
            self._end(req, req.constraint.failed)
        return False

    def _preempt(self) -> None:
        """Retract requests of lower priority where that lets the next one in the queue run, and no more than it takes."""
        chosen = preemption.victims(self)
        if chosen and self.flights:
            # A retraction needs the sampled ids on the host; what ends with them may have made room.
            while self.flights:
                self._drain_oldest()
            chosen = preemption.victims(self)
        for req in chosen:
            self._retract(req)

    def _admit(self, req: Req, expected: int, batch: ScheduleBatch) -> bool:
        """Give the request its row, its cached prefix and pages for all it has to compute; ``False`` if memory is short.

        ``expected`` pages must stay available for the output of the running requests and this one.
        """
        match = self.prefix.match(req)
        self.tree.lock(match.node)
        needed = policy.pages_for(len(req.ids), self._page_size) - len(match.pages)
        if needed + expected > self.pages.free_count + self.tree.evictable_pages or not self._reserve(needed):
            self.tree.unlock(match.node)
            return False
        self.waiting.remove(req)
        self.resident[req.arrival] = req
        req.status = Status.RUNNING
        req.row = self.rows.allocate(1)[0]
        req.pages = match.pages + self.pages.allocate(needed)
        self.prefix.admitted(req, match, batch)
        batch.new_rows.append(req)
        self.prefilling.append(req)
        if not req.admitted:
            self._first_admission(req)
        return True

    def _first_admission(self, req: Req) -> None:
        req.admitted = True
        req.cached_tokens = req.computed
        req.queue_seconds = self._clock() - req.arrival_time
        self._stats.prompt_tokens += req.prompt_len
        self._stats.cached_tokens += req.cached_tokens

    def _add_piece(self, req: Req, budget: int, batch: ScheduleBatch) -> int:
        """Schedule the next piece of a prefill and return its length."""
        start = req.computed
        length = self.prefix.piece_length(req, min(budget, len(req.ids) - start))
        last = start + length == len(req.ids)
        out_index = len(req.ids) - req.prompt_len
        batch.prefills.append(Slice(req, start, length, False, last, out_index, req.wants_prompt_logprobs))
        req.computed = start + length
        req.pending += 1
        self.prefix.keep_state(req, batch)
        if last:
            self.prefilling.remove(req)
            req.in_flight += 1
            if req.num_output < req.max_new_tokens:
                self.decoding.append(req)
        return length

    def _draw_masked(self) -> None:
        """Draw the step just launched, some of whose rows follow a grammar: their masks need all tokens before it."""
        assert self.grammars is not None
        while len(self.flights) > 1:
            self._drain_oldest()
        batch, handle = self.flights[0]
        pieces = [batch.sampled[place] for place in batch.masked]
        masks, ended = self.grammars.fill([s.req for s in pieces], [s.out_index for s in pieces])
        for req, finish in ended:
            self._end(req, finish)
        self._forget_ended()
        self.runner.draw(handle, masks)

    # --- draining ----------------------------------------------------------------------------------------------------

    def _drain_oldest(self) -> None:
        """Wait for the oldest launched step and apply it: append ids, find ends, share prefixes, free what ended."""
        batch, handle = self.flights.popleft()
        result = self.runner.collect(handle)
        if result.failed:
            self._fail(batch, result.failed)
        generated = self._stats.generation_tokens
        if len(result.ids) != len(batch.sampled):
            raise invariants.InvariantError(f"step {batch.step} gave {len(result.ids)} ids for {len(batch.sampled)}")
        logprobs: Iterable[TokenLogprob | None] = result.logprobs or itertools.repeat(None)
        drawn = zip(result.ids, logprobs)
        for piece in batch.decodes:
            token, logprob = next(drawn)
            self._apply(piece.req, token, logprob)
        for piece in batch.prefills:
            if piece.req.status is Status.RUNNING:
                self.prefix.share(piece)
        self.prefix.take_states(batch)
        for piece in batch.prefills:
            req = piece.req
            if piece.prompt_logprobs and req.status is Status.RUNNING:
                self._extend_prompt_logprobs(req, result)
            if piece.sample:
                token, logprob = next(drawn)
                self._apply(req, token, logprob)
            else:
                self._done_with_step(req)
        if self._stats.generation_tokens > generated:
            self._meter.count(self._stats.generation_tokens - generated)
        self._forget_ended()

    def _fail(self, batch: ScheduleBatch, failed: dict[str, str]) -> None:
        """End the requests of a drained step for which it could not be computed; nothing of theirs is kept for others."""
        for piece in batch.slices:
            req = piece.req
            if req.rid not in failed:
                continue
            req.spoiled = True
            if req.status is Status.RUNNING:
                self._end(req, Finish("error", None, failed[req.rid], 500, "step_failed", None))

    def _extend_prompt_logprobs(self, req: Req, result: StepResult) -> None:
        if req.prompt_logprobs is None:
            # Nothing precedes the first token, so it has no probability.
            req.prompt_logprobs = [TokenLogprob(req.ids[0], None)]
        req.prompt_logprobs.extend(result.prompt_logprobs.get(req.rid, ()))

    def _apply(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """Take the token a drained step sampled for ``req``; one of an ended request is thrown away."""
        req.in_flight -= 1
        if req.status is not Status.RUNNING:
            self._done_with_step(req)
            return
        req.pending -= 1
        req.ids.append(token)
        count = len(req.ids) - req.prompt_len
        finish = self.grammars.finish(req, token) if req.constraint is not None and self.grammars is not None else None
        if req.constraint is None and token in req.stop_ids and count > req.sampling.min_new_tokens:
            finish = Finish("stop", token)
        elif finish is None and count >= req.max_new_tokens:
            finish = Finish("length")
        output = RequestOutput(req.rid, [token], req.prompt_len, count, req.cached_tokens, finish)
        if logprob is not None:
            output.logprobs = [logprob]
        if count == 1:
            output.prompt_logprobs = req.prompt_logprobs
            output.queue_seconds = req.queue_seconds
        self._stats.generation_tokens += 1
        self._outputs.append(output)
        if finish is not None:
            self._close(req)

    def _done_with_step(self, req: Req) -> None:
        req.pending -= 1
        if req.status is Status.FINISHED and req.pending == 0:
            self._release(req)

    def _end(self, req: Req, finish: Finish) -> None:
        """End a live request for a reason other than its own tokens, with its terminal message."""
        count = len(req.ids) - req.prompt_len
        self._outputs.append(RequestOutput(req.rid, [], req.prompt_len, count, req.cached_tokens, finish))
        self._close(req)

    def _close(self, req: Req) -> None:
        """The terminal message is out: free what the request holds, now or when the last step naming it is drained."""
        waited = req.status is Status.WAITING
        req.status = Status.FINISHED
        del self.live[req.rid]
        if waited:
            self.waiting.remove(req)
        elif req.pending == 0:
            self._release(req)

    def _forget_ended(self) -> None:
        """Take ended requests out of what the next step is planned from."""
        if any(r.status is Status.FINISHED for r in self.prefilling):
            self.prefilling = [r for r in self.prefilling if r.status is Status.RUNNING]
        if any(r.status is Status.FINISHED for r in self.decoding):
            self.decoding = [r for r in self.decoding if r.status is Status.RUNNING]

    def _release(self, req: Req) -> None:
        """Hand the full pages of a resident request to the tree, free the rest and its row."""
        assert req.node is not None and req.pending == 0
        self.pages.free(self.prefix.release(req))
        self.rows.free((req.row,))
        del self.resident[req.arrival]
        req.pages = []
        req.shared_pages = 0
        req.node = None
        req.row = -1

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs
