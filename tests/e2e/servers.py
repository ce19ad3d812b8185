"""Start the real server as a process of its own, and look inside it from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(*args: str) -> list[str]:
    """The command line of a server."""
    return [sys.executable, "-m", "freetoken.launch_server", *args]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: this process' own, without what only tests need."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", **(extra or {})}
    env.pop("TRITON_INTERPRET", None)
    return env


def wait_until(condition: Callable[[], bool], seconds: float, what: str = "the condition") -> float:
    """Wait for ``condition`` and return the seconds it took; ``AssertionError`` after ``seconds``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"{what} did not come true within {seconds:g} seconds"
        time.sleep(0.02)
    return time.monotonic() - start


class Server:
    """``python -m freetoken.launch_server`` with ``args``; use as a context manager.

    Its output goes to a file (``output()``), so that a full pipe never blocks it.
    """

    def __init__(self, *args: str, env: dict[str, str] | None = None, wait: float = 120.0) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._args = args
        self._env = env or {}
        self._wait = wait
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".txt")  # noqa: SIM115 - lives as long as the server

    def __enter__(self) -> Server:
        line = command("--port", str(self.port), *self._args)
        env = environment(self._env)
        self.process = subprocess.Popen(line, env=env, stdout=self._log, stderr=subprocess.STDOUT, cwd=ROOT)
        deadline = time.monotonic() + self._wait
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.output()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
            time.sleep(0.05)
        self.stop()
        raise AssertionError(f"the server did not become healthy:\n{self.output()}")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def output(self) -> str:
        return Path(self._log.name).read_text()

    def wait(self, timeout: float = 30.0) -> int:
        """The exit code of a server that is going down; it is killed and the test fails if it does not."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop:\n{self.output()}") from None

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Send ``signum`` and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.wait(timeout)

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    @property
    def scheduler(self) -> psutil.Process:
        """The scheduler process: the child that holds the most memory."""
        return max(self.processes()[1:], key=lambda child: child.memory_info().rss)

    def cpu_seconds(self) -> float:
        """CPU time of the server and its children so far."""
        return sum(p.cpu_times().user + p.cpu_times().system for p in self.processes())

    def info(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/get_server_info", timeout=10).json()

    def stats(self) -> dict[str, Any]:
        """The scheduler's numbers of this moment."""
        return self.info()["stats"]

    def is_empty(self) -> bool:
        """Whether no request holds or waits for anything."""
        now = self.stats()
        return now["running"] == now["queued"] == now["used_tokens"] == now["rows_used"] == 0

    def metrics(self) -> dict[str, float]:
        """All samples of ``/metrics``; the key is the name with its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def metric(self, name: str) -> float:
        """Value of an unlabelled metric; the first one of a labelled metric."""
        for key, value in self.metrics().items():
            if key.partition("{")[0] == name:
                return value
        raise KeyError(name)

    def post(self, path: str, timeout: float = 60.0, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of ``processes`` runs any more."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def failed_start(*args: str, env: dict[str, str] | None = None, timeout: float = 60.0) -> tuple[int, str]:
    """``(exit code, stderr)`` of a server that does not come up. It and its children are gone when this returns, or the
    call fails: stderr ends only once every process that holds it has ended."""
    done = subprocess.run(
        command(*args), env=environment(env), cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.stdout == ""
    return done.returncode, done.stderr
