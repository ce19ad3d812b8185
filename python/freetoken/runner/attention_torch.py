"""Attention in plain torch: any device and dtype, and quick enough to serve small models from a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from freetoken.runner.attention import AttentionBackend
from freetoken.runner.forward_batch import ForwardBatch

# Bytes of K and V gathered at a time. On a CPU the copy should still be in the cache when it is read again.
CPU_GATHER_BYTES = 4 << 20
GPU_GATHER_BYTES = 256 << 20
# Elements of the mask of one piece of a prefill that has a prefix.
MASK_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class _Gather:
    """Sequences copied out of the pages together.

    ``index`` picks rows of the layer's storage seen as ``[2 * pages * kv_heads, page_size * head_dim]``; the result is
    ``[2, C, kv_heads, width, head_dim]`` for the C sequences. ``batch [C]`` says where they stand in the batch, ``None``
    for ``start`` and following. With unequal lengths ``valid [C, width]`` marks real positions and, on a CPU, ``holes``
    lists the other tokens of the flattened result.
    """

    index: torch.Tensor
    width: int
    start: int
    count: int
    batch: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    holes: torch.Tensor | None = None


def _groups(lens: Sequence[int], order: Sequence[int], page_size: int, max_tokens: int) -> list[tuple[int, int]]:
    """Cut ``order`` into spans ``[a, b)`` whose padded size stays within ``max_tokens`` (one sequence always fits)."""
    spans, a, widest = [], 0, 0
    for i, which in enumerate(order):
        width = max(widest, -(-lens[which] // page_size) * page_size)
        if i > a and width * (i + 1 - a) > max_tokens:
            spans.append((a, i))
            a, width = i, -(-lens[which] // page_size) * page_size
        widest = width
    if order:
        spans.append((a, len(order)))
    return spans


class TorchAttention(AttentionBackend):
    """Copies the pages of a few sequences at a time into one buffer, then uses scaled dot-product attention.

    The page indices are computed once a step. For a captured batch they are computed from the device tensors when a
    pass over the layers begins, so that a replay, real or re-run, sees the current ones.
    """

    name = "torch"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        kv = self.kv
        self._on_cpu = self.device.type == "cpu"
        token_bytes = 2 * kv.num_kv_heads * kv.head_dim * kv.storage.element_size()
        self._max_tokens = (CPU_GATHER_BYTES if self._on_cpu else GPU_GATHER_BYTES) // token_bytes
        planes = torch.arange(2, device=self.device).view(2, 1, 1, 1) * (kv.num_pages * kv.num_kv_heads)
        self._head_offsets = planes + torch.arange(kv.num_kv_heads, device=self.device).view(1, 1, -1, 1)
        self._scratch = torch.empty(0, dtype=kv.storage.dtype, device=self.device)
        self._decodes: list[_Gather] = []
        self._prefills: list[_Gather] = []
        self._last_layer = kv.num_layers

    def plan(self, fb: ForwardBatch) -> None:
        self._last_layer = self.kv.num_layers
        if fb.captured:
            return
        self._decodes = self._plan_decodes(fb, fb.seq_lens_host[: fb.num_decodes], exact=True)
        self._prefills = [
            self._gather_of(fb, fb.rows[b : b + 1], fb.seq_lens_host[b], start=b)
            for b in range(fb.num_decodes, fb.num_decodes + fb.num_prefills)
        ]

    def forward(self, layer: int, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        if fb.captured and layer <= self._last_layer:
            self._plan_captured(fb)
        self._last_layer = layer
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for gather in self._decodes:
            self._decode(layer, q, out, gather)
        token = fb.num_decodes
        for gather in self._prefills:
            q_len = fb.q_lens_host[gather.start]
            self._prefill(layer, q[token : token + q_len], out[token : token + q_len], gather, fb)
            token += q_len
        return out.flatten(1)

    def _plan_captured(self, fb: ForwardBatch) -> None:
        if fb.num_prefills:
            raise ValueError("a captured batch holds decodes only")
        if self._on_cpu:
            self._decodes = self._plan_decodes(fb, fb.seq_lens[: fb.num_decodes].tolist(), exact=True)
        else:
            self._decodes = self._plan_decodes(fb, [fb.decode_max_seq_len] * fb.num_decodes, exact=False)
        self._prefills = []

    def _plan_decodes(self, fb: ForwardBatch, lens: Sequence[int], *, exact: bool) -> list[_Gather]:
        """Group decodes of similar length. ``exact``: ``lens`` are the lengths themselves, not bounds on them."""
        order = sorted(range(len(lens)), key=lens.__getitem__)
        moved = order != list(range(len(lens)))
        gathers = []
        for a, b in _groups(lens, order, self.page_size, self._max_tokens):
            which = torch.tensor(order[a:b], device=self.device) if moved else None
            rows = fb.rows[a:b] if which is None else fb.rows[which]
            width = lens[order[b - 1]]
            ragged = not exact or lens[order[a]] != width
            seq_lens = None
            if ragged:
                seq_lens = fb.seq_lens[a:b] if which is None else fb.seq_lens[which]
            gathers.append(self._gather_of(fb, rows, width, start=a, batch=which, seq_lens=seq_lens))
        return gathers

    def _gather_of(
        self,
        fb: ForwardBatch,
        rows: torch.Tensor,
        width: int,
        *,
        start: int,
        batch: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
    ) -> _Gather:
        num_pages = -(-width // self.page_size)
        pages = fb.page_table[:, :num_pages].index_select(0, rows).long()
        padded = num_pages * self.page_size
        valid = holes = None
        if seq_lens is not None:
            valid = torch.arange(padded, device=self.device) < seq_lens[:, None]
            # Entries past a sequence's end may be stale: read page 0 instead.
            pages = torch.where(valid[:, :: self.page_size], pages, 0)
            if self._on_cpu:
                everywhere = valid.view(1, -1, 1, padded).expand(2, -1, self.num_kv_heads, -1)
                holes = (~everywhere).reshape(-1).nonzero().view(-1)
            width = padded
        index = pages.view(1, -1, 1, num_pages) * self.num_kv_heads + self._head_offsets
        return _Gather(index.reshape(-1), width, start, rows.shape[0], batch, valid, holes)

    def _load(self, layer: int, gather: _Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[C, kv_heads, width, head_dim]``, zero at positions that are not valid."""
        storage = self.kv.storage[layer].view(-1, self.page_size * self.head_dim)
        shape = (gather.index.shape[0], storage.shape[1])
        out = self._buffer(shape[0] * shape[1]).view(shape) if self._on_cpu else None
        flat = torch.index_select(storage, 0, gather.index, out=out)
        kv = flat.view(2, gather.count, self.num_kv_heads, -1, self.head_dim)
        if gather.holes is not None:
            flat.view(-1, self.head_dim).index_fill_(0, gather.holes, 0)
        elif gather.valid is not None:
            kv.masked_fill_(~gather.valid.view(1, gather.count, 1, -1, 1), 0)
        k, v = kv[..., : gather.width, :].unbind(0)
        return k, v

    def _buffer(self, numel: int) -> torch.Tensor:
        """Reused memory: fresh pages from the system for every layer cost more than the copy into them."""
        if self._scratch.numel() < numel:
            with torch.inference_mode(False):
                self._scratch = torch.empty(numel, dtype=self._scratch.dtype, device=self.device)
        return self._scratch[:numel]

    def _decode(self, layer: int, q: torch.Tensor, out: torch.Tensor, gather: _Gather) -> None:
        k, v = self._load(layer, gather)
        span = slice(gather.start, gather.start + gather.count)
        queries = q[span] if gather.batch is None else q.index_select(0, gather.batch)
        # The query heads of a group share K and V: they take the place of query positions.
        queries = queries.reshape(gather.count, self.num_kv_heads, self.group, self.head_dim)
        mask = None if gather.valid is None else gather.valid[:, None, None, :]
        result = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=self.scale)
        result = result.reshape(gather.count, self.num_heads, self.head_dim)
        if gather.batch is None:
            out[span] = result
        else:
            out.index_copy_(0, gather.batch, result)

    def _prefill(self, layer: int, q: torch.Tensor, out: torch.Tensor, gather: _Gather, fb: ForwardBatch) -> None:
        k, v = self._load(layer, gather)
        q_len, seq_len = q.shape[0], gather.width
        prefix = seq_len - q_len
        step = q_len if prefix == 0 else max(1, MASK_ELEMENTS // seq_len)
        for a in range(0, q_len, step):
            b = min(a + step, q_len)
            end = prefix + b
            mask = None
            if prefix > 0:
                seen = torch.arange(prefix + a, end, device=self.device)
                mask = torch.arange(end, device=self.device) <= seen[:, None]
            result = F.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None],
                k[:, :, :end],
                v[:, :, :end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=self.group > 1,
            )
            out[a:b] = result[0].transpose(0, 1)

    def info(self) -> dict[str, Any]:
        return {**super().info(), "gather_tokens": self._max_tokens}
