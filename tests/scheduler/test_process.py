"""The life of the scheduler process, with a fake runner in it and the test at the other end of its sockets."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import zmq

from freetoken import messages
from freetoken.errors import StartupError
from freetoken.messages import AddRequest, Channel, RequestOutput, SchedulerStats, StepOutput
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler import process as scheduler_process
from freetoken.scheduler.process import STATS_SECONDS, SchedulerProcess, run_scheduler
from freetoken.server_args import Config
from scheduler.fake_process import ProcessRunner
from scheduler.fake_runner import VOCAB, make_config

M = TypeVar("M")


def use_runner(monkeypatch: pytest.MonkeyPatch, runner: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "freetoken.runner.model_runner", SimpleNamespace(ModelRunner=runner))  # type: ignore[arg-type]


class Peer:
    """The HTTP process' end of a channel. Collects everything that comes."""

    def __init__(self) -> None:
        self.channel = Channel.create()
        self._context = zmq.Context()
        self._push, self._pull = self.channel.frontend_sockets(self._context)
        self._calls = 0
        self.received: list[messages.ToFrontend] = []

    def close(self) -> None:
        self._push.close(0)
        self._pull.close(0)
        self._context.term()
        self.channel.remove()

    def send(self, message: messages.ToScheduler) -> None:
        self._push.send(messages.encode(message))

    def add(self, rid: str, ids: list[int], **sampling: Any) -> None:
        self.send(AddRequest(rid, ids, SamplingParams(**{"seed": 3, "ignore_eos": True, **sampling})))

    def until(self, condition: Callable[[], M], seconds: float = 10.0) -> M:
        """Receive until ``condition`` gives something true, and return that."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            left = deadline - time.monotonic()
            assert left > 0 and self._pull.poll(max(1, int(1000 * left))), f"not in {self.received[-5:]}"
            self.received.append(messages.decode_to_frontend(self._pull.recv()))
        return value

    def listen(self, seconds: float) -> None:
        """Receive for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._pull.poll(max(1, int(1000 * left))):
                self.received.append(messages.decode_to_frontend(self._pull.recv()))

    def wait_for(self, kind: type[M]) -> M:
        """The first message of a kind, past or still to come."""
        return self.until(lambda: next((m for m in self.received if isinstance(m, kind)), None))  # type: ignore[return-value]

    def call(self, make: Callable[[int], messages.ToScheduler]) -> messages.ControlReply:
        self._calls += 1
        self.send(make(self._calls))

        def reply() -> messages.ControlReply | None:
            replies = [m for m in self.received if isinstance(m, messages.ControlReply) and m.call == self._calls]
            return replies[0] if replies else None

        answer = self.until(reply)
        assert answer is not None
        return answer

    def outputs(self, rid: str) -> list[RequestOutput]:
        steps = [m for m in self.received if isinstance(m, StepOutput)]
        return [output for step in steps for output in step.outputs if output.rid == rid]

    def ends(self, rid: str) -> list[str]:
        """Kinds of the terminal messages of a request."""
        return [output.finish.kind for output in self.outputs(rid) if output.finish is not None]

    def stats(self) -> list[SchedulerStats]:
        return [m.stats for m in self.received if isinstance(m, StepOutput) and m.stats is not None]


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


class Running:
    """A scheduler process in a thread of this one."""

    def __init__(self, peer: Peer, on: str = "cpu", **flags: Any) -> None:
        self.codes: list[int] = []
        config = dataclasses.replace(make_config(overlap=False, **flags), device=on)
        self._thread = threading.Thread(target=self._run, args=(config, peer.channel), daemon=True)
        self._thread.start()
        peer.wait_for(messages.Ready)

    def _run(self, config: Config, channel: Channel) -> None:
        process = SchedulerProcess(config, channel)
        self.codes.append(process.run())
        process.close()

    def code(self) -> int:
        self._thread.join(10)
        return self.codes[0]


@pytest.fixture
def process(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("FREETOKEN_CHECK_INVARIANTS", "1")
    use_runner(monkeypatch, ProcessRunner)
    running = Running(peer, decode_log_interval=10)
    yield running
    peer.send(messages.Shutdown(drain=False))
    assert running.code() == 0


def test_loading_is_told_now_and_then_and_ready_once(process: Running, peer: Peer) -> None:
    assert peer.wait_for(messages.Ready).info["max_total_tokens"] == 299 * 4
    phases = [m for m in peer.received if isinstance(m, messages.Loading)]
    assert [m.phase for m in phases[:2]] == ["starting", "loading weights"]
    assert phases[-1].done == phases[-1].total == 2000
    assert len(phases) < 10
    assert isinstance(peer.received[-1], messages.Ready)


@pytest.mark.parametrize(("on", "skip", "expected"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)])
def test_a_gpu_is_warmed_up_before_it_is_ready(
    on: str, skip: bool, expected: int, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[Any] = []

    def warm_up(runner: Any, progress: Callable[[str, int, int, str], None]) -> None:
        assert not any(isinstance(m, messages.Ready) for m in peer.received)
        progress("warming up", 1, 1, "steps")
        warmed.append(runner)

    monkeypatch.setitem(sys.modules, "freetoken.runner.warm_up", SimpleNamespace(warm_up=warm_up))  # type: ignore[arg-type]
    use_runner(monkeypatch, ProcessRunner)
    running = Running(peer, on, skip_server_warmup=skip)
    assert len(warmed) == expected
    phases = [m.phase for m in peer.received if isinstance(m, messages.Loading)]
    assert (phases[-1] == "warming up") == bool(expected)
    peer.send(messages.Shutdown(drain=False))
    assert running.code() == 0


def test_every_request_has_one_end(process: Running, peer: Peer) -> None:
    peer.add("whole", [1, 2, 3], max_new_tokens=5)
    peer.add("aborted", [1, 2, 3], max_new_tokens=1000)
    peer.add("too long", [1] * 2000)
    peer.add("no such id", [VOCAB])
    peer.until(lambda: peer.outputs("aborted"))
    peer.add("aborted", [4], max_new_tokens=1)  # its id is in use
    peer.send(messages.AbortRequest("nobody"))
    peer.until(lambda: peer.ends("aborted"))
    peer.send(messages.AbortRequest("aborted"))
    peer.until(lambda: len(peer.ends("aborted")) == 2)
    peer.until(lambda: peer.ends("whole"))
    peer.listen(0.1)
    assert peer.ends("whole") == ["length"] and sum(len(o.ids) for o in peer.outputs("whole")) == 5
    assert peer.ends("too long") == peer.ends("no such id") == ["error"]
    assert peer.ends("aborted") == ["error", "abort"]
    assert peer.stats()[-1].running == peer.stats()[-1].used_tokens == 0


def test_abort_of_all(process: Running, peer: Peer) -> None:
    for number in range(6):  # two of them wait
        peer.add(f"r{number}", [1, 2, number], max_new_tokens=280)
    peer.until(lambda: all(peer.outputs(f"r{number}") for number in range(4)))
    peer.send(messages.AbortRequest())
    peer.until(lambda: all(peer.ends(f"r{number}") == ["abort"] for number in range(6)))
    assert peer.call(messages.GetInfo).stats.used_tokens == 0  # type: ignore[union-attr]


def test_flush_is_refused_while_a_request_runs(process: Running, peer: Peer) -> None:
    peer.add("r", [1] * 20, max_new_tokens=1000)
    peer.until(lambda: peer.outputs("r"))
    reply = peer.call(messages.FlushCache)
    assert not reply.ok and "running" in reply.message
    peer.send(messages.AbortRequest("r"))
    peer.until(lambda: peer.ends("r"))
    before = peer.call(messages.GetInfo).stats
    assert before is not None and before.cached_pool_tokens >= 20
    reply = peer.call(messages.FlushCache)
    assert reply.ok and reply.message == "" and reply.stats is not None and reply.stats.cached_pool_tokens == 0


def test_info_has_the_runner_and_the_numbers_of_now(process: Running, peer: Peer) -> None:
    peer.add("r", [1, 2, 3], max_new_tokens=1000)
    peer.until(lambda: peer.outputs("r"))
    reply = peer.call(messages.GetInfo)
    assert reply.ok and reply.info["max_total_tokens"] == 1196
    stats = reply.stats
    assert stats is not None and (stats.running, stats.queued, stats.rows_used, stats.rows_total) == (1, 0, 1, 4)
    assert stats.used_tokens >= 4 and stats.total_tokens == 1196
    assert (stats.graph_replays, stats.graph_misses) == ({"8": 5}, 2)


def test_profile(process: Running, peer: Peer, tmp_path: Path) -> None:
    def profile(start: bool, folder: object = "") -> messages.ControlReply:
        return peer.call(lambda call: messages.Profile(call, start, str(folder)))

    reply = profile(False)
    assert not reply.ok and "no profile" in reply.message
    file = tmp_path / "file"
    file.write_text("")
    reply = profile(True, file / "below")
    assert not reply.ok and str(file) in reply.message
    for odd in ("a\0b", "x" * 5000):
        reply = profile(True, odd)
        assert not reply.ok and "cannot write" in reply.message
    assert profile(True, tmp_path / "traces").ok
    reply = profile(True, tmp_path / "traces")
    assert not reply.ok and "already" in reply.message
    peer.add("profiled", [1, 2], max_new_tokens=4)
    peer.until(lambda: peer.ends("profiled"))
    reply = profile(False)
    found = json.loads(Path(str(reply.info["roles"])).read_text())
    assert [step["kind"] for step in found] == ["decode", "prefill"] and found[1]["values"]["tokens"] == 2
    assert reply.ok and Path(reply.message).parent == tmp_path / "traces" and Path(reply.message).stat().st_size > 0
    # A folder that is gone when the trace is due costs the trace and nothing else.
    assert profile(True, tmp_path / "lost").ok
    (tmp_path / "lost").rmdir()
    (tmp_path / "lost").write_text("")
    reply = profile(False)
    assert not reply.ok and "cannot write" in reply.message
    peer.add("r", [1], max_new_tokens=1)
    peer.until(lambda: peer.ends("r"))


def test_a_profile_that_nobody_stops_ends_by_itself(
    process: Running, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_process, "PROFILE_STEPS", 3)
    assert peer.call(lambda call: messages.Profile(call, True, str(tmp_path))).ok
    peer.add("long", [1, 2], max_new_tokens=20)
    peer.until(lambda: peer.ends("long"))
    traces = list(tmp_path.glob("*.trace.json"))
    assert len(traces) == 1
    reply = peer.call(lambda call: messages.Profile(call, False))
    assert reply.ok and reply.message == str(traces[0]) and reply.info["steps"] == 3
    assert not peer.call(lambda call: messages.Profile(call, False)).ok


def test_statistics_come_at_a_steady_pace_and_when_it_falls_idle(process: Running, peer: Peer) -> None:
    start = time.monotonic()
    peer.add("r", [1, 2, 3], max_new_tokens=500)
    peer.until(lambda: peer.ends("r"))
    seconds = time.monotonic() - start
    assert seconds > 2 * STATS_SECONDS
    count = len(peer.stats())
    assert seconds / STATS_SECONDS - 2 <= count <= seconds / STATS_SECONDS + 2
    last = peer.received[-1]
    assert isinstance(last, StepOutput) and last.stats is not None
    assert (last.stats.running, last.stats.used_tokens, last.stats.generation_tokens) == (0, 0, 500)
    silent = len(peer.received)
    peer.listen(2.5 * STATS_SECONDS)
    assert len(peer.received) == silent


def test_a_batch_line_every_so_many_steps(process: Running, peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="freetoken.scheduler"):
        peer.add("r", [1, 2, 3], max_new_tokens=45)
        peer.until(lambda: peer.ends("r"))
        peer.call(messages.GetInfo)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("steps ")]
    assert len(lines) == 4 and "running 1, queued 0" in lines[0] and "of 1196 tokens" in lines[0]


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown(peer: Peer, monkeypatch: pytest.MonkeyPatch, drain: bool) -> None:
    use_runner(monkeypatch, ProcessRunner)
    running = Running(peer)
    for number in range(6):
        peer.add(f"r{number}", [1, 2, number], max_new_tokens=60)
    peer.until(lambda: peer.outputs("r0"))
    peer.send(messages.Shutdown(drain=drain))
    assert running.code() == 0
    peer.listen(0.1)
    for number in range(6):
        assert peer.ends(f"r{number}") == (["length"] if drain else ["abort"])


# --- failures -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """``run_scheduler`` ignores signals, which the test process must not go on doing."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (StartupError("the file is truncated"), "the file is truncated"),
        (RuntimeError("first line\nsecond line"), "RuntimeError: first line"),
        (ZeroDivisionError(), "ZeroDivisionError: no message"),
    ],
)
def test_a_start_that_fails_says_why(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, signals: None, error: Exception, detail: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    use_runner(monkeypatch, fail)
    assert run_scheduler(make_config(), peer.channel.folder) == 1
    failed = peer.wait_for(messages.Failed)
    assert failed.detail == detail
    assert failed.reason == f"the start failed ({type(error).__name__}); the server's log says more"
    assert not any(isinstance(message, messages.Ready) for message in peer.received)


def test_a_step_that_fails_is_the_end(peer: Peer, monkeypatch: pytest.MonkeyPatch, signals: None) -> None:
    class Breaking(ProcessRunner):
        def collect(self, handle: int) -> Any:
            if handle == 3:
                raise RuntimeError("the device is gone")
            return super().collect(handle)

    use_runner(monkeypatch, Breaking)
    # Sending blocks until the scheduler has connected.
    sender = threading.Thread(target=peer.add, args=("r", [1, 2, 3]), kwargs={"max_new_tokens": 50})
    sender.start()
    assert run_scheduler(make_config(overlap=False), peer.channel.folder) == 1
    sender.join()
    said = messages.Failed(
        "the step failed (RuntimeError); the server's log says more", "RuntimeError: the device is gone"
    )
    assert peer.wait_for(messages.Failed) == peer.received[-1] == said
    assert len(peer.outputs("r")) == 3 and peer.ends("r") == []
