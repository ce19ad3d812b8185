"""A server started for a benchmark and stopped behind it, or when the benchmark is killed (torch-free)."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from freetoken.errors import StartupError

HEALTHY_SECONDS, STOP_SECONDS = 900.0, 60.0
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _leave_with_parent() -> None:
    """In the child: end when the thread that started it does (Linux, prctl(2)); elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def last_words(log: str, status: int | None) -> str:
    """Why a process ended, from what it wrote: its last error, else its last line; of one that was killed its status."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error: ", "freetoken: "))]
    if errors:
        return errors[-1].partition(": ")[2]
    return lines[-1] if lines and status is not None and status >= 0 else f"exit status {status}"


def _wait_healthy(server: subprocess.Popen[bytes], base: str, log: Path) -> None:
    deadline = time.monotonic() + HEALTHY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            why = last_words(log.read_text(errors="replace"), server.returncode)
            raise StartupError(f"the server ended with status {server.returncode}: {why}")
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise StartupError(f"the server was not ready within {HEALTHY_SECONDS:.0f} s")


def launch(
    words: Sequence[str], port: int, output: IO[bytes] | int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server with arguments ``words`` on ``port``; what it says goes to ``output``. It ends with the thread that calls this."""
    command = [sys.executable, "-m", "freetoken.launch_server", *words, "--port", str(port)]
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment, preexec_fn=_leave_with_parent)


def stop(server: subprocess.Popen[bytes]) -> int:
    """Ask a server to end, and end it where it does not; its exit status."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


@contextmanager
def own_server(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, float]]:
    """``(address, seconds until it was ready)`` of a server with arguments ``words`` on a port of its own, stopped behind the block;
    :class:`StartupError` when it ends or is not ready in time."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as written:
            server = launch(words, port, written, environment)
        try:
            _wait_healthy(server, base, log)
            yield base, time.monotonic() - start
        finally:
            stop(server)


def post(url: str, body: Mapping[str, Any]) -> Any:
    """The JSON answer to a JSON body; :class:`StartupError` where there is none."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise StartupError(f"{url}: status {error.code}: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise StartupError(f"{url}: {error}") from None
