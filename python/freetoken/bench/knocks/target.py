"""The server that is knocked at: started here or elsewhere, and what can be seen of it from outside (torch-free)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from freetoken import environ
from freetoken.bench.extra import aiohttp
from freetoken.bench.own_server import free_port, launch, stop
from freetoken.errors import StartupError

HONEST: dict[str, Any] = {
    "prompt": "the cat sat on the mat and",
    "max_tokens": 16,
    "temperature": 0,
    "seed": 1,
    "ignore_eos": True,
}


class Target:
    """One server. ``pid`` is its process if it is known; without it memory is not looked at."""

    def __init__(self, url: str, pid: int | None = None, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url = url
        self.pid = pid
        self._process = process
        self.log: Path | None = None

    @classmethod
    def start(cls, flags: Sequence[str], checked: bool = True) -> Target:
        """Start a server of ``flags`` on a free port; its books are checked after every step if ``checked``."""
        port = free_port()
        handle, name = tempfile.mkstemp(prefix="freetoken-knocks-", suffix=".txt")
        environment = environ.for_child({"FREETOKEN_CHECK_INVARIANTS": str(int(checked))})
        process = launch(["--log-requests", "off", *flags], port, handle, environment)
        os.close(handle)
        target = cls(f"http://127.0.0.1:{port}", process.pid, process)
        target.log = Path(name)
        return target

    def log_tail(self) -> str:
        """The last lines of the log of a server that was started here."""
        return "" if self.log is None else "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def stop(self) -> int:
        """Ask a server that was started here to end; its exit code, 0 for one started elsewhere."""
        if self._process is None:
            return 0
        code = stop(self._process)
        if self.log is not None:
            self.log.unlink(missing_ok=True)
        return code

    def alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def rss(self) -> float:
        """Resident memory of the server and its children in GB (10^9 bytes); 0 where the process is not known."""
        if self.pid is None:
            return 0.0
        try:
            top = psutil.Process(self.pid)
            return sum(float(p.memory_info().rss) for p in (top, *top.children(recursive=True))) / 1e9
        except psutil.NoSuchProcess:
            return 0.0

    async def wait_ready(self, session: aiohttp.ClientSession, seconds: float = 600.0) -> None:
        """Until ``/health`` says so; :class:`StartupError` with the end of the log when it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.alive():
            try:
                async with session.get(self.url + "/health") as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(0.1)
        raise StartupError(f"the server at {self.url} does not become ready: {self.log_tail() or 'no answer'}")

    async def info(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        async with session.get(self.url + "/get_server_info") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def honest(self, session: aiohttp.ClientSession) -> str:
        """The text of a request that has always the same answer; an error is an ``AssertionError``."""
        async with session.post(self.url + "/v1/completions", json=HONEST) as answer:
            body = await answer.json()
            assert answer.status == 200, f"an honest request is answered {answer.status}: {body}"
            return str(body["choices"][0]["text"])

    async def settle(self, session: aiohttp.ClientSession, seconds: float = 60.0) -> None:
        """Until nothing runs and the cache has been emptied; ``AssertionError`` for what is still held then."""
        deadline = time.monotonic() + seconds
        held: dict[str, Any] = {}
        while time.monotonic() < deadline:
            stats = (await self.info(session))["stats"]
            names = ("running", "queued", "used_tokens", "rows_used")
            held = {name: stats[name] for name in names if stats[name]}
            if not held:
                break
            time.sleep(0.05)
        assert not held, f"after {seconds:g} seconds the scheduler still holds {held}"
        async with session.post(self.url + "/flush_cache") as answer:
            assert answer.status == 200, await answer.text()
        stats = (await self.info(session))["stats"]
        left = {name: stats[name] for name in ("used_tokens", "cached_pool_tokens", "rows_used") if stats[name]}
        assert not left, f"after a flush {left} do not add up to {stats['total_tokens']} free tokens"
