"""A step that does not end is noticed; the record of steps; faults put in on purpose."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import freetoken
from freetoken import messages
from freetoken.scheduler.request import ScheduleBatch, Slice
from freetoken.scheduler.steps import KEPT_STEPS, Faults, StepLog, WatchedRunner
from freetoken.scheduler.watchdog import Watchdog
from scheduler.fake_process import ProcessRunner
from scheduler.fake_runner import FakeRunner, make_config
from scheduler.test_process import Peer, Running, peer, use_runner  # noqa: F401 - a fixture


class Bark:
    """Collects what a watchdog says; ``called`` is set with the hard one."""

    def __init__(self) -> None:
        self.soft: list[float] = []
        self.hard: list[float] = []
        self.called = threading.Event()

    def on_hard(self, seconds: float) -> None:
        self.hard.append(seconds)
        self.called.set()


def test_soft_once_for_each_piece_of_work_then_hard() -> None:
    bark = Bark()
    dog = Watchdog(0.1, 1.0, on_soft=bark.soft.append, on_hard=bark.on_hard)
    dog.start()
    dog.begin()
    while not bark.soft:
        time.sleep(0.01)
    dog.end()
    dog.begin()
    assert bark.called.wait(20)
    dog.stop()
    assert len(bark.soft) == 2 and all(seconds >= 0.1 for seconds in bark.soft)
    assert len(bark.hard) == 1 and bark.hard[0] >= 1.0


def test_idle_and_short_work_are_left_alone() -> None:
    bark = Bark()
    now = [0.0]
    dog = Watchdog(0.1, 0.2, on_soft=bark.soft.append, on_hard=bark.on_hard, clock=lambda: now[0])
    dog.start()
    for _ in range(5):
        dog.begin()
        now[0] += 0.09
        time.sleep(0.06)
        dog.end()
        now[0] += 100
        time.sleep(0.06)
    dog.stop()
    assert bark.soft == bark.hard == []


def test_off_starts_no_thread() -> None:
    before = threading.active_count()
    dog = Watchdog(0, 0, on_soft=lambda _: None, on_hard=lambda _: None)
    dog.start()
    assert threading.active_count() == before
    dog.stop()


def test_native_code_that_keeps_the_interpreter_ends_the_process_too() -> None:
    code = (
        "import ctypes\n"
        "from freetoken.scheduler.watchdog import Watchdog\n"
        "dog = Watchdog(0, 0.3, on_soft=print, on_hard=print, last_resort=0.3)\n"
        "dog.start(); dog.begin()\n"
        "ctypes.PyDLL(None).sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(freetoken.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1
    assert "<string>" in done.stderr and "line 5" in done.stderr and done.stdout == ""


def batch(step: int, prefill: int = 0) -> ScheduleBatch:
    piece = Slice(None, 0, prefill, False, False)  # type: ignore[arg-type]
    return ScheduleBatch(step, [piece], [piece] if prefill else [])


def test_overlapping_steps_are_timed_from_the_end_of_the_one_before() -> None:
    now = [0.0]
    log = StepLog(clock=lambda: now[0])
    log.launched(batch(0, prefill=7))
    now[0] = 0.010
    log.launched(batch(1))
    now[0] = 0.030
    log.collected()
    now[0] = 0.034
    log.collected()
    now[0] = 9.0
    log.launched(batch(2))
    now[0] = 9.002
    log.collected()
    first, second, third = log.public()
    assert first == {"step": 1, "decodes": 1, "prefills": 1, "prefill_tokens": 7, "ms": pytest.approx(30)}
    assert second["ms"] == pytest.approx(4) and third["ms"] == pytest.approx(2)
    assert log.mean_ms(prefill=True) == pytest.approx(30) and log.mean_ms(prefill=False) == pytest.approx(3)
    for step in range(3, 200):
        log.launched(batch(step))
    assert len(log.public()) == KEPT_STEPS and log.public()[-1]["ms"] is None and log.launched_steps == 200


def test_nothing_measured_is_zero() -> None:
    assert StepLog().mean_ms(prefill=False) == 0.0 and StepLog().public() == []


def test_a_watched_runner_is_the_runner_in_everything_else() -> None:
    runner = FakeRunner(make_config(), 10, 2)
    watched = WatchedRunner(runner, StepLog(), Faults())
    assert (watched.num_pages, watched.max_rows, watched.has_state) == (10, 2, False)
    assert getattr(watched, "no_such_thing", "missing") == "missing"


def test_switches_come_from_the_environment_and_are_loud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Faults.from_environment() == Faults(0, 0, 0) and not caplog.records
    monkeypatch.setenv("FREETOKEN_FAULT_FAILING_KERNEL", "3")
    faults = Faults.from_environment()
    assert faults == Faults(failing_step=3) and "FREETOKEN_FAULT_FAILING_KERNEL=3" in caplog.text
    faults.strike(2)
    with pytest.raises(RuntimeError, match="step 3 fails on purpose"):
        faults.strike(3)


def test_forced_retractions_change_no_token(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    use_runner(monkeypatch, ProcessRunner)

    def said(every: int) -> tuple[list[list[int]], int]:
        if every:
            monkeypatch.setenv("FREETOKEN_FAULT_RETRACT_EVERY", str(every))
        running = Running(peer)
        names = [f"{every}-{number}" for number in range(5)]
        for number, name in enumerate(names):
            peer.add(name, [1, 2, number], max_new_tokens=40)
        peer.until(lambda: all(peer.ends(name) for name in names))
        stats = peer.call(messages.GetInfo).stats
        assert stats is not None and stats.used_tokens == stats.rows_used == 0
        peer.send(messages.Shutdown())
        assert running.code() == 0
        peer.received.clear()
        return [[i for o in outputs[name] for i in o.ids] for name in names], stats.retractions

    outputs: dict[str, list[messages.RequestOutput]] = {}
    original = peer.outputs

    def remember(rid: str) -> list[messages.RequestOutput]:
        outputs[rid] = original(rid)
        return outputs[rid]

    monkeypatch.setattr(peer, "outputs", remember)
    plain, forced = said(0), said(3)
    assert plain[1] == 0 and forced[1] > 10
    assert plain[0] == forced[0]


def test_the_batch_line_tells_of_states(peer: Peer) -> None:  # noqa: F811
    from freetoken.scheduler.process import batch_line

    stats = messages.SchedulerStats(steps=7, total_tokens=100, used_tokens=25, decode_step_ms=1.5)
    assert "steps 7 (1.5 ms a decode step)" in batch_line(stats) and "checkpoints" not in batch_line(stats)
    stats.state_block_bytes, stats.state_blocks_used, stats.state_blocks_total, stats.state_hits = 2_000_000, 3, 9, 4
    assert "checkpoints 3 of 9 (6.0 MB), 4 hits" in batch_line(stats)
