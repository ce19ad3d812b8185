"""SGLang's ``/generate``, the token calls, metrics, and the control calls."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from server.conftest import Served, serving


def test_generate_single_and_list(server: Served) -> None:
    params = {"max_new_tokens": 5, "temperature": 0}
    one = server.post("/generate", {"text": "count", "sampling_params": params, "rid": "my-id"}).json()
    assert one["text"] == "abcde" and one["output_ids"] == list(b"abcde")
    meta = one["meta_info"]
    assert meta["id"] == "my-id" and meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (6, 5, 5)
    both = server.post(
        "/generate", {"text": ["say:a", "say:b"], "sampling_params": [params, {"max_new_tokens": 9}]}
    ).json()
    assert [value["text"] for value in both] == ["a", "b"]
    assert both[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 302}
    ids = server.post("/generate", {"input_ids": [list(b"say:c")], "sampling_params": params}).json()
    assert [value["text"] for value in ids] == ["c"]
    many = server.post("/generate", {"text": "say:d", "sampling_params": {"n": 2}}).json()
    assert [value["text"] for value in many] == ["d", "d"]


def test_generate_defaults(server: Served) -> None:
    assert server.post("/generate", {"text": "count"}).json()["meta_info"]["completion_tokens"] == 128


def test_generate_streams_the_growing_text(server: Served) -> None:
    answer = server.post("/generate", {"text": "count", "sampling_params": {"max_new_tokens": 4}, "stream": True})
    lines = [line[6:] for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert texts[-1] == "abcd" and all("abcd".startswith(text) for text in texts)
    assert json.loads(lines[-2])["meta_info"]["finish_reason"]["type"] == "length"


def test_generate_logprobs(server: Served) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "top_logprobs_num": 1}
    meta = server.post("/generate", {**body, "logprob_start_len": 0, "return_text_in_logprobs": True}).json()[
        "meta_info"
    ]
    assert meta["input_token_logprobs"] == [[None, 300, "<bos>"], [-1.04, 104, "h"], [-1.05, 105, "i"]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["output_token_logprobs"] == [[-0.97, 97, "a"]] and meta["output_top_logprobs"] == [[[-0.97, 97, "a"]]]
    meta = server.post("/generate", body).json()["meta_info"]
    assert "input_token_logprobs" not in meta and meta["output_token_logprobs"] == [[-0.97, 97, None]]


def test_tokenize_and_back(server: Served) -> None:
    tokens = server.post("/tokenize", {"prompt": "hé"}).json()
    assert tokens == {"tokens": [300, 104, 195, 169], "count": 4, "max_model_len": 4096}
    assert server.post("/tokenize", {"prompt": "h", "add_special_tokens": False}).json()["tokens"] == [104]
    assert server.post("/tokenize", {"prompt": ["a", "b"]}).json()["count"] == [2, 2]
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"][0] == 301 and chat["count"] == len(chat["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["text"] == "hé"
    assert server.post("/detokenize", {"tokens": [300], "skip_special_tokens": False}).json()["prompt"] == "<bos>"
    assert server.post("/detokenize", {"tokens": [[104], [105]]}).json()["text"] == ["h", "i"]


def test_metrics_add_up() -> None:
    with serving() as served:
        served.complete("count", max_tokens=10)
        served.complete(["say:abc", "say:d"])
        served.complete("x", temperature=-1)
        text = served.get("/metrics").text

    def value(name: str) -> float:
        found = re.search(rf"^{re.escape('freetoken:' + name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found.group(1))

    assert value("num_requests_total") == 3
    assert value("prompt_tokens_total") == 6 + 8 + 6
    assert value("cached_tokens_total") == 5 + 7 + 5
    assert value("cache_hit_rate") == 17 / 20
    assert value("generation_tokens_total") == 10 + 4 + 2
    assert value("time_to_first_token_seconds_count") == 3
    assert value("inter_token_latency_seconds_count") == 9 + 3 + 1
    assert value("e2e_request_latency_seconds_count") == 3
    assert value("queue_time_seconds_count") == 3
    assert value("token_usage") == 0.01
    assert 'freetoken:kernel_path{impl="reference",op="norm"} 1.0' in text
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "num_used_tokens",
        "gen_throughput",
        "num_aborted_requests_total",
    ):
        value(name)


def test_metrics_can_be_off() -> None:
    with serving(enable_metrics=False) as served:
        assert served.get("/metrics").status_code == 404


def test_server_info(server: Served) -> None:
    info = server.get("/get_server_info").json()
    assert info["args"]["context_length"] == 4096 and info["args"]["reasons"]["dtype"]
    assert info["kernels"] == {"norm": "reference"} and info["max_total_tokens"] == 1000
    assert info["status"] == "ready" and "pid" in info["live"] and info["stats"]["total_tokens"] in (0, 1000)


def test_health(server: Served) -> None:
    assert server.get("/health").json() == {"status": "ready"}
    before = len(server.fake.added)
    assert server.get("/health_generate").status_code == 200
    assert len(server.fake.added) == before + 1


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/health_generate",
        "/v1/models",
        "/v1/models/tiny",
        "/v1/models/none",
        "/live",
        "/metrics",
        "/get_server_info",
        "/openapi.json",
    ],
)
def test_head_is_get_without_the_body(server: Served, path: str) -> None:
    """On a connection that goes on to be used, so a body that came after all would be read as the next answer."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        get, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"] and int(head.headers["content-length"]) > 0
        assert client.get(path).status_code == get.status_code
    refused = httpx.head(server.url + "/generate", timeout=20)
    assert (refused.status_code, refused.content, refused.headers["allow"]) == (405, b"", "POST")


def test_head_wants_the_key_too_and_tells_of_loading() -> None:
    with serving(api_key="secret") as served:
        statuses = [httpx.head(served.url + path, timeout=20).status_code for path in ("/", "/health", "/live")]
    assert statuses == [200, 200, 401]
    with serving(ready=False) as served:
        assert httpx.head(served.url + "/health", timeout=20).status_code == 503


def test_control_calls() -> None:
    with serving() as served:
        assert served.post("/flush_cache", {}).json()["success"] is True and served.fake.flushes == 1
        served.fake.refuse_flush = True
        answer = served.post("/flush_cache", None)
        assert answer.status_code == 409 and answer.json()["error"]["message"] == "busy"
        assert served.post("/start_profile", {"output_dir": "traces"}).json()["folder"] == "traces"
        assert served.post("/stop_profile", {}).status_code == 200


def test_openapi_document_lists_the_routes(server: Served) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/metrics", "/health"} <= set(paths)
    assert "requestBody" in paths["/v1/completions"]["post"]
