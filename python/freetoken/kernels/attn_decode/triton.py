"""One-query attention over paged KV: a long sequence is cut into parts, and a second kernel joins them."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.attn_decode.config import SHARE_STEP, DecodeConfig, join_config
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv, next_power_of_two

LOG2_E = math.log2(math.e)


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
def _chunks(
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
    CHUNK: tl.constexpr,
):
    """Addresses of K and V of every ``CHUNK`` tokens of one page, ``TOKENS`` from ``start`` on: how many tokens after it, the address, 0
    from ``end`` on. ``CHUNK`` neighbours name the same one."""
    lane = tl.arange(0, 2 * TOKENS)
    after = lane % TOKENS // CHUNK * CHUNK
    pos = start + after
    offsets = tile_offsets(tl.load(table + pos // PAGE, mask=pos < end, other=0), pos, kv_head, KV_HEADS, PAGE, D)
    size: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    address = tl.where(lane < TOKENS, k_ptr.to(tl.int64), v_ptr.to(tl.int64)) + offsets * size
    return after, tl.where(pos < end, address, 0)


@triton.jit
def _ask(address, BYTES: tl.constexpr):
    """Bring ``BYTES`` at every address but 0 into the L2 cache. A warp asks for one address after the other, once for each."""
    asm: tl.constexpr = """{ .reg .pred p; setp.ne.u64 p, $1, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"""
    tl.inline_asm_elementwise(asm, "=r,l,r", [address, BYTES], dtype=tl.int32, is_pure=False, pack=1)


@launched
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
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARE_STEP: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid ``(KV_HEADS, B, splits)``: parts that a sequence does not have come after those in use."""
    # With SLOTS row b of the table holds the flat slot of every token in place of the page of every PAGE tokens, and comes from the kernel
    # right before, as the lengths do.
    STEP: tl.constexpr = 1 if SLOTS else PAGE
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if SLOTS:
            tl.extra.cuda.gdc_wait()
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
    table = table_ptr + (b.to(tl.int64) if SLOTS else tl.load(rows_ptr + b)) * table_stride

    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # Summed over its row once, at the end: a sum in every step would have all warps wait for each other again.
    weights = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    # A block's page numbers are read one block ahead: K and V addresses never wait for them.
    page_ids = tl.load(table + (start + offs_n) // STEP, mask=start + offs_n < end, other=0)
    CHUNK_BYTES: tl.constexpr = SHARE_STEP * D * (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    if AHEAD > 0:
        # It may be early: the cache is the same memory to whoever still writes the newest token.
        after, chunks = _chunks(k_ptr, v_ptr, table, start, end, kv_head, KV_HEADS, PAGE, D, 4 * BLOCK_N, SHARE_STEP)
        first = (after < 2 * BLOCK_N) | (seq_len <= 4 * BLOCK_N)
        _ask(tl.where(first, chunks, 0), CHUNK_BYTES)
    if EARLY and not SLOTS:
        # Lengths and page numbers were there before the step began; q and this step's K and V were not.
        tl.extra.cuda.gdc_wait()
    if AHEAD > 2:
        # The rest of a short part queues behind what is waited for first, so that memory never idles.
        _ask(tl.where(first | (share > 4 * BLOCK_N), 0, chunks), CHUNK_BYTES)
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


@launched
@triton.jit(do_not_specialize=["whole", "min_share", "splits"])
def _join_kernel(
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    out_ptr,
    whole,
    min_share,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE_STEP: tl.constexpr,
    EARLY: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid ``(HEADS * ceil(D / WIDTH), B)``: a slice of one head's output, from all its partial results at once."""
    SLICES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if SLOTS:
            tl.extra.cuda.gdc_wait()
    head, column, b = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES * WIDTH, tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + b)
    share = _share_of(seq_len, whole, min_share, splits, SHARE_STEP)
    row = b.to(tl.int64) * HEADS + head
    offs_s, offs_d = tl.arange(0, PARTS), column + tl.arange(0, WIDTH)
    used = tl.cdiv(seq_len, share)
    # Past the last part it is read again, for a weight of 0: reads without a condition of their own leave all at once.
    part = tl.minimum(offs_s, used - 1)
    if share >= seq_len:
        if EARLY and not SLOTS:
            # Also with nothing to join: the kernel after this one takes our end for the end of the parts.
            tl.extra.cuda.gdc_wait()
        return
    if EARLY and not SLOTS:
        tl.extra.cuda.gdc_wait()
    slots = row * splits + part
    values = tl.load(partial_ptr + slots[:, None] * D + offs_d[None, :], mask=(offs_d < D)[None, :], other=0.0)
    lse = tl.where(offs_s < used, tl.load(lse_ptr + slots), float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    joined = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * D + offs_d, joined.to(out_ptr.dtype.element_ty), mask=offs_d < D)


def workspace_size(batch: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Float32 elements that :func:`attn_decode_triton` needs for partial results; 0 with one part."""
    return batch * num_heads * splits * (head_dim + 1) if splits > 1 else 0


def attn_decode_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor | None,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    config: DecodeConfig,
    workspace: torch.Tensor,
    *,
    slots: bool = False,
) -> None:
    """Write the attention of ``q [B, heads, head_dim]`` into ``out`` (same shape, contiguous).

    Arguments as for ``attn_decode_reference``; ``q`` may have any row stride that is a multiple of 8 elements.
    With ``slots`` the page table holds flat slots, one a token, in a row for every query (no ``rows``); a kernel right before may have
    written them and ``seq_lens``.
    ``workspace`` is float32 of at least :func:`workspace_size` elements and serves one call at a time. Launches one kernel, or two when
    ``config.splits > 1``; both depend on host facts only, so they can be captured.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    if batch == 0:
        return
    numel = batch * num_heads * config.splits
    partial, lse = workspace[: numel * head_dim], workspace[numel * head_dim :]
    group = num_heads // num_kv_heads
    early = launch.early(q)
    _split_kernel[(num_kv_heads, batch, config.splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens if rows is None else rows,
        seq_lens,
        out,
        partial,
        lse,
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
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        BLOCK_N=config.block_n,
        SHARE_STEP=SHARE_STEP,
        EARLY=early,
        AHEAD=config.ahead if early and not slots and page_size % SHARE_STEP == 0 else 0,
        SLOTS=slots,
        launch_pdl=early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    if config.splits > 1:
        join = join_config(head_dim, config.splits)
        _join_kernel[(num_heads * cdiv(head_dim, join.width), batch)](
            partial,
            lse,
            seq_lens,
            out,
            config.whole,
            config.min_share,
            config.splits,
            HEADS=num_heads,
            D=head_dim,
            PARTS=join.parts,
            WIDTH=join.width,
            SHARE_STEP=SHARE_STEP,
            EARLY=early,
            SLOTS=slots,
            launch_pdl=early,
            num_warps=join.num_warps,
            enable_fp_fusion=True,
        )
