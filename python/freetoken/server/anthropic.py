"""Anthropic's Messages protocol: JSON body to :class:`GenSpec` (torch-free).

Fields follow https://docs.claude.com/en/api/messages and ``/messages-count-tokens``. A field the protocol defines and this
server does not serve is refused by name. Prompt caching is automatic, so ``cache_control`` changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.errors import RequestError
from freetoken.sampling_params import Grammar, SamplingParams, schema_text
from freetoken.server.chat import (
    check_tool_names,
    made_call,
    make_tool,
    must_call,
    text_content,
    text_part,
    tool_list,
    unsupported,
)
from freetoken.server.chat_output import ChatStyle
from freetoken.server.generation import ChatPrompt, GenSpec, Prompt, ToolChoice, new_rid
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

_UNSERVED: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "output_format": (),
    "inference_geo": (),
    "speed": ("standard",),
    "n": (1,),
    "stop": (),
}
_SAMPLING = {name: ours for name, ours in SAMPLING_FIELDS.items() if name not in ("stop", "n")}
_KNOWN = {
    *_UNSERVED,
    *_SAMPLING,
    "model",
    "messages",
    "max_tokens",
    "system",
    "stop_sequences",
    "stream",
    "metadata",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "cache_control",
    "chat_template_kwargs",
    "priority",
}
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


@dataclass
class MessagesRequest:
    """A request as read."""

    spec: GenSpec
    style: ChatStyle


def read_messages_request(body: Mapping[str, Any], config: Config, *, counting: bool = False) -> MessagesRequest:
    """A body of ``/v1/messages``, or of ``/v1/messages/count_tokens`` if ``counting`` (which has no ``max_tokens``)."""
    check_model(body, config.served_model_name)
    refuse_unserved(body, _UNSERVED)
    warn_unknown(body, _KNOWN, "/v1/messages")
    string(mapping(body, "metadata"), "user_id", "metadata")
    reader = SamplingReader(config.model.sampling_defaults)
    reader.read(body, _SAMPLING)
    reader.read(body, {"stop_sequences": "stop"})
    most = integer(body, "max_tokens", 1, MAX_TOKENS)
    if most is None and not counting:
        raise RequestError("max_tokens is missing", param="max_tokens")
    reader.set("max_new_tokens", most, "max_tokens")
    tools = _tools(body)
    choice = _tool_choice(body, tools)
    offered = [] if choice.mode == "none" else tools
    effort, grammar = _output_config(body)
    if grammar is not None:
        reader.set("grammar", grammar, grammar.param)
    chat = _chat(body, offered, _thinking(body), effort)
    prompt = Prompt(_built(reader), chat=chat, param="messages", tool_choice=choice)
    spec = GenSpec(new_rid("msg"), [prompt], boolean(body, "stream", False), priority=read_priority(body, config))
    return MessagesRequest(spec, ChatStyle(tuple(offered), choice.parallel))


def _built(reader: SamplingReader) -> SamplingParams:
    if isinstance(reader.values.get("stop"), str):
        raise RequestError("stop_sequences must be a list of strings", param="stop_sequences")
    return reader.build()


def _thinking(body: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether to think, which is only when asked to, as in the protocol; and for how many tokens at most."""
    value = mapping(body, "thinking")
    if not value:
        return False, None
    refuse_unserved(value, {"display": ("summarized",)})
    if value.get("type") not in ("enabled", "adaptive", "disabled"):
        raise RequestError("thinking.type must be enabled, adaptive or disabled", param="thinking.type")
    budget = integer(value, "budget_tokens", 1, MAX_TOKENS)
    return value["type"] != "disabled", budget


def _output_config(body: Mapping[str, Any]) -> tuple[str | None, Grammar | None]:
    value = mapping(body, "output_config")
    effort = value.get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise RequestError(f"output_config.effort must be one of {', '.join(_EFFORTS)}", param="output_config.effort")
    form = mapping(value, "format")
    if not form:
        return _EFFORTS.get(effort or ""), None
    if form.get("type") != "json_schema":
        raise unsupported("output_config.format.type", "is not supported; only json_schema is")
    where = "output_config.format.schema"
    return _EFFORTS.get(effort or ""), Grammar(
        kind="json_schema", text=schema_text(form.get("schema"), where), param=where
    )


# --- tools ------------------------------------------------------------------------------------------------------------


def _tools(body: Mapping[str, Any]) -> list[Tool]:
    tools: list[Tool] = []
    for index, item in enumerate(tool_list(body)):
        where = f"tools[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", param=where)
        if item.get("type") not in (None, "custom"):
            raise unsupported(f"{where}.type", f"{str(item['type'])[:40]!r} is not supported; only custom tools are")
        if not isinstance(item.get("input_schema"), dict):
            raise RequestError(f"{where}.input_schema must be a JSON schema", param=f"{where}.input_schema")
        tools.append(make_tool(item, where, "input_schema"))
    check_tool_names(tools)
    return tools


def _tool_choice(body: Mapping[str, Any], tools: list[Tool]) -> ToolChoice:
    value = mapping(body, "tool_choice")
    parallel = not boolean(value, "disable_parallel_tool_use", False, "tool_choice")
    kind = value.get("type", "auto")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(f"tool_choice.type must be one of {', '.join(_CHOICES)}", param="tool_choice.type")
    if _CHOICES[kind] != "required":
        return ToolChoice(_CHOICES[kind], parallel=parallel)
    name = string(value, "name", "tool_choice")
    if kind == "tool" and name is None:
        raise RequestError("tool_choice.name is missing", param="tool_choice.name")
    return must_call(name if kind == "tool" else None, tools, parallel)


# --- messages ---------------------------------------------------------------------------------------------------------


def _chat(
    body: Mapping[str, Any], tools: list[Tool], thinking: tuple[bool, int | None], effort: str | None
) -> ChatPrompt:
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list that is not empty", param="messages")
    messages: list[dict[str, Any]] = []
    if body.get("system") is not None:
        messages.append({"role": "system", "content": text_content(body["system"], "system")})
    for index, item in enumerate(value):
        messages += _message(item, f"messages[{index}]")
    last = messages[-1]
    go_on = last["role"] == "assistant"
    if go_on and last.get("tool_calls"):
        raise RequestError("the last message must not be a tool_use without its tool_result", param="messages")
    options = mapping(body, "chat_template_kwargs")
    return ChatPrompt(
        messages,
        not go_on,
        go_on,
        options,
        tools=tools,
        effort=effort,
        effort_param="output_config.effort",
        thinking=thinking[0],
        thinking_budget=thinking[1],
    )


def _message(item: Any, where: str) -> list[dict[str, Any]]:
    """The messages that one of the client's stands for: each tool result is one of its own."""
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object", param=where)
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise RequestError(f"{where}.content[{index}] must be an object", param=f"{where}.content[{index}]")
    read = _assistant if role == "assistant" else _user
    return read(content, f"{where}.content")


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            messages.append(_tool_result(block, at))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(text_part(block, at))
        else:
            messages.append({"role": "user", "content": [text_part(block, at)]})
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    identity = string(block, "tool_use_id", at)
    if identity is None:
        raise RequestError(f"{at}.tool_use_id is missing", param=f"{at}.tool_use_id")
    content = text_content(block["content"], f"{at}.content") if block.get("content") is not None else ""
    if boolean(block, "is_error", False, at):
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]
    return {"role": "tool", "tool_call_id": identity, "content": content}


def _assistant(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": []}
    for index, block in enumerate(blocks):
        at, kind = f"{where}[{index}]", block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (string(block, "thinking", at) or "")
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            name = string(block, "name", at)
            if not name:
                raise RequestError(f"{at}.name is missing", param=f"{at}.name")
            call = made_call(string(block, "id", at), name, block.get("input"), f"{at}.input")
            message.setdefault("tool_calls", []).append(call)
        else:
            message["content"].append(text_part(block, at))
    if len(message["content"]) < 2:
        message["content"] = message["content"][0]["text"] if message["content"] else ""
    return [message]
