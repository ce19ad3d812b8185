"""Life of the scheduler process: loading, ready, the step loop, errors, exit."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
import time
import traceback

import zmq

from freetoken import environ
from freetoken.errors import FreetokenError
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
from freetoken.server_args import Config
from freetoken.startup import tokenizer_of

logger = logging.getLogger("freetoken.scheduler")

STATS_SECONDS = 0.5
LOADING_SECONDS = 0.1


class SchedulerProcess:
    """The loop around one :class:`Scheduler`: messages in, steps, messages out."""

    def __init__(self, config: Config, channel: Channel) -> None:
        self.config = config
        self._context = zmq.Context()
        self._inbox, self._outbox = channel.scheduler_sockets(self._context)
        self._stopping = False
        self._exit = False
        self._last_stats = 0.0
        self._last_loading = 0.0
        self._decode_steps = 0
        self._profiler: object = None
        self._profile_folder = ""

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
        check = bool(environ.get("FREETOKEN_CHECK_INVARIANTS"))
        config = self.config
        compiler = GrammarCompiler(lambda: tokenizer_of(config), config.sample_vocab, config.model.eos_token_ids)
        self.scheduler = Scheduler(config, self.runner, grammars=Grammars(compiler), check_invariants=check)
        gc.collect()
        gc.freeze()
        self.send(Ready(self.runner.info()))
        while not self._exit:
            self._turn()
        return 0

    def _turn(self) -> None:
        busy = self.scheduler.has_work
        if self._inbox.poll(0 if busy else None):
            for frame in drain_socket(self._inbox):
                self._handle(decode_to_scheduler(frame))
        outputs = self.scheduler.step() if self.scheduler.has_work else []
        self._publish(outputs)
        if self._stopping and not self.scheduler.has_work:
            self._exit = True

    def _publish(self, outputs: list[RequestOutput]) -> None:
        now = time.monotonic()
        idle = not self.scheduler.has_work
        due = now - self._last_stats >= STATS_SECONDS or (idle and bool(outputs))
        stats = None
        if due and (outputs or not idle):
            stats = self._stats()
            self._last_stats = now
        if outputs or stats is not None:
            self.send(StepOutput(outputs, stats))
        if outputs:
            self._log_batch_line()

    def _stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        stats.graph_replays, stats.graph_misses = self.runner.graph_counts()
        return stats

    def _log_batch_line(self) -> None:
        interval = self.config.decode_log_interval
        if not interval:
            return
        self._decode_steps += 1
        if self._decode_steps % interval:
            return
        s = self._stats()
        share = s.used_tokens / s.total_tokens if s.total_tokens else 0.0
        logger.info(
            "steps %d | running %d, queued %d | KV %d of %d tokens (%.1f %%), %d more cached | %.1f tok/s | retractions %d",
            s.steps,
            s.running,
            s.queued,
            s.used_tokens,
            s.total_tokens,
            100 * share,
            s.cached_pool_tokens,
            s.gen_throughput,
            s.retractions,
        )

    def _handle(self, message: ToScheduler) -> None:
        if isinstance(message, AddRequest):
            self.scheduler.add(message)
        elif isinstance(message, AbortRequest):
            self.scheduler.abort(message.rid)
        elif isinstance(message, FlushCache):
            done = self.scheduler.flush_cache()
            text = "" if done else "requests are running; the cache can be flushed only when none is"
            self.send(ControlReply(message.call, done, text, stats=self._stats()))
        elif isinstance(message, GetInfo):
            self.send(ControlReply(message.call, True, info=self.runner.info(), stats=self._stats()))
        elif isinstance(message, Profile):
            self.send(self._profile(message))
        elif isinstance(message, Shutdown):
            self._stopping = True
            if not message.drain:
                self.scheduler.abort(None)

    def _profile(self, message: Profile) -> ControlReply:
        import torch

        if message.start:
            if self._profiler is not None:
                return ControlReply(message.call, False, "a profile is already being taken")
            folder = message.folder or os.path.join(tempfile.gettempdir(), "freetoken-profile")
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                return ControlReply(message.call, False, f"cannot write to {folder}: {error.strerror}")
            self._profile_folder = folder
            self._profiler = torch.profiler.profile()
            self._profiler.start()  # type: ignore[attr-defined]
            return ControlReply(message.call, True, "started")
        if self._profiler is None:
            return ControlReply(message.call, False, "no profile is being taken")
        profiler, self._profiler = self._profiler, None
        path = os.path.join(self._profile_folder, f"freetoken-{int(time.time())}.trace.json")
        profiler.stop()  # type: ignore[attr-defined]
        profiler.export_chrome_trace(path)  # type: ignore[attr-defined]
        # The exporter reports a file it cannot open in the log alone.
        if not os.path.exists(path):
            return ControlReply(message.call, False, f"cannot write to {path}; the profile is lost")
        return ControlReply(message.call, True, path)

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()
        self._context.term()


def run_scheduler(config: Config, channel_folder: str) -> int:
    """Body of the scheduler process. Returns 0 after a shutdown and 1 after a failure, which it reports first.

    SIGINT and SIGTERM are left to the server process, which drains requests and then sends :class:`Shutdown`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    process = SchedulerProcess(config, Channel(channel_folder))
    try:
        return process.run()
    except FreetokenError as error:
        process.send(Failed(str(error)))
        return 1
    except Exception as error:
        logger.error("the scheduler failed:\n%s", traceback.format_exc())
        process.send(Failed(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"))
        return 1
    finally:
        process.close()
