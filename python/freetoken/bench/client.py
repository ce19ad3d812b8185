"""One streamed request of the serving benchmark, read as cheaply as one process for many streams needs (torch-free).

Events are counted by their blank lines and never parsed while the stream runs; only the first ones (to find the first
token) and the last few (to find the usage, or an error) are.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from freetoken.bench.datasets import Prompt
from freetoken.bench.extra import aiohttp
from freetoken.bench.report import Outcome

BACKENDS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/generate",
}
_TAIL_EVENTS = 4
_ERROR_CHARS = 300


@dataclass(frozen=True)
class Target:
    """Where and how to send: ``backend`` is a key of :data:`BACKENDS`; ``extra`` is laid over every body."""

    base_url: str
    backend: str
    model: str
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.base_url + BACKENDS[self.backend]

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request's JSON for one prompt."""
        if self.backend == "generate":
            sampling = {
                "max_new_tokens": prompt.output_len,
                "temperature": self.temperature,
                "ignore_eos": self.ignore_eos,
            }
            key = "text" if isinstance(prompt.content, str) else "input_ids"
            return {key: prompt.content, "sampling_params": sampling, "stream": True, **self.extra}
        content = (
            {"messages": [{"role": "user", "content": prompt.content}]}
            if self.backend == "chat"
            else {"prompt": prompt.content}
        )
        return {
            "model": self.model,
            **content,
            "max_tokens": prompt.output_len,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


class EventStream:
    """Turns chunks of a server-sent event stream into arrival times, keeping only the last events' bytes."""

    def __init__(self, skip_until_content: bool) -> None:
        self.times: list[float] = []
        self.tail: list[bytes] = []
        self._skipping = skip_until_content
        self._rest = b""

    def feed(self, chunk: bytes, now: float) -> None:
        """Take bytes that arrived at ``now``; a chunk may hold several events, or a part of one."""
        pieces = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        self._rest = pieces.pop()
        events = [piece for piece in pieces if b"data:" in piece]
        for event in events:
            if self._skipping and not _has_content(event):
                continue
            self._skipping = False
            self.times.append(now)
        if events:
            self.tail = (self.tail + events)[-_TAIL_EVENTS:]

    def finish(self) -> tuple[list[float], list[dict[str, Any]]]:
        """Arrival times of the events that carried output, and the last parsed events (oldest first).

        The closing ``[DONE]`` and an event without choices (usage alone) are not output.
        """
        tail: list[dict[str, Any]] = []
        not_output = 0
        for event in self.tail:
            payload = _payload(event)
            parsed = None if payload in (b"", b"[DONE]") else _parse(payload)
            if parsed is None or parsed.get("choices") == [] or "error" in parsed:
                not_output += 1
            if parsed is not None:
                tail.append(parsed)
        kept = max(0, len(self.times) - not_output)
        return self.times[:kept], tail


def _payload(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def _parse(payload: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(payload)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _has_content(event: bytes) -> bool:
    """Whether a chat event holds text: the first one often only names the role, before any token exists."""
    parsed = _parse(_payload(event))
    if parsed is None:
        return False
    choices = parsed.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return bool(delta.get("content") or delta.get("reasoning_content") or choices[0].get("finish_reason"))


def read_usage(tail: list[dict[str, Any]], outcome: Outcome) -> None:
    """Fill the token counts of ``outcome`` from the last events, or its ``error``."""
    usage: dict[str, Any] | None = None
    for event in reversed(tail):
        if "error" in event:
            error = event["error"]
            outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)[:_ERROR_CHARS]
            return
        usage = usage or event.get("usage") or event.get("meta_info")
    if not usage:
        outcome.error = "the stream ended without usage"
        return
    outcome.prompt_tokens = int(usage.get("prompt_tokens", 0))
    outcome.output_tokens = int(usage.get("completion_tokens", 0))
    details = usage.get("prompt_tokens_details") or {}
    outcome.cached_tokens = int(usage.get("cached_tokens", details.get("cached_tokens", 0)) or 0)
    if outcome.output_tokens == 0:
        outcome.error = "the stream ended without a token"


async def send(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> Outcome:
    """Send one request and read its stream to the end. Never raises for what the server or the network does."""
    body = json.dumps(target.body(prompt)).encode()
    outcome = Outcome(sent=time.perf_counter())
    stream = EventStream(skip_until_content=target.backend == "chat")
    try:
        async with session.post(target.url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                outcome.error = _http_error(response.status, await response.read())
            else:
                async for chunk in response.content.iter_any():
                    stream.feed(chunk, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
    outcome.ended = time.perf_counter()
    if outcome.error is None:
        outcome.events, tail = stream.finish()
        read_usage(tail, outcome)
    return outcome


def _http_error(status: int, body: bytes) -> str:
    parsed = _parse(body) or {}
    error = parsed.get("error", parsed)
    message = error.get("message") if isinstance(error, dict) else error
    return f"HTTP {status}: {message or body[:_ERROR_CHARS].decode(errors='replace')}"[:_ERROR_CHARS]
