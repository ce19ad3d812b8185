"""The real server process with a real model in it, driven by the stock ``openai`` client and by plain HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from make_tiny_model import make_tiny_model

from e2e.servers import Server

GREEDY: dict[str, Any] = {"temperature": 0}
PREFIX = "freetoken:"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny random model: exact, fast, meaningless."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)
    with Server("--model-path", str(folder), "--max-total-tokens", "8192") as server:
        yield server


@pytest.fixture(scope="module")
def smol(tiny: Server) -> Iterator[Server]:
    """The server that starts without ``--model-path``, beside the other one on the same machine."""
    with Server("--max-total-tokens", "4096") as server:
        yield server


@pytest.fixture(scope="module")
def client(tiny: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=60)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- the two front doors ------------------------------------------------------------------------------------------------


def test_models_list(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=user("hi"))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streamed_and_whole_say_the_same(client: openai.OpenAI, kind: str) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "extra_body": {"ignore_eos": True}, **GREEDY}
    if kind == "chat":
        create: Any = client.chat.completions.create
        options["messages"] = user("Tell me of the fox.")
    else:
        create = client.completions.create
        options["prompt"] = "The quick brown fox"
    whole = create(**options)
    chunks = list(create(**options, stream=True, stream_options={"include_usage": True}))
    if kind == "chat":
        text = whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    else:
        text = whole.choices[0].text
        streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text and streamed == text
    assert len(chunks) > 10
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason == "length" and set(reasons[:-1]) == {None}
    assert whole.usage.completion_tokens == 24
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_sse_by_plain_http(tiny: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=30)
    body = {"model": "tiny", "messages": user("hi"), "stream": True, "max_tokens": 5, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("content-type", "").startswith("text/event-stream")
    events = answer.read().decode().split("\n\n")
    connection.close()
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    chunks = [json.loads(event[6:]) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {len(chunk["choices"]) for chunk in chunks} == {1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_plain_http_without_a_client(tiny: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=30)
    connection.request("GET", "/health")
    health = connection.getresponse()
    assert (health.status, json.loads(health.read())) == (200, {"status": "ready"})
    # The same connection is kept open, and a body needs no content type.
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "the", "max_tokens": 2}))
    answer = connection.getresponse()
    assert answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] <= 2
    connection.request("GET", "/nothing")
    missing = connection.getresponse()
    assert missing.status == 404 and json.loads(missing.read())["error"]["code"] == "not_found"
    connection.close()


def test_sixty_four_at_once_say_what_each_says_alone(tiny: Server) -> None:
    requests = [request(number) for number in range(64)]

    async def together() -> list[tuple[str, str, int, int]]:
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(answer(client, body) for body in requests))

    async def one_by_one() -> list[tuple[str, str, int, int]]:
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return [await answer(client, body) for body in requests]

    crowd, alone = asyncio.run(together()), asyncio.run(one_by_one())
    assert crowd == alone
    assert len({text for text, *_ in crowd}) > 40, "the requests hardly differ"
    assert {reason for _, reason, *_ in crowd} <= {"stop", "length"}
    for body, (_, reason, prompt_tokens, completion_tokens) in zip(requests, crowd):
        assert prompt_tokens > 0
        assert completion_tokens == body["max_tokens"] if reason == "length" else completion_tokens > 0
    assert tiny.is_empty()


def request(number: int) -> dict[str, Any]:
    """One of many: chat or completion, streamed or not, of its own length."""
    words = " ".join(["the cat", "a server", "in the sun", "people"][(number >> shift) % 4] for shift in range(4))
    text = f"{number} {words} {'rain ' * (number % 13)}"
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8 + number % 17, "stream": number % 4 < 2, **GREEDY}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return {**body, "messages": user(text)} if number % 2 else {**body, "prompt": text}


async def answer(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, str, int, int]:
    """Text, finish reason, prompt and completion tokens."""
    chat = "messages" in body
    create: Any = client.chat.completions.create if chat else client.completions.create
    result = await create(**body)
    if not body["stream"]:
        choice, usage = result.choices[0], result.usage
        text = choice.message.content if chat else choice.text
        return text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens
    text, reason, usage = "", "", None
    async for chunk in result:
        for choice in chunk.choices:
            text += (choice.delta.content or "") if chat else choice.text
            reason = choice.finish_reason or reason
        usage = chunk.usage or usage
    return text, reason, usage.prompt_tokens, usage.completion_tokens


# --- what can be asked for ----------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_cached_until_it_is_flushed(tiny: Server, client: openai.OpenAI) -> None:
    def cached() -> int:
        usage = client.completions.create(model="tiny", prompt=list(range(10, 90)), max_tokens=2, **GREEDY).usage
        assert usage is not None and usage.prompt_tokens == 80
        return int(usage.prompt_tokens_details.cached_tokens)  # type: ignore[attr-defined]

    # At least the last token is computed, so of 80 tokens in pages of 16 four pages can be shared.
    assert (cached(), cached()) == (0, 64)
    assert httpx.post(f"{tiny.url}/flush_cache").json()["success"] is True
    assert tiny.stats()["cached_pool_tokens"] == 0
    assert (cached(), cached()) == (0, 64)


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "the mat", "max_tokens": 40, **GREEDY}
    text = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[len(text) // 2 :][:3]
    before = text[: text.index(stop)]
    choice = client.completions.create(**options, stop=[stop, "never said"]).choices[0]
    assert (choice.text, choice.finish_reason) == (before, "stop")
    chunks = list(client.completions.create(**options, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    def say(seed: int) -> str:
        options: dict[str, Any] = {"temperature": 1.0, "extra_body": {"ignore_eos": True}}
        return (
            client.completions.create(model="tiny", prompt="sun", max_tokens=24, seed=seed, **options).choices[0].text
        )

    assert say(1) == say(1) != say(2)


def test_n_choices_and_lists_of_prompts(client: openai.OpenAI) -> None:
    many = client.chat.completions.create(
        model="tiny", messages=user("hi"), n=3, temperature=1.0, seed=5, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in many.choices}) == 3
    assert many.usage is not None and many.usage.completion_tokens == 36
    texts = ["the cat", "a server answers"]
    both = client.completions.create(model="tiny", prompt=texts, max_tokens=8, **GREEDY)
    single = [client.completions.create(model="tiny", prompt=text, max_tokens=8, **GREEDY) for text in texts]
    assert [choice.text for choice in both.choices] == [item.choices[0].text for item in single]


def test_token_ids_are_prompts_too(tiny: Server, client: openai.OpenAI) -> None:
    ids = tiny.post("/tokenize", prompt="The quick brown fox").json()["tokens"]
    assert tiny.post("/detokenize", tokens=ids).json()["text"] == "The quick brown fox"
    by_text = client.completions.create(model="tiny", prompt="The quick brown fox", max_tokens=8, **GREEDY)
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=8, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == len(ids)


def test_logprobs_of_chat_and_completions(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "extra_body": {"ignore_eos": True}, **GREEDY}
    chat = client.chat.completions.create(messages=user("hi"), logprobs=True, top_logprobs=3, **options).choices[0]
    assert chat.logprobs is not None and chat.logprobs.content is not None and len(chat.logprobs.content) == 6
    for entry in chat.logprobs.content:
        best = [item.logprob for item in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        # Greedy: the sampled token is the most likely one.
        assert entry.logprob == pytest.approx(best[0], abs=1e-5) and sum(map(math.exp, best)) <= 1.0001
    plain = client.completions.create(prompt="the rain", logprobs=2, echo=True, **options).choices[0]
    assert plain.text.startswith("the rain") and plain.logprobs is not None
    values = plain.logprobs.token_logprobs
    assert values is not None and values[0] is None and all(value is not None and value <= 0 for value in values[1:])
    assert "".join(plain.logprobs.tokens or []).startswith("the rain")


def test_structured_output_by_the_client(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    whole = client.chat.completions.create(
        model="tiny", messages=user("Give me a number"), response_format=form, n=3, max_tokens=400, seed=1
    )
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
    assert all(json.loads(choice.message.content or "")["n"] in (1, 22) for choice in whole.choices)
    stream = client.completions.create(
        model="tiny", prompt="A code: ", extra_body={"regex": "[A-F]{3}-[0-9]{2}"}, stream=True, max_tokens=60
    )
    assert re.fullmatch("[A-F]{3}-[0-9]{2}", "".join(chunk.choices[0].text for chunk in stream if chunk.choices))
    form["json_schema"]["schema"] = {"type": "array", "items": {"type": "strin"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=user("x"), response_format=form, stream=True)
    assert caught.value.param == "response_format.json_schema.schema.items.type"


def test_native_generate(tiny: Server) -> None:
    body: dict[str, Any] = {"sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
    whole = tiny.post("/generate", input_ids=[5, 6, 7], **body).json()
    assert len(whole["output_ids"]) == 6 and whole["meta_info"]["prompt_tokens"] == 3
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    answer = tiny.post("/generate", input_ids=[5, 6, 7], stream=True, **body)
    events = [line[6:] for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert json.loads(events[-1])["output_ids"] == whole["output_ids"]


# --- looking in -----------------------------------------------------------------------------------------------------------

_SPEC_METRICS = [
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "cache_hit_rate",
    "gen_throughput",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "state_slots_used",
    "graph_misses_total",
]
_SPEC_HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "queue_time_seconds",
]


def test_metrics_have_the_names_and_add_up(tiny: Server, client: openai.OpenAI) -> None:
    before = tiny.metrics()
    assert {PREFIX + name for name in _SPEC_METRICS} <= set(before)
    assert {f"{PREFIX}{name}_{part}" for name in _SPEC_HISTOGRAMS for part in ("count", "sum")} <= set(before)
    assert any(name.startswith(PREFIX + "kernel_path{") for name in before)
    assert "# TYPE freetoken:graph_replays_total counter" in httpx.get(f"{tiny.url}/metrics").text
    usages = []
    for number in range(5):
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 5 + number, **GREEDY}
        usages.append(client.completions.create(prompt=list(range(100, 150 + 8 * (number // 2))), **options).usage)
    after = tiny.metrics()

    def grown(name: str) -> float:
        return after[PREFIX + name] - before[PREFIX + name]

    assert grown("num_requests_total") == 5
    assert grown("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert grown("generation_tokens_total") == sum(usage.completion_tokens for usage in usages)
    assert grown("cached_tokens_total") == sum(usage.prompt_tokens_details.cached_tokens for usage in usages) > 0
    assert grown("num_aborted_requests_total") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "queue_time_seconds"):
        assert grown(name + "_count") == 5
    tokens = sum(usage.completion_tokens for usage in usages)
    assert grown("inter_token_latency_seconds_count") == tokens - 5
    assert grown("time_to_first_token_seconds_sum") <= grown("e2e_request_latency_seconds_sum")
    assert after[PREFIX + "num_running_reqs"] == after[PREFIX + "num_used_tokens"] == 0
    share = after[PREFIX + "cached_tokens_total"] / after[PREFIX + "prompt_tokens_total"]
    assert after[PREFIX + "cache_hit_rate"] == pytest.approx(share)


def test_server_info_and_ready_line(tiny: Server) -> None:
    info = tiny.info()
    assert info["status"] == "ready" and info["max_total_tokens"] == 8192
    assert info["args"]["served_model_name"] == "tiny" and info["args"]["model"]["architecture"] == "LlamaForCausalLM"
    assert {row["op"] for row in info["kernels"]} >= {"rms_norm", "rope_kv", "sample"}
    assert all(row["impl"] and row["why"] for row in info["kernels"])
    assert info["stats"]["total_tokens"] == 8192 and info["stats"]["rows_total"] == 32
    (line,) = re.findall(r".*ready at.*", tiny.output())
    assert f"ready at {tiny.url}: tiny (float32 on cpu), 8,192 KV tokens, 32 running requests, attention torch" in line
    assert "rms_norm reference" in line
    assert "loading weights: 100 %" in tiny.output()


# --- a real model ---------------------------------------------------------------------------------------------------------


def test_the_default_model_knows_the_capital_of_france(smol: Server, tiny: Server) -> None:
    client = openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0, timeout=60)
    (model,) = client.models.list().data
    assert "SmolLM2-135M-Instruct" in model.id
    options: dict[str, Any] = {"model": model.id, "messages": user("What is the capital of France?"), **GREEDY}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The capital of France is Paris."
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0
    # Both servers stand side by side, each with its own model.
    assert httpx.get(f"{tiny.url}/v1/models").json()["data"][0]["id"] == "tiny"
