"""Attention behind an indexer (QSA of ``qwen4_exp``): a query sees the tokens of the blocks that its index heads score best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from freetoken.errors import StartupError
from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.qsa import IndexStep, PiecePlan, Pools, Qsa, flat_slots
from freetoken.kernels.rope_kv import reference as rope
from freetoken.models.config import ModelConfig
from freetoken.models.decoder import Ops, Pass
from freetoken.models.gdn import GatedAttention
from freetoken.models.layers import ColumnLinear, Norm, Placement, Slot, Weighted

if TYPE_CHECKING:
    from freetoken.runner.forward_batch import ForwardBatch
    from freetoken.runner.kv_pool import KVPool


@dataclass(frozen=True)
class IndexPass:
    """What the indexers of all layers share in one forward: page table, rows, positions and slots of the tokens, ``step`` where the
    reference runs, ``before`` where there are pieces: how many tokens before each in the step are of its request.

    ``sparse``: some query of the step may see less than everything; a captured batch is by its longest request. ``plan`` is for the
    pieces of such a step."""

    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    step: IndexStep | None
    before: torch.Tensor | None
    sparse: bool
    plan: PiecePlan | None


def make_qsa(config: ModelConfig, table: torch.Tensor) -> Qsa:
    """The op of a model, over the rotary ``table`` of its attention."""
    assert config.indexer is not None
    return Qsa(choose_op("qsa", table.device.type), table, config.indexer)


def make_index_pass(op: Qsa, fb: ForwardBatch, kv: KVPool, config: ModelConfig) -> IndexPass:
    """Lengths come from the host; nothing is read back."""
    assert config.indexer is not None
    decodes, rows, before, plan = fb.num_decodes, fb.rows, None, None
    longest = max(fb.decode_max_seq_len if decodes else 0, fb.max_seq_len)
    sparse = longest > config.indexer.visible
    if fb.num_prefills:
        request = torch.repeat_interleave(fb.q_starts.diff(), output_size=fb.num_tokens - decodes)
        rows = torch.cat([fb.rows[:decodes], fb.rows[decodes:][request]])
        starts = torch.cat([fb.positions[:decodes], fb.starts.to(fb.positions.dtype)[request]])
        before = fb.positions - starts
        if sparse:
            plan = op.plan(fb.q_lens_host[decodes:], fb.seq_lens_host[decodes:], decodes, kv.k(0), config.num_heads)
    where = (fb.page_table, rows, fb.positions, fb.out_slots)
    step = _make_step(op, *where, kv.page_size) if op.needs_steps else None
    return IndexPass(where, step, before, sparse, plan)


def _make_step(
    op: Qsa, table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, page_size: int
) -> IndexStep:
    ratio = op.config.ratio
    first = (positions - ratio + 1).clamp_min(0)
    block = first[:, None] + torch.arange(ratio, device=positions.device)
    return IndexStep(
        query_lines=rope.prepare(op.table, positions, slots, page_size),
        key_lines=rope.prepare(op.table, first, slots, page_size),
        out_slots=slots,
        block_slots=flat_slots(table, rows, block, page_size),
        ends=(positions + 1) % ratio == 0,
    )


class Indexer:
    """Projects index queries and one index key a token, and keeps the keys beside K and V."""

    def __init__(self, config: ModelConfig, ops: Ops, op: Qsa, place: Placement, name: str, kv_layer: int) -> None:
        indexer = config.indexer
        assert indexer is not None
        if place.tp_size != 1:
            raise StartupError(f"{name}: an indexer is not split over tensor-parallel ranks")
        self._op = op
        self._kv_layer = kv_layer
        self._eps = config.rms_norm_eps
        size = indexer.head_dim
        self._name, self._query_size = name, indexer.num_heads * size
        width = self._query_size + size
        self.projection = ColumnLinear(ops.gemm, place, {f"{name}.index_qk_proj": width}, config.hidden_size)
        self.q_norm, self.k_norm = (
            Norm(ops.norm, place, f"{name}.{part}_layernorm", size, self._eps, zero_centred=config.zero_centred_norm)
            for part in "qk"
        )

    def modules(self) -> Iterator[Weighted]:
        yield from (self.projection, self.q_norm, self.k_norm)

    def pieces(self) -> dict[str, dict[str, Slot]]:
        """Of the projection, the places of queries and keys in a checkpoint that holds them apart: ``index_q_proj``, ``index_k_proj``."""
        weight: torch.Tensor = self.projection.weight
        parts = {"q": weight[: self._query_size], "k": weight[self._query_size :]}
        slots = {f"{self._name}.index_{key}_proj.weight": Slot(rows, tuple(rows.shape)) for key, rows in parts.items()}
        return {f"{self._name}.index_qk_proj.weight": slots}

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        """Store the index keys of ``x [T, hidden]``; index queries ``[T, Hi, Di]``."""
        norms, pool = (self.q_norm.weight, self.k_norm.weight), step.kv.index(self._kv_layer)
        shared: IndexPass = step.index
        return self._op.index(self.projection(x), pool, norms, self._eps, shared.where, shared.step, shared.before)


class IndexedAttention(GatedAttention):
    """Gated attention of which each query sees all tokens, or in long contexts those that the indexer chooses for it."""

    def __init__(self, config: ModelConfig, ops: Ops, op: Qsa, place: Placement, name: str, kv_layer: int) -> None:
        super().__init__(config, ops, place, name, kv_layer)
        self._op = op
        self.indexer = Indexer(config, ops, op, place, f"{name}.indexer", kv_layer)
        self.scale = config.head_dim**-0.5

    def modules(self) -> Iterator[Weighted]:
        yield from super().modules()
        yield from self.indexer.modules()

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        projected = self.qkv(x)
        index_q = self.indexer.forward(x, step)
        qkv, gate = projected[:, : -self.gate_width], projected[:, -self.gate_width :]
        heads = self._attend_chosen(qkv, index_q, step) if step.index.sparse else self.attend(qkv, step)
        return self.o(self._gate.sigmoid_mul(heads, gate))

    def _attend_chosen(self, qkv: torch.Tensor, index_q: torch.Tensor, step: Pass) -> torch.Tensor:
        q = self.rotate(qkv, step)
        layer, fb, kv = self.kv_layer, step.fb, step.kv
        pools = Pools(kv.k(layer), kv.v(layer), kv.index(layer))
        parts, decodes = [], fb.num_decodes
        if decodes:
            where = (fb.page_table, fb.rows[:decodes], fb.seq_lens[:decodes], fb.decode_max_seq_len)
            parts.append(self._op.attend_decodes(q[:decodes], index_q[:decodes], pools, *where, self.scale))
        if step.index.plan is not None:
            where = (fb.page_table, fb.rows, fb.positions[decodes:])
            parts.append(
                self._op.attend_pieces(q[decodes:], index_q[decodes:], pools, *where, step.index.plan, self.scale)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
