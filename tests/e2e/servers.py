"""Start the real server as a process of its own, and look inside it from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        command = [sys.executable, "-m", "freetoken.launch_server", "--port", str(self.port), *self._args]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **self._env}
        env.pop("TRITON_INTERPRET", None)
        self.process = subprocess.Popen(command, env=env, stdout=self._log, stderr=subprocess.STDOUT, cwd=ROOT)
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

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Send ``signum`` and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop:\n{self.output()}") from None

    @property
    def scheduler(self) -> psutil.Process:
        """The scheduler process: the child that holds the most memory."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return max(children, key=lambda child: child.memory_info().rss)

    def cpu_seconds(self) -> float:
        """CPU time of the server and its children so far."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

    def info(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/get_server_info", timeout=10).json()

    def metric(self, name: str) -> float:
        """Value of an unlabelled metric from ``/metrics``."""
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line.split(" ")[0].split("{")[0] == name:
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)
