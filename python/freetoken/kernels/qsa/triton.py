"""Decode steps behind an indexer: keys and queries, scores of all blocks, the best of them as a list of slots, attention over it.

Launches depend on host facts only and stop at each request's own length, so that a captured batch costs what its texts cost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.attn_decode.config import decode_config, next_power_of_two
from freetoken.kernels.attn_decode.triton import attn_decode_triton, workspace_size
from freetoken.kernels.qsa.reference import Geometry, Pools

SCORE_BLOCKS = 64
SELECT_CHUNK = 4096


@triton.jit
def _slot(table, position, mask, PAGE: tl.constexpr):
    """Flat slot of each position of the request whose page numbers begin at ``table``."""
    return tl.load(table + position // PAGE, mask=mask, other=0).to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _raw(column, inside, own, pool_ptr, table, position, D: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr):
    """Columns of the mean of a block's raw keys, the last of which is ``own`` (rounded as it would be stored)."""
    total = own.to(pool_ptr.dtype.element_ty).to(tl.float32)
    for back in tl.static_range(1, RATIO):
        slot = _slot(table, position - back, True, PAGE)
        total += tl.load(pool_ptr + slot * D + column, mask=inside, other=0.0).to(tl.float32)
    return total / RATIO


@triton.jit
def index_kernel(
    projected_ptr,
    pool_ptr,
    rope_ptr,
    q_weight_ptr,
    k_weight_ptr,
    page_table_ptr,
    rows_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    projected_stride,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Grid ``(HEADS + 1, B)``: a query head normed and rotated, or (the last) the token's key stored."""
    head = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    STORAGE: tl.constexpr = projected_ptr.dtype.element_ty
    HALF: tl.constexpr = R // 2
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    # The column that the rotation mixes in; beyond the rotated part it is not used.
    other = tl.where(column < HALF, column + HALF, tl.where(column < R, column - HALF, column))
    position = tl.load(positions_ptr + lane)
    source = projected_ptr + lane * projected_stride + head * D
    x = tl.load(source + column, mask=inside, other=0.0)
    y = tl.load(source + other, mask=inside, other=0.0)
    weight_ptr = q_weight_ptr
    turned = position
    wide, wide_other = x.to(tl.float32), y.to(tl.float32)
    rotated = (position + 1) % RATIO == 0
    if head == HEADS:
        weight_ptr = k_weight_ptr
        turned = tl.maximum(position - (RATIO - 1), 0)
        if rotated:
            table = page_table_ptr + tl.load(rows_ptr + lane) * table_stride
            wide = _raw(column, inside, x, pool_ptr, table, position, D, RATIO, PAGE).to(STORAGE).to(tl.float32)
            wide_other = _raw(other, inside, y, pool_ptr, table, position, D, RATIO, PAGE).to(STORAGE).to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    first = wide * root * tl.load(weight_ptr + column, mask=inside, other=0.0)
    second = wide_other * root * tl.load(weight_ptr + other, mask=inside, other=0.0)
    first, second = first.to(STORAGE).to(tl.float32), second.to(STORAGE).to(tl.float32)
    angle = rope_ptr + turned * R + column % HALF
    cos = tl.load(angle, mask=column < R, other=1.0)
    sin = tl.load(angle + HALF, mask=column < R, other=0.0)
    result = (first * cos + tl.where(column < HALF, -second, second) * sin).to(STORAGE)
    if head == HEADS:
        stored = tl.where(rotated, result, x).to(pool_ptr.dtype.element_ty)
        tl.store(pool_ptr + tl.load(slots_ptr + lane) * D + column, stored, mask=inside)
    else:
        tl.store(out_ptr + (lane * HEADS + head) * D + column, result, mask=inside)


def index(
    projected: torch.Tensor,
    pool: torch.Tensor,
    rope_table: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    ratio: int,
) -> torch.Tensor:
    """Index queries ``[B, Hi, Di]`` of ``projected [B, (Hi + 1) Di]`` (any row stride), one token a request; its key goes to
    ``pool [pages, page_size, Di]``. ``norms`` are the float32 weights ``[Di]`` for queries and keys."""
    batch, size = projected.shape[0], pool.shape[2]
    heads = projected.shape[1] // size - 1
    out = projected.new_empty(batch, heads, size)
    if batch:
        index_kernel[(heads + 1, batch)](
            projected,
            pool,
            rope_table,
            *norms,
            page_table,
            rows,
            positions,
            slots,
            out,
            projected.stride(0),
            page_table.stride(0),
            eps,
            HEADS=heads,
            D=size,
            BLOCK_D=next_power_of_two(size),
            R=rope_table.shape[1],
            RATIO=ratio,
            PAGE=pool.shape[1],
            num_warps=1,
        )
    return out


@triton.jit
def score_kernel(
    q_ptr,
    pool_ptr,
    page_table_ptr,
    rows_ptr,
    seq_lens_ptr,
    scores_ptr,
    table_stride,
    scores_stride,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid ``(ceil(most blocks / BLOCKS), B)``."""
    lane = tl.program_id(1).to(tl.int64)
    whole = tl.load(seq_lens_ptr + lane) // RATIO
    if tl.program_id(0) * BLOCKS >= whole:
        return
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    table = page_table_ptr + tl.load(rows_ptr + lane) * table_stride
    slot = _slot(table, block * RATIO + (RATIO - 1), block < whole, PAGE)
    mask = (block < whole)[:, None] & inside[None, :]
    keys = tl.load(pool_ptr + slot[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCKS,), dtype=tl.float32)
    for head in tl.static_range(HEADS):
        q = tl.load(q_ptr + (lane * HEADS + head) * D + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.maximum(tl.sum(keys * q[None, :], 1), 0.0)
    tl.store(scores_ptr + lane * scores_stride + block, total * scale, mask=block < whole)


def score(
    index_q: torch.Tensor,
    pools: Pools,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    config: Geometry,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.qsa.reference.score`; nothing is written past a request's whole blocks. ``index_q`` is contiguous."""
    batch, heads, size = index_q.shape
    most = longest // config.ratio
    scores = torch.empty((batch, most), dtype=torch.float32, device=index_q.device)
    if scores.numel():
        score_kernel[(triton.cdiv(most, SCORE_BLOCKS), batch)](
            index_q,
            pools.index,
            page_table,
            rows,
            seq_lens,
            scores,
            page_table.stride(0),
            scores.stride(0),
            size**-0.5,
            HEADS=heads,
            D=size,
            BLOCK_D=next_power_of_two(size),
            RATIO=config.ratio,
            PAGE=pools.page_size,
            BLOCKS=SCORE_BLOCKS,
            num_warps=4,
        )
    return scores


@triton.jit
def select_kernel(
    scores_ptr,
    page_table_ptr,
    rows_ptr,
    seq_lens_ptr,
    chosen_ptr,
    counts_ptr,
    table_stride,
    scores_stride,
    chosen_stride,
    RATIO: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid ``(B,)``. Scores are not negative, so their bits order as they do: the least one that is kept is found four bits at a time."""
    lane = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + lane)
    whole = seq_len // RATIO
    scores = scores_ptr + lane * scores_stride
    table = page_table_ptr + tl.load(rows_ptr + lane) * table_stride
    offset = tl.arange(0, CHUNK)
    digits = tl.arange(0, 32)
    least = -1
    wanted = KEPT
    if whole > KEPT:
        least = 0
        for step in tl.static_range(8):
            shift = 28 - 4 * step
            counts = tl.zeros((32,), dtype=tl.int32)
            for begin in range(0, whole, CHUNK):
                block = begin + offset
                bits = tl.load(scores + block, mask=block < whole, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
                same = block < whole
                if step > 0:
                    same = same & ((bits >> (shift + 4)) == (least >> (shift + 4)))
                counts += tl.histogram(tl.where(same, (bits >> shift) & 15, 16), 32)
            counts = tl.where(digits < 16, counts, 0)
            from_top = tl.cumsum(counts, 0, reverse=True)
            digit = tl.max(tl.where((from_top >= wanted) & (digits < 16), digits, 0), 0)
            wanted -= tl.sum(tl.where(digits > digit, counts, 0), 0)
            least = least | (digit << shift)
    chosen = chosen_ptr + lane * chosen_stride
    taken = 0
    equals = 0
    for begin in range(0, whole, CHUNK):
        block = begin + offset
        inside = block < whole
        bits = tl.load(scores + block, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        equal = (inside & (bits == least)).to(tl.int32)
        rank = equals + tl.cumsum(equal, 0)
        take = inside & ((bits > least) | ((equal > 0) & (rank <= wanted)))
        place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        for token in tl.static_range(RATIO):
            slot = _slot(table, block * RATIO + token, take, PAGE)
            tl.store(chosen + place * RATIO + token, slot.to(tl.int32), mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    tail = whole * RATIO + tl.arange(0, TAIL)
    slot = _slot(table, tail, tail < seq_len, PAGE)
    tl.store(chosen + taken * RATIO + tl.arange(0, TAIL), slot.to(tl.int32), mask=tail < seq_len)
    tl.store(counts_ptr + lane, taken * RATIO + seq_len - whole * RATIO)


def select(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    config: Geometry,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots ``[B, visible]`` int32 that the last token of each request sees, in the order of the text, and how many ``[B]`` int32."""
    batch = rows.shape[0]
    chosen = torch.empty((batch, config.visible), dtype=torch.int32, device=rows.device)
    counts = torch.empty(batch, dtype=torch.int32, device=rows.device)
    if batch:
        chunk = min(SELECT_CHUNK, max(32, next_power_of_two(scores.shape[1])))
        select_kernel[(batch,)](
            scores,
            page_table,
            rows,
            seq_lens,
            chosen,
            counts,
            page_table.stride(0),
            scores.stride(0),
            chosen.stride(0),
            RATIO=config.ratio,
            TAIL=next_power_of_two(config.ratio),
            PAGE=page_size,
            KEPT=config.blocks,
            CHUNK=chunk,
            num_warps=max(1, min(16, chunk // 256)),
        )
    return chosen, counts


def attend(
    q: torch.Tensor, pools: Pools, chosen: torch.Tensor, counts: torch.Tensor, num_sms: int, scale: float
) -> torch.Tensor:
    """``[B, Hq * D]``: attention of ``q [B, Hq, D]`` over the first ``counts`` slots of ``chosen`` (both as of :func:`select`)."""
    batch, heads, size = q.shape
    q = q.contiguous()
    kv_heads = pools.k.shape[1]
    element = pools.k.element_size()
    width = chosen.shape[1]
    config = decode_config(size, heads // kv_heads, batch, width, num_sms, num_kv_heads=kv_heads, element_size=element)
    out = torch.empty_like(q)
    needed = workspace_size(batch, heads, size, config.splits)
    workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=q.device)
    lanes = torch.arange(batch, device=q.device)
    attn_decode_triton(q, pools.k, pools.v, chosen, lanes, counts, out, scale, config, workspace, arrivals, slots=True)
    return out.flatten(1)
