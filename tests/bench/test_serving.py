"""The serving benchmark against a small server with known timing, faults and broken streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from freetoken.bench import figures, serving
from freetoken.bench.client import EventStream, Target, read_usage
from freetoken.bench.datasets import Prompt, file_prompts, random_prompts, shared_prefix_prompts
from freetoken.bench.report import Outcome
from freetoken.errors import StartupError


class FakeServer:
    """Answers completions with ``max_tokens`` events, ``delay`` seconds apart; ``fault`` says what goes wrong."""

    def __init__(self, delay: float = 0.0, fault: str = "") -> None:
        self.delay = delay
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []
        self.flushed = 0
        self.running = self.most_running = 0
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"device": "CPU", "args": {"model": {"vocab_size": 50}, "sample_vocab": 40}})

    async def flush(self, _: web.Request) -> web.Response:
        self.flushed += 1
        return web.json_response({})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        warm = len(self.bodies) == 1
        if self.fault == "refuse" and not warm:
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        generate = "sampling_params" in body
        count = body["sampling_params"]["max_new_tokens"] if generate else body["max_tokens"]
        size = len(body.get("prompt") or body.get("input_ids") or body.get("text") or "")
        usage = {"prompt_tokens": size, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
        for index in range(count):
            if self.delay:
                await asyncio.sleep(self.delay)
            if self.fault == "cut" and not warm and index == 2:
                request.transport.close()  # type: ignore[union-attr]
                break
            meta = {"prompt_tokens": size, "completion_tokens": index + 1, "cached_tokens": 2}
            event = {"text": "a", "meta_info": meta} if generate else {"choices": [{"text": "a"}], "usage": None}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.fault == "error" and not warm:
            await response.write(b'data: {"error": {"message": "the scheduler is gone"}}\n\n')
        elif not generate:
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b": ping\n\ndata: [DONE]\n\n")
        self.running -= 1
        return response


@pytest.fixture
async def make_server() -> AsyncIterator[Any]:
    runners: list[web.AppRunner] = []

    async def make(**options: Any) -> FakeServer:
        server = FakeServer(**options)
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_get("/get_server_info", server.info)
        app.router.add_post("/flush_cache", server.flush)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/generate", server.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
        return server

    yield make
    for runner in runners:
        await runner.cleanup()


def arguments(server: FakeServer, *more: str) -> Any:
    line = ["--base-url", server.url, "--disable-tqdm", "--num-prompts", "6", "--random-input-len", "7"]
    return serving.parser().parse_args([*line, "--random-output-len", "5", *more])


@pytest.mark.parametrize("backend", ["completions", "generate"])
async def test_a_run_counts_what_was_sent(make_server: Any, backend: str) -> None:
    server = await make_server()
    found = await serving.run(arguments(server, "--backend", backend, "--max-concurrency", "2", "--flush-cache"))
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["input_tokens"], found["output_tokens"], found["cached_tokens"]) == (42, 30, 12)
    assert (found["what"], found["model"], found["max_concurrency"]) == ("serving http", "fake", 2)
    assert server.flushed == 1
    assert server.most_running <= 2
    bodies = server.bodies[1:]
    assert len(bodies) == 6
    for body in bodies:
        ids = body.get("prompt") or body.get("input_ids")
        assert len(ids) == 7
        assert all(0 <= token < 40 for token in ids)
        assert (body.get("sampling_params") or body)["ignore_eos"] is True
    json.dumps(found, allow_nan=False)


async def test_latencies_are_the_servers(make_server: Any) -> None:
    server = await make_server(delay=0.02)
    found = await serving.run(arguments(server, "--max-concurrency", "6", "--random-output-len", "8"))
    assert found["tpot_ms"]["median"] >= 19
    assert 19 <= found["ttft_ms"]["median"] <= found["e2e_ms"]["median"]
    assert found["e2e_ms"]["median"] >= 8 * 20 - 2
    assert found["decode_tok_s"] <= 6 / 0.0195


@pytest.mark.parametrize(
    ("fault", "message"),
    [("refuse", "HTTP 503: the queue is full"), ("error", "the scheduler is gone"), ("cut", "")],
)
async def test_faults_are_counted_not_raised(make_server: Any, fault: str, message: str) -> None:
    server = await make_server(fault=fault)
    found = await serving.run(arguments(server))
    assert (found["completed"], found["failed"]) == (0, 6)
    assert sum(found["errors"].values()) == 6
    if message:
        assert list(found["errors"]) == [message]


async def test_poisson_arrivals_keep_their_mean(make_server: Any) -> None:
    server = await make_server()
    start = time.perf_counter()
    await serving.run(arguments(server, "--request-rate", "100", "--num-prompts", "40"))
    assert time.perf_counter() - start > 0.15


async def test_a_server_that_is_not_there_is_one_sentence() -> None:
    args = serving.parser().parse_args(["--port", "9", "--disable-tqdm"])
    with pytest.raises(StartupError, match="cannot be read"):
        await serving.run(args)


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--num-prompts 0", "--num-prompts"),
        ("--request-rate 0", "--request-rate"),
        ("--request-rate nan", "--request-rate"),
        ("--random-range-ratio 1.5", "--random-range-ratio"),
        ("--dataset-name file", "--dataset-path"),
        ("--backend chat", "--backend chat"),
        ("--extra-request-body [1]", "--extra-request-body"),
        ("--extra-request-body {", "--extra-request-body"),
        ("--warmup-requests -1", "--warmup-requests"),
    ],
)
def test_bad_flags_are_one_sentence(line: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(line.split()) == 1
    captured = capsys.readouterr().err
    assert flag in captured
    assert captured.count("\n") == 1


async def test_the_client_keeps_up_with_fast_streams(make_server: Any) -> None:
    """64 streams, as fast as one process can write them; the client shares its core with the server."""
    server = await make_server()
    more = ("--num-prompts", "64", "--random-output-len", "120", "--max-concurrency", "64", "--warmup-requests", "0")
    found = await serving.run(arguments(server, *more))
    assert found["completed"] == 64
    assert found["output_tokens"] == 64 * 120


def test_events_survive_any_split() -> None:
    whole = b"".join(b'data: {"choices": [{"text": "%d"}]}\r\n\r\n' % i for i in range(5))
    whole += b': ping\n\ndata: {"choices": [], "usage": {"completion_tokens": 5}}\n\ndata: [DONE]\n\n'
    for size in range(1, len(whole)):
        stream = EventStream(skip_until_content=False)
        for index in range(0, len(whole), size):
            stream.feed(whole[index : index + size], float(index))
        times, tail = stream.finish()
        assert len(times) == 5, size
        assert tail[-1]["usage"]["completion_tokens"] == 5
        assert times == sorted(times)


def test_the_role_is_no_first_token() -> None:
    stream = EventStream(skip_until_content=True)
    stream.feed(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', 1.0)
    stream.feed(b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n', 2.0)
    stream.feed(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n', 3.0)
    assert stream.finish()[0] == [2.0, 3.0]


def test_a_stream_without_usage_is_an_error() -> None:
    for tail in ([], [{"choices": [{"text": "a"}]}]):
        outcome = Outcome(sent=0.0)
        read_usage(tail, outcome)
        assert outcome.error == "the stream ended without usage"


def test_bodies() -> None:
    ids, text = Prompt([1, 2], 3), Prompt("hello", 3)
    completions = Target("http://x", "completions", "m", extra={"seed": 4}).body(ids)
    assert (completions["prompt"], completions["max_tokens"], completions["seed"]) == ([1, 2], 3, 4)
    chat = Target("http://x", "chat", "m", ignore_eos=False).body(text)
    assert chat["messages"][0]["content"] == "hello"
    assert chat["ignore_eos"] is False
    generate = Target("http://x", "generate", "m")
    assert generate.body(ids)["input_ids"] == [1, 2]
    assert generate.body(text)["text"] == "hello"
    assert generate.url == "http://x/generate"


def test_random_prompts() -> None:
    exact = random_prompts(20, input_len=9, output_len=4, vocab_size=30)
    assert {len(p.content) for p in exact} == {9}
    assert {p.output_len for p in exact} == {4}
    assert exact == random_prompts(20, input_len=9, output_len=4, vocab_size=30)
    assert exact != random_prompts(20, input_len=9, output_len=4, vocab_size=30, seed=1)
    spread = random_prompts(300, input_len=10, output_len=10, vocab_size=3, range_ratio=0.5)
    assert {len(p.content) for p in spread} == set(range(5, 11))


def test_shared_prefixes() -> None:
    prompts = shared_prefix_prompts(
        groups=3, prompts_per_group=4, prefix_len=20, question_len=5, output_len=2, vocab_size=1000
    )
    heads = [tuple(p.content[:20]) for p in prompts]
    assert len(prompts) == 12
    assert {heads.count(head) for head in heads} == {4}
    assert len({tuple(p.content) for p in prompts}) == 12


def test_prompt_files(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("one\n\ntwo\n")
    assert [p.content for p in file_prompts(str(plain), count=3, output_len=1)] == ["one", "two", "one"]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "x", "output_len": 7}\n{"prompt": [1, 2]}\n')
    assert file_prompts(str(lines), count=None, output_len=5) == [Prompt("x", 7), Prompt([1, 2], 5)]
    for bad in (
        "{",
        "[1]",
        '{"prompt": ""}',
        '{"prompt": []}',
        '{"prompt": [true]}',
        '{"prompt": "x", "output_len": 0}',
    ):
        lines.write_text(bad + "\n")
        with pytest.raises(StartupError, match=r"a\.jsonl:1"):
            file_prompts(str(lines), count=None, output_len=5)
    with pytest.raises(StartupError, match="dataset-path"):
        file_prompts(str(tmp_path / "none"), count=None, output_len=5)


async def test_a_run_is_one_json_line(make_server: Any, tmp_path: Path) -> None:
    server = await make_server()
    path = tmp_path / "sub" / "run.jsonl"
    for _ in range(2):
        line = ["--base-url", server.url, "--num-prompts", "2", "--random-output-len", "2", "--disable-tqdm"]
        code = await asyncio.to_thread(serving.main, [*line, "--output-file", str(path), "--label", "tiny"])
        assert code == 0
    found = figures.read(path)
    assert [f["model"] for f in found] == ["tiny", "tiny"]
