"""The real scheduler process around a fake runner, in a thread of a test or as the child of a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from freetoken.grammar.compiler import GrammarCompiler
from freetoken.scheduler import process
from freetoken.scheduler.process import run_scheduler
from freetoken.server_args import Config
from scheduler import fake_runner
from scheduler.fake_runner import FakeRunner
from server.fakes import ByteTokenizer

DELAY = 0.002


class ProcessRunner(FakeRunner):
    """What the process asks of a runner besides steps; a step takes about ``DELAY`` seconds."""

    def __init__(self, config: Config, progress: Callable[[str, int, int, str], None]) -> None:
        super().__init__(config, num_pages=300, max_rows=4)
        for done in range(2001):
            progress("loading weights", done, 2000, "bytes")

    def launch(self, batch: Any) -> int:
        time.sleep(DELAY)
        return super().launch(batch)

    def info(self) -> dict[str, object]:
        return {"kernels": [], "max_total_tokens": (self.num_pages - 1) * self.size}

    def graph_counts(self) -> tuple[dict[str, int], int]:
        return {"8": 5}, 2


def run_on_fake_runner(config: Config, folder: str) -> int:
    """The child's entry in tests of the whole server."""
    fake_runner.VOCAB = config.sample_vocab
    fake_runner.COMPILER = GrammarCompiler(ByteTokenizer, config.sample_vocab, config.model.eos_token_ids)
    process.tokenizer_of = lambda _: ByteTokenizer()  # type: ignore[assignment]
    sys.modules["freetoken.runner.model_runner"] = SimpleNamespace(ModelRunner=ProcessRunner)  # type: ignore[assignment]
    return run_scheduler(config, folder)
