"""One-query attention over paged KV: each sequence is cut into parts, which the program that ends last joins."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.attn_decode.config import SHARE_STEP, DecodeConfig, join_step, next_power_of_two

LOG2_E = math.log2(math.e)
PREFETCHED = (128, 256, 512)
"""Bytes of a row of K or V that is brought into the L2 cache ahead of the kernel before."""


@triton.jit
def tile_offsets(page_ids, pos, kv_head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr):
    """Element offset of each token's K or V row in ``[pages, KV_HEADS, PAGE, D]``."""
    return page_ids.to(tl.int64) * (KV_HEADS * PAGE * D) + (kv_head * PAGE + pos % PAGE) * D


@triton.jit
def _share_of(seq_len, whole, min_share, splits, STEP: tl.constexpr):
    """Tokens in each part of a sequence; the number of parts in use is ``cdiv(seq_len, share)``."""
    parts = tl.where(seq_len <= whole, 1, tl.minimum(splits, tl.cdiv(seq_len, min_share)))
    return tl.cdiv(tl.cdiv(seq_len, parts), STEP) * STEP


@triton.jit
def _ask_ahead(
    k_ptr,
    v_ptr,
    table,
    start,
    end,
    kv_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Bring K and V of the first ``TOKENS`` tokens from ``start`` on into the L2 cache, a row of ``D`` elements a thread.

    It may be early: the cache is the same memory to whoever still writes the newest token. Past ``end`` the last row is asked for again.
    """
    lane = tl.arange(0, 2 * TOKENS)
    pos = tl.minimum(start + lane % TOKENS, end - 1)
    offsets = tile_offsets(tl.load(table + pos // PAGE), pos, kv_head, KV_HEADS, PAGE, D)
    size: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    row = tl.where(lane < TOKENS, k_ptr.to(tl.int64), v_ptr.to(tl.int64)) + offsets * size
    if D * size == 512:
        asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 512; mov.b32 $0, 0;"
    elif D * size == 256:
        asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;"
    else:
        tl.static_assert(D * size == 128)
        asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 128; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [row], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _join(
    partial_ptr,
    lse_ptr,
    first_slot,
    splits,
    used,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
):
    """``[BLOCK_H, BLOCK_D]``: the ``used`` partial results of ``GROUP`` heads, added in the order of the text."""
    offs_s, offs_h, offs_d = tl.arange(0, STEP), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    in_group = (offs_h < GROUP)[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, used, STEP):
        part = first + offs_s
        slots = (first_slot + offs_h)[None, :] * splits + part[:, None]
        known = (part < used)[:, None] & in_group
        # Written by other multiprocessors a moment ago: the L1 cache is passed by.
        lse = tl.load(lse_ptr + slots, mask=known, other=float("-inf"), cache_modifier=".cg")
        offsets = slots[:, :, None] * D + offs_d[None, None, :]
        mask = known[:, :, None] & (offs_d < D)[None, None, :]
        values = tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
        lse = tl.where(in_group, lse, 0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top[None, :])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = new_top
    return acc / total[:, None]


@triton.jit(do_not_specialize=["table_stride", "q_stride", "whole", "min_share", "splits"])
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    scale,
    table_stride,
    q_stride,
    whole,
    min_share,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARE_STEP: tl.constexpr,
    JOIN_STEP: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid ``(KV_HEADS, B, splits)``: parts that a sequence does not have come after those in use."""
    # With SLOTS the table holds the flat slot of every token in place of the page of every PAGE tokens.
    STEP: tl.constexpr = 1 if SLOTS else PAGE
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, b, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + b)
    share = _share_of(seq_len, whole, min_share, splits, SHARE_STEP)
    start = split * share
    if start >= seq_len:
        return
    end = tl.minimum(start + share, seq_len)

    offs_n, offs_d, offs_g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    heads = kv_head * GROUP + offs_g
    head_mask = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
    q_rows = b.to(tl.int64) * (tl.cast(q_stride, tl.int64) * 8)
    table = table_ptr + tl.load(rows_ptr + b) * table_stride

    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # Summed over its row once, at the end: a sum in every step would have all warps wait for each other again.
    weights = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    # A block's page numbers are read one block ahead: K and V addresses never wait for them.
    page_ids = tl.load(table + (start + offs_n) // STEP, mask=start + offs_n < end, other=0)
    if PREFETCH:
        _ask_ahead(k_ptr, v_ptr, table, start, end, kv_head, KV_HEADS, PAGE, D, 2 * BLOCK_N)
    if EARLY:
        # Lengths and page numbers were there before the step began; q and this step's K and V were not.
        tl.extra.cuda.gdc_wait()
    q_tile = q_ptr + q_rows + heads[:, None] * D + offs_d[None, :]
    for n in range(start, end, BLOCK_N):
        pos = n + offs_n
        if SLOTS:
            offsets = tile_offsets(page_ids // PAGE, page_ids, kv_head, KV_HEADS, PAGE, D)[:, None] + offs_d[None, :]
        else:
            offsets = tile_offsets(page_ids, pos, kv_head, KV_HEADS, PAGE, D)[:, None] + offs_d[None, :]
        page_ids = tl.load(table + (pos + BLOCK_N) // STEP, mask=pos + BLOCK_N < end, other=0)
        mask = (pos < end)[:, None] & (offs_d < D)[None, :]
        # Read again for every block, as K and V are: a read of its own would end before the first of theirs begins.
        q = tl.load(q_tile, mask=head_mask & (n + 0 * offs_g < end)[:, None], other=0.0)
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((pos < end)[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        rescale = tl.exp2(row_max - new_max)
        p = tl.exp2(s - new_max[:, None])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        weights = weights * rescale[:, None] + p
        row_max = new_max

    row_sum = tl.sum(weights, 1)
    acc = acc / row_sum[:, None]
    first_head = b.to(tl.int64) * HEADS + kv_head * GROUP
    if share >= seq_len:
        out_offsets = (first_head + offs_g)[:, None] * D + offs_d[None, :]
        tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=head_mask)
        return
    slots = (first_head + offs_g) * splits + split
    tl.store(partial_ptr + slots[:, None] * D + offs_d[None, :], acc, mask=head_mask)
    tl.store(lse_ptr + slots, row_max + tl.log2(row_sum), mask=offs_g < GROUP)
    tl.debug_barrier()
    used = tl.cdiv(seq_len, share)
    number = b * KV_HEADS + kv_head
    if tl.atomic_add(arrivals_ptr + number, 1, sem="acq_rel") == used - 1:
        joined = _join(partial_ptr, lse_ptr, first_head, splits, used, GROUP, D, BLOCK_H, BLOCK_D, JOIN_STEP)
        offs_h = tl.arange(0, BLOCK_H)
        out_offsets = (first_head + offs_h)[:, None] * D + offs_d[None, :]
        mask = (offs_h < GROUP)[:, None] & (offs_d < D)[None, :]
        tl.store(out_ptr + out_offsets, joined.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(arrivals_ptr + number, 0)


def workspace_size(batch: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Float32 elements that :func:`attn_decode_triton` needs for partial results; 0 with one part."""
    return batch * num_heads * splits * (head_dim + 1) if splits > 1 else 0


def attn_decode_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    config: DecodeConfig,
    workspace: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    slots: bool = False,
) -> None:
    """Write the attention of ``q [B, heads, head_dim]`` into ``out`` (same shape, contiguous).

    Arguments as for ``attn_decode_reference``; ``q`` may have any row stride that is a multiple of 8 elements.
    With ``slots`` the page table holds flat slots, one a token, which a kernel just before may have written.
    ``workspace`` is float32 of at least :func:`workspace_size` elements, ``arrivals`` int32 of at least ``B * kv_heads``, all zero,
    which they are again afterwards; both serve one call at a time. The launch depends on host facts only, so it can be captured.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    if batch == 0:
        return
    numel = batch * num_heads * config.splits
    partial, lse = workspace[: numel * head_dim], workspace[numel * head_dim :]
    group = num_heads // num_kv_heads
    early = launch.early(q) and not slots
    _split_kernel[(num_kv_heads, batch, config.splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        rows,
        seq_lens,
        out,
        partial,
        lse,
        arrivals,
        scale * LOG2_E,
        page_table.stride(0),
        q.stride(0) // 8,
        config.whole,
        config.min_share,
        config.splits,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        BLOCK_G=max(16, next_power_of_two(group)),
        BLOCK_H=next_power_of_two(group),
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        BLOCK_N=config.block_n,
        SHARE_STEP=SHARE_STEP,
        JOIN_STEP=join_step(head_dim, group, config.num_warps, config.splits),
        EARLY=early,
        PREFETCH=early and head_dim * k_cache.element_size() in PREFETCHED,
        SLOTS=slots,
        launch_pdl=early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
