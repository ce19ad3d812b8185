"""Fused against reference while serving: scores within a bound, the selection exactly (from the scores at hand), attention over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from freetoken.kernels.checking import KernelCheckError, require_close
from freetoken.kernels.qsa import reference
from freetoken.kernels.qsa.plan import Part, PiecePlan
from freetoken.kernels.qsa.reference import Geometry, Pools

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def check_decodes(
    found: Four,
    q: torch.Tensor,
    index_q: torch.Tensor,
    pools: Pools,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    config: Geometry,
    scale: float,
) -> None:
    """``found`` are scores, chosen slots, their counts and the output of one call; :class:`KernelCheckError` where they differ."""
    scores, chosen, counts, out = found
    whole = torch.div(seq_lens.long(), config.ratio, rounding_mode="floor")
    known = torch.arange(scores.shape[1], device=scores.device) < whole[:, None]
    wanted = reference.score(index_q, pools, page_table, rows, longest, config)
    require_close("qsa", "the scores", scores[known], wanted[known])
    slots, valid = reference.select_best(scores, page_table, rows, seq_lens.long(), pools.page_size, config)
    listed = torch.arange(chosen.shape[1], device=chosen.device) < counts[:, None]
    _require_same(chosen.long().where(listed, -1), slots.where(valid, -1))
    require_close("qsa", "attention", out, reference.attend_slots(q, pools, slots, valid, scale))


def check_part(
    found: Four,
    q: torch.Tensor,
    index_q: torch.Tensor,
    out: torch.Tensor,
    pools: Pools,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    plan: PiecePlan,
    part: Part,
    config: Geometry,
    scale: float,
) -> None:
    """``found`` are scores, listed slots, their bits and counts of a part of the pieces; the others as of the call."""
    scores, slots, bits, counts = found
    entry = torch.arange(slots.shape[1], device=slots.device)
    for number, (first, count, position, request) in enumerate(plan.tiles[part.attend].tolist()):
        tokens = slice(first, first + count)
        own = scores[first - part.begin : first - part.begin + count]
        lens = positions[tokens] + 1
        row = rows[request : request + 1].expand(count)
        whole = torch.div(lens, config.ratio, rounding_mode="floor")
        # Where everything is kept, no score is made.
        known = (torch.arange(own.shape[1], device=own.device) < whole[:, None]) & (whole > config.blocks)[:, None]
        wanted = reference.score(index_q[tokens], pools, page_table, row, position + count, config)
        wanted = F.pad(wanted, (0, own.shape[1] - wanted.shape[1]))
        require_close("qsa", "the scores", own[known], wanted[known])
        best, valid = reference.select_best(own.where(known, 0.0), page_table, row, lens, pools.page_size, config)
        query = torch.arange(count, device=slots.device)[:, None]
        listed = ((bits[number] >> query) & 1).bool() & (entry < counts[number])
        _require_same(slots[number].long().where(listed, -1), best.where(valid, -1))
        expected = reference.attend_slots(q[tokens], pools, best, valid, scale)
        require_close("qsa", "attention", out[tokens].flatten(1), expected)


def _require_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Rows that hold the same numbers in any order, -1 apart."""
    ours, theirs = (part.sort(1).values for part in (ours, theirs))
    width = max(ours.shape[1], theirs.shape[1])
    ours, theirs = (F.pad(part, (width - part.shape[1], 0), value=-1) for part in (ours, theirs))
    if not torch.equal(ours, theirs):
        raise KernelCheckError("qsa: the kernel selects other tokens than the reference")
