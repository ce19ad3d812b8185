"""Life of the scheduler process: loading, ready, the step loop, errors, exit."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from freetoken import crash_dump, environ, logs
from freetoken.errors import FreetokenError, StartupError
from freetoken.grammar.compiler import GrammarCompiler
from freetoken.messages import (
    AbortRequest,
    AddRequest,
    Channel,
    ControlReply,
    Failed,
    FlushCache,
    GetInfo,
    Loading,
    Profile,
    Ready,
    RequestOutput,
    SchedulerStats,
    Shutdown,
    StepOutput,
    ToFrontend,
    ToScheduler,
    decode_to_scheduler,
    drain_socket,
    encode,
)
from freetoken.scheduler.grammar import Grammars
from freetoken.scheduler.scheduler import Scheduler
from freetoken.scheduler.steps import Faults, StepLog, WatchedRunner
from freetoken.scheduler.watchdog import Watchdog
from freetoken.server_args import Config
from freetoken.startup import tokenizer_of

if TYPE_CHECKING:
    from freetoken.profiling.session import Session

logger = logging.getLogger("freetoken.scheduler")

STATS_SECONDS = 0.5
LOADING_SECONDS = 0.1
LOG_SECONDS = 2.0


PROFILE_STEPS = 500
"""Steps after which a profile ends by itself: what is recorded lies in memory, some 260 KB a step, until it is written."""


class SchedulerProcess:
    """The loop around one :class:`Scheduler`: messages in, steps, messages out."""

    def __init__(self, config: Config, channel: Channel) -> None:
        self.config = config
        self._channel = channel
        self._context = zmq.Context()
        self._inbox, self._outbox = channel.scheduler_sockets(self._context)
        self._stopping = False
        self._exit = False
        self._last_stats = 0.0
        self._last_loading = 0.0
        self._decode_steps = 0
        self._profile_session: Session | None = None
        self._profile_folder = ""
        self._profile_until = 0
        self._profile_done: ControlReply | None = None
        self.scheduler: Scheduler | None = None
        self.steps = StepLog()
        self._watchdog = Watchdog(
            config.soft_watchdog_timeout, config.watchdog_timeout, on_soft=self._warn_stuck, on_hard=self._end_stuck
        )

    def send(self, message: ToFrontend) -> None:
        self._outbox.send(encode(message))

    def progress(self, phase: str, done: int, total: int, unit: str) -> None:
        """Report a phase of the start, at most ten times a second."""
        now = time.monotonic()
        if done < total and done and now - self._last_loading < LOADING_SECONDS:
            return
        self._last_loading = now
        self.send(Loading(phase, done, total, unit))

    def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        from freetoken.runner.model_runner import ModelRunner

        self.send(Loading("starting", 0, 0, ""))
        self.runner = ModelRunner(self.config, self.progress)
        if self.config.device == "cuda" and not self.config.skip_server_warmup:
            from freetoken.runner.warm_up import warm_up

            warm_up(self.runner, self.progress)
        check = bool(environ.get("FREETOKEN_CHECK_INVARIANTS"))
        self._faults = Faults.from_environment()
        watched = WatchedRunner(self.runner, self.steps, self._faults)
        config = self.config
        compiler = GrammarCompiler(lambda: tokenizer_of(config), config.sample_vocab, config.model.eos_token_ids)
        scheduler = Scheduler(config, watched, grammars=Grammars(compiler), check_invariants=check)
        self.scheduler = scheduler
        gc.collect()
        gc.freeze()
        self.send(Ready(self.runner.info()))
        self._watchdog.start()
        while not self._exit:
            self._turn(scheduler)
        return 0

    def _turn(self, scheduler: Scheduler) -> None:
        if self._inbox.poll(0 if scheduler.has_work else None):
            for frame in drain_socket(self._inbox):
                self._handle(scheduler, decode_to_scheduler(frame))
        outputs: list[RequestOutput] = []
        if scheduler.has_work:
            self._watchdog.begin()
            outputs = scheduler.step()
            if self._faults.retract_every and self.steps.launched_steps % self._faults.retract_every == 0:
                scheduler.force_retraction()
            self._watchdog.end()
            if self._profile_session is not None and self.steps.launched_steps >= self._profile_until:
                self._profile_done = self._end_profile(0)
        self._publish(scheduler, outputs)
        if self._stopping and not scheduler.has_work:
            self._exit = True

    def _publish(self, scheduler: Scheduler, outputs: list[RequestOutput]) -> None:
        now = time.monotonic()
        idle = not scheduler.has_work
        due = now - self._last_stats >= STATS_SECONDS or (idle and bool(outputs))
        stats = None
        if due and (outputs or not idle):
            stats = self._stats(scheduler)
            self._last_stats = now
        if outputs or stats is not None:
            self.send(StepOutput(outputs, stats))
        if outputs:
            self._log_batch_line(scheduler)

    def _stats(self, scheduler: Scheduler) -> SchedulerStats:
        stats = scheduler.stats()
        stats.graph_replays, stats.graph_misses = self.runner.graph_counts()
        stats.decode_step_ms = self.steps.mean_ms(prefill=False)
        stats.prefill_step_ms = self.steps.mean_ms(prefill=True)
        stats.state_block_bytes = getattr(self.runner, "state_block_bytes", 0)
        return stats

    def _log_batch_line(self, scheduler: Scheduler) -> None:
        interval = self.config.decode_log_interval
        if not interval:
            return
        self._decode_steps += 1
        if self._decode_steps % interval:
            return
        logger.info(batch_line(self._stats(scheduler)))

    def _handle(self, scheduler: Scheduler, message: ToScheduler) -> None:
        if isinstance(message, AddRequest):
            scheduler.add(message)
        elif isinstance(message, AbortRequest):
            scheduler.abort(message.rid)
        elif isinstance(message, FlushCache):
            done = scheduler.flush_cache()
            text = "" if done else "requests are running; the cache can be flushed only when none is"
            self.send(ControlReply(message.call, done, text, stats=self._stats(scheduler)))
        elif isinstance(message, GetInfo):
            self.send(ControlReply(message.call, True, info=self.runner.info(), stats=self._stats(scheduler)))
        elif isinstance(message, Profile):
            self.send(self._profile(message))
        elif isinstance(message, Shutdown):
            self._stopping = True
            if not message.drain:
                scheduler.abort(None)

    def _profile(self, message: Profile) -> ControlReply:
        from freetoken.profiling.session import Session

        if message.start:
            if self._profile_session is not None:
                return ControlReply(message.call, False, "a profile is already being taken")
            folder = message.folder or os.path.join(tempfile.gettempdir(), "freetoken-profile")
            try:
                os.makedirs(folder, exist_ok=True)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                return ControlReply(message.call, False, f"cannot write to {folder!r}: {why}")
            self._profile_folder = folder
            session = Session(self.runner)
            session.start()
            self._profile_session = session
            self._profile_until = self.steps.launched_steps + PROFILE_STEPS
            self._profile_done = None
            return ControlReply(message.call, True, "started")
        if self._profile_session is not None:
            return self._end_profile(message.call)
        done, self._profile_done = self._profile_done, None
        if done is None:
            return ControlReply(message.call, False, "no profile is being taken")
        return ControlReply(message.call, done.ok, done.message, info={**done.info, "steps": PROFILE_STEPS})

    def _end_profile(self, call: int) -> ControlReply:
        """Stop the profiler and write what it has; the answer to ``call``."""
        from freetoken.profiling.session import write_roles

        session, self._profile_session = self._profile_session, None
        assert session is not None
        path = Path(self._profile_folder) / f"freetoken-{int(time.time())}.trace.json"
        try:
            session.stop(path)
        except StartupError as error:
            return ControlReply(call, False, str(error))
        roles, why = write_roles(path)
        return ControlReply(call, True, str(path), info={"no_roles": why} if roles is None else {"roles": str(roles)})

    # --- going wrong -------------------------------------------------------------------------------------------------

    def dump(self, reason: str, **more: Any) -> None:
        """Write a crash dump of this process, if one is wanted."""
        live = [] if self.scheduler is None else list(self.scheduler.live.values())
        text = self.config.log_requests == "text"
        requests = [
            {
                "rid": req.rid,
                "status": req.status.name.lower(),
                "prompt_tokens": req.prompt_len,
                "output_tokens": len(req.ids) - req.prompt_len,
                "cached_tokens": req.cached_tokens,
                "retractions": req.retractions,
                "sampling": crash_dump.numbers_of(req.sampling),
                **({"ids": req.ids} if text else {}),
            }
            for req in live
        ]
        crash_dump.write(self.config, "scheduler", reason, requests, last_steps=self.steps.public(), **more)

    def failure(self, error: Exception) -> str:
        """What clients are told of ``error``: its text may hold paths, sizes, or what somebody wrote."""
        what = "start" if self.scheduler is None else "step"
        return f"the {what} failed ({type(error).__name__}); the server's log says more"

    def _warn_stuck(self, seconds: float) -> None:
        _say(
            f"step {self.steps.launched_steps} has taken {seconds:.1f} seconds so far (--soft-watchdog-timeout); stacks "
            f"of all threads:\n{crash_dump.stacks_text()}"
        )

    def _end_stuck(self, seconds: float) -> None:
        """The step loop is stuck for good: tell the server from this thread, over a socket of its own, and end."""
        reason = f"step {self.steps.launched_steps} did not end within {self.config.watchdog_timeout:g} seconds"
        where = crash_dump.stacks_text()
        _say(f"{reason} (--watchdog-timeout); stacks of all threads:\n{where}", lambda: self.dump(reason))
        self._channel.send_once(Failed(f"{reason} (--watchdog-timeout)"))
        os._exit(1)

    def close(self) -> None:
        self._watchdog.stop()
        self._inbox.close()
        self._outbox.close()
        self._context.term()


def batch_line(s: SchedulerStats) -> str:
    """The scheduler's state in one line of the log."""
    share = s.used_tokens / s.total_tokens if s.total_tokens else 0.0
    parts = [
        f"steps {s.steps} ({s.decode_step_ms:.1f} ms a decode step)",
        f"running {s.running}, queued {s.queued}",
        f"KV {s.used_tokens} of {s.total_tokens} tokens ({100 * share:.1f} %), {s.cached_pool_tokens} more cached",
    ]
    if s.state_block_bytes:
        parts.append(
            f"states {s.rows_used} of {s.rows_total}, checkpoints {s.state_blocks_used} of {s.state_blocks_total} "
            f"({s.state_blocks_used * s.state_block_bytes / 1e6:.1f} MB), {s.state_hits} hits"
        )
    return " | ".join([*parts, f"{s.gen_throughput:.1f} tok/s", f"retractions {s.retractions}"])


def _say(text: str, first: Callable[[], None] = lambda: None) -> None:
    """Log an error from a thread of its own, and go on after :data:`LOG_SECONDS` should the log be what is stuck."""

    def say() -> None:
        first()
        logger.error(text)

    thread = threading.Thread(target=say, name="freetoken-log", daemon=True)
    thread.start()
    thread.join(LOG_SECONDS)


def run_scheduler(config: Config, channel_folder: str) -> int:
    """Body of the scheduler process. Returns 0 after a shutdown and 1 after a failure, which it reports first.

    SIGINT, SIGTERM and SIGHUP are left to the server process, which drains requests and then sends :class:`Shutdown`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.set_up(config.log_level)
    process = SchedulerProcess(config, Channel(channel_folder))
    try:
        return process.run()
    except FreetokenError as error:
        process.send(Failed(process.failure(error), str(error)))
        return 1
    except Exception as error:
        trace = traceback.format_exc()
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        # The server ends this process as soon as it knows, so it is told last.
        _say(f"the scheduler failed:\n{trace}", lambda: process.dump(detail, traceback=trace))
        process.send(Failed(process.failure(error), detail))
        return 1
    finally:
        process.close()
