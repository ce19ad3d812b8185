"""Lines of the log about HTTP requests: who asked for what, how it ended; never what was written, unless asked (torch-free)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetoken.crash_dump import numbers_of
from freetoken.server.generation import GenEvent, GenSpec, Prompt, usage_of

log = logging.getLogger("freetoken.requests")

QUIET = frozenset({"/health", "/metrics", "/live"})
"""Paths that monitors ask for again and again; their lines are for the debug level."""
_LONGEST_TEXT = 2000
_LONGEST_NAME = 120
_KEY = "freetoken.request"


def plain(text: str, limit: int = _LONGEST_NAME) -> str:
    """``text`` fit for one line of a log: control characters escaped, cut at ``limit`` characters."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    return shown if len(shown) <= limit else f"{shown[:limit]}... ({len(shown) - limit} more)"


class RequestRecord:
    """What the log says of one generation. ``level`` is that of ``--log-requests``."""

    def __init__(self, spec: GenSpec, level: str) -> None:
        self._spec = spec
        self._level = level
        self._last: dict[int, GenEvent] = {}
        self._texts: dict[int, list[str]] = {}

    def started(self, scope: Scope) -> None:
        """The request is known; its end will be told with the line of its HTTP request."""
        scope[_KEY] = self
        if self._level in ("params", "text"):
            spec = self._spec
            kind = f"{len(spec.prompts)} prompts, {spec.num_choices} outputs{', streamed' if spec.stream else ''}"
            params = " ".join(f"{name}={value}" for name, value in self._params().items())
            log.info("%s: %s, %s", plain(spec.rid), kind, params or "default parameters")
        if self._level == "text":
            for prompt in self._spec.prompts:
                log.info("%s: prompt %s", plain(self._spec.rid), plain(_text(prompt), _LONGEST_TEXT))

    def _params(self) -> dict[str, Any]:
        sampling = self._spec.prompts[0].sampling
        return msgspec.to_builtins(sampling) if self._level == "text" else numbers_of(sampling)

    def see(self, events: Iterable[GenEvent]) -> None:
        """Take note of events on their way to the client."""
        if self._level == "off":
            return
        for event in events:
            self._last[event.index] = event
            if self._level == "text":
                self._texts.setdefault(event.index, []).append(event.text)

    def summary(self) -> str:
        """Id, token counts and ends, for the line of the HTTP request."""
        usage = usage_of(self._spec, self._last)
        ends = sorted({e.finish or "cut off" for e in self._last.values() if e.finish or e.completion_tokens})
        return (
            f", {plain(self._spec.rid)}: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
            f"{usage.completion_tokens} output tokens, {' and '.join(ends) or 'no output'}"
        )

    def ended(self) -> None:
        """After the line of the HTTP request: the outputs, where texts are wanted."""
        for index, parts in sorted(self._texts.items()):
            log.info("%s: output %d %s", plain(self._spec.rid), index, plain("".join(parts), _LONGEST_TEXT))


def _text(prompt: Prompt) -> str:
    if prompt.chat is not None:
        return repr(prompt.chat.messages)
    return repr(prompt.ids) if prompt.ids is not None else prompt.text or ""


class RequestLog:
    """One line for each HTTP request when it has ended: method, path without its query, status, seconds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            record = scope.get(_KEY)
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            log.log(
                level,
                '%s "%s %s" %s in %.3f s%s',
                (scope.get("client") or ("-",))[0],
                plain(scope["method"]),
                plain(scope["path"]),
                status or "closed by the client",
                time.monotonic() - began,
                record.summary() if isinstance(record, RequestRecord) else "",
            )
            if isinstance(record, RequestRecord):
                record.ended()
