"""What happens when things go wrong: clients leave, queues fill, the scheduler fails, requests are aborted."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.conftest import Served, serving


def raw_request(served: Served, body: dict[str, object]) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    client = socket.create_connection((host, int(port)))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(data)
        + data
    )
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["count", "hang:", ["count", "count"]])
def test_a_closed_connection_aborts(server: Served, stream: bool, prompt: object) -> None:
    before = len(server.fake.aborted)
    client = raw_request(server, {"prompt": prompt, "max_tokens": 100_000, "stream": stream})
    server.until(lambda: server.fake.live)
    if stream and prompt != "hang:":
        assert client.recv(100)
    client.close()
    server.until(lambda: not server.fake.live, 1.0)
    assert len(server.fake.aborted) == before + (2 if isinstance(prompt, list) else 1)
    server.until(server.empty)


def test_a_request_that_ended_is_not_aborted(server: Served) -> None:
    before = len(server.fake.aborted)
    for stream in (False, True):
        assert server.complete("say:done", stream=stream).status_code == 200
    server.until(server.empty)
    assert len(server.fake.aborted) == before


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_scheduler_is_a_status_not_an_event(server: Served, stream: bool) -> None:
    answer = server.complete("fail:", stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "the pool can never hold this", "type": "invalid_request_error", "param": "prompt", "code": "too_long",
    }  # fmt: skip


def test_error_in_mid_stream_is_one_event_and_the_end(server: Served) -> None:
    answer = server.complete("late:", stream=True)
    lines = [line for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200 and len(lines) == 4
    assert json.loads(lines[-1][6:])["error"]["code"] == "too_long"
    assert server.complete("late:").status_code == 400
    assert server.complete(["late:", "count"], max_tokens=50).status_code == 400
    server.until(lambda: not server.fake.live)


def test_full_queue_is_refused_before_any_tokenising() -> None:
    with serving(max_running_requests=1, max_queued_requests=2) as served, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(served.complete, "hang:") for _ in range(3)]
        served.until(lambda: len(served.fake.live) == 3)
        seen = len(served.tokenizer.encoded)
        for stream in (False, True):
            answer = served.complete("one more", stream=stream)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        assert len(served.tokenizer.encoded) == seen
        answer = served.complete(["a"] * 4)
        assert answer.status_code == 400 and "--max-queued-requests" in answer.text
        served.post("/abort_request", {"abort_all": True})
        assert all(future.result().json()["choices"][0]["finish_reason"] == "abort" for future in waiting)
        served.until(served.empty)
        assert served.complete("say:fine").status_code == 200


def test_a_refusal_by_the_scheduler_says_when_to_retry_too(server: Served) -> None:
    for stream in (False, True):
        answer = server.complete("full:", stream=stream)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"


def test_waiting_prompt_tokens_are_bounded() -> None:
    with serving(max_queued_tokens=1000) as served, ThreadPoolExecutor(1) as pool:
        served.until(lambda: served.frontend._longest_token > 0)
        first = pool.submit(served.complete, "hang:" + "x" * 795)
        served.until(lambda: served.fake.live)
        seen = len(served.tokenizer.encoded)
        answer = served.complete([65] * 200)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
        longest = served.frontend._longest_token
        assert served.complete("x" * 200 * longest).status_code == 503
        assert len(served.tokenizer.encoded) == seen
        assert served.complete("x" * 300).status_code == 503  # known only after tokenising
        assert len(served.tokenizer.encoded) == seen + 1
        assert served.complete("say:short").status_code == 200
        served.post("/abort_request", {"abort_all": True})
        first.result()
        assert served.complete("say:" + "x" * 2000).status_code == 200  # nothing waits: it may start at once
        served.until(served.empty)


def test_abort_by_id(server: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.complete, ["hang:", "hang:"], rid="mine")
        server.until(lambda: len(server.fake.live) == 2)
        assert server.post("/abort_request", {"rid": "mine"}).json() == {"aborted": 1}
        assert [choice["finish_reason"] for choice in future.result().json()["choices"]] == ["abort", "abort"]
    assert server.post("/abort_request", {"rid": "mine"}).json() == {"aborted": 0}


def test_an_id_in_use_is_refused(server: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.complete, "hang:", rid="twice")
        server.until(lambda: server.fake.live)
        assert server.complete("x", rid="twice").json()["error"]["code"] == "duplicate_rid"
        server.post("/abort_request", {"rid": "twice"})
        future.result()


def test_scheduler_gone() -> None:
    with serving() as served, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(served.complete, "hang:")
        stream = pool.submit(served.complete, "count", max_tokens=4000, stream=True)
        served.until(lambda: len(served.fake.live) == 2)
        time.sleep(0.1)
        served.loop.call_soon_threadsafe(served.frontend.scheduler_gone, "the scheduler is no more")
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["message"] == "the scheduler is no more"
        lines = [line for line in stream.result().text.split("\n\n") if line]
        assert stream.result().status_code == 200
        assert [("error" in json.loads(line[6:])) for line in lines[-2:]] == [False, True]
        health = served.get("/health")
        assert health.status_code == 503 and health.json() == {"status": "failed", "reason": "the scheduler is no more"}
        assert served.complete("say:x").status_code == 503
        served.until(served.empty)


def test_loading_refuses_with_the_phase() -> None:
    with serving(ready=False) as served:
        assert served.get("/health").json()["status"] == "loading"
        answer = served.complete("say:x")
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert served.get("/health_generate").status_code == 503
        assert served.get("/v1/models").status_code == 200


def test_a_slow_reader_gets_everything_in_fewer_events() -> None:
    with serving(positions=200_000, delay=0.0) as served:
        client = raw_request(served, {"prompt": "count", "max_tokens": 30_000, "stream": True})
        served.until(lambda: served.fake.added)
        client.settimeout(30)
        served.until(lambda: not served.fake.live, 60)
        text, events, tail = 0, 0, b""
        while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data = client.recv(1 << 20)
            assert data
            tail = (tail + data)[-(1 << 20) :]
            events += data.count(b"data: ")
            text += len(data)
        client.close()
        assert events < 30_000
        served.until(served.empty)


def test_stream_interval_gathers_tokens() -> None:
    with serving(stream_interval=4) as served:
        answer = served.complete("count", max_tokens=10, stream=True)
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in answer.text.split("\n\n")[:-2]]
        # The first token goes out at once; a busy machine may find more than the interval waiting.
        assert "".join(texts) == "abcdefghij" and len(texts) <= 4
        assert all(len(text) >= 4 for text in texts[1:-1])


def test_clients_that_come_and_go_leave_nothing_behind(server: Served) -> None:
    def visit(number: int) -> None:
        client = raw_request(
            server, {"prompt": "count", "max_tokens": 4000, "stream": number % 2 == 0, "n": 1 + number % 3}
        )
        time.sleep(0.002 * (number % 7))
        client.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(visit, range(80)))
    server.until(lambda: not server.fake.live and server.empty())
    assert server.complete("say:fine").json()["choices"][0]["text"] == "fine"


def test_concurrent_reading_of_state_while_busy(server: Served) -> None:
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            for path in ("/health", "/metrics", "/get_server_info"):
                assert httpx.get(server.url + path).status_code == 200

    with ThreadPoolExecutor(9) as pool:
        watcher = pool.submit(poll)
        answers = list(pool.map(lambda n: server.complete("count", max_tokens=50 + n).json(), range(16)))
        stop.set()
        watcher.result()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [50 + n for n in range(16)]
