"""A client request and its sequences as the HTTP process follows them: outputs of the scheduler in, events for the client
out (torch-free)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from freetoken.errors import RequestError
from freetoken.messages import Finish, RequestOutput, TokenLogprob
from freetoken.sampling_params import SamplingParams
from freetoken.server.detokenizer import OutputText, Tokenizer
from freetoken.server.generation import GenEvent, GenSpec

if TYPE_CHECKING:
    from freetoken.server.frontend import Frontend


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Generation:
    """One client request on its way. Made by :meth:`Frontend.admit`; :meth:`close` must be called in the end."""

    def __init__(self, frontend: Frontend, spec: GenSpec, reserved_tokens: int) -> None:
        self.spec = spec
        self.created = int(time.time())
        self.choices: list[Choice] = []
        self.reserved_tokens = reserved_tokens
        self.aborted = False
        self._frontend = frontend
        self._open = spec.num_choices
        self._pending: dict[int, GenEvent] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._gone = False
        self.failure: RequestError | None = None

    async def start(self) -> None:
        """Render, tokenise, check and send. Raises :class:`RequestError`, or :class:`ClientGone` if so."""
        await self._frontend.start(self)
        self.check_client()

    def check_client(self) -> None:
        if self._gone:
            raise ClientGone

    async def next(self) -> list[GenEvent]:
        """All events since the last call, at least one, one a choice; an empty list once every choice has ended.

        Raises :class:`ClientGone` after :meth:`cancel`.
        """
        while True:
            self.check_client()
            if self._pending:
                events = list(self._pending.values())
                self._pending = {}
                return events
            if self._open == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def put(self, event: GenEvent) -> None:
        """Add an event; one the consumer has not taken yet grows instead."""
        if event.finish is not None:
            self._open -= 1
        earlier = self._pending.get(event.index)
        if earlier is None:
            self._pending[event.index] = event
        else:
            earlier.merge(event)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """The client is gone: stop generating and wake the consumer."""
        self._gone = True
        self.close()
        self.wake()

    def end_all(self, finish: str, error: RequestError | None) -> None:
        """Give every choice that is still open its last event; :meth:`Frontend.forget` must follow."""
        self.failure = error
        for index in range(self.spec.num_choices):
            if index >= len(self.choices):
                self.put(GenEvent(index, finish=finish, error=error))
            elif not self.choices[index].done:
                self.put(self.choices[index].standing(finish, error))
        self.wake()

    def rest(self) -> list[GenEvent]:
        """For the log, when the client has gone: the events it did not take, and how far every unfinished choice had come."""
        return [*self._pending.values(), *(choice.standing() for choice in self.choices if not choice.ended)]

    def close(self) -> None:
        """Abort whatever still runs. Idempotent."""
        self._frontend.forget(self)


class Choice:
    """The state of one sequence between two events.

    ``shown`` are special ids whose text is shown, ``thinking`` says that the prompt has opened a block of thoughts. Fields
    in the first group belong to the event loop, those in the second to the receiving thread.
    """

    def __init__(
        self,
        generation: Generation,
        index: int,
        rid: str,
        ids: list[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        interval: int,
        arrival: float,
        shown: Collection[int] = (),
        thinking: bool = False,
    ) -> None:
        self.generation = generation
        self.index = index
        self.rid = rid
        self.num_prompt_tokens = len(ids)
        self.waiting = True
        self.done = False

        self.arrival = arrival
        self.last_output = 0.0
        self.counted = 0
        self.ended = False
        self.stop_matched = False
        self._interval = interval
        self._prompt_only = generation.spec.prompt_only
        self._keep_stop = sampling.no_stop_trim
        self._wants_logprobs = sampling.logprobs is not None
        self._output = OutputText(tokenizer, sampling, shown)
        self._thinking = thinking
        self._prompt_ids: list[int] | None = ids
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._parts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._first = True
        self._completion_tokens = self._cached_tokens = 0

    def standing(self, finish: str | None = None, error: RequestError | None = None) -> GenEvent:
        """An event with the token counts so far, and nothing new but how the choice ends."""
        return GenEvent(
            self.index,
            finish=finish,
            error=error,
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
        )

    def take(self, output: RequestOutput) -> GenEvent | None:
        """Account for one step's output; the event to send now, or ``None`` to wait for more.

        Sets ``ended`` with the last event, and ``stop_matched`` when a stop string ended what the scheduler goes on with.
        """
        finish, matched = output.finish, None
        self._ids += output.ids
        self._completion_tokens, self._cached_tokens = output.completion_tokens, output.cached_tokens
        if output.logprobs:
            self._logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if not self._prompt_only:
            matched = self._add_text(output.ids, finish)
        self.ended = finish is not None or matched is not None
        self.stop_matched = matched is not None and finish is None
        if not self.ended and not self._due():
            return None
        event = self._event(output)
        if matched is not None:
            event.finish, event.matched = "stop", matched
        elif finish is not None:
            self._finish(event, finish)
        return event

    def _add_text(self, ids: list[int], finish: Finish | None) -> str | None:
        stop_token = finish is not None and finish.kind == "stop" and ids and ids[-1] == finish.matched
        text, matched = self._output.push(ids[:-1] if stop_token and not self._keep_stop else ids)
        if finish is not None and matched is None:
            text += self._output.flush()
            matched = self._output.stopped
        if text:
            self._parts.append(text)
        return matched

    def _due(self) -> bool:
        if self._interval == 0:
            return False
        if self._first:
            return True
        return len(self._ids) >= self._interval and (self._wants_logprobs or bool(self._parts))

    def _event(self, output: RequestOutput) -> GenEvent:
        event = GenEvent(
            self.index,
            "".join(self._parts),
            [] if self._prompt_only else self._ids,
            self._logprobs if self._wants_logprobs and not self._prompt_only else None,
            prompt_tokens=output.prompt_tokens or self.num_prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            prompt_ids=self._prompt_ids,
            prompt_logprobs=self._prompt_logprobs,
            thinking=self._thinking,
        )
        self._parts, self._ids, self._logprobs = [], [], []
        self._prompt_ids = self._prompt_logprobs = None
        self._first = False
        return event

    def _finish(self, event: GenEvent, finish: Finish) -> None:
        event.finish, event.matched = finish.kind, finish.matched
        if finish.kind == "error":
            event.error = RequestError(
                finish.message or "the request failed",
                status=finish.status,
                code=finish.code,
                param=finish.param,
                retry_after=1 if finish.status == 503 else None,
            )
        elif self._prompt_only and finish.kind != "abort":
            event.finish, event.matched = "length", None
