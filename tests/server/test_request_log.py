"""The log of requests, the allow-list of origins, large bodies off the event loop, and the slow client put in on purpose."""

from __future__ import annotations

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread

import httpx
import pytest

from freetoken.server import wire
from server.conftest import Served, serving
from server.test_http_faults import raw_request

SECRET = "zebra crossing"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "freetoken.requests"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="freetoken.requests")
    return caplog


def talk(served: Served) -> None:
    served.chat(SECRET, max_tokens=3, stop=[SECRET], rid="mine", temperature=0.5)
    served.complete(SECRET, max_tokens=2, stream=True)
    served.until(served.empty)


def test_one_line_a_request_without_any_text(server: Served, log: pytest.LogCaptureFixture) -> None:
    talk(server)
    server.get(f"/nothing?key={SECRET.replace(' ', '+')}")
    server.get("/health")
    server.until(lambda: len(lines(log)) == 3)
    chat, complete, missing = lines(log)
    assert re.fullmatch(
        r'127\.0\.0\.1 "POST /v1/chat/completions" 200 in \d+\.\d{3} s, mine: \d+ prompt tokens \(7 cached\), '
        r"3 output tokens, length",
        chat,
    )
    assert '"POST /v1/completions" 200' in complete and "2 output tokens, length" in complete
    assert '"GET /nothing" 404' in missing and "prompt tokens" not in missing
    assert not any("zebra" in line for line in lines(log))


def test_parameters_too_but_no_text(log: pytest.LogCaptureFixture) -> None:
    with serving(log_requests="params") as served:
        talk(served)
    start = next(line for line in lines(log) if line.startswith("mine: "))
    assert (
        start.startswith("mine: 1 prompts, 1 outputs, ") and "temperature=0.5" in start and "max_new_tokens=3" in start
    )
    assert any("1 outputs, streamed" in line for line in lines(log))
    assert not any("zebra" in line for line in lines(log))


def test_text_where_it_is_asked_for(log: pytest.LogCaptureFixture) -> None:
    with serving(log_requests="text") as served:
        served.chat(f"say:{SECRET}", rid="mine\nforged line")
        served.until(lambda: len(lines(log)) >= 4)
    said = lines(log)
    assert any("prompt" in line and SECRET in line for line in said)
    assert f"mine\\nforged line: output 0 {SECRET}" in said
    assert not any("\n" in line for line in said)


def test_off(log: pytest.LogCaptureFixture) -> None:
    with serving(log_requests="off") as served:
        talk(served)
    assert lines(log) == []


def test_a_path_cannot_forge_a_line(server: Served, log: pytest.LogCaptureFixture) -> None:
    server.get("/a%0A12:00:00 INFO root: all is well" + "x" * 1000)
    server.until(lambda: lines(log))
    (line,) = lines(log)
    assert "\n" not in line and len(line) < 300


def test_a_client_that_leaves_is_told_of(server: Served, log: pytest.LogCaptureFixture) -> None:
    connection = raw_request(server, {"prompt": "hang:"})
    server.until(lambda: server.frontend.live)
    connection.close()
    server.until(lambda: lines(log))
    assert "closed by the client" in lines(log)[0] and "no output" in lines(log)[0]
    assert ": 6 prompt tokens (0 cached), 0 output tokens" in lines(log)[0]
    server.until(server.empty)


@pytest.mark.parametrize("stream", [True, False])
def test_the_tokens_until_a_client_left_are_told(server: Served, log: pytest.LogCaptureFixture, stream: bool) -> None:
    """Of both choices, what was generated and not merely what was sent."""
    before = server.frontend.metrics.generation_tokens._value.get()
    connection = raw_request(server, {"prompt": "count", "max_tokens": 4000, "n": 2, "stream": stream})
    server.until(lambda: server.frontend.metrics.generation_tokens._value.get() >= before + 20)
    connection.close()
    server.until(lambda: lines(log))
    told = re.search(r": 6 prompt tokens \(5 cached\), (\d+) output tokens, cut off$", lines(log)[0])
    assert told is not None and 20 <= int(told[1]) < 8000
    server.until(server.empty)


@pytest.mark.parametrize("stream", [True, False])
def test_the_tokens_of_an_answer_that_ends_in_an_error_are_told(
    server: Served, log: pytest.LogCaptureFixture, stream: bool
) -> None:
    server.complete("late:", stream=stream, max_tokens=9)
    server.until(lambda: lines(log))
    assert lines(log)[0].endswith(": 6 prompt tokens (5 cached), 3 output tokens, error")


@pytest.mark.parametrize("stream", [True, False])
def test_the_tokens_until_the_scheduler_was_gone_are_told(log: pytest.LogCaptureFixture, stream: bool) -> None:
    """One choice has ended, one speaks and one has not begun."""
    with serving() as served:
        prompts = ["say:hello", "count", "hang:"]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.complete, prompts, stream=stream, max_tokens=4000)
            served.until(lambda: served.frontend.metrics.generation_tokens._value.get() >= 30)
            served.loop.call_soon_threadsafe(served.frontend.scheduler_gone, "the scheduler is gone")
            assert ("the scheduler is gone" in answer.result().text) and answer.result().text.count('"error"') == 1
        served.until(lambda: lines(log))
    told = re.search(r": 22 prompt tokens \(12 cached\), (\d+) output tokens, error and stop$", lines(log)[0])
    assert told is not None and int(told[1]) >= 30


# --- origins ----------------------------------------------------------------------------------------------------------------

ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_origins_on_the_list_may_call_and_others_may_not() -> None:
    with serving(cors_allow_origins=["https://a.example", "http://localhost:3000"], api_key="secret") as served:
        for origin, allowed in (
            ("https://a.example", True),
            ("http://localhost:3000", True),
            ("https://b.example", False),
        ):
            ask = httpx.options(served.url + "/v1/chat/completions", headers={"Origin": origin, **ASK}, timeout=20)
            assert (ask.headers.get("access-control-allow-origin") == origin) is allowed
            assert ask.status_code == (200 if allowed else 400)
            if allowed:
                assert "authorization" in ask.headers["access-control-allow-headers"].lower()
            # The answer to the call itself, refused for want of a key, can be read by the pages that may call; from others
            # the call is refused whatever key it has.
            refused = served.post("/v1/completions", {"prompt": "x"}, headers={"Origin": origin})
            assert refused.status_code == (401 if allowed else 403)
            assert (refused.headers.get("access-control-allow-origin") == origin) is allowed


def test_no_list_means_no_origin(server: Served) -> None:
    ask = httpx.options(server.url + "/v1/completions", headers={"Origin": "https://a.example", **ASK}, timeout=20)
    assert ask.status_code == 405 and "access-control-allow-origin" not in ask.headers
    assert "access-control-allow-origin" not in server.get("/health", headers={"Origin": "https://a.example"}).headers


def test_a_star_means_all() -> None:
    with serving(cors_allow_origins=["*"]) as served:
        answer = served.get("/health", headers={"Origin": "https://anything.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


def test_a_foreign_page_cannot_send_what_a_browser_does_not_ask_about_first() -> None:
    def post(served: Served, origin: str, site: str) -> httpx.Response:
        headers = {"Origin": origin, "Sec-Fetch-Site": site, "Content-Type": "text/plain"}
        return httpx.post(served.url + "/abort_request", content=b'{"abort_all": true}', headers=headers, timeout=20)

    with serving(cors_allow_origins=["https://a.example"]) as served:
        refused = post(served, "https://b.example", "cross-site")
        assert refused.status_code == 403 and "--cors-allow-origins" in refused.json()["error"]["message"]
        assert served.fake.aborted == []
        assert post(served, "https://a.example", "cross-site").status_code == 200
        assert post(served, served.url, "same-origin").status_code == 200
        assert served.get("/health", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_an_origin_is_enough_to_know_a_foreign_page_by() -> None:
    """Browsers without ``Sec-Fetch-Site``, and pages whose origin is hidden."""

    def status(served: Served, path: str = "/abort_request", **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if path == "/live":
            return served.get(path, headers=named).status_code
        return httpx.post(served.url + path, content=b'{"abort_all": true}', headers=named, timeout=20).status_code

    with serving(cors_allow_origins=["https://a.example"]) as served:
        own = served.url.removeprefix("http://")
        port = own.rpartition(":")[2]
        foreign = (
            "https://b.example",
            "null",
            "",
            "http://127.0.0.1",
            f"http://localhost:{port}",
            own,
            f"file://{own}",
        )
        for origin in foreign:
            assert status(served, Origin=origin) == 403, origin
            assert status(served, "/live", Origin=origin) == 403, origin
        assert status(served, Origin="https://b.example", Sec_Fetch_Site="same-origin") == 403
        assert served.fake.aborted == []
        assert status(served) == 200
        for origin in ("https://a.example", f"http://{own}", f"https://{own}"):
            assert status(served, Origin=origin) == status(served, "/live", Origin=origin) == 200, origin
        assert status(served, Origin="https://Page.example:8", Host="page.example:8") == 200
        refused = served.post("/v1/messages", {}, headers={"Origin": "null"})
        assert refused.status_code == 403 and refused.json()["type"] == "error"
    with serving(cors_allow_origins=["null"]) as served:
        assert status(served, Origin="null") == 200


# --- large bodies, slow clients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 2**20 + 1])
def test_large_bodies_are_parsed_on_a_thread(server: Served, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    threads: list[str] = []
    real = wire.parse_large_object
    monkeypatch.setattr(wire, "parse_large_object", lambda data: threads.append(current_thread().name) or real(data))
    assert server.complete("say:x", ignored_field="y" * size).status_code == 200
    assert all(name.startswith("freetoken-body") for name in threads) and len(threads) == (size > 4096)
    broken = httpx.post(server.url + "/v1/completions", content=b"[" * size, timeout=20)
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json"


def test_the_slow_client_switch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FREETOKEN_FAULT_SLOW_CLIENT", "0.05")
    with serving() as served:
        began = time.monotonic()
        answer = served.complete("count", max_tokens=40, stream=True)
        # Events gather while the client is slow; none is lost.
        assert answer.text.count('"text"') < 40 and time.monotonic() - began >= 0.15
        assert "".join(re.findall(r'"text":"([a-z]*)"', answer.text)) == ("abcdefghijklmnopqrstuvwxyz" * 2)[:40]
        served.until(served.empty)
    assert "FREETOKEN_FAULT_SLOW_CLIENT=0.05" in caplog.text
