"""Answers of OpenAI's Responses protocol: :class:`GenEvent` to JSON, whole or as server-sent events (torch-free)."""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from freetoken.errors import RequestError
from freetoken.server.chat_output import Block, Blocks, ChatOutputs, new_call_id
from freetoken.server.generation import GenEvent
from freetoken.server.openai_responses import ResponsesRequest
from freetoken.server.parsers import Dialects

_DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponsesWriter:
    """Writes the answer to one request."""

    def __init__(self, request: ResponsesRequest, model: str, created: int, dialects: Dialects) -> None:
        self._head = {"id": request.spec.rid, "object": "response", "created_at": created, "model": model}
        self._echo = request.echo
        self._outputs = ChatOutputs(dialects, request.style)
        self._blocks = Blocks()
        self._ids: dict[int, str] = {}
        self._calls: dict[int, str] = {}
        self._number = 0

    # --- streamed -----------------------------------------------------------------------------------------------------

    def chunk(self, event: GenEvent) -> bytes:
        """The events of one step, ready to send."""
        parts: list[bytes] = []
        if self._number == 0:
            for kind in ("response.created", "response.in_progress"):
                parts.append(self._event(kind, response=self._response("in_progress", None)))
        for what, block, text in self._blocks.feed(self._outputs.feed(event)):
            parts += self._change(what, block, text)
        if event.finish is not None:
            status = self._status(event)
            for what, block, text in self._blocks.close(cut=status == "incomplete"):
                parts += self._change(what, block, text)
            parts.append(self._event(f"response.{status}", response=self._response(status, event)))
        return b"".join(parts)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(value))

    def _change(self, what: str, block: Block, text: str) -> list[bytes]:
        place: dict[str, Any] = {"item_id": self._identity(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        name = _DELTAS[block.kind]
        if what == "delta":
            logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            return [self._event(f"{name}.delta", **place, delta=text, **logprobs)]
        item = {"output_index": block.index, "item": self._item(block, "in_progress" if what == "start" else "")}
        if what == "start":
            parts = [self._event("response.output_item.added", **item)]
            if block.kind != "call":
                parts.append(self._event("response.content_part.added", **place, part=_part(block, "")))
            return parts
        if block.kind == "call":
            done = [self._event(f"{name}.done", **place, name=block.name, arguments=block.text)]
        else:
            logprobs = {"logprobs": []} if block.kind == "text" else {}
            done = [
                self._event(f"{name}.done", **place, text=block.text, **logprobs),
                self._event("response.content_part.done", **place, part=_part(block, block.text)),
            ]
        return [*done, self._event("response.output_item.done", **item)]

    def end(self) -> bytes:
        """The protocol's last event has been sent."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot go on."""
        failure = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed", None), "error": failure})

    # --- whole --------------------------------------------------------------------------------------------------------

    def whole(self, events: list[GenEvent]) -> bytes:
        """The answer from the one event of the one choice."""
        (event,) = events
        for _ in self._blocks.feed(self._outputs.feed(event)):
            continue
        status = self._status(event)
        for _ in self._blocks.close(cut=status == "incomplete"):
            continue
        return orjson.dumps(self._response(status, event))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _status(self, event: GenEvent) -> str:
        return {"length": "incomplete", "abort": "incomplete"}.get(event.finish or "", "completed")

    def _response(self, status: str, last: GenEvent | None) -> dict[str, Any]:
        reason = None
        if last is not None and status == "incomplete":
            reason = {"reason": "max_output_tokens" if last.finish == "length" else "aborted"}
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            **self._echo,
            "output": [] if last is None else [self._item(block, "") for block in self._blocks.all],
            "usage": None if last is None else _usage(last, self._outputs.reasoning_tokens()),
        }

    def _identity(self, block: Block) -> str:
        if block.index not in self._ids:
            prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
            self._ids[block.index] = f"{prefix}_{uuid.uuid4().hex}"
            self._calls[block.index] = new_call_id("call_")
        return self._ids[block.index]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an output item: at its start while ``in_progress``, else as far as it has come."""
        identity = self._identity(block)
        if not status:
            status = "completed" if block.whole else "incomplete"
        started = status == "in_progress"
        if block.kind == "call":
            arguments = "" if started else block.text
            call = {"call_id": self._calls[block.index], "name": block.name, "arguments": arguments}
            return {"type": "function_call", "id": identity, "status": status, **call}
        content = [] if started else [_part(block, block.text)]
        if block.kind == "reasoning":
            return {"type": "reasoning", "id": identity, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": identity, "role": "assistant", "status": status, "content": content}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(event: GenEvent, reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": event.prompt_tokens,
        "input_tokens_details": {"cached_tokens": event.cached_tokens},
        "output_tokens": event.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": event.prompt_tokens + event.completion_tokens,
    }
