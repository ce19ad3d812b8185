"""What the OpenAPI document says of each route: bodies, path parameters, answers (torch-free).

Bodies are read by hand, field by field (:mod:`freetoken.server.wire`), so their schemas are written here. They say what
is accepted; unknown fields are ignored, as everywhere.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    made: Schema = {"type": "object", "properties": properties}
    if required:
        made["required"] = list(required)
    return made


def _one_of(schema: Schema, *names: str) -> Schema:
    """``schema`` with exactly one of the fields ``names``."""
    return {**schema, "oneOf": [{"required": [name]} for name in names]}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


TEXT: Schema = {"type": "string"}
SWITCH: Schema = {"type": "boolean"}
TOKEN = _integer(0, 2**31 - 1)
TOKENS = _list(TOKEN, minItems=1)
RID: Schema = {"type": "string", "minLength": 1, "maxLength": 200}

SAMPLING: dict[str, Schema] = {
    "temperature": _number(0, 100),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _integer(-1, 2**31 - 1),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    "stop": _either(TEXT, _list({"type": "string", "minLength": 1, "maxLength": 1024}, maxItems=16)),
    "stop_token_ids": _list(TOKEN, maxItems=64),
    "ignore_eos": SWITCH,
    "seed": _integer(-(2**63), 2**63 - 1),
    "n": _integer(1, 64),
    "skip_special_tokens": SWITCH,
    "no_stop_trim": SWITCH,
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100), "maxProperties": 1024},
}
_OPENAI: dict[str, Schema] = {
    **SAMPLING,
    "model": TEXT,
    "min_tokens": _integer(0, 2**31 - 1),
    "stream": SWITCH,
    "stream_options": _object(include_usage=SWITCH),
    "user": TEXT,
    "rid": RID,
}
_PART = _object(("type", "text"), type={"const": "text"}, text=TEXT)
MESSAGE = _object(
    ("role", "content"),
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content=_either(TEXT, _list(_PART)),
    name=TEXT,
)
_CHAT_PROMPT: dict[str, Schema] = {
    "messages": _list(MESSAGE, minItems=1),
    "add_generation_prompt": SWITCH,
    "continue_final_message": SWITCH,
    "chat_template_kwargs": {"type": "object"},
}

BODIES: dict[str, Schema] = {
    "/v1/chat/completions": _object(
        ("messages",),
        **_CHAT_PROMPT,
        **_OPENAI,
        max_tokens=_integer(1, 2**31 - 1),
        max_completion_tokens=_integer(1, 2**31 - 1),
        logprobs=SWITCH,
        top_logprobs=_integer(0, 20),
    ),
    "/v1/completions": _object(
        ("prompt",),
        **_OPENAI,
        prompt=_either(TEXT, _list(TEXT, minItems=1), TOKENS, _list(TOKENS, minItems=1)),
        max_tokens=_integer(0, 2**31 - 1),
        logprobs=_integer(0, 20),
        echo=SWITCH,
    ),
    "/generate": _one_of(
        _object(
            (),
            text=_either(TEXT, _list(TEXT, minItems=1)),
            input_ids=_either(TOKENS, _list(TOKENS, minItems=1)),
            sampling_params=_object(
                (),
                **SAMPLING,
                max_new_tokens=_integer(1, 2**31 - 1),
                min_new_tokens=_integer(0, 2**31 - 1),
            ),
            stream=SWITCH,
            rid=RID,
            return_logprob=SWITCH,
            top_logprobs_num=_integer(0, 20),
            logprob_start_len=_integer(-1, 2**31 - 1),
            return_text_in_logprobs=SWITCH,
        ),
        "text",
        "input_ids",
    ),
    "/tokenize": _one_of(
        _object((), prompt=_either(TEXT, _list(TEXT)), **_CHAT_PROMPT, model=TEXT, add_special_tokens=SWITCH),
        "prompt",
        "messages",
    ),
    "/detokenize": _object(("tokens",), tokens=_either(TOKENS, _list(TOKENS)), model=TEXT, skip_special_tokens=SWITCH),
    "/abort_request": _one_of(_object((), rid=TEXT, abort_all={"const": True}), "rid", "abort_all"),
    "/flush_cache": _object(),
    "/start_profile": _object((), output_dir=TEXT),
    "/stop_profile": _object(),
}

_ERROR = _object(
    ("error",),
    error=_object(("message", "type"), message=TEXT, type=TEXT, param={}, code={}),
)
_REFUSALS = {
    "400": "A field is wrong or not served",
    "401": "The API key is missing or wrong",
    "403": "A page of a foreign site calls",
    "404": "There is no such path or model",
    "413": "The body is too large",
    "503": "Loading, shutting down, full, or without a scheduler",
}


def operation(path: str, method: str) -> dict[str, Any]:
    """What to lay over the generated operation of ``method`` (one or two, as ``GET POST``) on ``path``."""
    refusals = {
        status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
        for status, text in _REFUSALS.items()
    }
    found: dict[str, Any] = {"responses": refusals}
    if "POST" in method:
        schema = BODIES.get(path, {"type": "object"})
        found["requestBody"] = {
            "required": bool(schema.get("required")),
            "content": {"application/json": {"schema": schema}},
        }
    if "{name" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    return found
