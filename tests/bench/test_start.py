"""A server's start as a benchmark: two starts, a cache of kernels between them, sentences for what cannot work."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from make_tiny_model import make_tiny_model

from e2e.servers import wait_until
from freetoken import environ
from freetoken.bench import figures, own_server, start
from freetoken.errors import StartupError


@pytest.mark.parametrize(("given", "prompts"), [(["--prompt-lens", "5", "40"], "5 40"), ([], "128 17 200")])
def test_two_starts(given: list[str], prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny", seed=4)
    words = ["--model-path", str(model), "--device", "cpu", "--max-total-tokens", "512"]
    words += ["--context-length", "256"]
    output = tmp_path / "o.jsonl"
    assert start.main([*given, "--label", "tiny", "--output", str(output), "--", *words]) == 0
    found = list(figures.read(output))
    assert [(f["what"], f["cache"], f["prompts"]) for f in found] == [
        ("server start", "empty", prompts),
        ("server start", "full", prompts),
    ]
    assert all(f["ready_s"] > 0 and f["first_ms"] > 0 and f["again_ms"] > 0 for f in found)
    out = capsys.readouterr().out
    assert out.count("ready after") == 2 and out.count(" tokens: ") == 2 * len(prompts.split())


def test_what_cannot_start_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["--prompt-lens", "0", "--", "--model-path", "x"]) == 1
    assert start.main(["--", "--model-path", "/nowhere"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: --prompt-lens must be at least 1, not 0"
    assert "/nowhere does not exist" in second


def test_prompts_that_no_context_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny", seed=4)
    words = ["--model-path", str(model), "--device", "cpu", "--context-length", "64"]
    assert start.main(["--prompt-lens", "64", "--", *words]) == 1
    assert "--prompt-lens 64 leaves no room in a context of 64 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_benchmark_stops_its_server(number: signal.Signals, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", seed=4)
    words = ["--model-path", str(model), "--device", "cpu", "--max-total-tokens", "256"]
    command = [sys.executable, "-m", "freetoken.bench.start", "--", *words]
    environment = environ.for_child({"PYTHONPATH": str(Path(start.__file__).parents[2])})
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as tool:
        held: list[psutil.Process] = []
        wait_until(lambda: bool(held.extend(psutil.Process(tool.pid).children(recursive=True)) or held), 60)
        tool.send_signal(number)
        _, said = tool.communicate(timeout=60)
    assert tool.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert number == signal.SIGKILL or said.splitlines()[-1] == "stopped: no figure is written"
    wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in held), 60)


def test_a_server_that_ends_or_is_silent() -> None:
    with (
        pytest.raises(StartupError, match="the server ended with status 1: model path /nowhere does not exist"),
        own_server.own_server(["--model-path", "/nowhere"]),
    ):
        raise AssertionError("it is not ready")
    port = own_server.free_port()
    with pytest.raises(StartupError, match="refused"):
        own_server.post(f"http://127.0.0.1:{port}/generate", {})


@pytest.mark.parametrize(("output", "said"), [("/", "is a folder"), (f"{__file__}/o.jsonl", "lies below a file")])
def test_figures_that_cannot_be_written(output: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["--output", output, "--", "--model-path", "/nowhere"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: --output {output} {said}") and len(error.splitlines()) == 1
