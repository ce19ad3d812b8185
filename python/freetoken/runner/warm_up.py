"""Steps before the first request: a kernel compiles when a call of its kind first comes, and no client should wait for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from freetoken.errors import StartupError
from freetoken.kernels.integers import cdiv
from freetoken.sampling_params import SamplingParams, ThinkingBudget
from freetoken.scheduler.request import Req, ScheduleBatch, Slice

if TYPE_CHECKING:
    from freetoken.runner.model_runner import ModelRunner, Progress

BOTH_SIDES = 32
"""Up to here a prompt of one token more than a power of two is run as well: products of few tokens are made for every eight of them."""
FEW, MANY = 5, 16
"""Tokens of prompts whose length does not matter, and prompts at once: where there are several, some kernels know a multiple of 16."""

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1, prompt_logprobs=1),
    SamplingParams(thinking_budget=ThinkingBudget(end=0, tokens=1)),
)
"""Every other stage of the sampler, and every pair of filters that has a kernel of its own."""


@dataclass(frozen=True)
class Step:
    """What one step holds: requests that decode behind ``FEW`` tokens, and prompts as ``(tokens before, tokens)``, sampled by ``sampling``."""

    decodes: int
    prompts: tuple[tuple[int, int], ...]
    sampling: SamplingParams = GREEDY

    @property
    def rows(self) -> int:
        return self.decodes + len(self.prompts)

    @property
    def prefill_tokens(self) -> int:
        return sum(length for _, length in self.prompts)

    def pages(self, page_size: int) -> int:
        """Pages that its requests fill."""
        prompts = sum(cdiv(before + length, page_size) for before, length in self.prompts)
        return self.decodes * cdiv(FEW + 1, page_size) + prompts


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to ``limit``, and ``limit`` itself, rising; none below 1."""
    return sorted({1 << n for n in range(limit.bit_length())} | {limit}) if limit > 0 else []


def plan(
    *,
    prefill_tokens: int,
    chunk_tokens: int,
    context: int,
    page_size: int,
    num_pages: int,
    rows: int,
    largest_graph: int,
) -> list[Step]:
    """The steps for a runner of ``rows`` rows and ``num_pages`` pages, the first of them padding, with at most ``prefill_tokens`` of prompts a
    step, ``chunk_tokens`` beside decodes and ``context`` a request, and graphs for up to ``largest_graph`` decodes.

    Kernels are chosen by a step's tokens, requests and longest request, mostly at powers of two, and behind decodes, even one, other kernels
    follow than in a step of prompts alone.
    """
    longest = min(context, (num_pages - 1) * page_size)
    limit = min(prefill_tokens, longest)
    lengths = {*powers(limit), *(n + 1 for n in powers(limit) if n <= BOTH_SIDES and n < limit)}
    few = min(FEW, limit)
    steps = [Step(0, ((0, length),)) for length in sorted(lengths)]
    steps += [Step(0, ((0, few),), sampling) for sampling in SAMPLINGS]
    steps += [Step(0, ((total - few, few),)) for total in powers(longest) if total > limit]
    steps += [Step(1, ((0, length),)) for length in powers(min(limit, chunk_tokens))]
    mixes = [(0, 2), (0, MANY), (1, 2), (1, MANY), *((n, 1) for n in powers(rows - 1) if n > 1)]
    mixes += [(n, 0) for n in powers(rows) if n > largest_graph]
    steps += [Step(n, ((0, few),) * prompts) for n, prompts in mixes]
    if longest <= FEW:
        steps = [step for step in steps if not step.decodes]
    return [
        step
        for step in steps
        if step.rows <= rows and step.prefill_tokens <= prefill_tokens and step.pages(page_size) < num_pages
    ]


def batches(steps: list[Step], *, page_size: int, vocab: int) -> Iterator[ScheduleBatch]:
    """The steps as the scheduler would make them, each with requests of its own. Token ids lie below ``vocab``."""
    for number, step in enumerate(steps, 1):
        reqs: list[Req] = []
        page = 1
        for row, tokens in enumerate([*[FEW + 1] * step.decodes, *map(sum, step.prompts)]):
            ids = [7919 * (row + place) % vocab for place in range(tokens)]
            req = Req(f"warm-up {number}.{row}", ids, tokens, step.sampling, 1, frozenset(), row, row=row)
            end = page + cdiv(tokens, page_size)
            req.pages, page = list(range(page, end)), end
            reqs.append(req)
        asked = step.sampling.prompt_logprobs is not None
        decodes = [Slice(req, FEW, 1, decode=True, sample=True) for req in reqs[: step.decodes]]
        prefills = [
            Slice(req, before, length, decode=False, sample=True, prompt_logprobs=asked)
            for req, (before, length) in zip(reqs[step.decodes :], step.prompts)
        ]
        yield ScheduleBatch(number, decodes, prefills, reqs)


def warm_up(runner: ModelRunner, progress: Progress) -> None:
    """Run ``runner``, which serves nobody yet, through the kinds of step that are to come; :class:`StartupError` where one of them does not
    fit into the GPU's memory."""
    config = runner.config
    sizes = {"page_size": runner.page_size, "num_pages": runner.num_pages, "rows": runner.max_rows}
    largest = max(runner.graphs.buckets) if runner.graphs is not None else 0
    steps = plan(
        prefill_tokens=config.max_prefill_tokens,
        chunk_tokens=config.chunked_prefill_size,
        context=config.context_length,
        largest_graph=largest,
        **sizes,
    )
    everything = np.full((1, cdiv(config.sample_vocab + 1, 32)), -1, np.int32)
    made = batches(steps, page_size=runner.page_size, vocab=config.sample_vocab)
    for done, (step, batch) in enumerate(zip(steps, made)):
        progress("warming up", done, len(steps), "steps")
        try:
            pending = runner.launch(batch)
            if batch.masked:
                runner.draw(pending, everything)
            runner.collect(pending)
        except torch.cuda.OutOfMemoryError:
            longest = max((before + length for before, length in step.prompts), default=FEW + 1)
            raise StartupError(
                f"out of GPU memory while warming up with {len(batch.slices)} requests, {batch.num_tokens} tokens and a context of {longest}; "
                "lower --mem-fraction-static, --max-prefill-tokens or --context-length"
            ) from None
    if runner.graphs is not None:
        runner.graphs.misses = 0
    progress("warming up", len(steps), len(steps), "steps")
