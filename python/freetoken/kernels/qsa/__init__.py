"""Sparse attention behind an indexer (QSA): index keys, selection, and attention over what was selected."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.qsa import reference
from freetoken.kernels.qsa.reference import Geometry, IndexStep, Pools, flat_slots

__all__ = ["Geometry", "IndexStep", "Pools", "Qsa", "flat_slots"]


class Qsa:
    """The op with its implementation bound once. The kernels serve decodes; prompt pieces go through :mod:`reference` in any case.

    ``rope_table [max_pos, R]`` is that of attention, ``config`` the indexer.
    """

    def __init__(self, choice: Choice, rope_table: torch.Tensor, config: Geometry) -> None:
        self.choice = choice
        self.table = rope_table
        self.config = config
        self.fused = choice.impl != "reference"
        self._checked = choice.impl == "check"
        self._num_sms = 16
        if self.fused:
            from freetoken.kernels.qsa import triton

            self._triton = triton
            if rope_table.is_cuda:
                self._num_sms = torch.cuda.get_device_properties(rope_table.device).multi_processor_count

    @property
    def needs_steps(self) -> bool:
        """Whether decodes, too, need an :class:`IndexStep`."""
        return not self.fused or self._checked

    def index(
        self,
        projected: torch.Tensor,
        pool: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        step: IndexStep | None,
        fused: bool,
    ) -> torch.Tensor:
        """Index queries ``[T, Hi, Di]`` of ``projected [T, (Hi + 1) Di]``, keys stored in ``pool``; ``fused`` is for one token a request.

        ``norms`` are the float32 weights for queries and keys, ``where`` page table, rows, positions and slots of the tokens.
        """
        if not (fused and self.fused):
            assert step is not None
            return reference.index(projected, pool, norms, eps, step)
        expected = kept = None
        if self._checked and step is not None:
            checking.refuse_capture("qsa", self.choice.flag)
            before = pool.clone()
            expected = reference.index(projected, before, norms, eps, step)
            kept = before.flatten(0, 1)[where[3]]
        out = self._triton.index(projected, pool, self.table, norms, eps, *where, self.config.ratio)
        if expected is not None and kept is not None:
            owned = where[3] >= pool.shape[1]
            checking.require_close("qsa", "the index queries", out, expected)
            checking.require_close("qsa", "the index keys", pool.flatten(0, 1)[where[3]][owned], kept[owned])
        return out

    def attend_decodes(
        self,
        q: torch.Tensor,
        index_q: torch.Tensor,
        pools: Pools,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        longest: int,
        scale: float,
    ) -> torch.Tensor:
        """See :func:`reference.attend_decodes`."""
        where = (page_table, rows)
        if not self.fused:
            return reference.attend_decodes(q, index_q, pools, *where, seq_lens, longest, self.config, scale)
        scores = self._triton.score(index_q, pools, *where, seq_lens, longest, self.config)
        chosen, counts = self._triton.select(scores, *where, seq_lens, pools.page_size, self.config)
        out = self._triton.attend(q, pools, chosen, counts, self._num_sms, scale)
        if self._checked:
            checking.refuse_capture("qsa", self.choice.flag)
            self._check(out, (scores, chosen, counts), q, index_q, pools, page_table, rows, seq_lens, longest, scale)
        return out

    def _check(
        self,
        out: torch.Tensor,
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        index_q: torch.Tensor,
        pools: Pools,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        longest: int,
        scale: float,
    ) -> None:
        """Scores against the reference's; the selection exactly, from the scores at hand; attention over that selection."""
        scores, chosen, counts = found
        whole = torch.div(seq_lens.long(), self.config.ratio, rounding_mode="floor")
        known = torch.arange(scores.shape[1], device=scores.device) < whole[:, None]
        wanted = reference.score(index_q, pools, page_table, rows, longest, self.config)
        checking.require_close("qsa", "the scores", scores[known], wanted[known])
        where = (page_table, rows, seq_lens.long())
        slots, valid = reference.select_best(scores, *where, pools.page_size, self.config)
        listed = torch.arange(chosen.shape[1], device=chosen.device) < counts[:, None]
        ours, theirs = (part.sort(1).values for part in (chosen.long().where(listed, -1), slots.where(valid, -1)))
        width = max(ours.shape[1], theirs.shape[1])
        ours, theirs = (torch.nn.functional.pad(part, (width - part.shape[1], 0), value=-1) for part in (ours, theirs))
        if not torch.equal(ours, theirs):
            raise checking.KernelCheckError("qsa: the kernel selects other tokens than the reference")
        checking.require_close("qsa", "attention", out, reference.attend_slots(q, pools, slots, valid, scale))
