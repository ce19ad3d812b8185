"""SGLang's ``/generate``: request to :class:`GenSpec`, :class:`GenEvent` to answer (torch-free).

Fields follow https://docs.sglang.io/basic_usage/native_api.html and ``sampling_params.html``. Streamed texts and ids
grow: every event holds all so far.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from freetoken.errors import RequestError
from freetoken.messages import TokenLogprob
from freetoken.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from freetoken.server.detokenizer import Tokenizer
from freetoken.server.generation import GenEvent, GenSpec, Prompt, new_rid
from freetoken.server.openai_response import DONE, finite, sse
from freetoken.server.wire import (
    SamplingReader,
    boolean,
    error_object,
    integer,
    mapping,
    read_priority,
    refuse_unserved,
    token_ids,
    warn_unknown,
)
from freetoken.server_args import Config

DEFAULT_NEW_TOKENS = 128
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "image_data": (),
    "audio_data": (),
    "video_data": (),
    "input_embeds": (),
    "lora_path": (),
    "session_params": (),
    "return_hidden_states": (False,),
    "token_ids_logprob": (),
    "custom_logit_processor": (),
}
_UNSERVED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "structural_tag": (),
    "stop_regex": (),
    "custom_params": (),
    "spaces_between_special_tokens": (True,),
}
_KNOWN = {
    *_UNSERVED,
    "text",
    "input_ids",
    "sampling_params",
    "stream",
    "rid",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "return_text_in_logprobs",
    "priority",
}


@dataclass
class GenerateRequest:
    """A request as read. ``single`` answers with one object rather than a list."""

    spec: GenSpec
    single: bool
    logprobs: bool
    text_in_logprobs: bool


def read_generate(body: Mapping[str, Any], config: Config) -> GenerateRequest:
    """A body of ``/generate``; :class:`RequestError` names the field at fault."""
    refuse_unserved(body, _UNSERVED)
    warn_unknown(body, _KNOWN, "/generate")
    inputs, single = _inputs(body)
    sampling = _samplings(body, config, len(inputs))
    prompts = [
        Prompt(params, param=name, **{_PROMPT_FIELD[name]: value}) for (name, value), params in zip(inputs, sampling)
    ]
    rid = body.get("rid")
    if rid is None:
        rid = new_rid("gen")
    if not isinstance(rid, str) or not 0 < len(rid) <= 200:
        raise RequestError("rid must be a string of 1 to 200 characters", param="rid")
    spec = GenSpec(rid, prompts, boolean(body, "stream", False), priority=read_priority(body, config))
    return GenerateRequest(
        spec,
        single and sampling[0].n == 1,
        boolean(body, "return_logprob", False),
        boolean(body, "return_text_in_logprobs", False),
    )


_PROMPT_FIELD = {"text": "text", "input_ids": "ids"}


def _inputs(body: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("give either text or input_ids", param="text")
    name, value = ("text", text) if ids is None else ("input_ids", ids)
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value, single = [value], True
    else:
        single = False
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a prompt or a list of prompts", param=name)
    if not value or any(not item for item in value):
        raise RequestError("the prompt is empty", param=name)
    for item in value:
        if name == "input_ids":
            token_ids(item, name)
        elif not isinstance(item, str):
            raise RequestError("text must be a string or a list of strings", param=name)
    return [(name, item) for item in value], single


def _samplings(body: Mapping[str, Any], config: Config, count: int) -> list[SamplingParams]:
    given = body.get("sampling_params")
    if isinstance(given, list):
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts", param="sampling_params")
        return [_sampling(body, mapping({"sampling_params": item}, "sampling_params"), config) for item in given]
    return [_sampling(body, mapping(body, "sampling_params"), config)] * count


def _sampling(body: Mapping[str, Any], given: Mapping[str, Any], config: Config) -> SamplingParams:
    refuse_unserved(given, _UNSERVED_SAMPLING)
    fields = {name: name for name in SamplingParams.__struct_fields__ if not name.endswith("logprobs")}
    del fields["grammar"], fields["thinking_budget"]
    fields |= {"sampling_seed": "seed", "json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf"}
    for name in given:
        if name not in fields and name not in _UNSERVED_SAMPLING:
            raise RequestError(f"unknown sampling parameter {name[:100]!r}", param=name[:100], code="unknown_parameter")
    reader = SamplingReader(config.model.sampling_defaults)
    reader.set("max_new_tokens", DEFAULT_NEW_TOKENS, "max_new_tokens")
    reader.read(given, fields)
    top = integer(body, "top_logprobs_num", 0, MAX_TOP_LOGPROBS) or 0
    start = integer(body, "logprob_start_len", -1, 2**31)
    if boolean(body, "return_logprob", False):
        reader.set("logprobs", top, "top_logprobs_num")
        if start is not None and start >= 0:
            if start > 0:
                raise RequestError(
                    "logprob_start_len must be -1 (output alone) or 0 (the whole prompt)", param="logprob_start_len"
                )
            reader.set("prompt_logprobs", top, "top_logprobs_num")
    return reader.build()


class GenerateWriter:
    """Writes the answer to one request."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, weight_version: str = "default") -> None:
        self._request, self._tokenizer = request, tokenizer
        self._so_far: dict[int, GenEvent] = {}
        self._started = time.monotonic()
        self._asks_prompt = any(prompt.sampling.prompt_logprobs is not None for prompt in request.spec.prompts)

    def chunk(self, event: GenEvent) -> bytes:
        """The choice's whole text so far as one event."""
        earlier = self._so_far.setdefault(event.index, event)
        if earlier is not event:
            earlier.merge(event)
        value = self._object(earlier)
        if not self._request.single:
            value["index"] = event.index
        return sse(value)

    def end(self) -> bytes:
        return DONE

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot go on."""
        return sse(error_object(error))

    def whole(self, events: list[GenEvent]) -> bytes:
        """The answer from each choice's one event."""
        values = [self._object(event) for event in sorted(events, key=lambda item: item.index)]
        return orjson.dumps(values[0] if self._request.single else values)

    def _object(self, event: GenEvent) -> dict[str, Any]:
        rid = self._request.spec.rid
        finish: dict[str, Any] | None = None
        if event.finish is not None:
            finish = {"type": event.finish}
            if event.finish == "stop":
                finish["matched"] = event.matched
            elif event.finish == "length":
                finish["length"] = event.completion_tokens
        meta: dict[str, Any] = {
            "id": rid if self._request.spec.num_choices == 1 else f"{rid}-{event.index}",
            "finish_reason": finish,
            "prompt_tokens": event.prompt_tokens,
            "completion_tokens": event.completion_tokens,
            "cached_tokens": event.cached_tokens,
        }
        if event.finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._started
        if self._request.logprobs:
            self._add_logprobs(meta, event)
        return {"text": event.text, "output_ids": event.ids, "meta_info": meta}

    def _add_logprobs(self, meta: dict[str, Any], event: GenEvent) -> None:
        groups = {"output": event.logprobs or []}
        if self._asks_prompt:
            groups["input"] = event.prompt_logprobs or []
        for name, entries in groups.items():
            meta[f"{name}_token_logprobs"] = [self._triple(entry.id, entry.logprob) for entry in entries]
            meta[f"{name}_top_logprobs"] = [self._top(entry) for entry in entries]

    def _top(self, entry: TokenLogprob) -> list[tuple[float | None, int, str | None]] | None:
        return [self._triple(*pair) for pair in zip(entry.top_ids, entry.top_logprobs)] or None

    def _triple(self, token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        text = self._tokenizer.token_text(token) if self._request.text_in_logprobs else None
        return finite(logprob), token, text
