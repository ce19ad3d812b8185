"""Decode steps behind an indexer: keys and queries, scores of all blocks, the best of them as a list of slots, attention over it.

Launches depend on host facts only and stop at each request's own length, so that a captured batch costs what its texts cost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.attn_decode.config import decode_config
from freetoken.kernels.attn_decode.triton import attn_decode_triton, workspace_size
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv, next_power_of_two
from freetoken.kernels.qsa.reference import Geometry, Pools

SCORE_BLOCKS = 64
SELECT_CHUNK = 4096
SELECT_SPLIT = 4096
"""Texts of more than twice so many blocks are searched by a program for each so many first."""


@triton.jit
def slot_of(table, position, mask, PAGE: tl.constexpr):
    """Flat slot of each position of the request whose page numbers begin at ``table``."""
    return tl.load(table + position // PAGE, mask=mask, other=0).to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _raw(
    column,
    inside,
    source,
    pool_ptr,
    table,
    position,
    before,
    stride,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Columns of the mean of a block's raw keys, all rounded as they are stored. The last is at ``source``, ``before`` it those of
    this step, and the others in the pool."""
    own = tl.load(source + column, mask=inside, other=0.0)
    total = own.to(pool_ptr.dtype.element_ty).to(tl.float32)
    for back in tl.static_range(1, RATIO):
        fresh = column * 0 + before >= back
        slot = slot_of(table, position - back, True, PAGE)
        raw = tl.load(source - back * stride + column, mask=inside & fresh, other=0.0)
        kept = tl.load(pool_ptr + slot * D + column, mask=inside & (fresh == 0), other=0.0)
        total += tl.where(fresh, raw.to(pool_ptr.dtype.element_ty), kept).to(tl.float32)
    return total / RATIO


@launched
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
    before_ptr,
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
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(T, HEADS + 1)``: a query head normed and rotated, or (the last) the token's key stored. Without ``PIECES`` no token has
    one of its own text before it in the step."""
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    STORAGE: tl.constexpr = projected_ptr.dtype.element_ty
    HALF: tl.constexpr = R // 2
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    # The column that the rotation mixes in; beyond the rotated part it is not used.
    other = tl.where(column < HALF, column + HALF, tl.where(column < R, column - HALF, column))
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
            before = 0
            if PIECES:
                before = tl.load(before_ptr + lane).to(tl.int32)
            wide = _raw(column, inside, source, pool_ptr, table, position, before, projected_stride, D, RATIO, PAGE)
            wide_other = _raw(
                other, inside, source, pool_ptr, table, position, before, projected_stride, D, RATIO, PAGE
            )
            wide, wide_other = wide.to(STORAGE).to(tl.float32), wide_other.to(STORAGE).to(tl.float32)
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
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Index queries ``[T, Hi, Di]`` of ``projected [T, (Hi + 1) Di]`` (any row stride); keys go to ``pool [pages, page_size, Di]``.

    ``norms`` are the float32 weights ``[Di]`` for queries and keys. ``before [T]`` int64 counts how many tokens right before each
    are of its text; ``None`` for one token a request.
    """
    batch, size = projected.shape[0], pool.shape[2]
    heads = projected.shape[1] // size - 1
    out = projected.new_empty(batch, heads, size)
    early = launch.early(projected)
    if batch:
        index_kernel[(batch, heads + 1)](
            projected,
            pool,
            rope_table,
            *norms,
            page_table,
            rows,
            positions,
            slots,
            positions if before is None else before,
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
            PIECES=before is not None,
            EARLY=early,
            launch_pdl=early,
            num_warps=1,
        )
    return out


@launched
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
    EARLY: tl.constexpr,
):
    """Grid ``(ceil(most blocks / BLOCKS), B)``."""
    lane = tl.program_id(1).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    whole = tl.load(seq_lens_ptr + lane) // RATIO
    if tl.program_id(0) * BLOCKS >= whole:
        return
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    table = page_table_ptr + tl.load(rows_ptr + lane) * table_stride
    slot = slot_of(table, block * RATIO + (RATIO - 1), block < whole, PAGE)
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
    early = launch.early(index_q)
    if scores.numel():
        score_kernel[(cdiv(most, SCORE_BLOCKS), batch)](
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
            EARLY=early,
            launch_pdl=early,
            num_warps=4,
        )
    return scores


@triton.jit
def find_bounds(scores, whole, KEPT: tl.constexpr, CHUNK: tl.constexpr):
    """The bits of the least of the first ``whole`` scores that is kept, and the last block with just these bits that is: the earlier
    of equals win. ``KEPT`` are kept, or all.

    Scores are not negative, so their bits order as they do, and four at a time of the least one are found. That ends as soon as all
    scores that begin with the bits known are kept.
    """
    offset = tl.arange(0, CHUNK)
    digits = tl.arange(0, 32)
    least = 0
    known = 0
    wanted = KEPT
    equals = whole
    shift = 28
    while (shift >= 0) & (equals > wanted):
        counts = tl.zeros((32,), dtype=tl.int32)
        for begin in range(0, whole, CHUNK):
            block = begin + offset
            bits = tl.load(scores + block, mask=block < whole, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            same = (block < whole) & (((bits ^ least) & known) == 0)
            counts += tl.histogram(tl.where(same, (bits >> shift) & 15, 16), 32)
        counts = tl.where(digits < 16, counts, 0)
        from_top = tl.cumsum(counts, 0, reverse=True)
        digit = tl.max(tl.where((from_top >= wanted) & (digits < 16), digits, 0), 0)
        wanted -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        equals = tl.sum(tl.where(digits == digit, counts, 0), 0)
        least = least | (digit << shift)
        known = known | (15 << shift)
        shift -= 4
    cut = whole
    if equals > wanted:
        passed = 0
        cut = 0
        for begin in range(0, whole, CHUNK):
            block = begin + offset
            bits = tl.load(scores + block, mask=block < whole, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            equal = ((block < whole) & (bits == least)).to(tl.int32)
            rank = passed + tl.cumsum(equal, 0)
            cut = tl.maximum(cut, tl.max(tl.where((equal > 0) & (rank <= wanted), block, 0), 0))
            passed += tl.sum(equal, 0)
    return least, cut


@launched
@triton.jit
def candidates_kernel(
    scores_ptr,
    seq_lens_ptr,
    best_ptr,
    blocks_ptr,
    scores_stride,
    best_stride,
    RATIO: tl.constexpr,
    KEPT: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(ceil(most blocks / SPLIT), B)``: the ``KEPT`` best of each ``SPLIT`` blocks of a long text, in the order of the text. None
    of the best of all is missing, and equals are in order."""
    lane = tl.program_id(1).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    whole = tl.load(seq_lens_ptr + lane) // RATIO
    start = tl.program_id(0) * SPLIT
    if (whole <= 2 * SPLIT) | (start >= whole):
        return
    scores = scores_ptr + lane * scores_stride + start
    count = tl.minimum(whole - start, SPLIT)
    least, cut = find_bounds(scores, count, KEPT, CHUNK)
    out = lane * best_stride + tl.program_id(0) * KEPT
    taken = 0
    for begin in range(0, count, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        score = tl.load(scores + block, mask=block < count, other=0.0)
        bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        take = (block < count) & ((bits > least) | ((bits == least) & (block <= cut)))
        place = out + taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(best_ptr + place, score, mask=take)
        tl.store(blocks_ptr + place, start + block, mask=take)
        taken += tl.sum(take.to(tl.int32), 0)


@launched
@triton.jit
def select_kernel(
    scores_ptr,
    best_ptr,
    blocks_ptr,
    page_table_ptr,
    rows_ptr,
    seq_lens_ptr,
    chosen_ptr,
    counts_ptr,
    table_stride,
    scores_stride,
    best_stride,
    chosen_stride,
    RATIO: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    KEPT: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(B,)``: of all scores or, with ``SPLIT`` and in a long text, of the candidates."""
    lane = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq_len = tl.load(seq_lens_ptr + lane)
    whole = seq_len // RATIO
    scores = scores_ptr + lane * scores_stride
    count = whole
    if SPLIT > 0:
        long = whole > 2 * SPLIT
        full = (whole - 1) // SPLIT
        scores = tl.where(long, best_ptr + lane * best_stride, scores)
        count = tl.where(long, full * KEPT + tl.minimum(KEPT, whole - full * SPLIT), whole)
    table = page_table_ptr + tl.load(rows_ptr + lane) * table_stride
    least, cut = find_bounds(scores, count, KEPT, CHUNK)
    chosen = chosen_ptr + lane * chosen_stride
    taken = 0
    for begin in range(0, count, CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        bits = tl.load(scores + entry, mask=entry < count, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        take = (entry < count) & ((bits > least) | ((bits == least) & (entry <= cut)))
        block = entry
        if SPLIT > 0:
            named = take & (entry * 0 + whole > 2 * SPLIT)
            block = tl.where(named, tl.load(blocks_ptr + lane * best_stride + entry, mask=named, other=0), entry)
        place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        for token in tl.static_range(RATIO):
            slot = slot_of(table, block * RATIO + token, take, PAGE)
            tl.store(chosen + place * RATIO + token, slot.to(tl.int32), mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
    tail = whole * RATIO + tl.arange(0, TAIL)
    slot = slot_of(table, tail, tail < seq_len, PAGE)
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
    batch, most, device = rows.shape[0], scores.shape[1], rows.device
    chosen = torch.empty((batch, config.visible), dtype=torch.int32, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    if not batch:
        return chosen, counts
    chunk = min(SELECT_CHUNK, max(32, next_power_of_two(most)))
    early = launch.early(scores)
    settings = {"RATIO": config.ratio, "KEPT": config.blocks, "CHUNK": chunk, "EARLY": early}
    settings |= {"launch_pdl": early, "num_warps": max(1, min(16, chunk // 256))}
    split = SELECT_SPLIT if most > 2 * SELECT_SPLIT and config.blocks <= SELECT_SPLIT // 2 else 0
    splits = cdiv(most, split) if split else 0
    best = torch.empty((batch, splits * config.blocks), dtype=torch.float32, device=device)
    blocks = torch.empty(best.shape, dtype=torch.int32, device=device)
    strides = (scores.stride(0), best.stride(0))
    if split:
        candidates_kernel[(splits, batch)](scores, seq_lens, best, blocks, *strides, SPLIT=split, **settings)
    select_kernel[(batch,)](
        scores,
        best,
        blocks,
        page_table,
        rows,
        seq_lens,
        chosen,
        counts,
        page_table.stride(0),
        *strides,
        chosen.stride(0),
        TAIL=next_power_of_two(config.ratio),
        PAGE=page_size,
        SPLIT=split,
        **settings,
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
    attn_decode_triton(q, pools.k, pools.v, chosen, None, counts, out, scale, config, workspace, slots=True)
    return out.flatten(1)
