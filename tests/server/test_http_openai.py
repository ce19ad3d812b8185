"""OpenAI's endpoints over a real socket, through the stock client where it has a word for it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.conftest import Served, serving


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat(server: Served) -> None:
    answer = server.openai.chat.completions.create(model="tiny", messages=ask("say:héllo 🙂"))
    assert answer.choices[0].message.content == "héllo 🙂"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.completion_tokens == len("héllo 🙂".encode()) + 1
    assert usage.prompt_tokens == len(server.fake.added[-1].ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 7


def test_chat_streamed(server: Served) -> None:
    stream = server.openai.chat.completions.create(model="tiny", messages=ask("say:héllo 🙂"), stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "héllo 🙂"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_include_usage(server: Served) -> None:
    for path, body in (("chat/completions", {"messages": ask("say:abc")}), ("completions", {"prompt": "say:abc"})):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(server.post(f"/v1/{path}", {**body, **options}))
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
        assert "cached_tokens" in chunks[-1]["usage"]["prompt_tokens_details"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_prompt_is_rendered_through_the_template(server: Served) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "so say:x"},
    ]
    server.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True, "max_tokens": 1})
    assert server.tokenizer.encoded[-1] == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nso say:x"
    )
    server.chat("say:x", max_tokens=1)
    assert server.tokenizer.encoded[-1].endswith("<|im_start|>assistant\n")
    assert server.fake.added[-1].ids[0] == 301


def test_length_and_stop_reasons(server: Served) -> None:
    choice = server.chat("count", max_completion_tokens=3).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")
    choice = server.chat("count", stop="fg", max_tokens=50).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("abcde", "stop", "fg")
    choice = server.chat("count", stop_token_ids=[ord("d")], max_tokens=50).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", ord("d"))
    choice = server.chat("count", stop=["zz", "fg"], no_stop_trim=True, max_tokens=50).json()["choices"][0]
    assert choice["message"]["content"] == "abcdefg"


def test_stop_string_across_token_borders_aborts_the_rest(server: Served) -> None:
    before = len(server.fake.aborted)
    # 260 and 261 are "STO" and "P!"; the script would go on for long.
    script = "ids:104,105,260,261" + ",65" * 600
    chunks = events(server.complete(script, stop=["STOP"], stream=True, max_tokens=1000))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hi"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    server.until(lambda: len(server.fake.aborted) == before + 1)
    server.until(lambda: not server.fake.live)


def test_n_choices_differ_by_seed(server: Served) -> None:
    start = len(server.fake.added)
    answer = server.openai.chat.completions.create(model="tiny", messages=ask("say:ab"), n=3, seed=2**63 - 1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 9
    sent = server.fake.added[start:]
    assert len({request.rid for request in sent}) == 3 and answer.usage.prompt_tokens == len(sent[0].ids)
    assert [request.sampling.seed for request in sent] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert {request.sampling.n for request in sent} == {1}


def test_n_streamed(server: Served) -> None:
    chunks = events(server.chat("say:ab", n=2, stream=True))
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "ab"
        assert mine[-1]["finish_reason"] == "stop"


def test_completion_prompts_in_every_form(server: Served) -> None:
    ids = list(b"say:xy")
    for prompt, texts in (
        ("say:xy", ["xy"]),
        (["say:xy", "say:z"], ["xy", "z"]),
        (ids, ["xy"]),
        ([ids, list(b"say:q")], ["xy", "q"]),
    ):
        answer = server.openai.completions.create(model="tiny", prompt=prompt)
        assert [choice.text for choice in answer.choices] == texts
    assert server.fake.added[-2].ids == ids
    assert server.complete("say:xy").json()["usage"]["prompt_tokens"] == 7  # bos and six bytes


def test_completion_default_and_no_output(server: Served) -> None:
    assert server.complete("count").json()["usage"]["completion_tokens"] == 16
    answer = server.complete("count", max_tokens=0, echo=True, logprobs=0).json()
    assert answer["choices"][0]["text"] == "count" and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<bos>", *"count"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_legacy_logprobs(server: Served, stream: bool) -> None:
    answer = server.complete(["héy", "q"], echo=True, logprobs=1, max_tokens=2, stream=stream)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json()["choices"]
    mine = [choice for choice in choices if choice["index"] == 0]
    assert "".join(choice["text"] for choice in mine) == "héyab"
    logprobs = {name: [v for c in mine for v in c["logprobs"][name] or []] for name in mine[0]["logprobs"]}
    assert logprobs["tokens"] == ["<bos>", "h", "\ufffd", "\ufffd", "y", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -1.04, -1.95, -1.69, -1.21, -0.97, -0.98]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][5] == {"a": -0.97}


def test_text_offsets_of_half_characters(server: Served) -> None:
    """A prompt that ends inside a character shows a replacement character, and the output begins behind it."""
    choice = server.complete([104, 0xC3], echo=True, logprobs=0, max_tokens=2).json()["choices"][0]
    assert choice["text"] == "h\ufffdab" and choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    said = server.complete("ids:195,97", logprobs=0).json()["choices"][0]
    assert said["text"] == "\ufffda" and said["logprobs"]["text_offset"] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(server: Served, stream: bool) -> None:
    answer = server.chat("say:é!", logprobs=True, top_logprobs=2, stream=stream)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json()["choices"]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "é!"
    assert content[2]["token"] == "!" and content[2]["logprob"] == -0.33
    assert [top["token"] for top in content[2]["top_logprobs"]] == ["!", "A"]
    assert content[2]["top_logprobs"][1]["logprob"] == -9999.0
    plain = server.chat("say:a", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert plain[0]["top_logprobs"] == []


def test_sixty_four_at_once(server: Served) -> None:
    client = server.openai

    def one(number: int) -> tuple[str, str]:
        said = f"answer {number} ü🙂" * (1 + number % 5)
        answer = client.chat.completions.create(model="tiny", messages=ask(f"say:{said}"), stream=number % 2 == 0)
        if number % 2:
            return said, answer.choices[0].message.content
        return said, "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    with ThreadPoolExecutor(64) as pool:
        for said, text in pool.map(one, range(64)):
            assert said == text


def test_sampling_reaches_the_scheduler(server: Served) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_tokens": 2, "max_tokens": 9, "seed": 4,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"65": -5},
        "ignore_eos": True, "user": "me", "unknown_field": 1,
    }  # fmt: skip
    assert server.chat("say:x", **fields).status_code == 200
    got = server.fake.added[-1].sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.seed) == (0.5, 0.9, 5, 0.1, 4)
    assert (got.min_new_tokens, got.max_new_tokens, got.logit_bias, got.ignore_eos) == (2, 9, {65: -5}, True)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.1, 0.2, 1.1)


def test_model_defaults_apply_where_the_request_says_nothing() -> None:
    with serving(sampling_defaults={"temperature": 0.6, "top_k": 20}) as served:
        served.chat("say:x", temperature=None)
        assert served.fake.added[-1].sampling.temperature == 0.6 and served.fake.added[-1].sampling.top_k == 20
        served.chat("say:x", temperature=0)
        assert served.fake.added[-1].sampling.temperature == 0


def test_model_list(server: Served) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.get("/v1/models/tiny").json()["max_model_len"] == 4096
    assert server.get("/v1/models/other/thing").status_code == 404


def test_neutral_values_of_what_is_not_served_pass(server: Served) -> None:
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True,
        "functions": None, "modalities": ["text"], "service_tier": "auto", "store": False, "priority": 0,
        "reasoning_effort": None, "metadata": {"run": "7"}, "stop": None, "n": None,
    }  # fmt: skip
    assert server.chat("say:x", **neutral).status_code == 200
    assert server.complete("say:x", best_of=1, suffix="", metadata={}).status_code == 200
    refused = server.chat("say:x", metadata="run 7")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "metadata"


def test_names_of_unknown_fields_are_for_the_debug_level(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    unknown = {"my_secret_field": 1, "my_other_field": 2}
    with caplog.at_level("INFO", logger="freetoken"):
        assert server.chat("say:x", **unknown).status_code == 200
        assert server.chat("say:x", **unknown).status_code == 200
        assert server.post("/v1/responses", {"input": "say:x", "my_secret_field": 1}).status_code == 200
    assert "my_" not in caplog.text
    said = [record.getMessage() for record in caplog.records if record.name == "freetoken.server.wire"]
    assert [line.partition(" (")[0] for line in said] == [
        "/v1/chat/completions: unknown request fields are ignored: 2 new",
        "/v1/responses: unknown request fields are ignored: 1 new",
    ]
    with caplog.at_level("DEBUG", logger="freetoken"):
        server.chat("say:x", my_third_field=1)
    assert "request field 'my_third_field' is not known" in caplog.text
