"""OpenAI's chat and completions answers: :class:`GenEvent` to JSON, whole or as server-sent events (torch-free)."""

from __future__ import annotations

from typing import Any

import orjson

from freetoken.errors import RequestError
from freetoken.messages import TokenLogprob
from freetoken.sampling_params import SamplingParams
from freetoken.server.chat_output import Answer, ChatOutputs, ChatStyle, new_call_id
from freetoken.server.detokenizer import REPLACEMENT, OutputText, Tokenizer
from freetoken.server.generation import GenEvent, usage_of
from freetoken.server.openai import WireRequest
from freetoken.server.parsers import CallArguments, CallStart, Delta, Dialects, Reasoning, Text
from freetoken.server.wire import error_object

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def finite(logprob: float | None) -> float | None:
    """JSON has no minus infinity."""
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)


class OpenAIWriter:
    """Writes the answer to one request, choice by choice; ``dialects`` are those the model speaks."""

    def __init__(
        self, request: WireRequest, tokenizer: Tokenizer, model: str, created: int, dialects: Dialects
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._last: dict[int, GenEvent] = {}
        self._offsets: dict[int, _Offsets] = {}
        self._outputs = ChatOutputs(dialects, request.chat or ChatStyle())
        self._prompts = [prompt for prompt in request.spec.prompts for _ in range(prompt.sampling.n)]
        kind = "chat.completion" if request.chat is not None else "text_completion"
        self._head = {"id": request.spec.rid, "object": kind, "created": created, "model": model}
        self._null_usage = {"usage": None} if request.options.include_usage else {}
        if request.chat is not None:
            head = {**self._head, "object": "chat.completion.chunk", **self._null_usage}
            self._head_chunk = head
            self._quick_head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        else:
            self._head_chunk = {**self._head, **self._null_usage}
            self._quick_head = b"data: " + orjson.dumps(self._head_chunk)[:-1] + b',"choices":[{"index":'

    # --- streamed -----------------------------------------------------------------------------------------------------

    def chunk(self, event: GenEvent) -> bytes:
        """The events of one step of one choice, ready to send."""
        first = event.index not in self._last
        self._last[event.index] = event
        if self._request.chat is not None:
            return self._chat_chunk(event, first)
        text = self._echo(event) + event.text if first else event.text
        if not text and event.finish is None and not self._request.logprobs:
            return b""
        choice: dict[str, Any] = {
            "index": event.index,
            "text": text,
            "logprobs": self._legacy_logprobs(event, first) if self._request.logprobs else None,
            "finish_reason": event.finish,
        }
        return sse({**self._head_chunk, "choices": [self._stop_reason(choice, event)]})

    def _chat_chunk(self, event: GenEvent, first: bool) -> bytes:
        parts: list[bytes] = []
        if first:
            parts.append(self._chat_delta(event.index, {"role": "assistant", "content": ""}))
        logprobs = event.shown_logprobs() if self._request.logprobs else []
        shown = self._chat_logprobs(logprobs) if logprobs else None
        for delta in self._outputs.feed(event):
            value = self._wire_delta(delta)
            if value is None:
                continue
            if shown is None and isinstance(delta, Text):
                parts.append(
                    b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]}\n\n'
                    % (self._quick_head, event.index, orjson.dumps(delta.text))
                )
            else:
                parts.append(self._chat_delta(event.index, value, shown))
                shown = None
        if shown is not None:
            parts.append(self._chat_delta(event.index, {"content": ""}, shown))
        if event.finish is not None:
            reason = self._finish_reason(event)
            choice = {"index": event.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            parts.append(sse({**self._head_chunk, "choices": [self._stop_reason(choice, event)]}))
        return b"".join(parts)

    def _wire_delta(self, delta: Delta) -> dict[str, Any] | None:
        if isinstance(delta, Text):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            return {
                "tool_calls": [
                    {"index": delta.index, "id": new_call_id("call_"), "type": "function", "function": function}
                ]
            }
        if isinstance(delta, CallArguments):
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
        return None

    def _chat_delta(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return sse({**self._head_chunk, "choices": [choice]})

    def end(self) -> bytes:
        """What follows the last choice's end."""
        if not self._request.options.include_usage:
            return DONE
        return sse({**self._head_chunk, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._request.spec, self._last).wire()
        reasoning = self._outputs.reasoning_tokens()
        if self._request.chat is not None and reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot go on."""
        return sse(error_object(error))

    # --- whole --------------------------------------------------------------------------------------------------------

    def whole(self, events: list[GenEvent]) -> bytes:
        """The answer from each choice's one event."""
        choices = []
        for event in sorted(events, key=lambda item: item.index):
            self._last[event.index] = event
            choice: dict[str, Any] = {"index": event.index}
            if self._request.chat is not None:
                choice["message"] = self._message(event)
                shown = self._chat_logprobs(event.shown_logprobs()) if self._request.logprobs else None
            else:
                choice["text"] = self._echo(event) + event.text
                shown = self._legacy_logprobs(event, True) if self._request.logprobs else None
            choice["logprobs"] = shown
            choice["finish_reason"] = self._finish_reason(event)
            choices.append(self._stop_reason(choice, event))
        return orjson.dumps({**self._head, "choices": choices, "usage": self._usage()})

    # --- parts --------------------------------------------------------------------------------------------------------

    def _message(self, event: GenEvent) -> dict[str, Any]:
        answer = Answer.of(self._outputs.feed(event))
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {
                    "id": new_call_id("call_"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        return message

    def _finish_reason(self, event: GenEvent) -> str | None:
        if event.finish == "stop" and self._outputs.called(event.index):
            return "tool_calls"
        return event.finish

    def _stop_reason(self, choice: dict[str, Any], event: GenEvent) -> dict[str, Any]:
        """Adds which of the request's own stop strings or token ids it was, as other open servers do."""
        if event.finish is not None:
            own = self._prompts[event.index].sampling.stop_token_ids
            shown = isinstance(event.matched, str) or event.matched in own
            choice["stop_reason"] = event.matched if shown else None
        return choice

    def _echo(self, event: GenEvent) -> str:
        if not self._request.echo:
            return ""
        prompt = self._prompts[event.index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids or [], prompt.sampling.skip_special_tokens)

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _chat_logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        content = [
            {
                **self._token(entry.id, entry.logprob),
                "top_logprobs": [self._token(*pair) for pair in zip(entry.top_ids, entry.top_logprobs)],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _legacy_logprobs(self, event: GenEvent, first: bool) -> dict[str, Any]:
        entries = event.shown_logprobs()
        if first:
            self._offsets[event.index] = _Offsets(self._tokenizer, self._prompts[event.index].sampling)
        offsets = self._offsets[event.index]
        at: list[int] = []
        if first and self._request.echo:
            prompt = event.prompt_logprobs or []
            at = [offsets.next(entry.id) for entry in prompt]
            offsets.end()
            entries = prompt + entries
        at += [offsets.next(entry.id) for entry in entries[len(at) :]]
        text_of = self._tokenizer.token_text
        tops: list[dict[str, float | None] | None] = []
        for entry in entries:
            top = {text_of(i): finite(p) for i, p in zip(entry.top_ids, entry.top_logprobs)}
            if top:
                top.setdefault(text_of(entry.id), finite(entry.logprob))
            tops.append(top or None)
        return {
            "tokens": [text_of(entry.id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": at,
        }


class _Offsets:
    """Position in the text at which each token begins, in characters; the prompt and the output are texts of their own."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sampling = SamplingParams(skip_special_tokens=sampling.skip_special_tokens)
        self._text = OutputText(tokenizer, self._sampling)
        self._at = 0

    def next(self, token: int) -> int:
        new, _ = self._text.push([token])
        own = self._tokenizer.token_text(token)
        at = self._at
        self._at += len(new)
        # Text that was held back comes out with the first token that cannot complete it, before that token's own.
        return self._at - len(own) if own != REPLACEMENT and new.endswith(own) else at

    def end(self) -> None:
        """The text ends here, and another begins."""
        self._at += len(self._text.flush())
        self._text = OutputText(self._tokenizer, self._sampling)
