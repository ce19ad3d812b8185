"""Anthropic's protocol through the stock client: text, thoughts, tools, the order of events, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from server.conftest import Served, serving
from server.templates import QWEN3, QWEN35
from server.test_http_tools import BERN, XML_CALL, say

TOOL = {
    "name": "weather",
    "description": "How it is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with serving(chat_template=QWEN35, api_key="sesame") as served:
        yield served
        served.until(served.empty)


@pytest.fixture(scope="module")
def client(qwen: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=qwen.url, api_key="sesame", max_retries=0)


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """The same answer whole and streamed."""
    whole = client.messages.create(model="tiny", **{"max_tokens": 500, **fields})
    with client.messages.stream(model="tiny", **{"max_tokens": 500, **fields}) as stream:
        for _ in stream:
            continue
        streamed = stream.get_final_message()
    leave = {"id": True, "content": {"__all__": {"id", "caller", "parsed_output"}}}
    assert streamed.model_dump(exclude=leave) == whole.model_dump(exclude=leave)
    return whole


def post(served: Served, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 50, "messages": say("hi"), **fields}
    return served.post(path, body, headers={"x-api-key": "sesame"})


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_text(qwen: Served, client: anthropic.Anthropic) -> None:
    answer = ask(client, messages=say("héllo"), system="Be brief.", extra_body={"temperature": 0.5})
    assert answer.content[0].text == "héllo" and answer.stop_reason == "end_turn" and answer.role == "assistant"
    assert answer.usage.output_tokens == len("héllo".encode()) + 1
    assert answer.usage.cache_read_input_tokens == 7
    assert answer.usage.input_tokens == len(qwen.fake.added[-1].ids) - 7
    prompt = qwen.tokenizer.encoded[-1]
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert prompt.endswith("<think>\n\n</think>\n\n")  # thinking was not asked for
    assert qwen.fake.added[-1].sampling.temperature == 0.5


def test_thinking_and_tools(client: anthropic.Anthropic) -> None:
    answer = ask(client, messages=say(f"I must look.\n</think>\n\nWell.\n{XML_CALL}"), tools=[TOOL], **THINK)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[0].thinking == "I must look." and answer.content[1].text == "Well."
    assert answer.content[2].input == BERN and answer.content[2].id.startswith("toolu_")
    assert answer.stop_reason == "tool_use"


def test_round_trip(qwen: Served, client: anthropic.Anthropic) -> None:
    messages: list[Any] = say(f"I must look.\n</think>\n\n{XML_CALL}")
    answer = ask(client, messages=messages, tools=[TOOL], **THINK)
    result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": [{"type": "text", "text": "sun"}]}
    text = {"type": "text", "text": say("</think>Fine.")[0]["content"], "cache_control": {"type": "ephemeral"}}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result, text]}]
    final = ask(client, messages=messages, tools=[TOOL], **THINK)
    assert final.content[0].text == "Fine."
    prompt = qwen.tokenizer.encoded[-1]
    assert "<think>\nI must look.\n</think>" in prompt and "<parameter=days>\n2\n</parameter>" in prompt
    assert "<tool_response>\nsun\n</tool_response>" in prompt
    failed = {"type": "tool_result", "tool_use_id": "x", "content": "no such city", "is_error": True}
    ask(client, messages=[{"role": "user", "content": [failed, text]}], tools=[TOOL])
    assert "<tool_response>\nError: no such city\n</tool_response>" in qwen.tokenizer.encoded[-1]


def test_events_come_in_order(qwen: Served) -> None:
    found = events(
        post(qwen, messages=say(f"a</think>b {XML_CALL} c"), max_tokens=500, tools=[TOOL], stream=True, **THINK)
    )
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    index, opened = -1, False
    blocks = []
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert not opened and event["index"] == index + 1
            index, opened = event["index"], True
            blocks.append(event["content_block"]["type"])
        else:
            assert opened and event["index"] == index
            opened = event["type"] == "content_block_delta"
    assert not opened and blocks == ["thinking", "text", "tool_use", "text"]
    start = found[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] > 20


def test_ends(qwen: Served, client: anthropic.Anthropic) -> None:
    answer = ask(client, messages=say("one two three"), stop_sequences=["two", "x"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one ", "stop_sequence", "two")
    answer = ask(client, messages=say("one two three"), max_tokens=3)
    assert (answer.content[0].text, answer.stop_reason) == ("one", "max_tokens")
    answer = ask(client, messages=say(XML_CALL), max_tokens=70, tools=[TOOL])
    assert answer.stop_reason == "max_tokens" and answer.content[0].input == {}
    assert ask(client, messages=[{"role": "user", "content": "say:"}]).content == []


def test_an_assistants_last_message_goes_on(qwen: Served, client: anthropic.Anthropic) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": say("hello")[0]["content"]}]
    answer = ask(client, messages=talk)
    assert answer.content[0].text == "hello"
    assert qwen.tokenizer.encoded[-1].endswith(talk[1]["content"])


def test_tool_choice(qwen: Served, client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        ask(client, messages=say(XML_CALL), tools=[TOOL], tool_choice=choice)
        assert "weather" in qwen.fake.added[-1].sampling.grammar.text
    answer = ask(client, messages=say(XML_CALL), tools=[TOOL], tool_choice={"type": "none"})
    assert answer.content[0].text == XML_CALL and qwen.fake.added[-1].sampling.grammar is None
    twice = say(f"{XML_CALL}\n{XML_CALL}")
    assert len(ask(client, messages=twice, tools=[TOOL]).content) == 2
    once = ask(client, messages=twice, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(once.content) == 1 and once.stop_reason == "tool_use"


def test_count_tokens(qwen: Served, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"messages": say("x"), "system": "Be brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(model="tiny", **fields).input_tokens
    client.messages.create(model="tiny", max_tokens=1, **fields)
    assert counted == len(qwen.fake.added[-1].ids) > 100


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 5}]}]},
         "messages[0].content[0].input"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]}, "last message"),
        ({"system": 5}, "system"), ({"system": [{"type": "image"}]}, "system[0].type"), ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": 200}, "temperature"), ({"top_k": "x"}, "top_k"), ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"), ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"), ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"output_config": {"effort": {}}}, "output_config.effort"), ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"), ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"), ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "x"}, "container"), ({"service_tier": "priority"}, "service_tier"), ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"output_config": {"effort": "lots"}}, "output_config.effort"), ({"n": 2}, "n"), ({"stop": "x"}, "stop"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"), ({"stream": "yes"}, "stream"),
    ],
)  # fmt: skip
def test_refusals(qwen: Served, fields: dict[str, Any], where: str) -> None:
    answer = post(qwen, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "invalid_request_error"
    assert where in answer.json()["error"]["message"]


def test_errors_have_the_protocols_envelope(qwen: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="claude", max_tokens=5, messages=say("x"))
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=qwen.url, api_key="wrong").messages.create(
            model="tiny", max_tokens=5, messages=say("x")
        )
    broken = httpx.post(qwen.url + "/v1/messages", content=b"{", headers={"x-api-key": "sesame"})
    assert broken.status_code == 400 and broken.json()["error"]["type"] == "invalid_request_error"
    full = post(qwen, messages=[{"role": "user", "content": "full:"}])
    assert full.status_code == 503 and full.json()["error"] == {
        "type": "overloaded_error",
        "message": "the queue is full",
    }
    missing = qwen.get("/v1/messages/nothing", headers={"x-api-key": "sesame"})
    assert missing.status_code == 404 and missing.json()["type"] == "error"


def test_an_error_in_the_middle_of_a_stream(qwen: Served) -> None:
    found = events(post(qwen, messages=[{"role": "user", "content": "late:"}], stream=True))
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "error"
    assert found[-1]["error"] == {"type": "invalid_request_error", "message": "the pool can never hold this"}


def test_thinking_needs_a_model_that_thinks() -> None:
    with serving() as served:
        answer = served.post(
            "/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": say("x"), "thinking": {"type": "adaptive"}}
        )
        assert answer.status_code == 400 and "thinking" in answer.json()["error"]["message"]
        body = {"model": "tiny", "max_tokens": 5, "messages": say("x"), "thinking": {"type": "disabled"}}
        assert served.post("/v1/messages", body).status_code == 200


def test_effort_and_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with serving(chat_template=QWEN3) as served:
        body = {"model": "tiny", "max_tokens": 5, "messages": say("x")}
        config = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
        assert served.post("/v1/messages", {**body, "output_config": config}).status_code == 200
        # Effort does not turn on what was not asked for.
        assert any(text.endswith("assistant\n<think>\n\n</think>\n\n") for text in served.tokenizer.encoded)
        grammar = served.fake.added[-1].sampling.grammar
        assert grammar.kind == "json_schema" and json.loads(grammar.text) == schema
    with serving() as served:
        answer = served.post("/v1/messages", {**body, "output_config": {"effort": "low"}})
        assert answer.status_code == 400 and "output_config.effort" in answer.json()["error"]["message"]
