"""The thread that blocks on the scheduler's socket (torch-free)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from freetoken import messages
from freetoken.messages import StepOutput
from freetoken.server.choice import Choice
from freetoken.server.generation import GenEvent

if TYPE_CHECKING:
    from freetoken.server.frontend import Frontend

log = logging.getLogger(__name__)


class Receiver(threading.Thread):
    """Blocks on the scheduler's socket; detokenises a whole step before it wakes the event loop once."""

    def __init__(self, frontend: Frontend, socket: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="freetoken-receiver", daemon=True)
        self._frontend, self._socket, self._loop = frontend, socket, loop

    def run(self) -> None:
        while True:
            data = self._socket.recv()
            if not data:
                return
            try:
                message = messages.decode_to_frontend(data)
                if isinstance(message, StepOutput):
                    batch = self._step(message)
                    if batch:
                        self._loop.call_soon_threadsafe(self._frontend.deliver, batch)
                else:
                    self._loop.call_soon_threadsafe(self._frontend.control, message)
            except msgspec.DecodeError:
                log.exception("the scheduler sent a message that cannot be read")
            except RuntimeError:
                return  # the loop has closed under us: the server is going down

    def _step(self, step: StepOutput) -> list[tuple[Choice, GenEvent | None]]:
        now = time.monotonic()
        choices, metrics = self._frontend.live, self._frontend.metrics
        if step.stats is not None:
            metrics.set_stats(step.stats)
        batch: list[tuple[Choice, GenEvent | None]] = []
        tokens = 0
        for output in step.outputs:
            choice = choices.get(output.rid)
            if choice is None:
                continue
            first = choice.last_output == 0.0
            if output.ids:
                tokens += len(output.ids)
                if first:
                    metrics.ttft.observe(now - choice.arrival)
                else:
                    metrics.itl.observe(now - choice.last_output)
            if first:
                metrics.started(output.prompt_tokens, output.cached_tokens)
                if output.queue_seconds is not None:
                    metrics.queue.observe(output.queue_seconds)
            choice.last_output = now
            event = choice.take(output)
            if choice.ended:
                choices.pop(output.rid, None)
                metrics.e2e.observe(now - choice.arrival)
                if output.finish is not None and output.finish.kind == "abort":
                    metrics.aborted.inc()
            if event is not None or first:
                batch.append((choice, event))
        if tokens:
            metrics.generation_tokens.inc(tokens)
        return batch
