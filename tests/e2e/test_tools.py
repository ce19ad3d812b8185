"""Tools and thoughts with real models in the real server, through the stock clients of both protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from e2e.qwen_folder import make_qwen_folder
from e2e.servers import Server

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days", "exact"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": PARAMETERS},
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
ANTHROPIC_TOOL: Any = {"name": "get_weather", "description": "Weather of a city.", "input_schema": PARAMETERS}
ASK = "What is the weather in Paris for 3 days? Use get_weather."


def check_arguments(value: Any) -> None:
    assert set(value) == {"city", "days", "exact"} and value["city"] in ("Bern", "Paris")
    assert type(value["days"]) is int and 1 <= value["days"] <= 9 and type(value["exact"]) is bool


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_qwen_folder(tmp_path_factory.mktemp("models") / "qwen")
    with Server("--model-path", str(folder), "--max-total-tokens", "8192") as server:
        yield server


@pytest.fixture(scope="module")
def smol(qwen: Server) -> Iterator[Server]:
    with Server("--max-total-tokens", "4096") as server:
        yield server


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def model_of(server: Server) -> str:
    return openai_client(server).models.list().data[0].id


def end_of_thinking(server: Server) -> int:
    return server.post("/tokenize", prompt="</think>", add_special_tokens=False).json()["tokens"][0]


# A random model would think for ever: the first token ends its thoughts.
def no_thoughts(server: Server) -> dict[str, Any]:
    return {"logit_bias": {str(end_of_thinking(server)): 100}, "temperature": 0}


def streamed_call(client: openai.OpenAI, **fields: Any) -> tuple[str, str, str | None]:
    """Name and arguments of the first call of a stream, and how the stream ends."""
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(stream=True, **fields):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index == 0:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return name, arguments, reason


def test_dialects_are_those_of_the_template(qwen: Server, smol: Server) -> None:
    info = qwen.info()
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("qwen3", "qwen3_coder")
    info = smol.info()
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("none", "hermes")


@pytest.mark.parametrize("seed", [1, 2])
def test_required_calls_of_a_random_model(qwen: Server, seed: int) -> None:
    client = openai_client(qwen)
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    fields: dict[str, Any] = {
        "model": "qwen", "messages": [{"role": "user", "content": ASK}], "tools": [TOOL], "tool_choice": "required",
        "parallel_tool_calls": False, "seed": seed, "temperature": 1.0, "max_tokens": 400, "extra_body": thinking,
    }  # fmt: skip
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    check_arguments(json.loads(call.function.arguments))
    assert streamed_call(client, **fields) == ("get_weather", call.function.arguments, "tool_calls")


def test_a_call_behind_thoughts(qwen: Server) -> None:
    """The template has opened the thoughts, so the grammar waits for their end."""
    client = openai_client(qwen)
    fields: dict[str, Any] = {
        "model": "qwen", "messages": [{"role": "user", "content": ASK}], "tools": [TIME, TOOL], "max_tokens": 400,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "parallel_tool_calls": False,
        **no_thoughts(qwen),
    }  # fmt: skip
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    check_arguments(json.loads(choice.message.tool_calls[0].function.arguments))
    assert streamed_call(client, **fields)[1] == choice.message.tool_calls[0].function.arguments
    # Without an end of thinking there is no call: all is reasoning.
    fields["logit_bias"] = {str(end_of_thinking(qwen)): -100}
    choice = client.chat.completions.create(**{**fields, "max_tokens": 20}).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content == "" and choice.message.reasoning_content


def test_round_trip_of_a_random_model(qwen: Server) -> None:
    client = openai_client(qwen)
    fields: dict[str, Any] = {"model": "qwen", "tools": [TOOL], "max_tokens": 400, "temperature": 0}
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    said = client.chat.completions.create(messages=messages, tool_choice="required", extra_body=thinking, **fields)
    message = said.choices[0].message
    assert message.tool_calls
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    fields["max_tokens"] = 8
    final = client.chat.completions.create(messages=messages, extra_body=thinking, **fields)
    assert final.choices[0].finish_reason in ("stop", "length") and final.usage.prompt_tokens_details.cached_tokens > 0


def test_anthropic_calls_behind_thoughts(qwen: Server) -> None:
    client = anthropic_client(qwen)
    fields: dict[str, Any] = {
        "model": "qwen", "messages": [{"role": "user", "content": ASK}], "tools": [ANTHROPIC_TOOL], "max_tokens": 2000,
        "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": no_thoughts(qwen),
    }  # fmt: skip
    whole = client.messages.create(**fields)
    assert whole.stop_reason == "tool_use" and whole.content[-1].type == "tool_use"
    check_arguments(whole.content[-1].input)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[-1].input == whole.content[-1].input and streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(
        model="qwen", messages=fields["messages"], tools=fields["tools"], thinking=fields["thinking"]
    )
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


@pytest.mark.parametrize("budget", [1, 24])
def test_anthropic_thoughts_end_at_their_budget(qwen: Server, budget: int) -> None:
    """A random model would think on: the call comes all the same."""
    client = anthropic_client(qwen)
    fields: dict[str, Any] = {
        "model": "qwen", "messages": [{"role": "user", "content": ASK}], "tools": [ANTHROPIC_TOOL], "max_tokens": 300,
        "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": budget}, "extra_body": {"seed": 3, "temperature": 1.0},
    }  # fmt: skip
    whole = client.messages.create(**fields)
    assert whole.stop_reason == "tool_use"
    check_arguments(whole.content[-1].input)
    thoughts = "".join(block.thinking for block in whole.content if block.type == "thinking")
    assert bool(thoughts) == (budget > 1)
    with client.messages.stream(**fields) as stream:
        assert stream.get_final_message().content[-1].input == whole.content[-1].input
    # Without a tool that must be called: thoughts, and then an answer.
    free = client.messages.create(**{**fields, "tools": [], "tool_choice": {"type": "none"}, "max_tokens": budget + 40})
    assert free.content[-1].type == "text"


def test_responses_of_a_random_model(qwen: Server) -> None:
    client = openai_client(qwen)
    fields: dict[str, Any] = {
        "model": "qwen", "input": ASK, "tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required",
        "parallel_tool_calls": False, "reasoning": {"effort": "none"}, "temperature": 0, "max_output_tokens": 400,
    }  # fmt: skip
    whole = client.responses.create(**fields)
    assert whole.status == "completed" and whole.output[0].type == "function_call"
    check_arguments(json.loads(whole.output[0].arguments))
    *_, last = client.responses.create(**fields, stream=True)
    assert last.type == "response.completed" and last.response.output[0].arguments == whole.output[0].arguments


def test_a_real_model_calls_a_tool_and_uses_its_result(smol: Server) -> None:
    """SmolLM2's template knows no tools: they are described to it in words."""
    client, model = openai_client(smol), model_of(smol)
    fields: dict[str, Any] = {"model": model, "tools": [TOOL], "temperature": 0, "max_tokens": 80}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    asked = {**fields, "tool_choice": "required", "parallel_tool_calls": False}
    said = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert said.finish_reason == "tool_calls"
    (call,) = said.message.tool_calls
    check_arguments(json.loads(call.function.arguments))
    assert json.loads(call.function.arguments)["city"] == "Paris"
    assert streamed_call(client, messages=messages, **asked) == ("get_weather", call.function.arguments, "tool_calls")
    messages += [said.message, {"role": "tool", "tool_call_id": call.id, "content": "Paris: 21 degrees, sunny."}]
    final = client.chat.completions.create(messages=messages, **{**fields, "max_tokens": 30}).choices[0]
    assert final.message.content


def test_a_real_model_through_anthropic(smol: Server) -> None:
    client, model = anthropic_client(smol), model_of(smol)
    fields: dict[str, Any] = {"model": model, "max_tokens": 30, "extra_body": {"temperature": 0}}
    talk: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.messages.create(messages=talk, **fields)
    assert answer.content[0].text == "The capital of France is Paris." and answer.stop_reason == "end_turn"
    with client.messages.stream(messages=talk, **fields) as stream:
        assert "".join(stream.text_stream) == "The capital of France is Paris."
    go_on = client.messages.create(messages=[*talk, {"role": "assistant", "content": "The capital of"}], **fields)
    assert go_on.content[0].text == " France is Paris."
    response = openai_client(smol).responses.create(model=model, input=talk[0]["content"], temperature=0)
    assert response.output_text == "The capital of France is Paris."
