"""Attention behind an indexer (QSA of ``qwen4_exp``): a query sees the tokens of the blocks that its index heads score best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from freetoken.errors import StartupError
from freetoken.kernels.qsa import reference as qsa
from freetoken.kernels.rope_kv import reference as rope
from freetoken.models.config import IndexerConfig, ModelConfig
from freetoken.models.decoder import Ops, Pass
from freetoken.models.gdn import GatedAttention
from freetoken.models.layers import ColumnLinear, Norm, Placement, Weighted

if TYPE_CHECKING:
    from freetoken.runner.forward_batch import ForwardBatch


def make_index_step(table: torch.Tensor, indexer: IndexerConfig, fb: ForwardBatch, page_size: int) -> qsa.IndexStep:
    """What the indexers of all layers share in one forward; lengths come from the host, nothing is read back.

    Selection is ``sparse`` where a request of the step may see more than everything: a captured batch is by its longest request.
    """
    decodes = fb.num_decodes
    rows = fb.rows
    if fb.num_prefills:
        lengths = fb.q_starts.diff()
        pieces = torch.repeat_interleave(fb.rows[decodes:], lengths, output_size=fb.num_tokens - decodes)
        rows = torch.cat([fb.rows[:decodes], pieces])
    longest = max(fb.decode_max_seq_len if decodes else 0, fb.max_seq_len)
    positions = fb.positions
    first = (positions - indexer.ratio + 1).clamp_min(0)
    block = first[:, None] + torch.arange(indexer.ratio, device=positions.device)
    return qsa.IndexStep(
        query_lines=rope.prepare(table, positions, fb.out_slots, page_size),
        key_lines=rope.prepare(table, first, fb.out_slots, page_size),
        out_slots=fb.out_slots,
        block_slots=qsa.flat_slots(fb.page_table, rows, block, page_size),
        ends=(positions + 1) % indexer.ratio == 0,
        sparse=longest > indexer.visible,
    )


class Indexer:
    """Projects index queries and one index key a token, and keeps the keys beside K and V."""

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, name: str, kv_layer: int) -> None:
        indexer = config.indexer
        assert indexer is not None
        if place.tp_size != 1:
            raise StartupError(f"{name}: an indexer is not split over tensor-parallel ranks")
        self.config = indexer
        self.kv_layer = kv_layer
        size, eps = indexer.head_dim, config.rms_norm_eps
        width = (indexer.num_heads + 1) * size
        self.projection = ColumnLinear(ops.gemm, place, {f"{name}.index_qk_proj": width}, config.hidden_size)
        self.q_norm, self.k_norm = (
            Norm(ops.norm, place, f"{name}.{part}_layernorm", size, eps, zero_centred=True) for part in "qk"
        )

    def modules(self) -> Iterator[Weighted]:
        yield from (self.projection, self.q_norm, self.k_norm)

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor | None:
        """Store the index keys of ``x [T, hidden]``; index queries ``[T, Hi, Di]`` where they are needed in this step."""
        size, where = self.config.head_dim, step.index
        projected = self.projection(x)
        qsa.store_keys(projected[:, -size:], step.kv.index(self.kv_layer), self.k_norm, where)
        if not where.sparse:
            return None
        heads = projected[:, :-size].reshape(-1, size)
        return rope.rotate(self.q_norm(heads).view(x.shape[0], -1, size), where.query_lines)


class IndexedAttention(GatedAttention):
    """Gated attention of which each query sees all tokens, or in long contexts those that the indexer chooses for it."""

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, name: str, kv_layer: int) -> None:
        super().__init__(config, ops, place, name, kv_layer)
        self.indexer = Indexer(config, ops, place, f"{name}.indexer", kv_layer)
        self.scale = config.head_dim**-0.5

    def modules(self) -> Iterator[Weighted]:
        yield from super().modules()
        yield from self.indexer.modules()

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        projected = self.qkv(x)
        index_q = self.indexer.forward(x, step)
        qkv, gate = projected[:, : -self.gate_width], projected[:, -self.gate_width :]
        heads = self.attend(qkv, step) if index_q is None else self._attend_chosen(qkv, index_q, step)
        return self.o(heads.mul_(gate.sigmoid()))

    def _attend_chosen(self, qkv: torch.Tensor, index_q: torch.Tensor, step: Pass) -> torch.Tensor:
        q = self.rotate(qkv, step)
        layer, fb, kv = self.kv_layer, step.fb, step.kv
        pools = qsa.Pools(kv.k(layer), kv.v(layer), kv.index(layer))
        parts, decodes, c = [], fb.num_decodes, self.indexer.config
        if decodes:
            where = (fb.page_table, fb.rows[:decodes], fb.seq_lens[:decodes], fb.decode_max_seq_len)
            parts.append(qsa.attend_decodes(q[:decodes], index_q[:decodes], pools, *where, c, self.scale))
        token = decodes
        for number in range(decodes, decodes + fb.num_prefills):
            piece = slice(token, token + fb.q_lens_host[number])
            token = piece.stop
            where_piece = (fb.page_table, fb.rows[number : number + 1], fb.seq_lens_host[number])
            parts.append(qsa.attend_piece(q[piece], index_q[piece], pools, *where_piece, c, self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
