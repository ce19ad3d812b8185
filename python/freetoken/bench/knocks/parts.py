"""The single trials: floods of odd requests, clients that vanish or dawdle, huge prompts, a queue of thousands (torch-free).

Each gives what it counted and raises ``AssertionError`` with one sentence for what must not happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import yarl

from freetoken.bench.extra import aiohttp
from freetoken.bench.knocks import fuzz
from freetoken.bench.knocks.target import HONEST, Target

SKIP = ("/start_profile", "/stop_profile")
"""They write files where the request says, and a profile takes memory for each step."""
_SHOWN_FAILURES = 5


class Trial:
    """What all trials need: the server, a session without limits, how many at once, and the seed."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, concurrency: int, seed: int) -> None:
        self.target, self.session, self.concurrency, self.seed = target, session, concurrency, seed

    async def document(self) -> dict[str, Any]:
        async with self.session.get(self.target.url + "/openapi.json") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def model(self) -> str:
        async with self.session.get(self.target.url + "/v1/models") as answer:
            return str((await answer.json())["data"][0]["id"])

    async def each(self, items: Iterable[Any], work: Callable[[Any], Awaitable[None]], at_once: int = 0) -> None:
        """``work`` on all items, so many at once. The first exception ends it."""
        source: Iterator[Any] = iter(items)

        async def worker() -> None:
            for item in source:
                await work(item)

        async with contextlib.AsyncExitStack() as stack:
            tasks = [asyncio.ensure_future(worker()) for _ in range(at_once or self.concurrency)]
            stack.push_async_callback(_cancel, tasks)
            await asyncio.gather(*tasks)


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _classes(statuses: Counter[int]) -> dict[str, int]:
    grouped: Counter[str] = Counter()
    for status, count in statuses.items():
        grouped[f"answers_{status // 100}xx"] += count
    return {"answers_2xx": 0, "answers_4xx": 0, "answers_5xx": 0, **grouped}


def _refused(answer: aiohttp.ClientResponse, text: str) -> bool:
    """Whether an answer is the refusal of a full queue, which says when to come back."""
    return answer.status == 503 and "queue_full" in text and int(answer.headers.get("retry-after", 0)) >= 1


async def _flood(trial: Trial, requests: Iterable[fuzz.Request], allowed: Callable[[int], bool]) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    failures: list[str] = []

    async def send(request: fuzz.Request) -> None:
        url = yarl.URL(trial.target.url + request.path, encoded=True)
        try:
            async with trial.session.request(request.method, url, data=request.body, headers=request.headers) as answer:
                body = await answer.read()
            status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            status, body = 599, repr(error).encode()
        statuses[status] += 1
        if not allowed(status) and len(failures) < _SHOWN_FAILURES:
            failures.append(f"{status} for {request.shown()}: {body[:300]!r}")

    await trial.each(requests, send)
    assert not failures, "\n".join(failures)
    return {"requests": statuses.total(), **_classes(statuses)}


async def fuzzing(trial: Trial, count: int) -> dict[str, Any]:
    """``count`` requests drawn from the server's own OpenAPI document: no 5xx, and every one is answered."""
    source = fuzz.fuzzed(await trial.document(), await trial.model(), trial.seed, SKIP)
    return await _flood(trial, itertools.islice(source, count), lambda status: status < 500)


async def malformed(trial: Trial, count: int) -> dict[str, Any]:
    """``count`` bodies that are no requests: nothing but 4xx."""
    source = fuzz.malformed(await trial.document(), trial.seed, SKIP)
    return await _flood(trial, itertools.islice(source, count), lambda status: 400 <= status < 500)


def _head(target: Target, body: dict[str, Any]) -> tuple[str, int, bytes]:
    parts = urlsplit(target.url)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    return parts.hostname or "127.0.0.1", parts.port or 80, head + data


async def vanishing(trial: Trial, count: int) -> dict[str, Any]:
    """``count`` clients that ask for an endless stream and go: before the first byte, after it, politely or by a reset."""
    read = 0

    async def visit(number: int) -> None:
        nonlocal read
        body = {
            "prompt": f"{number} the rain fell",
            "max_tokens": 100_000,
            "stream": number % 5 > 0,
            "ignore_eos": True,
        }
        host, port, data = _head(trial.target, body)
        reader, writer = await asyncio.open_connection(host, port)
        # Every seventh leaves in the middle of its own request.
        writer.write(data[: len(data) // 2] if number % 7 == 0 else data)
        if number % 7 and number % 5 and number % 2:
            read += len(await reader.read(64))
        else:
            await asyncio.sleep(0.001 * (number % 13))
        if number % 3 == 0:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    await trial.each(range(count), visit, max(trial.concurrency, 64))
    assert read or count < 8, "no client ever saw a byte"
    return {"clients": count}


async def dawdling(trial: Trial, count: int, tokens: int) -> dict[str, Any]:
    """``count`` clients that do not read their stream until an honest one has been served; none loses a byte of it."""
    open_streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for number in range(count):
            body = {"prompt": f"{number} slow", "max_tokens": tokens, "stream": True, "ignore_eos": True}
            host, port, data = _head(trial.target, body)
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, (host, port))
            reader, writer = await asyncio.open_connection(sock=raw, limit=2048)
            writer.write(data)
            open_streams.append((reader, writer))
        await trial.target.honest(trial.session)
        ends = await asyncio.gather(*(_read_slowly(reader) for reader, _ in open_streams))
    finally:
        for _, writer in open_streams:
            writer.close()
    assert all(end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for end in ends), (
        "a slow reader lost the end of its stream"
    )
    return {"clients": count, "tokens": tokens}


async def _read_slowly(reader: asyncio.StreamReader) -> bytes:
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        part = await asyncio.wait_for(reader.read(512), 120)
        assert part, "a slow reader was cut off"
        tail = (tail + part)[-64:]
    return tail


async def huge(trial: Trial, megabytes: float, copies: int) -> dict[str, Any]:
    """Prompts of so many megabytes as text, chat and token ids: refused as too long, or because as many tokens wait already."""
    size = int(megabytes * 1e6)
    bodies: list[tuple[str, bytes, tuple[int, ...]]] = []
    for number in range(copies):
        text = f"{number} the cat sat "
        words = (text * (size // len(text) + 1))[:size]
        for path, body in (
            ("/v1/completions", {"prompt": words}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
            ("/v1/completions", {"prompt": [number] * (size // 3)}),
        ):
            bodies.append((path, json.dumps({"max_tokens": 1, **body}).encode(), (400, 413)))
        ignored = {"prompt": "x", "max_tokens": 1, "nothing": [[]] * (size // 4)}
        bodies.append(("/v1/completions", json.dumps(ignored).encode(), (200, 413)))
    statuses: Counter[int] = Counter()
    refused = 0

    async def send(item: tuple[str, bytes, tuple[int, ...]]) -> None:
        nonlocal refused
        path, data, allowed = item
        async with trial.session.post(trial.target.url + path, data=data) as answer:
            text = await answer.text()
        if _refused(answer, text):
            refused += 1
            return
        assert answer.status in allowed, f"a body of {megabytes:g} MB is answered {answer.status}: {text[:300]}"
        statuses[answer.status] += 1

    done = threading.Event()
    watch = asyncio.ensure_future(asyncio.to_thread(_longest_health, trial.target.url, done))
    try:
        await trial.each(bodies, send, 4)
    finally:
        done.set()
    longest = await watch
    return {
        "requests": len(bodies),
        "mb": megabytes,
        **_classes(statuses),
        "refused": refused,
        "longest_health_ms": 1000 * longest,
    }


def _longest_health(url: str, done: threading.Event) -> float:
    """Seconds of the slowest answer of ``/health`` until ``done``, asked on a thread of its own and one connection."""
    parts, longest = urlsplit(url), 0.0
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=600)
    while not done.wait(0.05):
        began = time.monotonic()
        connection.request("GET", "/health")
        assert connection.getresponse().read(), "an empty answer"
        longest = max(longest, time.monotonic() - began)
    connection.close()
    return longest


async def queueing(trial: Trial, count: int) -> dict[str, Any]:
    """``count`` requests at once: each is served, or refused with a time to come back after; some must be served."""
    statuses: Counter[int] = Counter()
    deepest = refused = 0

    async def send(number: int) -> None:
        nonlocal refused
        body = {**HONEST, "prompt": f"{number % 50} of many", "max_tokens": 4, "stream": number % 2 == 0}
        async with trial.session.post(trial.target.url + "/v1/completions", json=body) as answer:
            text = await answer.text()
        if _refused(answer, text):
            refused += 1
            return
        assert answer.status == 200 and ('"length"' in text or '"stop"' in text), f"{answer.status}: {text[:300]}"
        statuses[answer.status] += 1

    sending = asyncio.ensure_future(trial.each(range(count), send, count))
    while not sending.done():
        deepest = max(deepest, int((await trial.target.info(trial.session))["stats"]["queued"]))
        await asyncio.sleep(0.2)
    await sending
    assert statuses[200] > 0, "nobody was served"
    return {"requests": count, "deepest_queue": deepest, **_classes(statuses), "refused": refused}
