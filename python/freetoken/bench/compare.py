"""The same prompts through this runner and through transformers' ``generate``, in alternating pairs."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from freetoken.bench import figures
from freetoken.bench.one_batch import WARMUP_STEPS, BatchDriver, random_ids, shapes
from freetoken.errors import StartupError
from freetoken.server_args import Config

if TYPE_CHECKING:
    from freetoken.runner.model_runner import ModelRunner


class StepClock:
    """A streamer for ``generate`` that only takes the time of every step: the prompt first, then each token."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        """Called once after the last step; there is nothing to flush."""


@dataclass
class PairTotals:
    """Decode milliseconds a step of each run, and how many drawn ids agreed."""

    ours_ms: list[float]
    theirs_ms: list[float]
    same_ids: int = 0
    all_ids: int = 0


def load_transformers(config: Config) -> Any:
    """The checkpoint as a transformers model in the runner's type, on its device."""
    from transformers import AutoModelForCausalLM

    folder, extra = config.model_path, {}
    if os.path.isfile(folder):
        folder, extra = os.path.dirname(folder) or ".", {"gguf_file": os.path.basename(folder)}
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype), **extra)
    except (OSError, ValueError, ImportError) as error:
        raise StartupError(f"transformers cannot load {config.model_path}: {str(error).splitlines()[0]}") from None
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().to(config.device)


def generate(model: Any, prompts: list[list[int]], output_len: int) -> tuple[float, list[list[int]]]:
    """``(decode seconds a step, drawn ids)`` of transformers' greedy ``generate``."""
    ids = torch.tensor(prompts, device=model.device)
    clock = StepClock()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            do_sample=False,
            streamer=clock,
        )
    timed = clock.stamps[1 + WARMUP_STEPS :]
    return (timed[-1] - timed[0]) / (len(timed) - 1), out[:, ids.shape[1] :].tolist()


def one_shape(
    runner: ModelRunner, config: Config, model: Any, requests: int, input_len: int, output_len: int, pairs: int
) -> PairTotals:
    """``pairs`` alternating runs of both on fresh prompts, after one of each that is not counted."""
    totals = PairTotals([], [])
    for pair in range(pairs + 1):
        prompts = random_ids(config, requests, input_len, 1000 + pair)
        timing = BatchDriver(runner, config, prompts, output_len).run()
        theirs, ids = generate(model, prompts, output_len)
        if pair == 0:
            continue
        totals.ours_ms.append(timing.step_s * 1e3)
        totals.theirs_ms.append(theirs * 1e3)
        flat = [a == b for ours, other in zip(timing.outputs, ids) for a, b in zip(ours, other)]
        totals.same_ids += sum(flat)
        totals.all_ids += len(flat)
    return totals


def compare_transformers(
    runner: ModelRunner, config: Config, args: argparse.Namespace, label: str
) -> list[dict[str, Any]]:
    """Compare every shape of the flags; prints a line each and returns the figures."""
    model = load_transformers(config)
    found: list[dict[str, Any]] = []
    for requests, input_len in shapes(args):
        totals = one_shape(runner, config, model, requests, input_len, args.output_len, args.repeats)
        ours, theirs = statistics.median(totals.ours_ms), statistics.median(totals.theirs_ms)
        found.append(
            figures.figure(
                "decode against transformers",
                model=label,
                device=config.device,
                requests=requests,
                depth=input_len,
                tokens=args.output_len,
                dtype=config.dtype,
                threads=torch.get_num_threads(),
                ms=ours,
                tok_s=requests * 1e3 / ours,
                transformers_ms=theirs,
                transformers_tok_s=requests * 1e3 / theirs,
                ratio=theirs / ours,
                same_ids=totals.same_ids,
                all_ids=totals.all_ids,
            )
        )
        print(
            f"batch {requests:>3}, depth {input_len:>6}: {requests * 1e3 / ours:9.1f} tok/s here, "
            f"{requests * 1e3 / theirs:9.1f} in transformers ({theirs / ours:.2f} times); "
            f"{totals.same_ids} of {totals.all_ids} ids equal",
            flush=True,
        )
    return found
