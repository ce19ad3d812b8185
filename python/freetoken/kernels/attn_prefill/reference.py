"""Causal attention of ragged prompts over paged KV, request by request: the specification."""

from __future__ import annotations

from itertools import pairwise

import torch

from freetoken.kernels.attn_decode.reference import gather_sequence


def attn_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    q_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend ``q [T, heads, head_dim]``; returns the same shape and dtype.

    Queries ``q_starts[j] .. q_starts[j + 1]`` are the last positions of sequence j, which is row ``rows[j]`` of
    ``page_table`` with ``seq_lens[j]`` tokens; each sees itself and all before it. Arithmetic is in float32 (float64
    for float64 input).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    starts = q_starts.tolist()
    for j, (a, b) in enumerate(pairwise(starts)):
        pages, seq_len = page_table[rows[j]], int(seq_lens[j])
        k = gather_sequence(k_cache, pages, seq_len).to(wide).repeat_interleave(group, 0)
        v = gather_sequence(v_cache, pages, seq_len).to(wide).repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hnd->hqn", q[a:b].to(wide), k) * scale
        positions = torch.arange(seq_len - (b - a), seq_len, device=q.device)
        hidden = torch.arange(seq_len, device=q.device)[None, :] > positions[:, None]
        scores.masked_fill_(hidden, float("-inf"))
        out[a:b] = torch.einsum("hqn,hnd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
