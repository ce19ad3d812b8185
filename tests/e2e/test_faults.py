"""What goes wrong around the real server process: vanishing clients, killed processes, broken models, full queues."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file, save_file

from e2e.servers import Server, failed_start, free_port, gone, wait_until

CHECKED = {"FREETOKEN_CHECK_INVARIANTS": "1"}
ENDLESS = {"max_tokens": 60_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a context long enough to be cut off in the middle of an answer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=65_536)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """A server with room for many; its books are checked after every step, and a fault in them would end it."""
    with Server("--model-path", str(model), "--max-total-tokens", "16384", env=CHECKED) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[Server]:
    """A server in which nearly everything is too much."""
    flags = "--max-total-tokens 512 --context-length 1024 --max-running-requests 4 --max-queued-requests 4"
    with Server("--model-path", str(model), *flags.split(), "--max-request-bytes", "20000", env=CHECKED) as server:
        yield server
        assert server.stop() == 0


# --- clients that vanish --------------------------------------------------------------------------------------------------


def open_stream(server: Server, **fields: Any) -> socket.socket:
    """A connection that has asked for a completion and not read anything."""
    body = json.dumps({"prompt": "the cat sat", "stream": True, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: Server, stream: bool) -> None:
    aborted = server.metric("freetoken:num_aborted_requests_total")
    connection = open_stream(server, **{**ENDLESS, "stream": stream})
    if stream:
        assert connection.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: server.stats()["used_tokens"] > 0, 10, "running")
    connection.close()
    wait_until(server.is_empty, 2, "freeing the pages")
    assert server.metric("freetoken:num_aborted_requests_total") == aborted + 1


def test_two_hundred_clients_vanish_and_an_honest_one_is_served(server: Server) -> None:
    def honest() -> str:
        answer = server.post("/v1/completions", prompt="the cat sat", max_tokens=16, temperature=0)
        return answer.json()["choices"][0]["text"]

    before = honest()
    aborted = server.metric("freetoken:num_aborted_requests_total")
    connections = [open_stream(server, **{**ENDLESS, "prompt": f"{number} rain"}) for number in range(200)]
    wait_until(lambda: (s := server.stats())["running"] + s["queued"] == 200, 30, "200 requests in the system")
    for number, connection in enumerate(connections):
        if number % 2:
            # A reset instead of a polite end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    assert honest() == before
    wait_until(server.is_empty, 10, "freeing the pages")
    assert server.metric("freetoken:num_aborted_requests_total") == aborted + 200
    stats = server.stats()
    assert stats["used_tokens"] + stats["cached_pool_tokens"] <= stats["total_tokens"]
    assert server.post("/flush_cache").status_code == 200
    assert server.stats()["cached_pool_tokens"] == 0


def test_abort_by_id_and_of_all(server: Server) -> None:
    answers: list[httpx.Response] = []

    def ask(rid: str) -> None:
        answers.append(server.post("/v1/completions", prompt="rain", rid=rid, **ENDLESS))

    threads = [threading.Thread(target=ask, args=(f"r{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.stats()["running"] == 3, 10, "running")
    assert server.post("/flush_cache").status_code == 409
    assert server.post("/abort_request", rid="r1").json() == {"aborted": 1}
    wait_until(lambda: len(answers) == 1, 2, "the aborted answer")
    assert server.post("/abort_request", abort_all=True).json() == {"aborted": 2}
    for thread in threads:
        thread.join(5)
    assert [a.json()["choices"][0]["finish_reason"] for a in answers] == ["abort"] * 3
    assert server.is_empty()


def test_idle_it_costs_next_to_nothing(server: Server) -> None:
    wait_until(server.is_empty, 5)
    time.sleep(0.5)
    before, start = server.cpu_seconds(), time.monotonic()
    time.sleep(3.0)
    assert server.cpu_seconds() - before < 0.02 * (time.monotonic() - start)


# --- too much ---------------------------------------------------------------------------------------------------------------


def test_more_than_fits_is_retracted_and_finishes_and_a_full_queue_refuses(small: Server) -> None:
    def body(number: int) -> dict[str, Any]:
        return {"prompt": [10 + number] * 24, "max_tokens": 300, "temperature": 0, "ignore_eos": True}

    answers: list[dict[str, Any]] = []
    connections = [open_stream(small, **body(number), stream=False) for number in range(8)]
    wait_until(lambda: (s := small.stats())["running"] + s["queued"] == 8, 10, "a full house")
    refused = small.post("/v1/completions", prompt="one more", stream=True)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full" and refused.headers["content-type"] == "application/json"
    for connection in connections:
        response = http.client.HTTPResponse(connection)
        response.begin()
        answers.append(json.loads(response.read()))
        connection.close()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [300] * 8
    assert small.stats()["retractions"] > 0
    assert small.metric("freetoken:num_retractions_total") > 0
    assert small.metric("freetoken:num_refused_requests_total") == 1
    assert small.is_empty()
    # Retracted or not, each says what it says alone.
    for number in (0, 7):
        alone = small.post("/v1/completions", **body(number)).json()
        assert alone["choices"][0]["text"] == answers[number]["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ({"prompt": [5] * 1024}, 400, "context_length_exceeded", "--context-length"),
        ({"prompt": [5] * 600}, 400, "kv_cache_exceeded", "--max-total-tokens"),
        ({"prompt": [5] * 600, "stream": True}, 400, "kv_cache_exceeded", "--max-total-tokens"),
        ({"prompt": [5, 384]}, 400, None, "383"),
        ({"prompt": [5, -1]}, 400, None, "token id"),
        ({"prompt": ""}, 400, None, "empty"),
        ({"prompt": "x" * 20_000}, 413, "request_too_large", "--max-request-bytes"),
        ({"prompt": "x", "temperature": -1}, 400, None, "temperature"),
        ({"prompt": "x", "n": 9}, 400, None, "--max-queued-requests"),
        ({"prompt": "x", "logit_bias": {"384": 1}}, 400, None, "logit_bias"),
    ],
)
def test_refusals_say_what_to_change(
    small: Server, body: dict[str, Any], status: int, code: str | None, says: str
) -> None:
    answer = small.post("/v1/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == status and says in error["message"] and error["message"].count("\n") == 0
    assert code is None or error["code"] == code
    assert status == 413 or error["param"] in body or error["param"] == "prompt"
    assert small.is_empty()


def test_broken_json_is_a_400(small: Server) -> None:
    answer = httpx.post(f"{small.url}/v1/chat/completions", content=b'{"messages": [')
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


# --- processes that die -------------------------------------------------------------------------------------------------------


class Listener(threading.Thread):
    """Asks for a completion and keeps what came: ``events`` of a stream, or the ``answer``; ``ended`` says when."""

    def __init__(self, server: Server, stream: bool, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.answer: httpx.Response | None = None
        self.ended = 0.0
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": "the cat sat", "stream": stream, "ignore_eos": True, **fields}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            if self._body["stream"] and answer.status_code == 200:
                self.events.extend(line for line in answer.iter_lines() if line)
            else:
                answer.read()
            self.answer = answer
        self.ended = time.monotonic()


def test_a_killed_scheduler_is_one_error_each_and_the_end(model: Path) -> None:
    with Server("--model-path", str(model), "--max-total-tokens", "16384", "--max-running-requests", "3") as server:
        streams = [Listener(server, True, **ENDLESS) for _ in range(3)]
        wait_until(lambda: all(listener.events for listener in streams), 20, "streaming")
        # Those that still wait in the queue get their error too.
        whole = [Listener(server, stream, **ENDLESS) for stream in (False, False, True)]
        wait_until(lambda: server.stats()["queued"] == 3, 10, "queueing")
        everyone = server.processes()
        killed = time.monotonic()
        server.scheduler.send_signal(signal.SIGKILL)
        health = [200]

        def unhealthy() -> bool:
            try:
                health.append(httpx.get(f"{server.url}/health", timeout=1).status_code)
            except httpx.TransportError:
                return True
            return health[-1] != 200

        wait_until(unhealthy, 1.0, "an unhealthy server")
        assert health[-1] == 503
        for listener in streams + whole:
            listener.join(2)
            assert 0 < listener.ended - killed < 1.0
        for listener in streams:
            assert sum('"error"' in line for line in listener.events) == 1
            assert '"error"' in listener.events[-1] and "SIGKILL" in listener.events[-1]
        for listener in whole:
            assert listener.answer is not None and listener.answer.status_code == 503
            assert "SIGKILL" in listener.answer.json()["error"]["message"]
        assert server.wait(5) == 1
        wait_until(lambda: gone(everyone), 2, "the end of all processes")
        assert server.output().splitlines()[-1] == "freetoken: the scheduler was killed by SIGKILL"
        assert "Traceback" not in server.output()


def test_sigterm_drains_and_exits_0(model: Path, tmp_path: Path) -> None:
    flags = ["--model-path", str(model), "--max-total-tokens", "4096"]
    with Server(*flags, env={"TMPDIR": str(tmp_path), **CHECKED}) as server:
        running = Listener(server, True, max_tokens=1200, stream_options={"include_usage": True})
        wait_until(lambda: bool(running.events), 20, "streaming")
        everyone = server.processes()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, 1, "draining")
        refused = server.post("/v1/completions", prompt="too late")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        running.join(30)
        assert running.events[-1] == "data: [DONE]"
        assert json.loads(running.events[-2][6:])["usage"]["completion_tokens"] == 1200
        assert server.wait(10) == 0
        wait_until(lambda: gone(everyone), 2, "the end of all processes")
        assert not list(tmp_path.iterdir())
        assert "Traceback" not in server.output()


def test_the_scheduler_does_not_outlive_a_killed_server(model: Path, tmp_path: Path) -> None:
    with Server("--model-path", str(model), env={"TMPDIR": str(tmp_path)}) as server:
        connection = open_stream(server, **ENDLESS)
        assert connection.recv(12) == b"HTTP/1.1 200"
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: gone(children), 2, "the end of the scheduler")
        connection.close()
        assert not list(tmp_path.iterdir()), "the folder of the sockets is left behind"


# --- starts that cannot work --------------------------------------------------------------------------------------------------


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def add_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_norm2.weight"] = next(iter(tensors.values())).clone()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "lacks model-00002-of-00002.safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda f: cut(f / "model-00001-of-00002.safetensors"), "is truncated"),
        (lambda f: edit_config(f, architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (lambda f: edit_config(f, intermediate_size=136), "has shape"),
    ],
)
def test_a_broken_folder_is_one_sentence(tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    folder = make_tiny_model(tmp_path / "broken", shards=2)
    damage(folder)
    check_one_sentence(failed_start("--port", "0", "--model-path", str(folder)), says)


def test_a_surplus_tensor_and_a_cut_gguf_are_one_sentence(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "surplus")
    add_tensor(folder)
    check_one_sentence(failed_start("--port", "0", "--model-path", str(folder)), "q_norm2.weight' is not part of")
    file = make_tiny_model(tmp_path / "cut.gguf", format="gguf")
    cut(file)
    check_one_sentence(failed_start("--port", "0", "--model-path", str(file)), "truncated")


def check_one_sentence(result: tuple[int, str], says: str, code: int = 1) -> None:
    """The exit code, and on stderr one line after the lines of progress."""
    lines = [line for line in result[1].splitlines() if not re.match(r"(starting|loading weights)\b", line)]
    assert result[0] == code and len(lines) == 1, result[1]
    assert lines[0].startswith("freetoken: ") and says in lines[0]


@pytest.mark.parametrize(
    ("flags", "env", "says", "code"),
    [
        (["--page-size", "3"], {}, "--page-size must be a power of two", 1),
        (["--context-length", "70000"], {}, "--context-length 70000 is above the model's 65536", 1),
        (["--nonsense"], {}, "--nonsense", 2),
        (["--dtype", "int3"], {}, "--dtype", 2),
        (["--max-running-requests", "many"], {}, "--max-running-requests", 2),
        ([], {"FREETOKEN_FUSED_NORM": "perhaps"}, "FREETOKEN_FUSED_NORM='perhaps'", 1),
        ([], {"FREETOKEN_NO_SUCH_NAME": "1"}, "FREETOKEN_NO_SUCH_NAME is not a freetoken setting", 1),
    ],
)
def test_bad_settings_are_one_sentence(
    model: Path, flags: list[str], env: dict[str, str], says: str, code: int
) -> None:
    arguments = ["--port", "0", "--log-level", "error", "--model-path", str(model), *flags]
    check_one_sentence(failed_start(*arguments, env=env), says, code)


def test_a_temporary_folder_that_sockets_cannot_use_is_one_sentence(model: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    result = failed_start("--port", "0", "--log-level", "error", "--model-path", str(model), env={"TMPDIR": str(deep)})
    check_one_sentence(result, "set TMPDIR to a shorter one")
    assert not list(deep.iterdir())


def test_a_taken_port_is_one_sentence(model: Path) -> None:
    with socket.socket() as other:
        port = free_port()
        other.bind(("127.0.0.1", port))
        other.listen()
        result = failed_start("--port", str(port), "--model-path", str(model))
    check_one_sentence(result, f"cannot listen on 127.0.0.1 port {port}")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-total-tokens", "99999999999"], r"needs \d\S* GiB .* \d\S* GiB is there .*--mem-fraction-static"),
        (["--max-running-requests", "99999999"], r"needs? \d\S* GiB .* \d\S* GiB .*--max-running-requests"),
    ],
)
def test_too_little_memory_says_what_is_needed(model: Path, flags: list[str], says: str) -> None:
    result = failed_start("--port", "0", "--log-level", "error", "--model-path", str(model), *flags)
    check_one_sentence(result, flags[0])
    assert re.search(says, result[1])
