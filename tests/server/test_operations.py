"""Hard knocks to the two processes, the real scheduler in them on a fake runner: stuck and failing steps, a killed
scheduler, crash dumps, full disks for logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetoken.logs import LossyFile
from server.test_launch import MAIN, ROOT, Process, chat, free_port

FAKE_RUNNER = "scheduler.fake_process:run_on_fake_runner"
FLAGS = ("--max-total-tokens", "1024", "--context-length", "1000")
SECRET = "zebra crossing"


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for item in processes:
        item.process.kill()
        item.process.wait()


class Clients:
    """Open requests, two streamed and two whole; each keeps what came."""

    def __init__(self, url: str) -> None:
        self.lines: list[list[str]] = [[], []]
        self.whole: list[httpx.Response] = []
        self._threads = [threading.Thread(target=self._stream, args=(url, lines)) for lines in self.lines]
        self._threads += [threading.Thread(target=self._ask, args=(url,)) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _stream(self, url: str, lines: list[str]) -> None:
        request = chat(url, SECRET, stream=True, max_tokens=900, ignore_eos=True)
        with httpx.stream("POST", **request, timeout=30) as answer:  # type: ignore[arg-type]
            lines.extend(line for line in answer.iter_lines() if line)

    def _ask(self, url: str) -> None:
        self.whole.append(httpx.post(**chat(url, SECRET, max_tokens=900, ignore_eos=True), timeout=30))  # type: ignore[arg-type]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def one_error_each(self, says: str) -> None:
        """Everybody was told once, and nothing came after it."""
        self.join()
        assert len(self.whole) == 2
        for answer in self.whole:
            assert answer.status_code == 503 and says in answer.json()["error"]["message"]
        for lines in self.lines:
            errors = [line for line in lines if '"error"' in line]
            assert len(errors) == 1 and lines[-1] == errors[0] and says in errors[0]


def dumps(folder: Path) -> dict[str, dict[str, Any]]:
    """The crash dumps by process; no other file is there, and none tells what a client wrote."""
    found = {}
    for path in folder.iterdir():
        assert path.name.startswith("freetoken-crash-") and path.name.endswith(".json")
        assert SECRET not in path.read_text()
        content = json.loads(path.read_text())
        found[content["process"]] = content
    return found


def test_a_stuck_step_is_told_of_then_ends_the_server(started: list[Process], tmp_path: Path) -> None:
    server = Process(
        FAKE_RUNNER, *FLAGS, "--soft-watchdog-timeout", "0.4", "--watchdog-timeout", "1.5",
        "--crash-dump-folder", str(tmp_path), env={"FREETOKEN_FAULT_STUCK_STEP": "60"},
    )  # fmt: skip
    started.append(server)
    clients = Clients(server.ready())
    clients.one_error_each("step 60 did not end within 1.5 seconds (--watchdog-timeout)")
    assert server.end() == 1
    log = server.text()
    assert "FREETOKEN_FAULT_STUCK_STEP=60: this server breaks on purpose" in log
    soft = log.index("step 60 has taken")
    assert 0 < soft < log.index("step 60 did not end within")
    assert "in strike" in log[soft:] and "thread freetoken-watchdog" in log[soft:]
    assert SECRET not in log and "Traceback" not in log
    found = dumps(tmp_path)
    assert set(found) == {"server", "scheduler"}
    assert found["scheduler"]["last_steps"][-1]["step"] == 60 and found["scheduler"]["last_steps"][-1]["ms"] is None
    assert {r["status"] for r in found["scheduler"]["open_requests"]} == {"running"}
    assert any("in strike" in "".join(lines) for lines in found["scheduler"]["stacks"].values())
    for content in found.values():
        assert content["num_open_requests"] == len(content["open_requests"]) == 4
        assert content["config"]["watchdog_timeout"] == 1.5


@pytest.mark.parametrize("writable", [True, False])
def test_a_failing_kernel_is_one_error_each_whatever_the_dump_folder(
    started: list[Process], tmp_path: Path, writable: bool
) -> None:
    folder = tmp_path / "dumps"
    server = Process(
        FAKE_RUNNER, *FLAGS, "--crash-dump-folder", str(folder), env={"FREETOKEN_FAULT_FAILING_KERNEL": "60"}
    )
    started.append(server)
    url = server.ready()
    if writable:
        folder.mkdir()
    else:
        folder.write_text("a file stands where the folder should be")
    Clients(url).one_error_each("the step failed (RuntimeError); the server's log says more")
    assert server.end() == 1
    assert server.log[-1] == "freetoken: RuntimeError: step 60 fails on purpose (FREETOKEN_FAULT_FAILING_KERNEL)\n"
    if writable:
        assert "in strike" in dumps(folder)["scheduler"]["traceback"]
    else:
        assert server.text().count("could not be written") == 2


def test_a_killed_scheduler_leaves_a_dump_of_the_server(started: list[Process], tmp_path: Path) -> None:
    server = Process(FAKE_RUNNER, *FLAGS, "--crash-dump-folder", str(tmp_path))
    started.append(server)
    url = server.ready()
    clients = Clients(url)
    server.find("ready at")
    while httpx.get(url + "/live").json()["running"] < 4:
        time.sleep(0.01)
    (child,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()[-1:]
    os.kill(int(child), signal.SIGKILL)
    clients.one_error_each("the scheduler was killed by SIGKILL")
    assert server.end() == 1
    found = dumps(tmp_path)
    assert set(found) == {"server"} and found["server"]["num_open_requests"] == 4
    assert found["server"]["stats"]["running"] == 4


def test_a_full_disk_for_the_log_changes_nothing() -> None:
    port = free_port()
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": path, "FREETOKEN_FAULT_FAILING_KERNEL": "60"}
    line = [sys.executable, "-c", MAIN, FAKE_RUNNER, "--port", str(port), "--device", "cpu", *FLAGS]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*line, "--log-level", "debug"], env=env, stderr=full, stdout=full)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None
            try:
                if httpx.get(url + "/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        for _ in range(3):
            assert httpx.post(**chat(url, "hi", max_tokens=5), timeout=20).status_code == 200  # type: ignore[arg-type]
        Clients(url).one_error_each("the step failed (RuntimeError)")
        assert process.wait(15) == 1
    finally:
        process.kill()
        process.wait()


def test_a_bad_setting_with_a_full_disk_still_exits_1() -> None:
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")])
    line = [sys.executable, "-c", MAIN, FAKE_RUNNER, "--port", "0", "--device", "cpu", "--page-size", "3"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, stderr=full, stdout=full, timeout=30)
    assert done.returncode == 1


def test_a_pipe_without_a_reader_and_a_full_disk_take_everything(capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "wb", buffering=0) as full:
        for descriptor in (write, full.fileno()):
            assert LossyFile(descriptor).write(b"x" * 100_000) == 100_000
    os.close(write)
    assert LossyFile(2).write(memoryview(b"seen\n")) == 5
    assert capfd.readouterr().err == "seen\n"
