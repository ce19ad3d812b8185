"""The real scheduler over the real runner on the CPU, one step at a time, with the invariant battery after each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle import Generated

from freetoken.grammar.compiler import GrammarCompiler
from freetoken.messages import AddRequest, Finish, RequestOutput
from freetoken.runner.model_runner import ModelRunner
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler.grammar import Grammars
from freetoken.scheduler.request import ScheduleBatch
from freetoken.scheduler.scheduler import Scheduler
from freetoken.server_args import ServerArgs
from freetoken.startup import prepare


@dataclass
class Answer(Generated):
    """What the scheduler said of one request."""

    cached_tokens: int = 0
    finish: Finish | None = None


@dataclass
class Shape:
    """One step as it was launched: decodes, and the length of each prompt piece."""

    decodes: int
    pieces: list[int] = field(default_factory=list)

    @property
    def mixed(self) -> bool:
        return self.decodes > 0 and bool(self.pieces)


class Rig:
    """``overlap`` and ``cuda_graph_bs`` are set past the rules that turn them off on the CPU; ``flags`` are the server's."""

    def __init__(
        self, path: str | Path, *, overlap: bool = False, cuda_graph_bs: tuple[int, ...] = (), **flags: Any
    ) -> None:
        flags = {"page_size": 4, "max_total_tokens": 2048, "random_seed": 5, **flags}
        config, self.tokenizer = prepare(ServerArgs(model_path=str(path), device="cpu", dtype="float32", **flags))
        self.config = dataclasses.replace(config, overlap=overlap, cuda_graph_bs=cuda_graph_bs)
        self.runner = ModelRunner(self.config)
        self.compiler = GrammarCompiler(
            lambda: self.tokenizer, self.config.sample_vocab, self.config.model.eos_token_ids
        )
        self.scheduler = Scheduler(self.config, self, grammars=Grammars(self.compiler), check_invariants=True)
        self.answers: dict[str, Answer] = {}
        self.shapes: list[Shape] = []

    # --- the runner that the scheduler sees: the real one, with the shape of each step noted ---------------------------

    @property
    def num_pages(self) -> int:
        return self.runner.num_pages

    @property
    def max_rows(self) -> int:
        return self.runner.max_rows

    @property
    def has_state(self) -> bool:
        return self.runner.has_state

    @property
    def state_blocks(self) -> int:
        return self.runner.state_blocks

    def launch(self, batch: ScheduleBatch) -> Any:
        self.shapes.append(Shape(len(batch.decodes), [piece.length for piece in batch.prefills]))
        return self.runner.launch(batch)

    def draw(self, handle: Any, masks: Any) -> None:
        self.runner.draw(handle, masks)

    def collect(self, handle: Any) -> Any:
        return self.runner.collect(handle)

    # --- driving -------------------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], **sampling: Any) -> Answer:
        """Queue a request: greedy, past any end of sequence, unless ``sampling`` says otherwise."""
        values = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 16, **sampling}
        rid = f"r{len(self.answers)}"
        self.answers[rid] = Answer(prompt, [])
        self.scheduler.add(AddRequest(rid, list(prompt), SamplingParams.from_dict(values)))
        return self.answers[rid]

    def step(self) -> None:
        for output in self.scheduler.step():
            self._receive(self.answers[output.rid], output)

    def _receive(self, answer: Answer, output: RequestOutput) -> None:
        assert answer.finish is None, "an output after the last one"
        answer.ids += output.ids
        answer.cached_tokens = output.cached_tokens
        answer.finish = output.finish
        if output.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None
            answer.prompt_logprobs = output.prompt_logprobs

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.scheduler.has_work:
            self.step()

    def serve(self, prompts: Sequence[list[int]], every: int = 0, **sampling: Any) -> list[Answer]:
        """Answers to ``prompts``: all queued at once, or one after every ``every`` steps."""
        answers = []
        for prompt in prompts:
            answers.append(self.add(prompt, **sampling))
            for _ in range(every):
                self.step()
        self.run()
        return answers

    @property
    def retractions(self) -> int:
        return self.scheduler.stats().retractions
