"""The whole server as processes: start, faults, signals, two at once; the scheduler in it is a fake."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from freetoken.launch_server import Opened, main
from freetoken.server_args import ServerArgs, model_overrides
from server.fakes import ByteTokenizer, make_config

ROOT = Path(__file__).resolve().parents[2]
MAIN = """
import sys
from freetoken.launch_server import Opened, main
from server.fakes import ByteTokenizer, make_config
def opened(args):
    return Opened("tiny", make_config().model, ByteTokenizer())
if __name__ == "__main__":
    target = sys.argv[1] if ":" in sys.argv[1] else "server.fakes:" + sys.argv[1]
    sys.exit(main(sys.argv[2:], scheduler=target, open_checkpoint=opened))
"""


class Process:
    """A server process; its log is collected, and its address read from the ready line. With ``terminal``, the side of a pseudo-terminal
    that it is to have as its own, it writes there instead."""

    def __init__(
        self, target: str, *flags: str, port: int = 0, env: dict[str, str] | None = None, terminal: int | None = None
    ) -> None:
        path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, target, "--port", str(port), "--device", "cpu", *flags],
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stderr=subprocess.PIPE if terminal is None else terminal,
            stdout=subprocess.DEVNULL if terminal is None else terminal,
            text=True,
            start_new_session=terminal is not None,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
        )
        self.log: list[str] = []
        if terminal is not None:
            return
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def find(self, pattern: str, seconds: float = 15.0) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self.log):
                if found := re.search(pattern, line):
                    return found
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} not in {self.log}")

    def ready(self) -> str:
        return self.find(r"ready at (http://\S+):").group(1)

    def end(self, seconds: float = 10.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def text(self) -> str:
        return "".join(self.log)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes to be killed at the end of the test."""
    processes: list[Process] = []
    yield processes
    for item in processes:
        item.process.kill()
        item.process.wait()


def chat(url: str, text: str, **fields: object) -> dict[str, object]:
    return {"url": url + "/v1/chat/completions", "json": {"messages": [{"role": "user", "content": text}], **fields}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_serves_drains_and_exits_0(number: signal.Signals, started: list[Process]) -> None:
    server = Process("run_scheduler")
    started.append(server)
    url = server.ready()
    assert "1,000 KV tokens" in server.text() and "norm reference" in server.text()
    answers: list[httpx.Response] = []
    worker = threading.Thread(
        target=lambda: answers.append(httpx.post(**chat(url, "count", max_tokens=600), timeout=20))
    )
    worker.start()
    time.sleep(0.3)
    server.process.send_signal(number)
    time.sleep(0.1)
    refused = httpx.post(**chat(url, "say:late"))
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    assert httpx.get(url + "/health").status_code == 503
    server.process.send_signal(signal.SIGHUP)
    worker.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 600
    assert server.end() == 0
    assert "Traceback" not in server.text()


def test_a_closed_terminal_drains(started: list[Process]) -> None:
    """Both processes are told, and what they still write goes nowhere."""
    terminal, side = os.openpty()
    server = Process("run_scheduler", terminal=side)
    os.close(side)
    started.append(server)
    shown = b""
    while b"\n" not in shown.partition(b"ready at ")[2]:
        shown += os.read(terminal, 4096)
    url = re.search(rb"ready at (http://\S+):", shown)
    assert url is not None
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, **chat(url[1].decode(), "count", max_tokens=600), timeout=20)
        while httpx.get(url[1].decode() + "/live").json()["running"] < 1 and not answer.done():
            time.sleep(0.01)
        os.close(terminal)
        os.killpg(server.process.pid, signal.SIGHUP)  # as the end of the shell would
        assert answer.result().json()["usage"]["completion_tokens"] == 600
    assert server.process.wait(10) == 0


def test_under_nohup_sighup_changes_nothing(started: list[Process]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = Process("run_scheduler")
    finally:
        signal.signal(signal.SIGHUP, before)
    started.append(server)
    url = server.ready()
    server.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert httpx.post(**chat(url, "say:still here")).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_second_signal_ends_at_once(started: list[Process]) -> None:
    server = Process("run_scheduler")
    started.append(server)
    url = server.ready()
    answers: list[httpx.Response] = []
    worker = threading.Thread(target=lambda: answers.append(httpx.post(**chat(url, "hang:"), timeout=20)))
    worker.start()
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.end(5) == 128 + signal.SIGINT
    worker.join()
    assert answers[0].status_code == 503


def test_killed_scheduler_gives_every_request_one_error_and_ends_the_server(started: list[Process]) -> None:
    server = Process("run_scheduler")
    started.append(server)
    url = server.ready()
    pid = httpx.get(url + "/get_server_info").json()["live"]["pid"]
    whole: list[httpx.Response] = []
    lines: list[str] = []

    def stream() -> None:
        with httpx.stream("POST", **chat(url, "count", stream=True), timeout=20) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    workers = [threading.Thread(target=lambda: whole.append(httpx.post(**chat(url, "count"), timeout=20)))]
    workers.append(threading.Thread(target=stream))
    for worker in workers:
        worker.start()
    time.sleep(0.5)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for worker in workers:
        worker.join(2)
    assert time.monotonic() - killed < 1.0
    assert whole[0].status_code == 503 and "SIGKILL" in whole[0].json()["error"]["message"]
    assert sum('"error"' in line for line in lines) == 1 and '"error"' in lines[-1] and "[DONE]" not in lines[-1]
    assert server.end(3) == 1
    assert time.monotonic() - killed < 3.0
    assert "killed by SIGKILL" in server.log[-1] and "Traceback" not in server.text()


@pytest.mark.parametrize(
    ("target", "says"), [("run_failing", "model.safetensors is cut short"), ("run_dying", "killed by SIGKILL")]
)
def test_child_failing_before_ready_is_one_sentence(started: list[Process], target: str, says: str) -> None:
    server = Process(target, "--log-level", "error")
    started.append(server)
    assert server.end() == 1
    assert len(server.log) == 1 and says in server.log[0]


def test_health_shows_the_phase_while_loading_and_requests_are_refused(started: list[Process]) -> None:
    port = free_port()
    server = Process("run_slow_start", port=port, env={"FREETOKEN_LAUNCH_TIMEOUT": "3"})
    started.append(server)
    server.find(r"weights: 75 % \(3.0 of 4.0 MiB")
    url = f"http://127.0.0.1:{port}"
    health = httpx.get(url + "/health")
    assert health.status_code == 503
    assert health.json() == {
        "status": "loading",
        "phase": "weights",
        "done": 3 * 2**20,
        "total": 4 * 2**20,
        "unit": "bytes",
    }
    refused = httpx.post(**chat(url, "say:hi"))
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert server.end() == 1
    assert "FREETOKEN_LAUNCH_TIMEOUT" in server.log[-1] and "Traceback" not in server.text()


def test_sigterm_while_loading(started: list[Process]) -> None:
    server = Process("run_slow_start")
    started.append(server)
    server.find("weights")
    server.process.send_signal(signal.SIGTERM)
    assert server.end(5) == 0


def test_two_servers_and_a_taken_port(started: list[Process]) -> None:
    first, second = Process("run_scheduler"), Process("run_scheduler", "--skip-server-warmup")
    started += [first, second]
    urls = [first.ready(), second.ready()]
    assert urls[0] != urls[1]
    for url, word in zip(urls, ("one", "two")):
        answer = httpx.post(**chat(url, f"say:{word}")).json()
        assert answer["choices"][0]["message"]["content"] == word
    third = Process("run_scheduler", port=int(urls[0].rpartition(":")[2]))
    started.append(third)
    assert third.end() == 1
    assert len(third.log) == 1 and re.search(r"cannot listen .*in use", third.log[0])


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (["--page-size", "3"], {}, "--page-size must be a power of two"),
        ([], {"FREETOKEN_FUSED_NORM": "maybe"}, "FREETOKEN_FUSED_NORM='maybe'"),
        (["--chat-template", "/no/such/file"], {}, "--chat-template /no/such/file cannot be read"),
        (["--host", "no.such.host.invalid"], {}, "cannot listen on no.such.host.invalid"),
        (["--json-model-override-args", "{"], {}, "--json-model-override-args is not valid JSON"),
    ],
)
def test_bad_settings_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    env: dict[str, str],
    says: str,
) -> None:
    def opened(args: ServerArgs) -> Opened:
        model_overrides(args)
        return Opened("tiny", make_config().model, ByteTokenizer())

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments = ["--port", "0", "--device", "cpu", "--log-level", "error", *flags]
    assert main(arguments, scheduler="server.fakes:run_scheduler", open_checkpoint=opened) == 1
    assert re.fullmatch(f"freetoken: .*{re.escape(says)}.*\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_idle_costs_next_to_nothing(started: list[Process]) -> None:
    server = Process("run_scheduler")
    started.append(server)
    url = server.ready()
    httpx.post(**chat(url, "say:hi"))

    def cpu() -> float:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.5)
    before = cpu()
    time.sleep(3)
    assert cpu() - before <= 0.03


def test_the_http_process_imports_no_torch() -> None:
    code = (
        "import sys, freetoken.launch_server, freetoken.server.http, freetoken.server.progress\n"
        "from server.fakes import ByteTokenizer, make_config\n"
        "from freetoken.server.template import ChatTemplate\n"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_memory_of_large_bodies_goes_back_to_the_system() -> None:
    code = (
        "import os, sys\n"
        "def grown():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 1e6\n"
        "from freetoken.server.lifecycle import give_memory_back\n"
        "if sys.argv[1] == 'with':\n"
        "    give_memory_back()\n"
        "before, kept = grown(), []\n"
        "for _ in range(6):\n"
        "    body = bytearray(b'x') * 20_000_000\n"
        "    kept.append(bytearray(100_000))\n"
        "    del body\n"
        "print(grown() - before)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    if "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"):
        pytest.skip("not glibc")
    held = [
        float(subprocess.run([sys.executable, "-c", code, how], env=env, capture_output=True, text=True).stdout)
        for how in ("without", "with")
    ]
    assert held[1] < 10 < held[0]
