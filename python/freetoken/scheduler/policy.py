"""What runs next, decided from plain numbers (torch-free).

A step is every stream's next token first, then prompt pieces up to the token budget. A request is admitted when its
prompt, and the share of their output that all running requests are expected to produce, fit the memory that is free or
can be taken back from the prefix cache. When the expectation was too low, the youngest request gives its memory back; with
priorities the youngest of the lowest, which also makes way for a higher one that waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

RATIO_START = 0.5
"""Share of its remaining ``max_new_tokens`` a request is expected to use before anything was observed: most replies end
on a stop token well before their limit, and half leaves room for those that do not."""

RATIO_FLOOR = 0.1
"""The expectation never falls below this, so that memory is never filled by prompts alone."""

RATIO_DECAY_STEPS = 500
"""Decode steps from start to floor: about the length of a long reply, so one generation without a shortage is the
evidence for admitting more."""

RATIO_RISE = 0.2
"""Added on a retraction. It undoes 250 quiet steps: a retraction costs a whole prefill, a late admission only waiting."""

EXPECTED_NEW_TOKENS_CAP = 4096
"""Largest remaining output the estimate considers. A request without a limit may run to the end of the context, and
reserving a share of that for each would leave the machine empty."""

QUEUE_WINDOW = 128
"""Waiting requests looked at in one step, which bounds the work of planning whatever the queue's length."""

MAX_BYPASS = 32
"""Later arrivals the longest-prefix order may let past one request before it goes by arrival."""

SHARED_PREFIX_TOKENS = 256
"""A waiting request that would recompute at least this much of a prompt being computed right now waits for it instead:
the wait is a step or two, and this many tokens cost more than that."""

CHECKPOINT_TOKENS = 64
"""A checkpoint of recurrent state must spare at least this much prefill: each costs a piece of its own, a copy of all the
state of a request and its place in host memory."""

END_TOKENS = 256
"""The same on a GPU for the checkpoint at a prompt's end, which may never be used: a piece of its own is a forward pass more before the
first token, and launching one takes as long as computing some hundred tokens."""

CHECKPOINT_SHARE = 4
"""One prompt may take a quarter of all checkpoint blocks; a longer one gets them at a multiple of the interval, so that it
does not drive out everything else and its own beginning."""


def prefill_budget(decodes: int, chunked_prefill_size: int, max_prefill_tokens: int) -> int:
    """Prompt tokens the step may take beside ``decodes`` streams.

    With streams running the whole step, they included, stays within ``chunked_prefill_size``; at least one prompt token
    is granted, or a budget below the number of streams would stop all prefill.
    """
    if decodes == 0:
        return max_prefill_tokens
    return max(1, chunked_prefill_size - decodes)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


def checkpoint_positions(
    start: int, end: int, junction: int, interval: int, blocks: int, end_tokens: int = 0
) -> list[int]:
    """Where the state of a prompt is kept, rising, in ``(start, end]``: at its end, its junction and between.

    ``start`` is where the prompt resumes, ``end`` the last page border that leaves a token to compute, ``junction`` the
    border where it parts from a stored path (0 for none), ``interval`` a multiple of the page size and ``blocks`` how many
    checkpoints there can be in all. Positions are ``CHECKPOINT_TOKENS`` apart, the end ``end_tokens`` from what is before it where
    that is more: the junction goes before the end, and both before those between.
    """
    if blocks < 1:
        return []
    fixed = [start]
    for position, least in ((junction, CHECKPOINT_TOKENS), (end, max(CHECKPOINT_TOKENS, end_tokens))):
        if position - fixed[-1] >= least:
            fixed.append(position)
    most = max(1, blocks // CHECKPOINT_SHARE)
    stride = interval * max(1, pages_for(end - start, interval * most), pages_for(CHECKPOINT_TOKENS, interval))
    between = [
        position
        for position in range(start // stride * stride + stride, end, stride)
        if all(abs(position - other) >= CHECKPOINT_TOKENS for other in (*fixed, end))
    ]
    return sorted((*fixed[1:], *between))


class NewTokenRatio:
    """The expected share of remaining output: falls while memory suffices, rises when it did not."""

    def __init__(self) -> None:
        self.value = RATIO_START

    def decoded(self) -> None:
        """One more decode step went by without a shortage."""
        self.value = max(RATIO_FLOOR, self.value - (RATIO_START - RATIO_FLOOR) / RATIO_DECAY_STEPS)

    def retracted(self) -> None:
        self.value = min(1.0, self.value + RATIO_RISE)


def expected_pages(total_len: int, remaining_new: int, held_pages: int, ratio: float, page_size: int) -> int:
    """Pages a request is expected to take beyond the ``held_pages`` it has."""
    expected = total_len + int(ratio * min(remaining_new, EXPECTED_NEW_TOKENS_CAP))
    return max(0, pages_for(expected, page_size) - held_pages)


@dataclass(frozen=True)
class Waiting:
    """What the order of the queue depends on. ``bypassed`` counts later arrivals that were admitted before it."""

    arrival: int
    retracted: bool
    cached_pages: int
    bypassed: int
    priority: int = 0


def longest_prefix_order(waiting: Sequence[Waiting]) -> list[int]:
    """Indices of ``waiting``, next first: by priority; in it retracted requests, then starved ones, then by cached prefix,
    by arrival."""

    def rank(index: int) -> tuple[int, int, int, int]:
        item = waiting[index]
        if item.retracted:
            return -item.priority, 0, 0, item.arrival
        if item.bypassed >= MAX_BYPASS:
            return -item.priority, 1, 0, item.arrival
        return -item.priority, 2, -item.cached_pages, item.arrival

    return sorted(range(len(waiting)), key=rank)


class Standing(NamedTuple):
    """What a resident request's claim to its memory depends on."""

    priority: int
    arrival: int


def victims(residents: Sequence[Standing], below: int | None = None) -> list[int]:
    """Indices of ``residents`` in the order in which they are retracted: of the lowest priority the youngest first, so that
    the oldest of the highest always gets on. With ``below`` only those of a lower priority than that."""
    chosen = [index for index, item in enumerate(residents) if below is None or item.priority < below]
    return sorted(chosen, key=lambda index: (residents[index].priority, -residents[index].arrival))
