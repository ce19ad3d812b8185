"""Runs of an experiment in fresh processes, several of them made ready at once (torch-free).

Most of a short run is its start: imports, weights, a first pass. Those of several runs may overlap, since none of them is timed. Then
each is told to go when the one before has ended; the others sleep meanwhile, so timings have the machine to themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from freetoken import environ
from freetoken.bench.ab_arm import READY, WAIT, Arm
from freetoken.errors import StartupError

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Setting:
    """One arm: environment names and values, and words added to the model's arguments."""

    name: str
    environment: dict[str, str]
    words: tuple[str, ...]

    @property
    def label(self) -> str:
        return " ".join([*(f"{k}={v}" for k, v in self.environment.items()), *self.words]) or "as it is"


class Run:
    """A process of ``arm``, started at once: ``words`` are workload, the server's words, and the workload's. Use as a context: behind it no
    process and no file of it is left.

    ``timeout`` bounds the seconds of the start, and those of the rest.
    """

    def __init__(self, arm: Setting, words: Sequence[str], timeout: float) -> None:
        self.arm = arm
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._result, self._log, self._ready = folder / "result.json", folder / "log", folder / READY
        command = [sys.executable, "-m", "freetoken.bench.ab_arm", WAIT, str(self._result), *words]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environ.for_child(arm.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()

    def wait_ready(self) -> None:
        """Until nothing is left but what is timed; :class:`StartupError` names the arm and says what its process said last."""
        deadline = time.monotonic() + self._timeout
        while not self._ready.exists():
            if self._process.poll() is not None:
                raise self._failed()
            if time.monotonic() >= deadline:
                raise self._late()
            time.sleep(POLL_SECONDS)

    def finish(self) -> Arm:
        """Let it go, and wait for what it reports; errors as of :meth:`wait_ready`."""
        try:
            self._process.communicate(b"go\n", timeout=self._timeout)
        except subprocess.TimeoutExpired:
            raise self._late() from None
        if self._process.returncode != 0 or not self._result.exists():
            raise self._failed()
        return Arm(**json.loads(self._result.read_text(encoding="utf-8")))

    def _late(self) -> StartupError:
        return StartupError(f"arm {self.arm.name} ({self.arm.label}) ran past {self._timeout:g} s")

    def _failed(self) -> StartupError:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = (lines or [f"exit status {self._process.returncode}"])[-1].removeprefix("error: ")
        return StartupError(f"arm {self.arm.name} ({self.arm.label}) failed: {last}")


def run_wave(arms: Sequence[Setting], words: Sequence[Sequence[str]], timeout: float) -> Iterator[Arm]:
    """What runs of ``arms`` report, in order: all are made ready at once, then each is timed alone."""
    with ExitStack() as stack:
        runs = [stack.enter_context(Run(arm, own, timeout)) for arm, own in zip(arms, words, strict=True)]
        for run in runs:
            run.wait_ready()
        for run in runs:
            yield run.finish()
