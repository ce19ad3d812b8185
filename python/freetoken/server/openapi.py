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


def _object(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
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
ANY_SCHEMA: Schema = {"type": "object", "description": "A JSON schema."}
_LEAF = _object(
    type={"enum": ["string", "integer", "number", "boolean", "null", "array", "object"]},
    enum=_list({}),
    pattern=TEXT,
    minLength=_integer(0, 16),
    maximum=_number(-1e6, 1e6),
    items=ANY_SCHEMA,
)
JSON_SCHEMA = _object(
    type={"const": "object"},
    properties={"type": "object", "additionalProperties": _LEAF},
    required=_list(TEXT),
    additionalProperties=SWITCH,
)
_FORMATS: dict[str, Schema] = {
    "response_format": _either(
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=_object(("name", "schema"), name=TEXT, schema=JSON_SCHEMA, strict=SWITCH),
        ),
    ),
    "regex": TEXT,
    "ebnf": TEXT,
}
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
_TOOLS: dict[str, Schema] = {
    "tools": _list(
        _object(
            ("type", "function"),
            type={"const": "function"},
            function=_object(("name",), name=_NAME, description=TEXT, parameters=JSON_SCHEMA, strict=SWITCH),
        )
    ),
    "tool_choice": _either(
        {"enum": ["none", "auto", "required"]},
        _object(("type", "function"), type={"const": "function"}, function=_object(("name",), name=_NAME)),
    ),
    "parallel_tool_calls": SWITCH,
}
_EFFORT: Schema = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh"]}
_OPENAI: dict[str, Schema] = {
    **SAMPLING,
    **_FORMATS,
    "model": TEXT,
    "priority": _integer(1 - 2**31, 2**31 - 1),
    "min_tokens": _integer(0, 2**31 - 1),
    "stream": SWITCH,
    "stream_options": _object(include_usage=SWITCH),
    "user": TEXT,
    "metadata": {"type": "object"},
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
    "reasoning_effort": _EFFORT,
    **_TOOLS,
}
_CLAUDE_BLOCK = _either(
    _PART,
    _object(("type", "thinking"), type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
    _object(("type", "id", "name", "input"), type={"const": "tool_use"}, id=TEXT, name=_NAME, input={"type": "object"}),
    _object(
        ("type", "tool_use_id"), type={"const": "tool_result"}, tool_use_id=TEXT, content=_either(TEXT, _list(_PART))
    ),
)
_CLAUDE: dict[str, Schema] = {
    "model": TEXT,
    "messages": _list(
        _object(
            ("role", "content"),
            role={"enum": ["user", "assistant"]},
            content=_either(TEXT, _list(_CLAUDE_BLOCK, minItems=1)),
        ),
        minItems=1,
    ),
    "system": _either(TEXT, _list(_PART)),
    "tools": _list(_object(("name", "input_schema"), name=_NAME, description=TEXT, input_schema=JSON_SCHEMA)),
    "tool_choice": _either(
        _object(("type",), type={"enum": ["auto", "any", "none"]}, disable_parallel_tool_use=SWITCH),
        _object(("type", "name"), type={"const": "tool"}, name=_NAME),
    ),
    "thinking": _object(
        ("type",), type={"enum": ["enabled", "disabled", "adaptive"]}, budget_tokens=_integer(1, 2**31 - 1)
    ),
}
_RESPONSES_ITEM = _either(
    _object(
        ("role", "content"),
        type={"const": "message"},
        role={"enum": ["system", "developer", "user", "assistant"]},
        content=_either(TEXT, _list(_object(("type", "text"), type={"const": "input_text"}, text=TEXT))),
    ),
    _object(
        ("type", "call_id", "name", "arguments"),
        type={"const": "function_call"},
        call_id=TEXT,
        name=_NAME,
        arguments=TEXT,
    ),
    _object(("type", "call_id", "output"), type={"const": "function_call_output"}, call_id=TEXT, output=TEXT),
)

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
    "/v1/messages": _object(
        ("messages", "max_tokens"),
        **_CLAUDE,
        max_tokens=_integer(1, 2**31 - 1),
        stop_sequences=_list({"type": "string", "minLength": 1, "maxLength": 1024}, maxItems=16),
        stream=SWITCH,
        temperature=_number(0, 1),
        top_p=SAMPLING["top_p"],
        top_k=SAMPLING["top_k"],
        metadata=_object(user_id=TEXT),
    ),
    "/v1/messages/count_tokens": _object(("messages",), **_CLAUDE),
    "/v1/responses": _object(
        ("input",),
        model=TEXT,
        input=_either(TEXT, _list(_RESPONSES_ITEM, minItems=1)),
        instructions=TEXT,
        max_output_tokens=_integer(1, 2**31 - 1),
        stream=SWITCH,
        temperature=SAMPLING["temperature"],
        top_p=SAMPLING["top_p"],
        tools=_list(
            _object(("type", "name"), type={"const": "function"}, name=_NAME, description=TEXT, parameters=JSON_SCHEMA)
        ),
        tool_choice=_either(
            {"enum": ["none", "auto", "required"]}, _object(("type", "name"), type={"const": "function"}, name=_NAME)
        ),
        parallel_tool_calls=SWITCH,
        reasoning=_object(effort=_EFFORT),
        metadata={"type": "object", "additionalProperties": TEXT},
    ),
    "/generate": _one_of(
        _object(
            (),
            text=_either(TEXT, _list(TEXT, minItems=1)),
            input_ids=_either(TOKENS, _list(TOKENS, minItems=1)),
            sampling_params=_object(
                (),
                **SAMPLING,
                regex=TEXT,
                ebnf=TEXT,
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
