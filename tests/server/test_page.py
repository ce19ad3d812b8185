"""The page at ``/``: what is sent without a browser, and how it works in headless Chromium where there is one."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.conftest import Served, serving

try:
    from playwright.sync_api import Browser, Page, expect, sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(
    sync_playwright is None or CHROMIUM is None,
    reason="needs playwright and the system's chromium",
)


# --- without a browser ----------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(server: Served) -> None:
    answer = server.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    html = answer.text
    assert len(answer.content) < 40_000
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", html) and "http://" not in html and "https://" not in html
    assert "@import" not in html and "url(" not in html
    assert not re.search(r"\son\w+=|\sstyle=", html), "the policy would block it"


def test_the_policy_allows_the_pages_own_script_and_style_alone(server: Served) -> None:
    answer = server.get("/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert policy[name] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_every_control_has_a_name(server: Served) -> None:
    html = server.get("/").text
    for tag, attributes in re.findall(r"<(input|textarea|button|svg)\b([^>]*)>", html):
        inside_label = re.search(rf"<label[^>]*>[^<]*<{tag}{re.escape(attributes)}>", html)
        named = inside_label or "aria-label=" in attributes
        assert named or re.search(rf"<{tag}{re.escape(attributes)}>[^<]+</{tag}>", html), (tag, attributes)
    assert '<html lang="en">' in html and "<title>" in html


def test_live_view_is_small_and_never_asks_the_scheduler(server: Served) -> None:
    server.complete("count", max_tokens=3)
    steps = server.fake.steps
    answer = server.get("/live")
    assert answer.status_code == 200 and len(answer.content) < 8000
    live = answer.json()
    assert live["status"] == "ready" and live["model"] == "tiny" and live["loading"] is None
    assert live["kv"] == {"used": 10, "cached": 0, "total": 1000} and live["checkpoints"] is None
    assert live["kernels"] == [{"op": "norm", "impl": "reference", "why": ""}]
    assert live["flags"]["context_length"] == 4096 and live["steps"] == steps
    assert server.fake.steps == steps


def test_the_page_is_open_and_its_numbers_are_not() -> None:
    with serving(api_key="secret") as served:
        assert served.get("/").status_code == 200
        refused = served.get("/live")
        assert refused.status_code == 401 and "secret" not in refused.text
        answer = served.get("/live", headers={"Authorization": "Bearer secret"})
        assert answer.json()["flags"]["api_key"] == "set" and "secret" not in answer.text


def test_live_view_while_loading() -> None:
    with serving(ready=False) as served:
        live = served.get("/live").json()
        assert live["status"] == "loading" and live["loading"]["phase"] == "starting"


# --- in a browser -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh profile; whatever the console complains of fails the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 700}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(15_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    # Refusals are part of the tests, and Chromium reports every such answer.
    assert [text for text in problems if not text.startswith("Failed to load resource")] == []
    context.close()


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last(page: Page, part: str) -> Any:
    return page.locator(f".turn.assistant:last-child .{part}")


@in_browser
def test_chat_streams_folds_thinking_away_and_shows_text_as_text(server: Served, page: Page) -> None:
    page.goto(server.url)
    say(page, "say:<think>let me see</think>It is <b>42</b>.")
    expect(last(page, "note")).to_contain_text("tokens")
    expect(last(page, "text")).to_have_text("It is <b>42</b>.")
    fold = last(page, "thought")
    assert fold.get_attribute("open") is None
    expect(fold.get_by_text("let me see")).to_be_hidden()
    fold.get_by_text("Thinking").click()
    expect(fold.get_by_text("let me see")).to_be_visible()
    # The next question carries the conversation, without the thoughts of the answer before.
    say(page, "and now?")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    expect(last(page, "note")).to_contain_text("tokens")
    prompt = bytes(token for token in server.fake.added[-1].ids if token < 256).decode()
    assert "assistant\nIt is <b>42</b>." in prompt and prompt.count("let me see") == 1


@in_browser
def test_stop_by_button_and_by_key_aborts_and_keeps_what_was_said(page: Page) -> None:
    with serving(delay=0.01) as served:
        page.goto(served.url)
        for number, stop in enumerate((lambda: page.get_by_role("button", name="Stop").click(), None), 1):
            say(page, "count")
            expect(last(page, "text")).to_contain_text("abc")
            if stop is not None:
                stop()
            else:
                page.keyboard.press("Escape")
            expect(last(page, "note")).to_have_text("stopped")
            served.until(lambda number=number: len(served.fake.aborted) == number and not served.fake.live)
        expect(last(page, "text")).to_contain_text("abc")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.get_by_role("button", name="New").click()
        expect(page.locator(".turn")).to_have_count(0)


@in_browser
def test_an_error_is_shown_and_is_no_part_of_the_conversation(server: Served, page: Page) -> None:
    page.goto(server.url)
    say(page, "fail:")
    expect(page.get_by_role("alert")).to_have_text("the pool can never hold this")
    say(page, "say:fine")
    expect(last(page, "text")).to_have_text("fine")
    assert "fail:" not in bytes(token for token in server.fake.added[-1].ids if token < 256).decode()


@in_browser
def test_live_view_moves_and_shows_kernels_and_flags(page: Page) -> None:
    with serving(delay=0.01) as served:
        page.goto(served.url)
        expect(page.get_by_role("status")).to_have_text("ready")
        say(page, "count")
        expect(page.locator("#requests")).to_have_text("1 / 0")
        page.keyboard.press("Escape")
        page.get_by_text("Kernels").click()
        expect(page.locator("#kernels")).to_contain_text("reference")
        page.get_by_text("Flags").click()
        expect(page.locator("#flags")).to_contain_text("context_length")
        served.until(served.empty)


@in_browser
def test_a_key_is_typed_in(page: Page) -> None:
    with serving(api_key="secret") as served:
        page.goto(served.url)
        expect(page.get_by_role("status")).to_have_text("needs the API key")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.get_by_role("status")).to_have_text("ready")
        say(page, "say:let in")
        expect(last(page, "text")).to_have_text("let in")
        assert httpx.get(served.url + "/live", timeout=20).status_code == 401


@in_browser
def test_light_and_dark_by_system_and_by_button_and_all_by_keyboard(server: Served, page: Page, tmp_path: Path) -> None:
    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.goto(server.url)
    expect(page.get_by_role("status")).to_have_text("ready")
    light, light_shot = ground(), page.screenshot(path=tmp_path / "light.png")
    page.emulate_media(color_scheme="dark")
    dark, dark_shot = ground(), page.screenshot(path=tmp_path / "dark.png")
    assert light != dark and light_shot != dark_shot
    page.get_by_role("button", name="Light").press("Enter")
    assert ground() == light
    page.reload()
    assert ground() == light
    # Tab reaches every control in the order of the page, and each one shows that it has the focus.
    page.locator("a.skip").focus()
    seen = []
    for _ in range(9):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    wanted = ["key", "theme", "log", "prompt", "send", "clear", "Settings", "Kernels", "Flags"]
    assert seen == wanted
    page.set_viewport_size({"width": 360, "height": 640})
    page.screenshot(path=tmp_path / "narrow.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a narrow window scrolls sideways"
