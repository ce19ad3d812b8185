"""Bodies of the chat protocols with parts exchanged for nonsense: never a server error, and nothing is left behind."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from server.conftest import serving
from server.templates import QWEN35

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "x", "parameters": SCHEMA, "strict": False}
USER = {"role": "user", "content": [{"type": "text", "text": "say:</think>x"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "B"}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "x"}, USER],
        "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning_effort": "low", "separate_reasoning": True, "max_tokens": 9, "response_format": {"type": "text"},
    },
    "/v1/messages": {
        "model": "tiny", "max_tokens": 9, "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "B"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}, *USER["content"]]},
        ],
        "tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}, "stop_sequences": ["q"],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}, "metadata": {},
    },
    "/v1/responses": {
        "input": [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"role": "user", "content": [{"type": "input_text", "text": "say:</think>x"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}}, "max_output_tokens": 9, "metadata": {"a": "b"}, "include": [],
    },
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
NONSENSE = [
    None,
    True,
    0,
    -1,
    1.5,
    1e30,
    "",
    "x",
    "required",
    "\u0000",
    "{",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"type": []},
    {"type": "x"},
]


def mutated(value: Any, draw: random.Random, rate: float) -> Any:
    if draw.random() < rate:
        return draw.choice(NONSENSE)
    if isinstance(value, dict):
        return {key: mutated(item, draw, rate) for key, item in value.items() if draw.random() > rate / 2}
    if isinstance(value, list):
        return [mutated(item, draw, rate) for item in value]
    return value


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


def test_deep_nesting_is_refused() -> None:
    """Deeper than a JSON encoder goes, but not so deep that the reader stops it."""
    with serving(chat_template=QWEN35) as served:
        for depth in (60, 140, 300):
            tools = {
                "/v1/chat/completions": [{"type": "function", "function": {**FUNCTION, "parameters": nested(depth)}}],
                "/v1/messages": [{"name": "weather", "input_schema": nested(depth)}],
                "/v1/responses": [{"type": "function", **FUNCTION, "parameters": nested(depth)}],
            }
            for path, value in tools.items():
                error = served.post(path, {**BODIES[path], "tools": value})
                assert error.status_code == 400 and "nested more than 100 levels" in error.json()["error"]["message"]
            call = {**CALL, "function": {"name": "weather", "arguments": json.dumps(nested(depth))}}
            messages = [{"role": "assistant", "tool_calls": [call]}, USER]
            assert "levels" in served.post("/v1/chat/completions", {"messages": messages}).json()["error"]["message"]
            odd = {
                "tool_choice": {"type": "function", "name": "weather", "x": nested(depth)},
                "text": {"format": {"type": "text", "x": nested(depth)}},
            }
            asked = {**BODIES["/v1/responses"], **odd, "reasoning": {"effort": "none"}}
            assert served.post("/v1/responses", asked).status_code == 200
            assert (
                served.post(
                    "/v1/responses", {**asked, "text": {"format": {"type": "json_schema", "name": nested(depth)}}}
                ).status_code
                == 400
            )
            kwargs = {"chat_template_kwargs": {"x": nested(depth)}}
            assert served.post("/v1/chat/completions", {**BODIES["/v1/chat/completions"], **kwargs}).status_code == 200
        served.until(served.empty)


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_server_error(path: str) -> None:
    draw = random.Random(path)
    with serving(chat_template=QWEN35) as served, httpx.Client(base_url=served.url, timeout=30) as client:
        assert client.post(path, json=BODIES[path]).status_code == 200
        seen = set()
        for number in range(60):
            rate = 0.02 + 0.002 * number
            body = {key: mutated(item, draw, rate) for key, item in BODIES[path].items()} | {"stream": number % 3 == 0}
            answer = client.post(path, json=body)
            assert answer.status_code < 500, (body, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"], (body, answer.text)
            seen.add(answer.status_code)
        assert {200, 400} <= seen
        served.until(served.empty)
