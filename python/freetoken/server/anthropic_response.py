"""Anthropic's answers: :class:`GenEvent` to JSON, whole or as server-sent events, and its error envelope (torch-free)."""

from __future__ import annotations

from typing import Any

import orjson

from freetoken.errors import RequestError
from freetoken.server.anthropic import MessagesRequest
from freetoken.server.chat_output import Block, Blocks, ChatOutputs, new_call_id
from freetoken.server.generation import GenEvent
from freetoken.server.parsers import Dialects
from freetoken.server.parsers.json_scan import complete_object

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The protocol's envelope."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value))


class MessagesWriter:
    """Writes the answer to one request."""

    def __init__(self, request: MessagesRequest, model: str, dialects: Dialects) -> None:
        self._rid, self._model = request.spec.rid, model
        self._outputs = ChatOutputs(dialects, request.style)
        self._blocks = Blocks()
        self._started = False

    def chunk(self, event: GenEvent) -> bytes:
        """The events of one step, ready to send."""
        parts: list[bytes] = []
        if not self._started:
            self._started = True
            parts.append(_event({"type": "message_start", "message": self._message([], None, event, output=0)}))
        parts += [self._change(*change) for change in self._blocks.feed(self._outputs.feed(event))]
        if event.finish is not None:
            parts += [self._change(*change) for change in self._blocks.close()]
        if event.finish == "abort":
            parts.append(_event(anthropic_error(_aborted())))
        elif event.finish is not None:
            reason = {"stop_reason": self._stop_reason(event), "stop_sequence": self._stop_sequence(event)}
            usage = self._usage(event, event.completion_tokens)
            parts.append(_event({"type": "message_delta", "delta": reason, "usage": usage}))
            parts.append(_event({"type": "message_stop"}))
        return b"".join(parts)

    def _change(self, what: str, block: Block, text: str) -> bytes:
        head: dict[str, Any] = {"type": f"content_block_{what}", "index": block.index}
        if what == "start":
            head["content_block"] = self._content(block, orjson.Fragment(b"{}"))
        elif what == "delta":
            kind, name = _DELTAS[block.kind]
            head["delta"] = {"type": kind, name: text}
        return _event(head)

    def end(self) -> bytes:
        """The protocol's last event has been sent."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot go on."""
        return _event(anthropic_error(error))

    def whole(self, events: list[GenEvent]) -> bytes:
        """The answer from the one event of the one choice."""
        (event,) = events
        if event.finish == "abort":
            raise _aborted()
        for _ in self._blocks.feed(self._outputs.feed(event)):
            continue
        content = []
        for block in self._blocks.all:
            arguments = block.text if block.whole else complete_object(block.text)
            content.append(self._content(block, orjson.Fragment(arguments)))
        return orjson.dumps(self._message(content, event, event, output=event.completion_tokens))

    def _content(self, block: Block, arguments: orjson.Fragment) -> dict[str, Any]:
        if block.kind == "call":
            return {"type": "tool_use", "id": new_call_id("toolu_"), "name": block.name, "input": arguments}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        return {"type": "text", "text": block.text}

    def _message(
        self, content: list[dict[str, Any]], last: GenEvent | None, event: GenEvent, *, output: int
    ) -> dict[str, Any]:
        return {
            "id": self._rid,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None if last is None else self._stop_reason(last),
            "stop_sequence": None if last is None else self._stop_sequence(last),
            "usage": self._usage(event, output),
        }

    def _stop_reason(self, event: GenEvent) -> str:
        if event.finish == "length":
            return "max_tokens"
        if self._outputs.called(event.index):
            return "tool_use"
        return "stop_sequence" if isinstance(event.matched, str) else "end_turn"

    def _stop_sequence(self, event: GenEvent) -> str | None:
        return event.matched if isinstance(event.matched, str) else None

    @staticmethod
    def _usage(event: GenEvent, output: int) -> dict[str, int]:
        """``input_tokens`` are those that were not in the cache."""
        return {
            "input_tokens": event.prompt_tokens - event.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": event.cached_tokens,
            "output_tokens": output,
        }


def _aborted() -> RequestError:
    return RequestError("the request was aborted", status=499, code="aborted")
