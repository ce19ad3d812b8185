"""A real HTTP server on a free port over the fake scheduler, in threads of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from freetoken.messages import Channel
from freetoken.server.frontend import Frontend
from freetoken.server.http import build_app
from freetoken.server.lifecycle import HttpServer, listen, server_address
from server.fakes import ByteTokenizer, FakeScheduler, in_thread, make_config


@dataclass
class Served:
    """What a test holds of its server."""

    url: str
    frontend: Frontend
    fake: FakeScheduler
    tokenizer: ByteTokenizer
    loop: asyncio.AbstractEventLoop

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def post(self, path: str, value: object, **kwargs: object) -> httpx.Response:
        return httpx.post(self.url + path, json=value, timeout=60, **kwargs)

    def post_text(self, path: str, text: str) -> httpx.Response:
        """A body that is not made by a JSON library."""
        return httpx.post(self.url + path, content=text.encode(), timeout=60)

    def get(self, path: str, **kwargs: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **kwargs)

    def chat(self, text: str, **fields: object) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: object, **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def until(self, condition: Callable[[], object], seconds: float = 5.0) -> None:
        """Wait for something to become true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)

    def empty(self) -> bool:
        """All accounts of the frontend are back at nothing."""
        frontend = self.frontend
        return not (frontend._generations or frontend.live or frontend._in_system or frontend._waiting_tokens)


@contextlib.contextmanager
def serving(
    *, ready: bool = True, delay: float = 0.001, chat_template: str | None = "default", **args: object
) -> Iterator[Served]:
    """Start a server; ``args`` are flags."""
    config = make_config(**args)
    tokenizer = ByteTokenizer() if chat_template == "default" else ByteTokenizer(chat_template)
    channel = Channel.create()
    listener = listen("127.0.0.1", 0)
    made: dict[str, object] = {}
    running = threading.Event()

    async def serve() -> None:
        frontend = Frontend(config, tokenizer, channel)
        frontend.open()
        server = HttpServer(build_app(frontend), frontend)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        made.update(frontend=frontend, server=server, loop=asyncio.get_running_loop())
        running.set()
        if ready:

            async def open_up() -> None:
                await frontend.wait_scheduler()
                frontend.mark_ready()

            made["opener"] = asyncio.ensure_future(open_up())
        await server.serve(sockets=[listener])
        frontend.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    url = server_address(listener)
    thread.start()
    running.wait(5)
    fake = FakeScheduler(config, channel.folder, delay)
    in_thread(fake, ready)
    served = Served(url, made["frontend"], fake, tokenizer, made["loop"])  # type: ignore[arg-type]
    try:
        if ready:
            served.until(lambda: served.get("/health", headers={}).status_code == 200)
        yield served
    finally:
        made["loop"].call_soon_threadsafe(made["server"].leave)  # type: ignore[attr-defined]
        thread.join(10)
        fake.exit_code = 0
        channel.remove()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One server with default flags for a whole module; its accounts must be empty in the end."""
    with serving() as served:
        yield served
        served.until(served.empty)
