"""Host data of the scheduler: one request, one step's batch, one step's result (torch-free)."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from freetoken.messages import TokenLogprob
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler.radix import Node

if TYPE_CHECKING:
    from freetoken.scheduler.grammar import Constraint


class Status(enum.Enum):
    """Life of a request. ``FINISHED`` is reached exactly once, with its terminal message."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Req:
    """One sequence.

    ``ids`` is the prompt and every output token already drained to the host. ``in_flight`` counts tokens sampled by steps
    that were launched and not yet drained: their ids exist on the device alone. ``computed`` is the number of leading
    tokens whose KV is written once all launched steps have run. ``pages`` hold positions ``[i * page_size, (i + 1) *
    page_size)`` in order; the first ``shared_pages`` of them belong to the prefix cache and end at its ``node``, which
    the request holds locked. ``row`` is the request's row in the runner's tables, -1 while it waits.

    ``pending`` counts launched and undrained steps that name the request: until it is 0 nothing the request holds may be
    given to another. ``key`` is ``ids`` as of the last time the request was queued, packed for the prefix cache.
    ``keep_private`` says that other pages with this prompt's content are in the cache and in use, so these enter it (or
    are freed) only when the request ends. ``bypassed`` counts later arrivals admitted before it.

    ``spoiled`` says that a step failed for it: its pages beyond the shared ones and its states hold nothing of use to others.

    For models with recurrent state: ``cuts`` are the positions, rising and beyond ``computed``, where a piece must end so
    that the state there can be kept. ``held`` are ``(position, block)`` of states already copied out whose pages are not
    in the prefix cache yet. ``commons`` remembers, by the arrival of a resident request, how many leading tokens are the
    same.

    ``constraint`` follows the output through the grammar it must match; it has seen exactly the output in ``ids``.
    """

    rid: str
    ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    arrival: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    status: Status = Status.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    shared_pages: int = 0
    computed: int = 0
    in_flight: int = 0
    pending: int = 0
    cached_tokens: int = 0
    admitted: bool = False
    retractions: int = 0
    bypassed: int = 0
    keep_private: bool = False
    key: array[int] = field(default_factory=lambda: array("i"))
    cuts: list[int] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)
    commons: dict[int, int] = field(default_factory=dict)
    spoiled: bool = False
    node: Node | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    queue_seconds: float | None = None
    constraint: Constraint | None = None

    @property
    def total_len(self) -> int:
        """Tokens that exist on the host or the device."""
        return len(self.ids) + self.in_flight

    @property
    def num_output(self) -> int:
        """Output tokens that exist on the host or the device."""
        return self.total_len - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt were asked for and are still to be computed."""
        return self.sampling.prompt_logprobs is not None and self.num_output == 0


class Slice(NamedTuple):
    """One request's part in one step: positions ``[start, start + length)``.

    A decode slice (``decode=True``, ``length`` 1) takes its input id from the runner's last sampled id of ``req.row``; a
    prefill slice takes ``req.ids[start : start + length]``. With ``sample`` the step draws the next token, whose index
    among the request's outputs is ``out_index``. ``prompt_logprobs`` asks for the log-probabilities of the prompt tokens
    at positions ``start + 1 .. start + length`` that lie inside the prompt.
    """

    req: Req
    start: int
    length: int
    decode: bool
    sample: bool
    out_index: int = 0
    prompt_logprobs: bool = False

    @property
    def spends_budget(self) -> bool:
        """Whether the token to be drawn is the last that may belong to the request's thoughts."""
        budget = self.req.sampling.thinking_budget
        return budget is not None and self.sample and self.out_index == budget.tokens - 1


@dataclass
class ScheduleBatch:
    """One step: decode slices first, then prefill slices; ``new_rows`` are requests whose row was assigned for this step.

    ``restores`` and ``snapshots`` are ``(request, block)`` for models with recurrent state. Before the step the state in
    the block goes to the request's row (only requests of ``new_rows`` that do not start at position 0). After the step
    the row's state, that after the request's piece in this step, goes to the block. One block may be restored to several rows; none is in both lists.

    The runner reads ``req.row``, ``req.pages``, ``req.ids``, ``req.sampling``, ``req.stop_ids``, ``req.seed`` while it
    launches and keeps no reference to them afterwards.
    """

    step: int
    decodes: list[Slice]
    prefills: list[Slice]
    new_rows: list[Req] = field(default_factory=list)
    restores: list[tuple[Req, int]] = field(default_factory=list)
    snapshots: list[tuple[Req, int]] = field(default_factory=list)

    @cached_property
    def slices(self) -> list[Slice]:
        return [*self.decodes, *self.prefills]

    @cached_property
    def sampled(self) -> list[Slice]:
        """Slices that draw a token, in the order of :attr:`StepResult.ids`."""
        return [s for s in self.slices if s.sample]

    @cached_property
    def masked(self) -> list[int]:
        """Places in :attr:`sampled` whose draw needs a token mask."""
        return [place for place, s in enumerate(self.sampled) if s.req.constraint is not None or s.spends_budget]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(s.length for s in self.prefills)


@dataclass
class StepResult:
    """What a step produced, on the host.

    ``ids[i]`` belongs to ``batch.sampled[i]``; ``logprobs[i]`` is ``None`` unless that request asked.
    ``prompt_logprobs`` maps ``rid`` to the entries for positions ``start + 1 ..`` of its slice. ``failed`` maps the ``rid`` of a request
    for which the step could not be computed to one sentence: what the step made for it (ids, KV, state) must not be used, while
    all others are well.
    """

    ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
