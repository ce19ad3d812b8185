"""Raw ASGI answers: JSON, errors in the envelope, and a generation, whole or as server-sent events (torch-free)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from freetoken.errors import RequestError
from freetoken.server.anthropic_response import anthropic_error
from freetoken.server.choice import ClientGone, Generation
from freetoken.server.frontend import Frontend
from freetoken.server.generation import GenEvent, GenSpec
from freetoken.server.request_log import RequestRecord
from freetoken.server.wire import error_object

log = logging.getLogger(__name__)

ANTHROPIC_PATH = "/v1/messages"
_LONG_ANSWER = 4096


class JSON(Response):
    """A value, or bytes that are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def envelope(error: RequestError, path: str) -> dict[str, Any]:
    """The error in the envelope of the protocol that ``path`` belongs to."""
    return anthropic_error(error) if path.startswith(ANTHROPIC_PATH) else error_object(error)


def error_response(error: RequestError, path: str = "") -> JSON:
    """The envelope, with ``Retry-After`` where the error has one."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        headers["connection"] = "close"
    return JSON(envelope(error, path), status_code=error.status, headers=headers)


class Writer(Protocol):
    """How one protocol writes a generation."""

    def chunk(self, event: GenEvent) -> bytes: ...
    def end(self) -> bytes: ...
    def whole(self, events: list[GenEvent]) -> bytes: ...
    def error(self, error: RequestError) -> bytes: ...


class GenerationResponse(Response):
    """Runs a generation and answers with it.

    Headers go out with the first output, so whatever goes wrong before is a proper HTTP status. A closed connection
    aborts the generation, whether it is streamed or not.
    """

    def __init__(self, frontend: Frontend, spec: GenSpec, writer: Writer) -> None:
        super().__init__()
        self._frontend, self._spec, self._writer = frontend, spec, writer
        self._record = RequestRecord(spec, frontend.config.log_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            generation = self._frontend.admit(self._spec)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        self._record.started(scope)
        watcher = asyncio.ensure_future(_cancel_when_closed(receive, generation))
        try:
            await generation.start()
            events = await generation.next()
            self._record.see(events)
            _raise_error(events)
            if self._spec.stream:
                await self._stream(generation, events, send)
            else:
                while more := await generation.next():
                    self._record.see(more)
                    _raise_error(more)
                    events += more
                await JSON(await self._whole(events))(scope, receive, send)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, send)
        except ClientGone:
            self._record.see(generation.rest())
            log.debug("client closed the connection of %s", self._spec.rid)
        finally:
            generation.close()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _whole(self, events: list[GenEvent]) -> bytes:
        """Reading the calls out of a long answer takes a while, in which the streams of others must go on."""
        if sum(len(event.text) for event in events) < _LONG_ANSWER:
            return self._writer.whole(events)
        body: bytes = await self._frontend.in_thread(lambda: self._writer.whole(events))
        return body

    async def _stream(self, generation: Generation, events: list[GenEvent], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"x-accel-buffering", b"no")]})
        while events:
            parts: list[bytes] = []
            for event in events:
                if event.error is not None:
                    parts.append(self._writer.error(event.error))
                    await send({"type": "http.response.body", "body": b"".join(parts)})
                    return
                parts.append(self._writer.chunk(event))
            if body := b"".join(parts):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            events = await generation.next()
            self._record.see(events)
        await send({"type": "http.response.body", "body": self._writer.end()})


def _raise_error(events: list[GenEvent]) -> None:
    for event in events:
        if event.error is not None:
            raise event.error


async def _cancel_when_closed(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    generation.cancel()
