"""OpenAI's Responses protocol, stateless: JSON body to :class:`GenSpec` (torch-free).

Fields follow https://platform.openai.com/docs/api-reference/responses/create. Nothing is kept between requests: what the
protocol would store is refused by name. Thoughts go out, and come back, in the clear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.errors import RequestError
from freetoken.sampling_params import Grammar, schema_text
from freetoken.server.chat import (
    ROLES,
    check_tool_names,
    made_call,
    make_tool,
    read_effort,
    read_tool_choice,
    text_content,
    text_part,
    tool_list,
    unsupported,
)
from freetoken.server.chat_output import ChatStyle
from freetoken.server.generation import ChatPrompt, GenSpec, Prompt, new_rid
from freetoken.server.openai import MAX_TOKENS
from freetoken.server.parsers.base import Tool
from freetoken.server.wire import (
    SAMPLING_FIELDS,
    SamplingReader,
    boolean,
    check_model,
    integer,
    mapping,
    read_priority,
    refuse_unserved,
    string,
    warn_unknown,
)
from freetoken.server_args import Config

ENCRYPTED = "reasoning.encrypted_content"
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "moderation": (),
    "n": (1,),
}
_LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_SAMPLING = {name: ours for name, ours in SAMPLING_FIELDS.items() if name != "n"}
_KNOWN = {
    *_UNSERVED,
    *_LABELS,
    *_SAMPLING,
    "model",
    "input",
    "instructions",
    "max_output_tokens",
    "stream",
    "stream_options",
    "metadata",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "include",
    "chat_template_kwargs",
    "priority",
}
_MAX_METADATA = 16
_PARTS = ("input_text", "output_text", "text")


@dataclass
class ResponsesRequest:
    """A request as read; ``echo`` holds the fields that the answer repeats."""

    spec: GenSpec
    style: ChatStyle
    echo: dict[str, Any]


def read_responses(body: Mapping[str, Any], config: Config) -> ResponsesRequest:
    """A body of ``/v1/responses``; :class:`RequestError` names the field at fault."""
    check_model(body, config.served_model_name)
    refuse_unserved(body, _UNSERVED)
    refuse_unserved(mapping(body, "stream_options"), {"include_obfuscation": (False,)})
    warn_unknown(body, _KNOWN, "/v1/responses")
    for label in _LABELS:
        string(body, label)
    reader = SamplingReader(config.model.sampling_defaults)
    reader.read(body, _SAMPLING)
    reader.set("max_new_tokens", integer(body, "max_output_tokens", 1, MAX_TOKENS), "max_output_tokens")
    tools = _tools(body)
    choice = read_tool_choice(body, tools)
    offered = [] if choice.mode == "none" else tools
    grammar = _text_format(body)
    if grammar is not None:
        reader.set("grammar", grammar, grammar.param)
    sampling = reader.build()
    chat = ChatPrompt(
        _messages(body),
        options=mapping(body, "chat_template_kwargs"),
        tools=offered,
        effort=_effort(body),
        effort_param="reasoning.effort",
    )
    prompt = Prompt(sampling, chat=chat, param="input", tool_choice=choice)
    spec = GenSpec(new_rid("resp"), [prompt], boolean(body, "stream", False), priority=read_priority(body, config))
    echo = {
        "instructions": body.get("instructions"),
        "max_output_tokens": sampling.max_new_tokens,
        "metadata": _metadata(body),
        "parallel_tool_calls": choice.parallel,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tools": [_shown_tool(tool) for tool in tools],
        "tool_choice": {"type": "function", "name": choice.name} if choice.name is not None else choice.mode,
        "reasoning": {"effort": chat.effort, "summary": None},
        "text": {"format": _shown_format(body)},
        "previous_response_id": None,
        "truncation": "disabled",
        "store": False,
        "user": body.get("user"),
    }
    return ResponsesRequest(spec, ChatStyle(tuple(offered), choice.parallel), echo)


def _shown_tool(tool: Tool) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", **about, "strict": tool.strict}


def _shown_format(body: Mapping[str, Any]) -> dict[str, Any]:
    form = mapping(mapping(body, "text"), "format")
    kept = ("name", "schema", "strict") if form.get("type") == "json_schema" else ()
    return {"type": form.get("type", "text"), **{name: form[name] for name in kept if name in form}}


def _metadata(body: Mapping[str, Any]) -> dict[str, Any]:
    value = mapping(body, "metadata")
    if len(value) > _MAX_METADATA or not all(isinstance(item, str) for item in value.values()):
        raise RequestError(f"metadata must hold at most {_MAX_METADATA} strings", param="metadata")
    return value


def _effort(body: Mapping[str, Any]) -> str | None:
    value = mapping(body, "reasoning")
    # The thoughts themselves are in the answer, so an automatic summary has nothing to add.
    for name in ("summary", "generate_summary"):
        if value.get(name) not in (None, "auto"):
            raise unsupported(f"reasoning.{name}")
    include = body.get("include")
    if include is not None and (not isinstance(include, list) or any(item != ENCRYPTED for item in include)):
        raise unsupported("include", f"holds something else than {ENCRYPTED}, which this server does not support")
    return read_effort(value.get("effort"), "reasoning.effort")


def _text_format(body: Mapping[str, Any]) -> Grammar | None:
    value = mapping(body, "text")
    refuse_unserved(value, {"verbosity": ("medium",)})
    form = mapping(value, "format")
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_object", param="text.format")
    if kind != "json_schema":
        raise RequestError("text.format.type must be text, json_object or json_schema", param="text.format.type")
    string(form, "name", "text.format")
    boolean(form, "strict", False, "text.format")
    where = "text.format.schema"
    return Grammar(kind="json_schema", text=schema_text(form.get("schema"), where), param=where)


def _tools(body: Mapping[str, Any]) -> list[Tool]:
    tools: list[Tool] = []
    for index, item in enumerate(tool_list(body)):
        where = f"tools[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", param=where)
        if item.get("type") != "function":
            raise unsupported(f"{where}.type", f"{str(item.get('type'))[:40]!r} is not supported; only function is")
        tools.append(make_tool(item, where))
    check_tool_names(tools)
    return tools


# --- input ------------------------------------------------------------------------------------------------------------


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    instructions = string(body, "instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    value = body.get("input")
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise RequestError("input must be a string or a list that is not empty", param="input")
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", param=where)
        _add(messages, item, where)
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add an item; what the assistant said, thought and called in a row is one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ROLES or role == "tool":
            raise RequestError(f"{where}.role must be system, developer, user or assistant", param=f"{where}.role")
        content = text_content(item.get("content"), f"{where}.content", _PARTS)
        if role == "assistant":
            turn = _turn(messages)
            turn["content"] = content if not turn["content"] else _joined(turn["content"], content)
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        name = string(item, "name", where)
        if not name:
            raise RequestError(f"{where}.name is missing", param=f"{where}.name")
        call = made_call(string(item, "call_id", where), name, item.get("arguments"), f"{where}.arguments")
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = text_content(item.get("output"), f"{where}.output", _PARTS)
        identity = string(item, "call_id", where)
        if identity is None:
            raise RequestError(f"{where}.call_id is missing", param=f"{where}.call_id")
        messages.append({"role": "tool", "tool_call_id": identity, "content": content})
    elif kind == "reasoning":
        turn = _turn(messages)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _thoughts(item, where)
    else:
        raise unsupported(f"{where}.type", f"{str(kind)[:40]!r} is not supported")


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, a new one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _joined(first: Any, second: Any) -> list[dict[str, str]]:
    parts = [value if isinstance(value, list) else [{"type": "text", "text": value}] for value in (first, second)]
    return [*parts[0], *parts[1]]


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    content = item.get("content")
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a list", param=f"{where}.content")
    parts = [text_part(part, f"{where}.content[{i}]", ("reasoning_text", "text")) for i, part in enumerate(content)]
    return "".join(part["text"] for part in parts)
