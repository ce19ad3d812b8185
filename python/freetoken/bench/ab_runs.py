"""Runs of an experiment in fresh processes, several of them made ready at once (torch-free).

Most of a short run is its start: imports, weights, a first pass. Those of several runs may overlap, since none of them is timed. Then
the two of a pair take turns, a moment each, so that what else the machine does meets both alike; the others sleep meanwhile.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from freetoken import environ
from freetoken.bench.ab_arm import DONE, GO, TURNS, Arm
from freetoken.bench.own_server import last_words
from freetoken.errors import StartupError

POLL_SECONDS = 0.5


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

    ``timeout`` bounds the seconds of the start, of each turn, and of the end. Of every method :class:`StartupError` names the arm and
    says what its process said last.
    """

    def __init__(self, arm: Setting, words: Sequence[str], timeout: float) -> None:
        self.arm = arm
        self.left = 0
        """Turns it still wants; known once it is ready."""
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._result, self._log = folder / "result.json", folder / "log"
        self._heard = b""
        self._answers, answers = os.pipe()
        command = [sys.executable, "-m", "freetoken.bench.ab_arm", TURNS, str(answers), str(self._result), *words]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environ.for_child(arm.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=[answers],
                bufsize=0,
                start_new_session=True,
            )
        os.close(answers)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        # With all that it started, which a process that was killed leaves behind: a server, say.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._answers)
        self._folder.cleanup()

    def wait_ready(self) -> None:
        """Until nothing is left but what is timed."""
        self.left = int(self._answer())

    def turn(self) -> None:
        """Let it run one timed part; behind its last it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{GO}\n".encode())
        except BrokenPipeError:
            raise self._failed() from None
        if self._answer() != DONE:
            raise self._failed()
        self.left -= 1
        if not self.left:
            self._end()

    def result(self) -> Arm:
        """What it reports, behind its last turn."""
        return Arm(**json.loads(self._result.read_text(encoding="utf-8")))

    def _answer(self) -> str:
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._heard:
            ended = self._process.poll() is not None
            if select.select([self._answers], [], [], 0 if ended else POLL_SECONDS)[0]:
                heard = os.read(self._answers, 1 << 10)
                if heard:
                    self._heard += heard
                    continue
                self._wait(POLL_SECONDS)
            if ended:
                raise self._failed()
            if time.monotonic() >= deadline:
                raise self._late()
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def _wait(self, seconds: float) -> bool:
        """Whether it has ended, within ``seconds``."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _end(self) -> None:
        if not self._wait(self._timeout):
            raise self._late()
        if self._process.returncode != 0 or not self._result.exists():
            raise self._failed()

    def _late(self) -> StartupError:
        return StartupError(f"arm {self.arm.name} ({self.arm.label}) ran past {self._timeout:g} s")

    def _failed(self) -> StartupError:
        self._wait(POLL_SECONDS)
        last = last_words(self._log.read_text(errors="replace"), self._process.returncode)
        return StartupError(f"arm {self.arm.name} ({self.arm.label}) failed: {last}")


def take_turns(runs: Sequence[Run]) -> None:
    """Run all that ``runs`` want timed, one part of each in turn, the order reversed each time."""
    order = list(runs)
    while any(run.left for run in runs):
        for run in order:
            if run.left:
                run.turn()
        order.reverse()


def run_wave(arms: Sequence[Setting], words: Sequence[Sequence[str]], timeout: float) -> Iterator[Arm]:
    """What runs of ``arms`` report, in order: all are made ready at once, then every two in a row are timed together."""
    with ExitStack() as stack:
        runs = [stack.enter_context(Run(arm, own, timeout)) for arm, own in zip(arms, words, strict=True)]
        for run in runs:
            run.wait_ready()
        for at in range(0, len(runs), 2):
            pair = runs[at : at + 2]
            take_turns(pair)
            yield from (run.result() for run in pair)
