"""Tools and reasoning over HTTP: what the template is given, what the client gets, and that streams say the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from server.conftest import Served, serving
from server.templates import QWEN3, QWEN35

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
BERN = {"city": "Bern", "days": 2}


@pytest.fixture(scope="module")
def qwen3() -> Iterator[Served]:
    with serving(chat_template=QWEN3) as served:
        yield served
        served.until(served.empty)


@pytest.fixture(scope="module")
def qwen35() -> Iterator[Served]:
    with serving(chat_template=QWEN35) as served:
        yield served
        served.until(served.empty)


def say(text: str) -> list[dict[str, Any]]:
    """A prompt that the fake scheduler answers with ``text``."""
    return [{"role": "user", "content": "ids:" + ",".join(map(str, text.encode()))}]


def streamed(served: Served, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that a stream adds up to, and its chunks."""
    chunks = list(served.openai.chat.completions.create(model="tiny", stream=True, **fields))
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["tool_calls"]) and call.type == "function"
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments or ""
    return message, chunks


def both(served: Served, **fields: Any) -> tuple[dict[str, Any], str]:
    """Message and finish reason, the same streamed and whole."""
    message, chunks = streamed(served, **fields)
    choice = served.openai.chat.completions.create(model="tiny", **fields).choices[0]
    whole = {
        "content": choice.message.content or "",
        "reasoning_content": getattr(choice.message, "reasoning_content", None) or "",
        "tool_calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
    }
    assert message == whole
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    return whole, choice.finish_reason


def test_a_call(qwen3: Served, qwen35: Served) -> None:
    for served, text in ((qwen3, HERMES_CALL), (qwen35, f"I must look.\n</think>\n\n{XML_CALL}")):
        message, reason = both(served, messages=say(text), tools=[TOOL])
        assert reason == "tool_calls" and message["content"] == ""
        ((name, arguments),) = message["tool_calls"]
        assert name == "weather" and json.loads(arguments) == BERN
        assert message["reasoning_content"] == ("I must look." if served is qwen35 else "")
    assert '"name": "weather"' in qwen35.tokenizer.encoded[-1]


def test_content_is_null_beside_calls_alone(qwen3: Served) -> None:
    message = qwen3.post("/v1/chat/completions", {"messages": say(HERMES_CALL), "tools": [TOOL]}).json()["choices"][0]
    assert message["message"]["content"] is None and message["finish_reason"] == "tool_calls"
    assert message["message"]["tool_calls"][0]["id"].startswith("call_")


def test_several_calls_with_text_before(qwen3: Served) -> None:
    message, reason = both(qwen3, messages=say(f"Both.\n{HERMES_CALL}\n{HERMES_CALL}"), tools=[TOOL])
    assert message["content"] == "Both." and len(message["tool_calls"]) == 2 and reason == "tool_calls"
    message, reason = both(
        qwen3, messages=say(f"One.\n{HERMES_CALL}\n{HERMES_CALL} end"), tools=[TOOL], parallel_tool_calls=False
    )
    assert message["content"] == "One." and len(message["tool_calls"]) == 1 and reason == "tool_calls"


def test_arguments_are_streamed_as_they_come(qwen35: Served) -> None:
    _, chunks = streamed(qwen35, messages=say(f"</think>{XML_CALL}"), tools=[TOOL])
    pieces = [call.function.arguments for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert json.loads("".join(pieces)) == BERN and len(pieces) > 5


def test_malformed_and_unknown_calls_are_text(qwen3: Served, caplog: pytest.LogCaptureFixture) -> None:
    for text in (HERMES_CALL.replace("weather", "remove"), "<tool_call>weather()</tool_call>", "<tool_call>{"):
        with caplog.at_level(logging.WARNING):
            message, reason = both(qwen3, messages=say(text), tools=[TOOL])
        assert (message["content"], message["tool_calls"], reason) == (text, [], "stop")
        assert "malformed tool call" in caplog.text
        caplog.clear()


def test_a_call_cut_off_by_the_limit(qwen3: Served) -> None:
    message, reason = both(qwen3, messages=say(HERMES_CALL), tools=[TOOL], max_tokens=60)
    assert reason == "length" and message["tool_calls"][0][1].startswith('{"city"')


def test_without_tools_calls_are_text(qwen3: Served) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message, reason = both(qwen3, messages=say(HERMES_CALL), **fields)
        assert message["content"] == HERMES_CALL and reason == "stop"
        assert "weather" not in qwen3.tokenizer.encoded[-1]


def test_reasoning(qwen3: Served, qwen35: Served) -> None:
    thinking = "<think>\nhm, 2\n</think>\n\nIt is 2."
    message, reason = both(qwen3, messages=say(thinking))
    assert (message["reasoning_content"], message["content"], reason) == ("hm, 2", "It is 2.", "stop")
    message, _ = both(qwen35, messages=say("hm, 2\n</think>\n\nIt is 2."))
    assert (message["reasoning_content"], message["content"]) == ("hm, 2", "It is 2.")
    message, _ = both(qwen3, messages=say(thinking), extra_body={"separate_reasoning": False})
    assert (message["reasoning_content"], message["content"]) == ("", thinking)


def test_thinking_can_be_turned_off(qwen35: Served) -> None:
    for fields in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        message, _ = both(qwen35, messages=say("It is 2."), **fields)
        assert (message["reasoning_content"], message["content"]) == ("", "It is 2.")
        assert qwen35.tokenizer.encoded[-1].endswith("<think>\n\n</think>\n\n")
    both(qwen35, messages=say("</think>It is 2."), reasoning_effort="high")
    assert qwen35.tokenizer.encoded[-1].endswith("assistant\n<think>\n")


def test_several_choices_have_parsers_of_their_own(qwen35: Served) -> None:
    answer = qwen35.openai.chat.completions.create(
        model="tiny", messages=say(f"a</think>b {XML_CALL}"), tools=[TOOL], n=3
    )
    for choice in answer.choices:
        assert choice.message.content == "b" and choice.message.reasoning_content == "a"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == BERN


def test_round_trip_with_the_clients_own_objects(qwen35: Served) -> None:
    messages: list[Any] = say(f"I look.\n</think>\n\n{XML_CALL}")
    answer = qwen35.openai.chat.completions.create(model="tiny", messages=messages, tools=[TOOL]).choices[0].message
    call = answer.tool_calls[0]
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue"}'}, *say("</think>Blue.")]
    final, _ = both(qwen35, messages=messages, tools=[TOOL])
    assert final["content"] == "Blue."
    prompt = qwen35.tokenizer.encoded[-1]
    assert "<think>\nI look.\n</think>" in prompt and "<parameter=days>\n2\n</parameter>" in prompt
    assert '<tool_response>\n{"sky": "blue"}\n</tool_response>' in prompt


def test_a_call_that_was_cut_off_can_be_sent_back(qwen35: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"days": 3, "city": "Be'}}
    talk = [{"role": "assistant", "content": None, "tool_calls": [call]}, *say("</think>Yes.")]
    message, _ = both(qwen35, messages=talk, tools=[TOOL])
    assert message["content"] == "Yes." and "<parameter=days>\n3\n" in qwen35.tokenizer.encoded[-1]
    assert "<parameter=city>" not in qwen35.tokenizer.encoded[-1]


def test_logprobs_beside_calls(qwen3: Served) -> None:
    answer = qwen3.openai.chat.completions.create(
        model="tiny", messages=say(f"ab{HERMES_CALL}"), tools=[TOOL], logprobs=True
    ).choices[0]
    _, chunks = streamed(qwen3, messages=say(f"ab{HERMES_CALL}"), tools=[TOOL], logprobs=True)
    tokens = [t.token for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert "".join(tokens) == "".join(t.token for t in answer.logprobs.content) == f"ab{HERMES_CALL}"


def test_tool_choice_becomes_a_grammar(qwen3: Served) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        qwen3.post("/v1/chat/completions", {"messages": say(HERMES_CALL), "tools": [TOOL], "tool_choice": choice})
        grammar = qwen3.fake.added[-1].sampling.grammar
        assert grammar.kind == "lark" and grammar.param == "tool_choice" and "weather" in grammar.text
    qwen3.post("/v1/chat/completions", {"messages": say(HERMES_CALL), "tools": [TOOL]})
    assert qwen3.fake.added[-1].sampling.grammar is None


def test_parsers_that_the_operator_turned_off() -> None:
    with serving(chat_template=QWEN3, tool_call_parser="none", reasoning_parser="none") as served:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            served.openai.chat.completions.create(model="tiny", messages=say("x"), tools=[TOOL])
        text = f"<think>a</think>{HERMES_CALL}"
        assert both(served, messages=say(text))[0]["content"] == text
        info = served.get("/get_server_info").json()
        assert (info["reasoning_parser"], info["tool_call_parser"]) == ("none", "none")


def test_template_without_tools_reads_hermes_calls(server: Served) -> None:
    message, reason = both(server, messages=say(HERMES_CALL), tools=[TOOL])
    assert reason == "tool_calls" and json.loads(message["tool_calls"][0][1]) == BERN
    assert "You can call functions." in server.tokenizer.encoded[-1]


def test_the_clients_own_stream_helper_and_strict_tools(qwen3: Served) -> None:
    class Weather(pydantic.BaseModel):
        city: str
        days: int

    tool = openai.pydantic_function_tool(Weather, name="weather")
    fields: dict[str, Any] = {"model": "tiny", "messages": say(f"I look.\n{HERMES_CALL}"), "tools": [tool]}
    with qwen3.openai.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    parsed = choice.message.tool_calls[0].function.parsed_arguments
    assert parsed == Weather(city="Bern", days=2)
    assert (
        qwen3.openai.chat.completions.parse(**fields).choices[0].message.tool_calls[0].function.parsed_arguments
        == parsed
    )
    # A strict tool's arguments are held to its schema.
    assert '"additionalProperties": false' in qwen3.fake.added[-1].sampling.grammar.text
