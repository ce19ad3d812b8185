"""Causal attention of ragged prompts over paged KV, one program for each block of queries and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.attn_decode.triton import LOG2_E, tile_offsets
from freetoken.kernels.attn_prefill.config import PrefillConfig
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import next_power_of_two


@triton.jit
def softmax_step(s, v, acc, row_max, row_sum):
    """Fold base-2 scores ``s [M, N]`` and values ``v [N, D]`` into the running softmax."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    rescale = tl.exp2(row_max - new_max)
    p = tl.exp2(s - new_max[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    k_ptr,
    v_ptr,
    table,
    kv_head,
    q_pos,
    first,
    last,
    scale,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the tokens ``first .. last``; without ``MASKED`` every query sees all of them, in whole blocks."""
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    page_ids = tl.load(table + (first + offs_n) // PAGE, mask=first + offs_n < last, other=0)
    for n in range(first, last, BLOCK_N):
        pos = n + offs_n
        offsets = tile_offsets(page_ids, pos, kv_head, KV_HEADS, PAGE, D)[:, None] + offs_d[None, :]
        page_ids = tl.load(table + (pos + BLOCK_N) // PAGE, mask=pos + BLOCK_N < last, other=0)
        if MASKED:
            mask = (pos < last)[:, None] & (offs_d < D)[None, :]
            k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
            v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        elif D == BLOCK_D:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        else:
            k = tl.load(k_ptr + offsets, mask=(offs_d < D)[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=(offs_d < D)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            s = tl.where(pos[None, :] <= q_pos[:, None], s, float("-inf"))
        acc, row_max, row_sum = softmax_step(s, v, acc, row_max, row_sum)
    return acc, row_max, row_sum


@launched
@triton.jit(do_not_specialize=["table_stride", "q_stride", "num_decodes"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    q_starts_ptr,
    tiles_ptr,
    out_ptr,
    scale,
    table_stride,
    q_stride,
    num_decodes,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    j = tl.load(tiles_ptr + 2 * tile)
    block = tl.load(tiles_ptr + 2 * tile + 1)
    q_first = tl.load(q_starts_ptr + j)
    q_len = tl.load(q_starts_ptr + j + 1) - q_first
    seq_len = tl.load(seq_lens_ptr + num_decodes + j)
    table = table_ptr + tl.load(rows_ptr + num_decodes + j) * table_stride

    offs_m, offs_d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens = (num_decodes + q_first + offs_m).to(tl.int64)
    q_mask = (offs_m < q_len)[:, None] & (offs_d < D)[None, :]
    q_offsets = tokens[:, None] * (tl.cast(q_stride, tl.int64) * 8) + head * D + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)

    lowest = seq_len - q_len + block * BLOCK_M
    q_pos = seq_len - q_len + offs_m
    seen_by_all = (lowest + 1) // BLOCK_N * BLOCK_N
    last = tl.minimum(seq_len, lowest + BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table, kv_head, q_pos, 0, seen_by_all, scale,
        False, KV_HEADS, D, PAGE, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table, kv_head, q_pos, seen_by_all, last, scale,
        True, KV_HEADS, D, PAGE, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    acc = acc / row_sum[:, None]
    out_offsets = (tokens[:, None] * HEADS + head) * D + offs_d[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def attn_prefill_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    q_starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    config: PrefillConfig,
    num_decodes: int = 0,
) -> None:
    """Write the attention of a batch's prefill tokens into ``out [T, heads, head_dim]`` (contiguous).

    ``q`` has the same shape (any row stride that is a multiple of 8 elements); its first ``num_decodes`` tokens are
    skipped, and so are the first ``num_decodes`` entries of ``rows`` and ``seq_lens``. ``tiles [N, 2] int32`` holds the
    pairs of ``prefill_tiles`` for ``config.block_m``.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    if tiles.shape[0] == 0:
        return
    _prefill_kernel[(num_heads, tiles.shape[0])](
        q,
        k_cache,
        v_cache,
        page_table,
        rows,
        seq_lens,
        q_starts,
        tiles,
        out,
        scale * LOG2_E,
        page_table.stride(0),
        q.stride(0) // 8,
        num_decodes,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
