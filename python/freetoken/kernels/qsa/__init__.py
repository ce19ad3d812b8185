"""Sparse attention behind an indexer (QSA): index keys, selection, and attention over what was selected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken.kernels import checking, launch
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.qsa import checks, reference
from freetoken.kernels.qsa.plan import PieceConfig, PiecePlan, piece_config, plan_pieces
from freetoken.kernels.qsa.reference import Geometry, IndexStep, Pools, flat_slots

__all__ = ["Geometry", "IndexStep", "PieceConfig", "PiecePlan", "Pools", "Qsa", "flat_slots"]


class Qsa:
    """The op with its implementation bound once.

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
            from freetoken.kernels.qsa import pieces, triton

            self._triton, self._pieces = triton, pieces
            if rope_table.is_cuda:
                self._num_sms = torch.cuda.get_device_properties(rope_table.device).multi_processor_count

    @property
    def needs_steps(self) -> bool:
        """Whether an :class:`IndexStep` is needed."""
        return not self.fused or self._checked

    def index(
        self,
        projected: torch.Tensor,
        pool: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        step: IndexStep | None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Index queries ``[T, Hi, Di]`` of ``projected [T, (Hi + 1) Di]``, keys stored in ``pool``.

        ``norms`` are the float32 weights for queries and keys, ``where`` page table, rows, positions and slots of the tokens.
        ``before [T]`` int64 counts how many tokens right before each in the step are of its text; ``None`` for one token a request.
        """
        if not self.fused:
            assert step is not None
            return reference.index(projected, pool, norms, eps, step)
        expected = kept = None
        if self._checked and step is not None:
            checking.refuse_capture("qsa", self.choice.flag)
            copy = pool.clone()
            expected = reference.index(projected, copy, norms, eps, step)
            kept = copy.flatten(0, 1)[where[3]]
        out = self._triton.index(projected, pool, self.table, norms, eps, *where, self.config.ratio, before)
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
            found = (scores, chosen, counts, out)
            checks.check_decodes(found, q, index_q, pools, page_table, rows, seq_lens, longest, self.config, scale)
        return out

    def plan(
        self, q_lens: Sequence[int], seq_lens: Sequence[int], decodes: int, pool: torch.Tensor, num_heads: int
    ) -> PiecePlan:
        """For :meth:`attend_pieces`: pieces of ``q_lens`` tokens at the ends of texts of ``seq_lens``, behind ``decodes`` requests.

        ``pool [pages, Hkv, page_size, D]`` is any of K or V; no element of it is read."""
        group, capability = num_heads // pool.shape[1], launch.capability(pool.device) or (8, 0)
        piece = piece_config(pool.shape[3], group, self.config.head_dim, pool.dtype, capability)
        return plan_pieces(q_lens, seq_lens, decodes, self.config, piece, pool.device)

    def attend_pieces(
        self,
        q: torch.Tensor,
        index_q: torch.Tensor,
        pools: Pools,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        plan: PiecePlan,
        scale: float,
    ) -> torch.Tensor:
        """``[T, Hq * D]``: queries ``q [T, Hq, D]`` and ``index_q`` of the tokens of pieces at ``positions [T]``.

        ``rows [B]`` are those of all requests of the batch, decodes before them. Scratch memory is bounded by the indexer's geometry.
        """
        if not self.fused:
            parts, token = [], 0
            for number, (count, seq_len) in enumerate(zip(plan.q_lens, plan.seq_lens, strict=True), plan.decodes):
                piece, token = slice(token, token + count), token + count
                text = (page_table, rows[number : number + 1], seq_len, self.config, scale)
                parts.append(reference.attend_piece(q[piece], index_q[piece], pools, *text))
            return torch.cat(parts)
        q, index_q = q.contiguous(), index_q.contiguous()
        out = torch.empty_like(q)
        where, kernels = (page_table, rows), self._pieces
        for part in plan.parts:
            tokens = slice(part.begin, part.end)
            scores = kernels.score(index_q, pools, *where, plan, part, self.config)
            found = kernels.bounds(scores, positions[tokens], self.config)
            listed = kernels.list_tokens(scores, found, *where, pools.page_size, plan, part, self.config)
            kernels.attend(q, pools, plan.tiles[part.attend], listed, plan.config, scale, out)
            if self._checked:
                text = (pools, page_table, rows, positions, plan, part, self.config, scale)
                checks.check_part((scores, *listed), q, index_q, out, *text)
        return out.flatten(1)
