"""One run of one arm of an experiment, in a process of its own (started by :mod:`freetoken.bench.ab_runs`).

Writes one JSON object: ``samples`` (milliseconds or tokens a second by name, one a turn), ``lower`` (whether lower is better, by name),
``outputs`` (drawn ids by request), ``tokens``, ``scores`` (by request, then by output index: scores by token id) and ``bound`` (relative
RMS that scores of an equivalent arm may differ by; ``null`` where outputs were checked by the workload itself).
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from freetoken import hardware
from freetoken.bench import cli, one_batch, ops
from freetoken.bench.own_server import own_server, post
from freetoken.environ import EnvironmentValueError
from freetoken.errors import FreetokenError, StartupError
from freetoken.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from freetoken.runner.model_runner import ModelRunner

TURNS, GO, DONE = "--turns", "go", "done"
"""First word of an arm that is told when it may run, what it is told, and what it answers behind each turn."""
KEPT_REQUESTS, KEPT_OUTPUTS, KEPT_SCORES = 4, 8, 256
PROBES, PROBE_TOKENS, PROBE_PROMPT = 4, 24, 48
RELATIVE_RMS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Bound of a single op, as in :data:`freetoken.kernels.checking.RELATIVE_RMS`, by name and without torch."""
EIGHT_BITS = 2e-2
"""The same where activations are rounded to eight bits, which sums in another order, or a last bit before, make fall otherwise: in each
arm a product is some 0.7 % off (docs/kernels.md), and a block has two products."""


def score_bound(model: ModelConfig, dtype: str) -> float:
    """Relative RMS that logits of equivalent arms stay below: an op's bound, once for each of two blocks a layer, added as
    independent errors add."""
    single = RELATIVE_RMS[dtype] if model.packed is None else max(EIGHT_BITS, RELATIVE_RMS[dtype])
    return single * math.sqrt(2 * model.num_layers)


@dataclass
class Arm:
    """What a run reports."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    lower: dict[str, bool] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)
    scores: list[dict[str, dict[str, float]]] = field(default_factory=list)
    bound: float | None = None
    tokens: int = 0
    """Output tokens of a timed part whose outputs are not kept: equal work has equally many."""

    def add(self, name: str, value: float, *, lower: bool) -> None:
        """One more value of a metric."""
        self.samples.setdefault(name, []).append(value)
        self.lower[name] = lower


class Recorder:
    """Stands before a runner's sampler and keeps logits of the first requests and outputs: of ids evenly over the vocabulary, whose spread
    is that of all.

    Rows arrive in the order of the requests, first those that end a prompt, then one a request and decode step.
    """

    def __init__(self, runner: ModelRunner, requests: int) -> None:
        self.requests = requests
        self.seen = 0
        self.scores: list[dict[str, dict[str, float]]] = [{} for _ in range(min(requests, KEPT_REQUESTS))]
        self._sampler = runner.sampler
        self._sample = runner.sampler.sample
        self._sampler.sample = self.sample  # type: ignore[method-assign]

    def sample(self, logits: torch.Tensor, plan: Any, masks: torch.Tensor | None = None) -> Any:
        """As the sampler's own."""
        for row in range(logits.shape[0]):
            output, request = divmod(self.seen, self.requests)
            self.seen += 1
            if request < len(self.scores) and output < KEPT_OUTPUTS:
                step = max(1, logits.shape[1] // KEPT_SCORES)
                kept = logits[row, ::step].float().tolist()
                self.scores[request][str(output)] = {str(i * step): value for i, value in enumerate(kept)}
        return self._sample(logits, plan, masks)

    def stop(self) -> None:
        """Give the sampler back."""
        self._sampler.sample = self._sample  # type: ignore[method-assign]


Turns = Callable[[int], Iterator[None]]
"""Of how many turns a run wants: what it iterates over, one timed part each."""


def at_once(count: int) -> Iterator[None]:
    """Turns of a run that has the machine to itself."""
    yield from [None] * count


def run_one_batch(words: Sequence[str], turns: Turns) -> Arm:
    """Prefill and decode milliseconds of every shape, ``--repeats`` turns. The first run of each shape is recorded and not timed; a short
    one opens each turn, since another process may have had the machine before."""
    from freetoken.runner.model_runner import ModelRunner
    from freetoken.startup import prepare

    args = one_batch.parser().parse_args(words)
    one_batch.check(args)
    config, _ = prepare(one_batch.server_args(args))
    runner = ModelRunner(config, lambda *_: None)
    arm = Arm(bound=score_bound(config.model, config.dtype))

    def once(shape: tuple[int, int], seed: int, tokens: int = args.output_len) -> one_batch.Timing:
        prompts = one_batch.random_ids(config, *shape, seed)
        return one_batch.BatchDriver(runner, config, prompts, tokens).run()

    cases = [(shape, graphs) for shape in one_batch.shapes(args) for graphs in one_batch.graph_choices(args)]
    for shape, graphs in cases:
        recorder = Recorder(runner, shape[0])
        with one_batch.graphs_set(runner, graphs):
            timing = once(shape, 0)
        recorder.stop()
        arm.scores += recorder.scores
        arm.outputs += timing.outputs[:KEPT_REQUESTS]
    # As a server does when it is ready: a collection among a few short steps would be most of their time.
    gc.collect()
    gc.freeze()
    for turn, _ in enumerate(turns(args.repeats)):
        if turn == 0:
            stay_on_a_core()
        once(cases[0][0], 0, one_batch.SHORTEST_OUTPUT)
        for shape, graphs in cases:
            with one_batch.graphs_set(runner, graphs):
                timing = once(shape, turn + 1)
            name = f"{shape[0]}x{shape[1]}"
            # Prompts never run in graphs: each case is one more sample.
            arm.add(f"prefill {name}, ms", timing.prefill_s * 1e3, lower=True)
            how = "" if graphs else " without graphs"
            # Where the host is the limit, one step that was interrupted would move the mean.
            arm.add(f"decode {name}{how}, ms", statistics.median(timing.steps_s) * 1e3, lower=True)
    return arm


def run_ops(words: Sequence[str]) -> Arm:
    """Microseconds of every case; the benchmark itself has compared each with its reference."""
    arm = Arm()
    for figure in ops.run(ops.parser().parse_args(words)):
        shape = ", ".join(
            f"{k} {v}" for k, v in figure.items() if isinstance(v, int) and k not in ("us", "roof", "share")
        )
        arm.add(f"{figure['what']} {shape}, us", figure["us"], lower=True)
    return arm


def _probe(arm: Arm, base: str, vocab: int) -> None:
    """Greedy answers to fixed random prompts, one at a time, with the scores of the best ids at each place."""
    rng = random.Random(0)
    for _ in range(PROBES):
        ids = [rng.randrange(vocab) for _ in range(PROBE_PROMPT)]
        sampling = {"max_new_tokens": PROBE_TOKENS, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
        answer = post(f"{base}/generate", body)
        arm.outputs.append(answer["output_ids"])
        places = answer["meta_info"]["output_top_logprobs"]
        arm.scores.append({str(n): {str(i): v for v, i, *_ in place} for n, place in enumerate(places)})


def run_serving(words: Sequence[str], server_words: Sequence[str]) -> Arm:
    """Rates and latencies of a server started for this run."""
    from freetoken.bench import serving
    from freetoken.server_args import ServerArgs
    from freetoken.server_args import parser as server_parser
    from freetoken.startup import prepare

    given = server_parser().parse_args(server_words)
    config, _ = prepare(ServerArgs(**vars(given)))
    with own_server(server_words) as (base, _):
        port = base.rpartition(":")[2]
        args = serving.parser().parse_args([*words, "--port", port, "--disable-tqdm"])
        figure = asyncio.run(serving.run(args))
        if figure["failed"]:
            raise StartupError(f"{figure['failed']} requests failed")
        arm = Arm(bound=score_bound(config.model, config.dtype))
        arm.tokens = figure["output_tokens"]
        _probe(arm, base, config.sample_vocab)
    arm.add("output tok/s", figure["output_tok_s"], lower=False)
    if figure["decode_tok_s"] is not None:
        arm.add("decode tok/s", figure["decode_tok_s"], lower=False)
    for name in ("ttft_ms", "tpot_ms"):
        if figure.get(name, {}).get("median") is not None:
            arm.add(f"median {name.removesuffix('_ms')}, ms", figure[name]["median"], lower=True)
    return arm


def run(workload: str, words: Sequence[str], server_words: Sequence[str], turns: Turns) -> Arm:
    """The run of ``workload``: ``one_batch``, or in one turn ``ops`` or ``serving``."""
    if workload == "one_batch":
        return run_one_batch(words, turns)
    arm = Arm()
    for _ in turns(1):
        arm = run_ops(words) if workload == "ops" else run_serving(words, server_words)
    return arm


def stay_on_a_core() -> None:
    """On a GPU a step is launched by this thread: keep it on one core, the same in every run, since cores differ by more than many a
    setting. Where the CPU computes, nothing."""
    if hasattr(os, "sched_setaffinity") and hardware.probe().usable_gpu:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def in_turns(answers: TextIO) -> Turns:
    """Turns that standard input gives: how many are wanted is the first line of ``answers``, and each turn that is over a further one."""

    def turns(count: int) -> Iterator[None]:
        print(count, file=answers, flush=True)
        for _ in range(count):
            if sys.stdin.readline() != f"{GO}\n":
                raise StartupError("nobody waits for this run any more")
            yield
            print(DONE, file=answers, flush=True)

    return turns


def main(argv: Sequence[str] | None = None) -> int:
    """``[--turns FD] RESULT WORKLOAD SERVER_WORDS WORD...``: run and write ``RESULT``; 1 and one sentence when it cannot work.

    With ``--turns`` every timed part waits for a line on standard input, and answers go to the descriptor ``FD`` (see :func:`in_turns`).
    """
    given = list(sys.argv[1:] if argv is None else argv)
    turns: Turns = at_once
    if given[0] == TURNS:
        turns = in_turns(os.fdopen(int(given[1]), "w", encoding="ascii"))
        given = given[2:]
    result, workload, server_words, *words = given
    try:
        arm = run(workload, words, shlex.split(server_words), turns)
    except (FreetokenError, EnvironmentValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Path(result).write_text(json.dumps(vars(arm)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    cli.leave(main())
