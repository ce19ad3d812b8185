"""What is on record of each step: what it held, how long it took; and faults put into it on purpose (torch-free)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from freetoken import environ
from freetoken.scheduler.request import ScheduleBatch, StepResult
from freetoken.scheduler.runner import Runner

logger = logging.getLogger(__name__)

KEPT_STEPS = 64


@dataclass
class StepRecord:
    """One step: its number from 1, sequences decoded, prompts and prompt tokens in it, and its milliseconds once it ended.

    Steps overlap, so a step's time runs from its launch or the end of the step before it, whichever was later.
    """

    step: int
    decodes: int
    prefills: int
    prefill_tokens: int
    ms: float | None = None


class StepLog:
    """The last :data:`KEPT_STEPS` steps. Written by the step loop; other threads may read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._open: deque[tuple[StepRecord, float]] = deque()
        self._ended = float("-inf")
        self.launched_steps = 0

    def launched(self, batch: ScheduleBatch) -> None:
        """A step begins."""
        tokens = sum(piece.length for piece in batch.prefills)
        record = StepRecord(batch.step + 1, len(batch.decodes), len(batch.prefills), tokens)
        self.launched_steps += 1
        self._records.append(record)
        self._open.append((record, self._clock()))

    def collected(self) -> None:
        """The oldest step that had not ended has ended."""
        record, began = self._open.popleft()
        now = self._clock()
        record.ms = 1000.0 * (now - max(began, self._ended))
        self._ended = now

    def mean_ms(self, *, prefill: bool) -> float:
        """Mean milliseconds of the kept steps with, or without, prompt tokens in them; 0 for none."""
        times = [r.ms for r in list(self._records) if r.ms is not None and bool(r.prefills) is prefill]
        return sum(times) / len(times) if times else 0.0

    def public(self) -> list[dict[str, Any]]:
        """JSON-ready, oldest first."""
        return [asdict(record) for record in list(self._records)]


@dataclass(frozen=True)
class Faults:
    """The fault switches of the scheduler; a value of 0 is no fault. Steps count from 1."""

    stuck_step: int = 0
    failing_step: int = 0
    retract_every: int = 0

    @classmethod
    def from_environment(cls) -> Faults:
        """As the environment says, and each one that is set is a warning in the log."""
        names = ("FREETOKEN_FAULT_STUCK_STEP", "FREETOKEN_FAULT_FAILING_KERNEL", "FREETOKEN_FAULT_RETRACT_EVERY")
        values = [int(environ.get(name)) for name in names]
        for name, value in zip(names, values):
            if value:
                logger.warning("%s=%d: this server breaks on purpose", name, value)
        return cls(*values)

    def strike(self, step: int) -> None:
        """Called before a step is launched."""
        if step == self.stuck_step:
            threading.Event().wait()
        if step == self.failing_step:
            raise RuntimeError(f"step {step} fails on purpose (FREETOKEN_FAULT_FAILING_KERNEL)")


class WatchedRunner:
    """A runner as the scheduler sees it, with every step on record."""

    def __init__(self, runner: Runner, log: StepLog, faults: Faults) -> None:
        self._runner, self._log, self._faults = runner, log, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: ScheduleBatch) -> Any:
        self._log.launched(batch)
        self._faults.strike(batch.step + 1)
        return self._runner.launch(batch)

    def collect(self, handle: Any) -> StepResult:
        result = self._runner.collect(handle)
        self._log.collected()
        return result
