"""Tools in plain text, for chat templates that know none: a description for the model, and earlier calls and results as
messages, all in the form the Hermes dialect reads (torch-free)."""

from __future__ import annotations

from typing import Any

from freetoken.server.parsers import hermes
from freetoken.server.parsers.base import Tool
from freetoken.server.parsers.json_scan import dump

_ABOUT = """\
You can call functions. These are the functions, one JSON object a line:
{tools}
To call one, write nothing but a JSON object with its name and its arguments between tags, like this:
{start}
{{"name": "the_name", "arguments": {{"the_argument": "the value"}}}}
{end}
The results come back between <tool_response> tags."""


def as_text(messages: list[dict[str, Any]], tools: list[Tool]) -> list[dict[str, Any]]:
    """``messages`` without tool calls and tool messages, and with ``tools`` described in the system message."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            if plain and plain[-1].get("answers"):
                plain[-1]["content"] += "\n" + answer
            else:
                plain.append({"role": "user", "content": answer, "answers": True})
        elif message.get("tool_calls"):
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            text = "\n".join([_text(message["content"]), *calls] if message["content"] else calls)
            plain.append({**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text})
        else:
            plain.append(message)
    plain = [{key: value for key, value in message.items() if key != "answers"} for message in plain]
    if not tools:
        return plain
    about = _ABOUT.format(tools="\n".join(dump(tool.shown()) for tool in tools), start=hermes.START, end=hermes.END)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{_text(plain[0]['content'])}\n\n{about}"}, *plain[1:]]
    return [{"role": "system", "content": about}, *plain]


def _call(function: dict[str, Any]) -> str:
    return f"{hermes.START}\n{dump({'name': function['name'], 'arguments': function['arguments']})}\n{hermes.END}"


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
