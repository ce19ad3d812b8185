"""Messages and tools of a chat as the OpenAI protocol writes them, checked and brought into the form chat templates take
(torch-free)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from freetoken.errors import RequestError
from freetoken.grammar.schema import too_deep
from freetoken.server.generation import ChatPrompt, ToolChoice
from freetoken.server.parsers.base import Tool
from freetoken.server.parsers.json_scan import complete_object
from freetoken.server.wire import boolean, mapping, string

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_TOOLS = 1024
MAX_DEPTH = 100
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def unsupported(where: str, what: str = "is not supported by this server") -> RequestError:
    """A part of the protocol that is not served."""
    return RequestError(f"{where} {what}", param=where, code="unsupported_parameter")


# --- tools ------------------------------------------------------------------------------------------------------------


def make_tool(value: Mapping[str, Any], where: str, schema: str = "parameters") -> Tool:
    """A function from an object with ``name``, ``description`` and, under the key ``schema``, the schema of its arguments;
    ``where`` is the object's place in the request."""
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name must be 1 to 128 letters, digits, or characters of _ - . : /", param=f"{where}.name"
        )
    description = string(value, "description", where) or ""
    parameters = value.get(schema)
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{where}.{schema} must be a JSON schema", param=f"{where}.{schema}")
    if too_deep(parameters, MAX_DEPTH):
        raise RequestError(f"{where}.{schema} is nested more than {MAX_DEPTH} levels deep", param=f"{where}.{schema}")
    strict = boolean(value, "strict", False, where)
    return Tool(name, description, parameters or _NO_ARGUMENTS, strict, f"{where}.{schema}")


def tool_list(body: Mapping[str, Any]) -> list[Any]:
    """The list ``tools``; empty where there is none."""
    value = body.get("tools")
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError("tools must be a list", param="tools")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(value)} functions; at most {MAX_TOOLS} are allowed", param="tools")
    return value


def check_tool_names(tools: list[Tool]) -> None:
    """No two tools have one name."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(f"tools names {tool.name!r} twice", param=f"tools[{index}]")
        seen.add(tool.name)


def read_tools(body: Mapping[str, Any]) -> list[Tool]:
    """``tools`` of the chat protocol."""
    tools: list[Tool] = []
    for index, item in enumerate(tool_list(body)):
        where = f"tools[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", param=where)
        if item.get("type", "function") != "function":
            raise unsupported(f"{where}.type", f"{str(item['type'])[:40]!r} is not supported; only function is")
        if not isinstance(item.get("function"), dict):
            raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
        tools.append(make_tool(item["function"], f"{where}.function"))
    check_tool_names(tools)
    return tools


def read_tool_choice(body: Mapping[str, Any], tools: list[Tool]) -> ToolChoice:
    """``tool_choice`` (chat's form or that of responses) and ``parallel_tool_calls``."""
    parallel = boolean(body, "parallel_tool_calls", True)
    value = body.get("tool_choice")
    if value is None or value in ("auto", "none"):
        return ToolChoice(value or "auto", parallel=parallel)
    name = None
    if isinstance(value, dict) and value.get("type") == "function":
        named = value.get("function", value)
        name = named.get("name") if isinstance(named, dict) else None
        if not isinstance(name, str):
            raise RequestError("tool_choice must name a function", param="tool_choice")
    elif isinstance(value, dict):
        raise unsupported("tool_choice", f"of type {str(value.get('type'))[:40]!r} is not supported by this server")
    elif value != "required":
        raise RequestError("tool_choice must be none, auto, required or a named function", param="tool_choice")
    return must_call(name, tools, parallel)


def must_call(name: str | None, tools: list[Tool], parallel: bool) -> ToolChoice:
    """A call of ``name``, or of any tool, is asked for; :class:`RequestError` if there is none such."""
    if not tools:
        raise RequestError("tool_choice needs tools to choose from", param="tool_choice")
    if name is not None and all(tool.name != name for tool in tools):
        raise RequestError(f"tool_choice names {name[:64]!r}, which is not one of tools", param="tool_choice")
    return ToolChoice("required", name, parallel)


# --- messages ---------------------------------------------------------------------------------------------------------


def read_chat_prompt(body: Mapping[str, Any], tools: list[Tool] | None = None) -> ChatPrompt:
    """``messages`` and the template switches; :class:`RequestError` names the message at fault."""
    value = body.get("messages")
    if not isinstance(value, list):
        raise RequestError("messages must be a list", param="messages")
    if not value:
        raise RequestError("messages is empty", param="messages")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(value)]
    go_on = boolean(body, "continue_final_message", False)
    open_turn = boolean(body, "add_generation_prompt", not go_on)
    if go_on and open_turn:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if go_on and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise RequestError(
            "continue_final_message needs the last message to be a text of the assistant's",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages,
        open_turn,
        go_on,
        mapping(body, "chat_template_kwargs"),
        tools=tools or [],
        effort=read_effort(body.get("reasoning_effort"), "reasoning_effort"),
    )


def read_effort(value: Any, where: str) -> str | None:
    """How much to think: one of :data:`EFFORTS`, or ``None``."""
    if value is not None and value not in EFFORTS:
        raise RequestError(f"{where} must be one of {', '.join(EFFORTS)}", param=where)
    return value if isinstance(value, str) else None


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object", param=where)
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    for name in ("function_call", "audio"):
        if item.get(name):
            raise unsupported(f"{where}.{name}")
    calls = _tool_calls(item, where) if role == "assistant" else []
    content = item.get("content")
    message = {"role": role, "content": "" if calls and content is None else text_content(content, f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := string(item, name, where)) is not None:
            message[name] = value
    if role == "assistant" and (thoughts := string(item, "reasoning", where)) is not None:
        message.setdefault("reasoning_content", thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def text_content(value: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str | list[dict[str, str]]:
    """A string, or text parts under the names ``kinds``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    return [text_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(value)]


def text_part(part: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> dict[str, str]:
    """A content part as templates take it; :class:`RequestError` unless it is text (under one of the names ``kinds``)."""
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object", param=where)
    if part.get("type") not in kinds:
        raise unsupported(f"{where}.type", f"{str(part.get('type'))[:40]!r} is not supported; only text is")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
    return {"type": "text", "text": part["text"]}


def _tool_calls(item: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    value = item.get("tool_calls")
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        at = f"{where}.tool_calls[{index}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RequestError(f"{at} must be an object with a function", param=at)
        name = string(call["function"], "name", f"{at}.function")
        if not name:
            raise RequestError(f"{at}.function.name must be a string", param=f"{at}.function.name")
        calls.append(
            made_call(string(call, "id", at), name, call["function"].get("arguments"), f"{at}.function.arguments")
        )
    return calls


def made_call(identity: str | None, name: str, arguments: Any, where: str) -> dict[str, Any]:
    """A call of an earlier turn as templates take it, with its arguments as an object.

    Arguments may come as JSON text. Of arguments that were cut off, as far as they go; :class:`RequestError` for anything
    that is not the beginning of an object.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            if not arguments.lstrip().startswith("{"):
                raise RequestError(f"{where} must be a JSON object", param=where) from None
            arguments = json.loads(complete_object(arguments))
    if arguments is None:
        arguments = {}
    if too_deep(arguments, MAX_DEPTH):
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} levels deep", param=where)
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be a JSON object", param=where)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": identity, **call} if identity is not None else call
