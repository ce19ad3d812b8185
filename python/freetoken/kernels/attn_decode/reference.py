"""One-query attention over paged KV, request by request: the specification."""

from __future__ import annotations

import torch


def gather_sequence(cache: torch.Tensor, pages: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The first ``seq_len`` tokens of a sequence as ``[kv_heads, seq_len, head_dim]``.

    ``cache`` is ``[num_pages, kv_heads, page_size, head_dim]``; ``pages`` lists the sequence's pages in order.
    """
    page_size = cache.shape[2]
    positions = torch.arange(seq_len, device=cache.device)
    return cache[pages[positions // page_size].long(), :, positions % page_size].transpose(0, 1)


def attn_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend ``q [B, heads, head_dim]`` to whole sequences; returns the same shape and dtype.

    Sequence i is row ``rows[i]`` of ``page_table`` with ``seq_lens[i]`` tokens. Query head h reads KV head
    ``h // (heads // kv_heads)``. Arithmetic is in float32 (float64 for float64 input).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        pages, seq_len = page_table[rows[i]], int(seq_lens[i])
        k = gather_sequence(k_cache, pages, seq_len).to(wide).repeat_interleave(group, 0)
        v = gather_sequence(v_cache, pages, seq_len).to(wide).repeat_interleave(group, 0)
        scores = torch.einsum("hd,hnd->hn", q[i].to(wide), k) * scale
        out[i] = torch.einsum("hn,hnd->hd", scores.softmax(-1), v).to(q.dtype)
    return out
