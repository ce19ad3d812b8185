"""OpenAI's Responses protocol, stateless, through the stock client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.server.chat_output import ChatOutputs, ChatStyle
from freetoken.server.generation import GenEvent
from freetoken.server.parsers import Dialects
from server.conftest import Served, serving
from server.templates import QWEN35
from server.test_http_refusals import refusal
from server.test_http_tools import BERN, XML_CALL, say

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "How it is.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with serving(chat_template=QWEN35) as served:
        yield served
        served.until(served.empty)


def plain(response: Any) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    value = response.model_dump(exclude={"id": True, "created_at": True, "output": {"__all__": {"id", "call_id"}}})
    assert response.id.startswith("resp")
    return value


def ask(served: Served, **fields: Any) -> Any:
    """The same answer whole and streamed; the events are checked on the way."""
    whole = served.openai.responses.create(model="tiny", **fields)
    stream = list(served.openai.responses.create(model="tiny", stream=True, **fields))
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    assert [event.type for event in stream[:2]] == ["response.created", "response.in_progress"]
    assert stream[-1].type == f"response.{whole.status}" and plain(stream[-1].response) == plain(whole)
    texts: dict[str, str] = {}
    added, done = [], []
    for event in stream[2:-1]:
        if event.type == "response.output_item.added":
            assert len(added) == len(done) == event.output_index
            added.append(event.item.id)
        elif event.type == "response.output_item.done":
            done.append(event.item.id)
        elif event.type.endswith(".delta"):
            assert event.item_id == added[-1] and len(done) == len(added) - 1
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        elif event.type.endswith((".output_text.done", ".reasoning_text.done")):
            assert event.text == texts[event.item_id]
        elif event.type.endswith("arguments.done"):
            assert event.arguments == texts[event.item_id]
    assert added == done == [item.id for item in stream[-1].response.output]
    return whole


def test_text(qwen: Served) -> None:
    answer = ask(
        qwen, input=say("</think>héllo")[0]["content"], instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert answer.output_text == "héllo" and answer.status == "completed" and answer.error is None
    assert answer.usage.input_tokens == len(qwen.fake.added[-1].ids)
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert qwen.tokenizer.encoded[-1].startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_thoughts_text_and_calls(qwen: Served) -> None:
    answer = ask(qwen, input=say(f"I must look.\n</think>\n\nWell.\n{XML_CALL}"), tools=[TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output[0].content[0].text == "I must look." and answer.output_text == "Well."
    assert answer.output[2].name == "weather" and json.loads(answer.output[2].arguments) == BERN
    assert answer.tools[0].name == "weather" and answer.parallel_tool_calls is True


def test_round_trip(qwen: Served) -> None:
    items: list[Any] = [*say(f"I must look.\n</think>\n\n{XML_CALL}")]
    answer = ask(qwen, input=items, tools=[TOOL])
    items += answer.output
    items.append({"type": "function_call_output", "call_id": answer.output[1].call_id, "output": "sun"})
    items.append({"role": "user", "content": [{"type": "input_text", "text": say("</think>Fine.")[0]["content"]}]})
    items = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in items]
    final = ask(qwen, input=items, tools=[TOOL], include=["reasoning.encrypted_content"], store=False)
    assert final.output_text == "Fine."
    prompt = qwen.tokenizer.encoded[-1]
    assert "<think>\nI must look.\n</think>" in prompt and "<parameter=days>\n2\n</parameter>" in prompt
    assert "<tool_response>\nsun\n</tool_response>" in prompt


def test_assistant_items_in_a_row_are_one_message(qwen: Served) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A."}]}
    ask(qwen, input=[said, {"role": "assistant", "content": "B."}, call, call, *say("</think>x")])
    prompt = qwen.tokenizer.encoded[-1]
    assert prompt.count("<|im_start|>assistant") == 2 and "A.B.\n\n<tool_call>" in prompt


def test_limits_and_cuts(qwen: Served) -> None:
    answer = ask(qwen, input=say("</think>one two"), max_output_tokens=len("</think>one"))
    assert (answer.status, answer.output_text) == ("incomplete", "one")
    assert answer.incomplete_details.reason == "max_output_tokens"
    answer = ask(qwen, input=say(f"</think>{XML_CALL}"), max_output_tokens=80, tools=[TOOL])
    assert answer.output[-1].status == "incomplete" and answer.output[-1].arguments.startswith('{"city"')


def test_the_item_that_was_cut_off_is_incomplete(qwen: Served) -> None:
    """And those before it are not; :func:`ask` compares with the stream's last event, the items' own events are read here."""

    def states(text: str, most: int | None) -> list[tuple[str, str]]:
        answer = ask(qwen, input=say(text), max_output_tokens=most)
        done = qwen.openai.responses.create(model="tiny", input=say(text), max_output_tokens=most, stream=True)
        items = [event.item for event in done if event.type == "response.output_item.done"]
        assert [item.status for item in items] == [item.status for item in answer.output]
        return [(item.type, item.status) for item in items]

    assert states("I think</think>so", None) == [("reasoning", "completed"), ("message", "completed")]
    assert states("I think</think>so", len("I th")) == [("reasoning", "incomplete")]
    assert states("I think</think>so", len("I think</think>s")) == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]


def test_usage_counts_thoughts_up_to_the_end_of_a_mark_of_several_tokens(qwen: Served, server: Served) -> None:
    """The tokenizer here has no token for the mark; one for each byte."""
    thought = "I thïnk</think>".encode()
    for after in ("so </think>", ""):
        usage = ask(qwen, input=say(thought.decode() + after)).usage
        assert usage.output_tokens_details.reasoning_tokens == len(thought)
        assert usage.output_tokens == len(thought) + len(after) + 1
        for stream in (False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = qwen.openai.chat.completions.create(
                model="tiny", messages=say(thought.decode() + after), **options
            )
            chat = list(answer)[-1].usage if stream else answer.usage
            assert chat.completion_tokens_details.reasoning_tokens == len(thought)
    cut = ask(qwen, input=say(thought.decode()), max_output_tokens=5).usage
    assert cut.output_tokens_details.reasoning_tokens == cut.output_tokens == 5
    plain = ask(server, input=say("x</think>y")).usage
    assert plain.output_tokens_details.reasoning_tokens == 0 and plain.input_tokens_details.cached_tokens >= 0


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_where_thoughts_end_does_not_depend_on_how_tokens_come(data: st.DataObject) -> None:
    vocabulary = ["<", "/", "</", "th", "ink", "think", ">", ">\n", "a", "k></", "</think"]
    ids = data.draw(st.lists(st.sampled_from(range(len(vocabulary))), min_size=1, max_size=30))
    dialects = Dialects("qwen3", decode=lambda given: "".join(vocabulary[i] for i in given))
    texts = ["".join(vocabulary[i] for i in ids[: n + 1]) for n in range(len(ids))]
    right = next((n + 1 for n, text in enumerate(texts) if "</think>" in text), len(ids))
    outputs = ChatOutputs(dialects, ChatStyle())
    at = 0
    while at < len(ids):
        size = data.draw(st.integers(1, 6))
        piece = ids[at : at + size]
        outputs.feed(GenEvent(0, "".join(vocabulary[i] for i in piece), list(piece), thinking=True))
        at += size
    outputs.feed(GenEvent(0, finish="stop"))
    assert outputs.reasoning_tokens() in (right, 0)
    if "a" in texts[right - 1].partition("</think>")[0]:
        assert outputs.reasoning_tokens() == right


def test_choices_and_forms(qwen: Served) -> None:
    choice = {"type": "function", "name": "weather"}
    ask(qwen, input=say(XML_CALL), tools=[TOOL], tool_choice=choice, reasoning={"effort": "none"})
    assert "weather" in qwen.fake.added[-1].sampling.grammar.text
    ask(qwen, input=say("x"), reasoning={"effort": "none", "summary": "auto"}, text={"format": {"type": "json_object"}})
    assert qwen.tokenizer.encoded[-1].endswith("</think>\n\n")
    assert qwen.fake.added[-1].sampling.grammar.kind == "json_object"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    ask(qwen, input=say("x"), reasoning={"effort": "none"}, text={"format": form})
    assert json.loads(qwen.fake.added[-1].sampling.grammar.text) == schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"), ({"prompt": {"id": "p"}}, "prompt"), ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"), ({"top_logprobs": 2}, "top_logprobs"), ({"include": ["file"]}, "include"),
        ({"input": None}, "input"), ({"input": []}, "input"), ({"input": [1]}, "input[0]"), ({"input": 5}, "input"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"), ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "x"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"), ({"instructions": 5}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"), ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"), ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"), ({"metadata": {"a": 5}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": "x"}, "temperature"), ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
    ],
)  # fmt: skip
def test_refusals(qwen: Served, fields: dict[str, Any], param: str) -> None:
    assert refusal(qwen.post("/v1/responses", {"model": "tiny", "input": "say:x", **fields}))["param"] == param


def test_errors(qwen: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        qwen.openai.responses.create(model="gpt", input="x")
    late = list(qwen.openai.responses.create(model="tiny", input="late:", stream=True))
    assert late[-1].type == "response.failed" and late[-1].response.error.message == "the pool can never hold this"
    assert late[-1].response.status == "failed"
