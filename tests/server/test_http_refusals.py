"""Every bad request is a clear 4xx in OpenAI's envelope that names the field."""

from __future__ import annotations

import logging
import socket
from typing import Any

import httpx
import openai
import pytest

from freetoken.server import http
from server.conftest import Served, serving

USER = [{"role": "user", "content": "say:x"}]


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", 1e9), ("temperature", True),
        ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 2),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "ten"), ("max_tokens", 1.5),
        ("max_completion_tokens", 0), ("min_tokens", -1), ("n", 0), ("n", 65), ("n", "two"),
        ("seed", 2**63), ("seed", "x"), ("stop", 3), ("stop", ["a", 3]), ("stop", [""]), ("stop", ["a"] * 17),
        ("stop", "x" * 1025), ("stop_token_ids", [310]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
        ("ignore_eos", 1), ("logit_bias", {"x": 1}), ("logit_bias", {"310": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", [1]), ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
        ("top_logprobs", 21), ("top_logprobs", 2), ("logprobs", "yes"), ("logprobs", 1), ("stream", "yes"),
        ("stream_options", 1), ("stream_options", {"include_usage": True}), ("user", 5),
        ("chat_template_kwargs", 1), ("chat_template_kwargs", {"messages": []}), ("continue_final_message", True),
        ("skip_special_tokens", "no"), ("rid", ""), ("rid", 7),
    ],
)  # fmt: skip
def test_bad_values_name_the_field(server: Served, field: str, value: object) -> None:
    error = refusal(server.post("/v1/chat/completions", {"messages": USER, field: value}))
    assert error["param"] == field and field in error["message"]
    assert error["type"] == "invalid_request_error"


def test_errors_speak_the_clients_names(server: Served) -> None:
    error = refusal(server.chat("x", min_tokens=5, max_completion_tokens=2))
    assert error["message"] == "min_tokens 5 is above max_completion_tokens 2" and error["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]), ("tool_choice", {"type": "allowed_tools"}), ("reasoning", {"effort": "low"}),
        ("functions", []), ("function_call", {"name": "f"}), ("function_call", "none"), ("function_call", "auto"),
        ("guided_regex", "a+"), ("json_schema", {}),
        ("reasoning_effort", "high"), ("stream_reasoning", False), ("priority", 1), ("modalities", ["text", "audio"]),
        ("audio", {}), ("prediction", {}), ("best_of", 2), ("store", True), ("service_tier", "flex"),
        ("web_search_options", {}), ("echo", True),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(server: Served, field: str, value: object) -> None:
    error = refusal(server.post("/v1/chat/completions", {"messages": USER, field: value}))
    assert error["param"] == field and error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("hi", "messages"), ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"), ([{"role": "boss", "content": "x"}], "messages[0].role"),
        ([*USER, {"role": "user"}], "messages[1].content"), ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
         "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
         "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "content": "x", "reasoning": 5}], "messages[0].reasoning"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ],
)  # fmt: skip
def test_bad_messages(server: Served, messages: object, param: str) -> None:
    assert refusal(server.post("/v1/chat/completions", {"messages": messages}))["param"] == param


FUNCTION = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": FUNCTION}, {"function": FUNCTION}]}, "tools[1]"),
        ({"tools": [{"function": FUNCTION}] * 1025}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some", "tools": [{"function": FUNCTION}]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [{"function": FUNCTION}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [{"function": FUNCTION}]}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"), ({"separate_reasoning": 1}, "separate_reasoning"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_bad_tools(server: Served, fields: dict[str, object], param: str) -> None:
    assert refusal(server.post("/v1/chat/completions", {"messages": USER, **fields}))["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [["a"]],
        ["a", 1],
        [1, "a"],
        [310],
        [-1],
        [[1], [310]],
        [True],
        5,
        {"a": 1},
        [1.5],
    ],
)
def test_bad_prompts(server: Served, prompt: object) -> None:
    assert refusal(server.complete(prompt))["param"] == "prompt"


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"best_of": 3}, {"max_tokens": 0}, {"logprobs": 21}, {"logprobs": True}]
)
def test_bad_completion_fields(server: Served, fields: dict[str, object]) -> None:
    assert refusal(server.complete("x", **fields))["param"] == next(iter(fields))


def test_prompt_too_long_says_both_numbers(server: Served) -> None:
    for answer in (server.chat("x" * 5000), server.complete("x" * 5000), server.complete([65] * 4096)):
        error = refusal(answer)
        assert "4096" in error["message"] and "--context-length" in error["message"]
        assert error["code"] == "context_length_exceeded" and error["param"] in ("prompt", "messages")
    assert server.complete([65] * 4095, max_tokens=5).json()["usage"]["completion_tokens"] == 1


def test_unknown_model(server: Served) -> None:
    assert refusal(server.chat("x", model="gpt-4"), 404)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="gpt-4", prompt="x")
    assert refusal(server.chat("x", model=5))["param"] == "model"


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b'"x"', b"\xff", b'{"messages": "\\ud800"}', b"[" * 100_000, b"nul"]
)
def test_broken_json(server: Served, body: bytes) -> None:
    answer = httpx.post(server.url + "/v1/chat/completions", content=body)
    assert refusal(answer)["code"] == "invalid_json"


def test_unknown_paths_and_methods(server: Served) -> None:
    assert refusal(server.get("/nowhere"), 404)["code"] == "not_found"
    answer = server.get("/v1/chat/completions")
    assert refusal(answer, 405)["code"] == "method_not_allowed" and answer.headers["allow"] == "POST"


def test_unknown_field_is_warned_about_once(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert server.chat("say:x", brand_new_field=1).status_code == 200
    assert sum("unknown request fields" in record.getMessage() for record in caplog.records) == 1


def test_no_prompt_text_in_the_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="freetoken"):
        server.chat("say:secret words")
        server.chat("secret words", temperature=-1)
    assert not any("secret" in record.getMessage() for record in caplog.records)


def test_body_limit() -> None:
    with serving(max_request_bytes=1000) as served:
        answer = served.chat("x" * 1000)
        assert refusal(answer, 413)["code"] == "request_too_large" and "--max-request-bytes" in answer.text
        pieces = (b"x" * 400 for _ in range(10))
        assert refusal(httpx.post(served.url + "/v1/completions", content=pieces), 413)
        assert served.chat("say:ok").status_code == 200


def raw_post(url: str, head: str, *parts: bytes) -> bytes:
    """What the server answers to a client that sends all before it reads."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n\r\n".encode())
        for part in parts:
            connection.sendall(part)
        answer = b""
        while received := connection.recv(65536):
            answer += received
        return answer


def test_a_client_that_sends_all_before_it_reads_is_told_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DROP_SECONDS", 0.5)
    with serving(max_request_bytes=4_000_000) as served:
        pieces = [b"x" * 1_000_000] * 15
        whole = raw_post(served.url, f"Content-Length: {15_000_000}", *pieces)
        chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
        chunked = raw_post(served.url, "Transfer-Encoding: chunked", *chunks, b"0\r\n\r\n")
        asking = raw_post(served.url, f"Content-Length: {15_000_000}\r\nExpect: 100-continue")
        huge = raw_post(served.url, f"Content-Length: {10**15}")
        slow = raw_post(served.url, f"Content-Length: {15_000_000}", b"x" * 1000)
        for answer in (whole, chunked, asking, huge, slow):
            assert answer.startswith(b"HTTP/1.1 413 ") and b"--max-request-bytes" in answer, answer[:100]
        assert served.chat("say:ok").status_code == 200


def test_key_guards_all_but_health() -> None:
    with serving(api_key="sesame") as served:
        for path in ("/v1/models", "/metrics", "/get_server_info", "/nowhere", "/openapi.json"):
            answer = served.get(path)
            assert refusal(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("", "Bearer", "Bearer wrong", "Bearer sesam", "Basic sesame", "sesame"):
            assert served.get("/v1/models", headers={"Authorization": key}).status_code == 401
        assert served.get("/health").status_code == 200
        assert served.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert served.get("/v1/models", headers={"x-api-key": "sesame"}).status_code == 200
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="sesame")
        assert client.models.list().data[0].id == "tiny"
        shown = served.get("/get_server_info", headers={"x-api-key": "sesame"})
        assert "sesame" not in shown.text


def test_without_a_template_completions_still_work() -> None:
    with serving(chat_template=None) as served:
        error = refusal(served.chat("x"))
        assert "/v1/completions" in error["message"] and "--chat-template" in error["message"]
        assert served.complete("say:x").status_code == 200


def test_template_refusal_is_the_clients() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('start with a user') }}{% endif %}{{ 1 / nothing }}"
    with serving(chat_template=source) as served:
        answer = served.post("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}]})
        assert "start with a user" in refusal(answer)["message"]
        assert refusal(served.chat("x"))["param"] == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": ""}, "text"), ({"text": 5}, "text"),
        ({"text": ["a", 5]}, "text"), ({"input_ids": [310]}, "input_ids"), ({"input_ids": [["a"]]}, "input_ids"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ({"text": "a", "sampling_params": {"grammar": {"kind": "regex"}}}, "grammar"),
        ({"text": "a", "sampling_params": {"structural_tag": "a"}}, "structural_tag"), ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 30}, "top_logprobs_num"), ({"text": "a", "rid": 5}, "rid"),
    ],
)  # fmt: skip
def test_bad_generate(server: Served, fields: dict[str, object], param: str) -> None:
    assert refusal(server.post("/generate", fields))["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": ["a"]}, "tokens"), ("/detokenize", {"tokens": [303]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"), ("/abort_request", {}, "rid"), ("/abort_request", {"rid": 5}, "rid"),
        ("/start_profile", {"output_dir": 5}, "output_dir"),
        ("/start_profile", {"prompt": "x"}, "prompt"),
    ],
)  # fmt: skip
def test_bad_calls(server: Served, path: str, body: dict[str, object], param: str) -> None:
    status = 404 if param == "model" else 400
    assert refusal(server.post(path, body), status)["param"] == param
