"""Between HTTP and the scheduler: admission, template, tokeniser, detokeniser, aborts, and the scheduler's fate.

Everything here runs on the event loop except :meth:`Prompts.prepare` (thread pool) and ``receiver`` (one thread
that blocks on the scheduler's socket and hands each step's events over in one piece). Torch-free.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from freetoken import crash_dump, messages
from freetoken.errors import RequestError
from freetoken.messages import AbortRequest, AddRequest, Channel, ControlReply, SchedulerStats, ToScheduler
from freetoken.sampling_params import SamplingParams
from freetoken.server.choice import Choice, Generation
from freetoken.server.detokenizer import Tokenizer
from freetoken.server.generation import GenEvent, GenSpec, Prompt, new_rid
from freetoken.server.metrics import Metrics
from freetoken.server.prompts import Prepared, Prompts
from freetoken.server.receiver import Receiver
from freetoken.server_args import Config

log = logging.getLogger(__name__)

CONTROL_TIMEOUT = 60.0
_RETRY_QUEUE = 1
_RETRY_LOADING = 5


@dataclass
class Status:
    """``state`` is ``loading``, ``ready``, ``draining`` or ``failed``; the rest says how far loading is, or why not:
    ``reason`` to clients, ``cause`` to the operator."""

    state: str = "loading"
    phase: str = "starting"
    done: int = 0
    total: int = 0
    unit: str = ""
    reason: str = ""
    cause: str = ""


class Frontend:
    """The HTTP process' side of one scheduler.

    ``channel`` is this launch's pair of addresses; :meth:`open` binds it. ``on_fatal``, if set, is called once, with one
    sentence, when the scheduler is gone or says it failed.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        channel: Channel,
        *,
        on_progress: Callable[[Status], None] | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.prompts = Prompts(config, tokenizer)
        self.metrics = Metrics()
        self.status = Status()
        self.info: dict[str, Any] = {}
        self.live: dict[str, Choice] = {}
        self._channel = channel
        self.on_fatal: Callable[[str], None] | None = None
        self._on_progress = on_progress
        self._generations: dict[str, Generation] = {}
        self._in_system = 0
        self._waiting_tokens = 0
        self._longest_token = 0
        self.scheduler_ready = False
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._call_ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="freetoken-tokenize")
        # Requests with a grammar wait for one another, not others for them: one may take seconds to compile.
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="freetoken-grammar")

    # --- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind the sockets and start receiving. To be called on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._push, pull = self._channel.frontend_sockets(self._context)
        self._receiver = Receiver(self, pull, self._loop)
        self._receiver.start()
        self._pull = pull
        self._pool.submit(self._measure_vocabulary)

    def close(self) -> None:
        """Stop receiving and release the sockets; every open request ends with an error first."""
        self.fail_all("the server is shutting down")
        waker = self._context.socket(zmq.PUSH)
        waker.connect(self._channel.outputs_address)
        waker.send(b"")
        self._receiver.join(timeout=2.0)
        for socket in (waker, self._pull, self._push):
            socket.close(linger=0)
        self._context.term()
        self._pool.shutdown(wait=False)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)

    def _measure_vocabulary(self) -> None:
        self._longest_token = max((len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.size)), default=0)

    async def wait_scheduler(self) -> None:
        """Until the scheduler is ready. :class:`RequestError` when it failed instead."""
        while not self.scheduler_ready and self.status.state == "loading":
            self._changed.clear()
            await self._changed.wait()
        if self.status.state == "failed":
            raise RequestError(self.status.reason, status=503, code="scheduler_gone")

    async def wait_idle(self) -> None:
        """Until no request is in the system."""
        while self._generations:
            self._changed.clear()
            await self._changed.wait()

    def mark_ready(self) -> None:
        """Open for clients (after the warm-up, if there is one)."""
        if self.status.state == "loading":
            self.status = Status("ready", "ready")
            self._changed.set()

    def drain(self) -> None:
        """Refuse new requests from now on; those running go on."""
        if self.status.state != "failed":
            self.status = Status("draining", "draining")
            self._changed.set()

    def shut_scheduler(self, drain: bool = True) -> None:
        """Tell the scheduler to exit."""
        self._try_send(messages.Shutdown(drain=drain))

    def scheduler_gone(self, reason: str, detail: str = "") -> None:
        """The scheduler has exited or failed: every open request gets one error, ``reason``; ``detail`` is what only the
        operator is told. Must run on the event loop."""
        if self.status.state == "failed":
            return
        if self.scheduler_ready:
            crash_dump.write(
                self.config, "server", detail or reason, self._open_requests(), stats=msgspec.to_builtins(self.stats)
            )
        self.status = Status("failed", "failed", reason=reason, cause=detail or reason)
        self.fail_all(reason)
        self._changed.set()
        if self.on_fatal is not None:
            self.on_fatal(reason)

    def _open_requests(self) -> list[dict[str, Any]]:
        """For a crash dump; the prompts only where the log shows them too."""
        return [
            {
                "rid": generation.spec.rid,
                "streamed": generation.spec.stream,
                "outputs": generation.spec.num_choices,
                "created": generation.created,
                "prompt_tokens": [choice.num_prompt_tokens for choice in generation.choices],
                "sampling": [crash_dump.numbers_of(prompt.sampling) for prompt in generation.spec.prompts],
                **(
                    {"prompts": [repr(p) for p in generation.spec.prompts]}
                    if self.config.log_requests == "text"
                    else {}
                ),
            }
            for generation in self._generations.values()
        ]

    def fail_all(self, reason: str) -> None:
        """End every open request and control call with one error."""
        error = RequestError(reason, status=503, code="scheduler_gone")
        for generation in list(self._generations.values()):
            generation.end_all("error", error)
            self.forget(generation, send=False)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    # --- admission ----------------------------------------------------------------------------------------------------

    def check_serving(self) -> None:
        """:class:`RequestError` (503) unless ready."""
        status = self.status
        if status.state == "ready":
            return
        if status.state == "loading":
            raise RequestError(
                f"the model is still loading ({status.phase})", status=503, code="loading", retry_after=_RETRY_LOADING
            )
        if status.state == "draining":
            raise RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=30)
        raise RequestError(status.reason, status=503, code="scheduler_gone")

    def admit(self, spec: GenSpec, *, warm_up: bool = False) -> Generation:
        """Take a place in the bounded queue, before anything is rendered or tokenised.

        Raises :class:`RequestError`: 503 ``queue_full`` or not serving, 400 for a request that could never fit or an id
        that is in use.
        """
        if not warm_up:
            self.check_serving()
        limit = self.config.max_running_requests + self.config.max_queued_requests
        if spec.num_choices > limit:
            raise RequestError(
                f"the request asks for {spec.num_choices} sequences; at most {limit} fit "
                "(--max-running-requests plus --max-queued-requests)",
                param="n" if len(spec.prompts) == 1 else spec.prompts[0].param,
            )
        if spec.rid in self._generations:
            raise RequestError(f"a request with id {spec.rid[:100]!r} is running", param="rid", code="duplicate_rid")
        if self._in_system + spec.num_choices > limit:
            raise self._queue_full(f"{self._in_system} requests are in the system, and {limit} are allowed")
        tokens = sum(self._lower_bound(prompt) * prompt.sampling.n for prompt in spec.prompts)
        self._check_queue_tokens(tokens, 0)
        generation = Generation(self, spec, tokens)
        self._generations[spec.rid] = generation
        self._in_system += spec.num_choices
        self._waiting_tokens += tokens
        return generation

    def _lower_bound(self, prompt: Prompt) -> int:
        if prompt.ids is not None:
            return len(prompt.ids)
        return prompt.num_bytes() // self._longest_token if self._longest_token else 0

    def _check_queue_tokens(self, tokens: int, own: int) -> None:
        others = self._waiting_tokens - own
        if others > 0 and others + tokens > self.config.max_queued_tokens:
            raise self._queue_full(
                f"{others} prompt tokens are waiting, and {self.config.max_queued_tokens} are allowed"
            )

    def _queue_full(self, why: str) -> RequestError:
        self.metrics.refused.inc()
        return RequestError(f"the queue is full: {why}", status=503, code="queue_full", retry_after=_RETRY_QUEUE)

    async def start(self, generation: Generation) -> None:
        """Prepare an admitted request on a thread and send its sequences; see :meth:`Generation.start`."""
        arrival = time.monotonic()
        spec = generation.spec
        pool = self._grammar_pool if any(prompt.has_grammar for prompt in spec.prompts) else self._pool
        prompts = await self._loop.run_in_executor(pool, self.prompts.prepare, spec)
        generation.check_client()
        if generation.failure is not None:
            return
        if generation.aborted:
            generation.end_all("abort", None)
            return
        tokens = sum(len(prepared.ids) * prepared.sampling.n for prepared in prompts)
        self._check_queue_tokens(tokens, generation.reserved_tokens)
        self._waiting_tokens += tokens - generation.reserved_tokens
        generation.reserved_tokens = 0
        try:
            for prompt, prepared in zip(spec.prompts, prompts):
                self._send_prompt(generation, prompt, prepared, arrival)
        except BaseException:
            unsent = tokens - sum(choice.num_prompt_tokens for choice in generation.choices)
            self._waiting_tokens -= unsent
            raise

    def _send_prompt(self, generation: Generation, prompt: Prompt, prepared: Prepared, arrival: float) -> None:
        spec, ids, sampling = generation.spec, prepared.ids, prepared.sampling
        shown = self.prompts.shown_ids(prompt)
        for number in range(sampling.n):
            one = sampling if sampling.n == 1 else _nth(sampling, number)
            index = len(generation.choices)
            rid = spec.rid if spec.num_choices == 1 else f"{spec.rid}-{index}"
            interval = self.config.stream_interval if spec.stream else 0
            choice = Choice(
                generation,
                index,
                rid,
                ids,
                one,
                self.tokenizer,
                interval=interval,
                arrival=arrival,
                shown=shown,
                thinking=prepared.thinking,
            )
            generation.choices.append(choice)
            self.live[rid] = choice
            if not self._try_send(AddRequest(rid, ids, one, spec.priority)):
                raise RequestError("the scheduler is gone", status=503, code="scheduler_gone")
            self.metrics.requests.inc()

    # --- events from the receiving thread -----------------------------------------------------------------------------

    def deliver(self, batch: list[tuple[Choice, GenEvent | None]]) -> None:
        """Hand one step's events to their requests. A choice without an event has merely begun."""
        woken: dict[str, Generation] = {}
        for choice, event in batch:
            if choice.done:
                continue
            if choice.waiting:
                choice.waiting = False
                self._waiting_tokens -= choice.num_prompt_tokens
            if event is None:
                continue
            if event.finish is not None:
                choice.done = True
                self._in_system -= 1
                if choice.stop_matched:
                    self._try_send(AbortRequest(choice.rid))
            choice.generation.put(event)
            woken[choice.generation.spec.rid] = choice.generation
        for generation in woken.values():
            generation.wake()

    def control(self, message: Any) -> None:
        """Everything the scheduler says besides step outputs."""
        if isinstance(message, messages.Loading):
            if self.status.state == "loading":
                self.status = Status("loading", message.phase, message.done, message.total, message.unit)
                if self._on_progress is not None:
                    self._on_progress(self.status)
        elif isinstance(message, messages.Ready):
            self.info = message.info
            self.metrics.set_kernels(message.info)
            self.status = Status(self.status.state, "warm-up") if self.status.state == "loading" else self.status
            self.scheduler_ready = True
            self._changed.set()
        elif isinstance(message, messages.Failed):
            self.scheduler_gone(message.reason, message.detail)
        elif isinstance(message, ControlReply):
            call = self._calls.get(message.call)
            if call is not None and not call.done():
                call.set_result(message)
            if message.stats is not None:
                self.metrics.set_stats(message.stats)

    # --- ending -------------------------------------------------------------------------------------------------------

    def forget(self, generation: Generation, *, send: bool = True) -> None:
        """Drop a request; sequences that still run are aborted."""
        if self._generations.get(generation.spec.rid) is not generation:
            return
        del self._generations[generation.spec.rid]
        self._waiting_tokens -= generation.reserved_tokens
        self._in_system -= generation.spec.num_choices - len(generation.choices)
        for choice in generation.choices:
            self.live.pop(choice.rid, None)
            if choice.waiting:
                choice.waiting = False
                self._waiting_tokens -= choice.num_prompt_tokens
            if not choice.done:
                choice.done = True
                self._in_system -= 1
                if send:
                    self.metrics.aborted.inc()
                    self._try_send(AbortRequest(choice.rid))
        self._changed.set()

    def abort(self, rid: str | None) -> int:
        """Abort by the client request's id, or all; returns how many client requests that concerns."""
        if rid is None:
            found = list(self._generations.values())
        else:
            found = [self._generations[rid]] if rid in self._generations else []
        for generation in found:
            generation.aborted = True
            for choice in generation.choices:
                if not choice.done and rid is not None:
                    self._try_send(AbortRequest(choice.rid))
        if rid is None:
            self._try_send(AbortRequest(None))
        return len(found)

    def _try_send(self, message: ToScheduler) -> bool:
        """Without blocking: a socket whose peer is gone would wait for ever."""
        try:
            self._push.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # --- calls --------------------------------------------------------------------------------------------------------

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run slow work on the tokeniser's threads."""
        return await self._loop.run_in_executor(self._pool, work)

    async def call(self, make: Callable[[int], ToScheduler], timeout: float = CONTROL_TIMEOUT) -> ControlReply:
        """A control call and its answer. :class:`RequestError` 503 without a scheduler, 504 without an answer."""
        number = next(self._call_ids)
        if not self._try_send(make(number)):
            raise RequestError("the scheduler is gone", status=503, code="scheduler_gone")
        future: asyncio.Future[ControlReply] = self._loop.create_future()
        self._calls[number] = future
        try:
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            raise RequestError("the scheduler did not answer in time", status=504, code="timeout") from None
        finally:
            del self._calls[number]

    async def probe(self, *, warm_up: bool = False, tokens: int = 1) -> None:
        """Generate a few tokens through the whole path; :class:`RequestError` when that fails."""
        start = self.config.model.bos_token_id
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        prompt = Prompt(sampling, ids=[start if start is not None else 0])
        generation = self.admit(GenSpec(new_rid("health"), [prompt]), warm_up=warm_up)
        try:
            await generation.start()
            while events := await generation.next():
                for event in events:
                    if event.error is not None:
                        raise event.error
        finally:
            generation.close()

    @property
    def stats(self) -> SchedulerStats:
        return self.metrics.stats


def _nth(sampling: SamplingParams, number: int) -> SamplingParams:
    """The sampling of choice ``number`` of ``n``: a given seed moves on, so that the choices differ."""
    seed = sampling.seed
    if seed is not None:
        seed = (seed + number + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, n=1, seed=seed)
