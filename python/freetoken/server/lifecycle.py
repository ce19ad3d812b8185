"""The life of the two processes: listening, signals, the child scheduler and its end (torch-free)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess

import uvicorn
from starlette.types import ASGIApp

from freetoken.errors import StartupError
from freetoken.server.frontend import Frontend
from freetoken.server_args import Config

log = logging.getLogger(__name__)

STOP_SECONDS = 20.0
_LAST_WORDS = 0.2
_FLUSH_SECONDS = 0.3
_TICK_SECONDS = 0.5
_M_MMAP_THRESHOLD = -3


def give_memory_back() -> None:
    """Have every allocation of a megabyte or more returned to the system when it is freed, where the C library is glibc.

    It would keep more and more of them for itself after the first large body, and such bodies leave holes everywhere.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; :class:`StartupError` when the address is taken or not ours."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error} (--host, --port)") from None
    return listener


def server_address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Uvicorn with our signals: the first one drains, a second SIGINT or SIGTERM ends at once.

    ``signals`` are those that counted; ``interrupted`` is true after the second. A SIGHUP that finds the server draining does not
    count, since a closing terminal sends several, and a service manager one after its SIGTERM.
    """

    def __init__(self, app: ASGIApp, frontend: Frontend) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=2,
            )
        )
        self.signals: list[int] = []
        self.interrupted = False
        self._frontend = frontend
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        yield

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self.signals:
            return
        self.signals.append(number)
        if len(self.signals) > 1:
            self.interrupted = self.force_exit = True
            self.leave()
            return
        log.info(
            "%s: finishing what is running; SIGINT or SIGTERM from now on stops at once", signal.Signals(number).name
        )
        self._frontend.drain()
        self._tasks.append(asyncio.ensure_future(self._leave_when_idle()))

    async def _leave_when_idle(self) -> None:
        await self._frontend.wait_idle()
        self.leave()

    def leave(self) -> None:
        """End :meth:`serve` soon."""
        self.should_exit = True
        self._wake.set()

    def leave_soon(self) -> None:
        """End :meth:`serve` after the answers that were just given have been sent."""
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.leave)

    async def main_loop(self) -> None:
        """As uvicorn's own, which wakes ten times a second, but twice; :meth:`leave` wakes it at once."""
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _TICK_SECONDS)


class Scheduler:
    """The scheduler's process, watched: when it ends unasked, the frontend is told why.

    ``target`` is ``module:function``, called in the child as ``function(config, channel_folder)``. The child starts with
    SIGINT, SIGTERM and SIGHUP ignored, since a terminal or a service manager sends them to both processes and the parent decides.
    """

    def __init__(self, target: str, config: Config, folder: str, frontend: Frontend) -> None:
        self._process: SpawnProcess = multiprocessing.get_context("spawn").Process(
            target=run_child, args=(target, config, folder), name="freetoken-scheduler"
        )
        self._frontend = frontend
        self._ended = asyncio.Event()
        self._asked = False

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self) -> None:
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_exit)

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()
        if not self._asked:
            # Its last message, which says more than an exit code, may still be on its way.
            loop.call_later(_LAST_WORDS, self._frontend.scheduler_gone, self._how_it_ended())

    def _how_it_ended(self) -> str:
        code = self._process.exitcode or 0
        if code >= 0:
            return f"the scheduler ended unexpectedly with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the scheduler was killed by {name}"

    async def stop(self, at_once: bool) -> int:
        """End the child and give its exit code: asked politely if it serves, killed when it does not listen."""
        self._asked = True
        if not self._ended.is_set():
            if at_once or not self._frontend.scheduler_ready or self._frontend.status.state == "failed":
                self._process.kill()
            else:
                self._frontend.shut_scheduler()
            try:
                await asyncio.wait_for(self._ended.wait(), STOP_SECONDS)
            except asyncio.TimeoutError:
                log.warning("the scheduler did not stop within %g seconds and is killed", STOP_SECONDS)
                self._process.kill()
                await self._ended.wait()
        return self._process.exitcode or 0

    def kill(self) -> None:
        """Make sure that nothing is left, whatever went wrong."""
        self._asked = True
        if self._process.pid is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


def _leave_with_parent(folder: str) -> None:
    """Wait for the end of the server process, and end this one: whatever it is doing, nobody is left to hear of it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    log.error("the server process is gone; stopping")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def run_child(target: str, config: Config, folder: str) -> None:
    """Entry of the child process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(folder,), name="freetoken-parent", daemon=True).start()
    module, _, function = target.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(config, folder))
