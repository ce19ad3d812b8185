"""Hard knocks in small: all of them against a server of two processes, and that each would notice what it is there for."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from freetoken.bench import figures, hard_knocks
from freetoken.bench.knocks import fuzz, parts, soak
from freetoken.bench.knocks.target import Target
from freetoken.server.openapi import BODIES, operation
from server.test_launch import Process

DOCUMENT = {
    "paths": {path: {"post": operation(path, "POST")} for path in BODIES} | {"/health": {"get": operation("/", "GET")}}
}


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """The real scheduler on a fake runner behind the real HTTP, its books checked after every step."""
    server = Process(
        "scheduler.fake_process:run_on_fake_runner", "--max-total-tokens", "1024", "--context-length", "1000",
        "--log-requests", "off", "--decode-log-interval", "0", env={"FREETOKEN_CHECK_INVARIANTS": "1"},
    )  # fmt: skip
    server.ready()
    yield server
    server.process.terminate()
    assert server.end(20) == 0
    assert "Traceback" not in server.text()


def test_a_server_stands_it_all(process: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "knocks.jsonl"
    flags = (
        "--fuzz 400 --malformed 200 --vanish 60 --slow 4 --slow-tokens 60 --huge-mb 1.2 --huge-copies 1 --queue 150 "
        "--soak-seconds 3 --soak-tokens 8 --seed 7 --slack-mb 64"
    )
    own = ["--base-url", process.ready(), "--pid", str(process.process.pid), "--output", str(output)]
    code = hard_knocks.main([*own, *flags.split(), "--parts", *hard_knocks.PARTS])
    assert code == 0, capsys.readouterr().err
    found = {figure["what"].removeprefix("hard knocks "): figure for figure in figures.read(output)}
    assert list(found) == list(hard_knocks.PARTS)
    assert found["fuzz"]["requests"] == 400 and found["fuzz"]["answers_5xx"] == 0
    assert found["fuzz"]["answers_2xx"] > 80 and found["fuzz"]["answers_4xx"] > 80
    assert found["malformed"]["answers_4xx"] == found["malformed"]["requests"] == 200
    huge = found["huge"]
    assert huge["answers_2xx"] + huge["answers_4xx"] + huge["refused"] == 4 and huge["answers_4xx"] > 0
    assert found["queue"]["answers_2xx"] == 150 and found["queue"]["deepest_queue"] > 0
    assert found["soak"]["requests"] > 20 and found["soak"]["requests_leave"] > 0
    assert all(figure["before_gb"] > 0.05 for name, figure in found.items() if name != "soak")


# --- what is sent -----------------------------------------------------------------------------------------------------------


def test_a_seed_brings_the_same_requests_back_and_every_route_is_called() -> None:
    def first(seed: int, make: Any) -> list[fuzz.Request]:
        return list(itertools.islice(make(seed), 600))

    def fuzzed(seed: int) -> Iterator[fuzz.Request]:
        return fuzz.fuzzed(DOCUMENT, "tiny", seed, ("/stop_profile",))

    assert first(1, fuzzed) == first(1, fuzzed) != first(2, fuzzed)
    called = Counter(request.path.split("?")[0] for request in first(1, fuzzed))
    assert "/stop_profile" not in called
    assert all(called[path] > 10 for path in BODIES if path != "/stop_profile") and called["/health"] > 3


def allowed(schema: dict[str, Any], value: Any) -> bool:
    """Whether a schema allows a value, by the words our document uses."""
    if "anyOf" in schema:
        return any(allowed(inner, value) for inner in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if "type" not in schema:
        return True
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
    if not isinstance(value, kinds[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        ways = sum(set(way["required"]) <= set(value) for way in schema.get("oneOf", ()))
        return (
            set(schema.get("required", ())) <= set(value)
            and ways == bool(schema.get("oneOf"))
            and all(allowed(known.get(name, rest), item) for name, item in value.items())
        )
    if isinstance(value, list):
        return schema.get("minItems", 0) <= len(value) and all(allowed(schema["items"], item) for item in value)
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
    low, high = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
    return low <= value <= high and value > schema.get("exclusiveMinimum", float("-inf"))


@pytest.mark.parametrize("path", sorted(BODIES))
def test_unspoilt_values_are_what_the_document_allows_and_spoilt_ones_often_are_not(path: str) -> None:
    maker = fuzz.Maker(Random(3))
    values = [maker.value(BODIES[path]) for _ in range(60)]
    assert all(allowed(BODIES[path], value) for value in values)
    if BODIES[path].get("required"):
        spoilt = [maker.spoil(json.loads(json.dumps(value))) for value in values]
        assert sum(not allowed(BODIES[path], value) for value in spoilt) > 5


def test_no_malformed_body_is_a_request() -> None:
    for request in itertools.islice(fuzz.malformed(DOCUMENT, 4), 400):
        try:
            value = json.loads(request.body or b"")
        except ValueError:
            continue
        assert not allowed(BODIES[request.path], value), request


# --- what is noticed --------------------------------------------------------------------------------------------------------


class Bad:
    """A small server that does one thing wrong."""

    def __init__(self) -> None:
        self.status = 200
        self.held = 0
        self.text = "fine"
        self.texts = itertools.repeat("fine")

    async def any(self, request: web.Request) -> web.Response:
        await request.read()
        if request.path == "/openapi.json":
            return web.json_response(DOCUMENT)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        if request.path == "/get_server_info":
            stats = dict.fromkeys(("running", "queued", "rows_used", "cached_pool_tokens"), 0)
            args = {"device": "cpu", "served_model_name": "tiny"}
            return web.json_response({"args": args, "stats": {**stats, "used_tokens": self.held, "total_tokens": 9}})
        if request.path == "/v1/completions" and self.status == 200:
            return web.json_response({"choices": [{"text": next(self.texts), "finish_reason": "length"}]})
        return web.json_response({}, status=200 if request.path in ("/health", "/flush_cache") else self.status)


@pytest.fixture
async def bad() -> AsyncIterator[tuple[Bad, str]]:
    server, app = Bad(), web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", server.any)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def refused(bad: tuple[Bad, str], *names: str, rss: Iterator[float] | None = None) -> str:
    """What the parts say of a server that is not as it should be."""
    line = "--fuzz 40 --malformed 20 --huge-mb 0.1 --huge-copies 1 --queue 8 --concurrency 4 --parts"
    args = hard_knocks.parser().parse_args([*line.split(), *names])
    target = Target(bad[1])
    if rss is not None:
        target.pid, target.rss = 1, lambda: next(rss)  # type: ignore[method-assign]
    with pytest.raises(AssertionError) as caught:
        await hard_knocks.knock(args, target)
    return str(caught.value)


async def test_a_5xx_is_noticed_with_the_request_that_made_it(bad: tuple[Bad, str]) -> None:
    async with aiohttp.ClientSession() as session:
        trial = parts.Trial(Target(bad[1]), session, 4, 0)
        bad[0].status = 500
        with pytest.raises(AssertionError, match=r"^500 for (GET|POST|PUT|DELETE|OPTIONS|HEAD) /"):
            await parts.fuzzing(trial, 30)


async def test_a_malformed_body_that_is_taken_is_noticed(bad: tuple[Bad, str]) -> None:
    assert "200 for POST" in await refused(bad, "malformed")


async def test_pages_that_are_held_are_noticed(bad: tuple[Bad, str], monkeypatch: pytest.MonkeyPatch) -> None:
    bad[0].held = 5
    async with aiohttp.ClientSession() as session:
        with pytest.raises(AssertionError, match=r"still holds \{'used_tokens': 5\}"):
            await Target(bad[1]).settle(session, seconds=0.2)


async def test_another_answer_to_the_honest_is_noticed(bad: tuple[Bad, str]) -> None:
    bad[0].texts = itertools.chain(["first"], itertools.repeat("second"))
    assert "an honest request gets another answer" in await refused(bad, "queue")


async def test_memory_that_grows_is_noticed(bad: tuple[Bad, str]) -> None:
    assert "memory grew from 1.000 to 1.100 GB" in await refused(bad, "queue", rss=iter((1.0, 1.1)))


async def test_a_soak_that_grows_is_noticed(bad: tuple[Bad, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: soak.Soak) -> None:
        self.counts["chat"] += 1

    monkeypatch.setattr(soak.Soak, "one", nothing)
    monkeypatch.setattr(soak.Soak, "run", lambda self, seconds, sample: nothing(self))
    async with aiohttp.ClientSession() as session:
        target = Target(bad[1])
        memory = iter((1.0, 1.2))
        target.rss = lambda: next(memory)  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match=r"memory grew from 1\.000 to 1\.200 GB"):
            await soak.soaking(parts.Trial(target, session, 2, 0), 1.0, 4, 0.05)


def test_flags_of_a_server_that_runs_already_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert hard_knocks.main(["--base-url", "http://127.0.0.1:1", "--page-size", "4"]) == 2
    assert "--page-size" in capsys.readouterr().err
