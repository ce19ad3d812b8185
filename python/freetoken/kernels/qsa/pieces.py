"""Pieces of prompts behind an indexer. A part of a step at a time: scores of its queries as products of tiles, for each query the
least score that it keeps, for each tile of neighbouring queries a list of the tokens that any of them sees, attention over that list.

A token of a list carries one bit a query, so queries that choose alike share what is read, and no query sees what it did not choose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.attn_decode.triton import LOG2_E, tile_offsets
from freetoken.kernels.attn_prefill.triton import softmax_step
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv, next_power_of_two
from freetoken.kernels.qsa.plan import Part, PieceConfig, PiecePlan
from freetoken.kernels.qsa.reference import Geometry, Pools
from freetoken.kernels.qsa.triton import find_bounds, slot_of

SELECT_CHUNK = 2048
LIST_CHUNK = 1024
LIST_UNROLL = 4
"""Queries whose scores are read at a time."""


@launched
@triton.jit(do_not_specialize=["table_stride", "scores_stride", "begin"])
def piece_score_kernel(
    q_ptr,
    pool_ptr,
    table_ptr,
    rows_ptr,
    tiles_ptr,
    scores_ptr,
    table_stride,
    scores_stride,
    begin,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid ``(ceil(most blocks / BLOCK_N), tiles)``. Where every query keeps all its blocks, scores are not needed."""
    tile = tiles_ptr + tl.program_id(1) * 4
    first, count = tl.load(tile), tl.load(tile + 1)
    whole = (tl.load(tile + 2) + count) // RATIO
    if (whole <= KEPT) | (tl.program_id(0) * BLOCK_N >= whole):
        return
    table = table_ptr + tl.load(rows_ptr + tl.load(tile + 3)) * table_stride
    block = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    query = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    slot = slot_of(table, block * RATIO + (RATIO - 1), block < whole, PAGE)
    mask = (block < whole)[:, None] & (column < D)[None, :]
    keys = tl.load(pool_ptr + slot[:, None] * D + column[None, :], mask=mask, other=0.0)
    rows = (first + query).to(tl.int64)
    inside = (query < count)[:, None] & (column < D)[None, :]
    queries = q_ptr + (rows * (HEADS * D))[:, None] + column[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for head in tl.range(0, HEADS, num_stages=STAGES):
        q = tl.load(queries + head * D, mask=inside, other=0.0)
        total += tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
    out = scores_ptr + ((rows - begin) * scores_stride)[:, None] + block[None, :]
    tl.store(out, total * scale, mask=(query < count)[:, None] & (block < whole)[None, :])


@launched
@triton.jit(do_not_specialize=["scores_stride"])
def piece_bounds_kernel(
    scores_ptr,
    positions_ptr,
    bounds_ptr,
    scores_stride,
    RATIO: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid ``(queries,)``."""
    lane = tl.program_id(0).to(tl.int64)
    whole = ((tl.load(positions_ptr + lane) + 1) // RATIO).to(tl.int32)
    least, cut = find_bounds(scores_ptr + lane * scores_stride, whole, KEPT, CHUNK)
    tl.store(bounds_ptr + 2 * lane, least)
    tl.store(bounds_ptr + 2 * lane + 1, cut)


@launched
@triton.jit(do_not_specialize=["table_stride", "scores_stride", "list_stride", "begin"])
def piece_list_kernel(
    scores_ptr,
    bounds_ptr,
    table_ptr,
    rows_ptr,
    tiles_ptr,
    slots_ptr,
    bits_ptr,
    counts_ptr,
    table_stride,
    scores_stride,
    list_stride,
    begin,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    UNROLL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid ``(tiles,)``. A block that some query sees has ``RATIO`` entries: the slots of its tokens, -1 for those nobody sees, and
    which queries see each."""
    number = tl.program_id(0)
    tile = tiles_ptr + number * 4
    first, count, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    last = position + count - 1
    table = table_ptr + tl.load(rows_ptr + tl.load(tile + 3)) * table_stride
    slots = slots_ptr + number.to(tl.int64) * list_stride
    marks = bits_ptr + number.to(tl.int64) * list_stride
    offset = tl.arange(0, CHUNK)
    taken = 0
    for start in range(0, last // RATIO + 1, CHUNK):
        block = start + offset
        bits = tl.zeros([CHUNK], dtype=tl.int32)
        for query in tl.range(0, count, loop_unroll_factor=UNROLL):
            row = (first + query - begin).to(tl.int64)
            whole = (position + query + 1) // RATIO
            least, cut = tl.load(bounds_ptr + 2 * row), tl.load(bounds_ptr + 2 * row + 1)
            found = tl.load(scores_ptr + row * scores_stride + block, mask=block < whole, other=0.0)
            found = found.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            take = (block < whole) & ((found > least) | ((found == least) & (block <= cut)))
            take = take | ((block >= whole) & (block * RATIO <= position + query))
            bits = bits | (take.to(tl.int32) << query)
        seen = bits != 0
        place = (taken + tl.cumsum(seen.to(tl.int32), 0) - 1) * RATIO
        for token in tl.static_range(RATIO):
            at = block * RATIO + token
            after = tl.minimum(tl.maximum(at - position, 0), 31)
            mine = tl.where(at <= last, bits & (-1 << after), 0)
            slot = slot_of(table, at, mine != 0, PAGE)
            tl.store(slots + place + token, tl.where(mine != 0, slot, -1).to(tl.int32), mask=seen)
            tl.store(marks + place + token, mine, mask=seen)
        taken += tl.sum(seen.to(tl.int32), 0)
    tl.store(counts_ptr + number, taken * RATIO)


@launched
@triton.jit(do_not_specialize=["list_stride"])
def piece_attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    slots_ptr,
    bits_ptr,
    counts_ptr,
    out_ptr,
    scale,
    list_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid ``(KV_HEADS, tiles)``; a row of a tile is a query with one of its heads."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, number = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles_ptr + number * 4), tl.load(tiles_ptr + number * 4 + 1)
    row, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    own = tl.where(query < QUERIES, 1 << tl.minimum(query, 31), 0)
    token = (first + query).to(tl.int64)
    q_mask = (query < count)[:, None] & (offs_d < D)[None, :]
    places = ((token * HEADS + head) * D)[:, None] + offs_d[None, :]
    q = tl.load(q_ptr + places, mask=q_mask, other=0.0)
    total = tl.load(counts_ptr + number)
    slots_ptr += number.to(tl.int64) * list_stride
    bits_ptr += number.to(tl.int64) * list_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Finite, as a row may see nothing of the first blocks.
    row_max = tl.full([BLOCK_M], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Read one step ahead: addresses of K and V never wait for them.
    slots = tl.load(slots_ptr + offs_n, mask=offs_n < total, other=-1)
    for n in range(0, total, BLOCK_N):
        offsets = tile_offsets(slots // PAGE, slots, kv_head, KV_HEADS, PAGE, D)[:, None] + offs_d[None, :]
        mask = (slots >= 0)[:, None] & (offs_d < D)[None, :]
        bits = tl.load(bits_ptr + n + offs_n, mask=n + offs_n < total, other=0)
        following = n + BLOCK_N + offs_n
        slots = tl.load(slots_ptr + following, mask=following < total, other=-1)
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((own[:, None] & bits[None, :]) != 0, s, float("-inf"))
        acc, row_max, row_sum = softmax_step(s, v, acc, row_max, row_sum)
    # Rows beyond the last query saw nothing.
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def score(
    index_q: torch.Tensor, pools: Pools, page_table: torch.Tensor, rows: torch.Tensor, plan: PiecePlan, part: Part,
    config: Geometry,
) -> torch.Tensor:  # fmt: skip
    """Scores ``[tokens of the part, blocks]`` float32 of ``index_q [T, Hi, Di]`` (contiguous, all tokens of the plan).

    ``rows [B]`` are those of all requests of the batch. Written are the whole blocks of a tile's last query, where that has more than
    the indexer keeps.
    """
    _, heads, size = index_q.shape
    scores = torch.empty((part.end - part.begin, part.blocks), dtype=torch.float32, device=index_q.device)
    tiles = plan.tiles[part.score]
    if scores.numel():
        piece_score_kernel[(cdiv(part.blocks, plan.config.score_n), tiles.shape[0])](
            index_q,
            pools.index,
            page_table,
            rows,
            tiles,
            scores,
            page_table.stride(0),
            scores.stride(0),
            part.begin,
            size**-0.5,
            HEADS=heads,
            D=size,
            BLOCK_D=max(16, next_power_of_two(size)),
            RATIO=config.ratio,
            PAGE=pools.page_size,
            KEPT=config.blocks,
            BLOCK_M=plan.config.score_m,
            BLOCK_N=plan.config.score_n,
            STAGES=2,
            num_warps=8,
        )
    return scores


def bounds(scores: torch.Tensor, positions: torch.Tensor, config: Geometry) -> torch.Tensor:
    """For each query ``[T, 2]`` int32: the bits of the least score it keeps, and the last block of that score that it keeps.

    ``positions [T]`` are those of the queries, of whose whole blocks there are ``scores [T, blocks]``.
    """
    found = torch.empty((scores.shape[0], 2), dtype=torch.int32, device=scores.device)
    if scores.shape[0]:
        piece_bounds_kernel[(scores.shape[0],)](
            scores,
            positions,
            found,
            scores.stride(0),
            RATIO=config.ratio,
            KEPT=config.blocks,
            CHUNK=SELECT_CHUNK,
            num_warps=max(1, SELECT_CHUNK // 512),
        )
    return found


def list_tokens(
    scores: torch.Tensor, found: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, page_size: int,
    plan: PiecePlan, part: Part, config: Geometry,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the queries of each tile see, from :func:`score` and :func:`bounds`: slots ``[tiles, (blocks + 1) ratio]`` int32 in the order
    of the text (-1: nobody's), bits of the queries that see each, and how many entries ``[tiles]`` there are."""
    tiles = plan.tiles[part.attend]
    shape = (tiles.shape[0], (part.blocks + 1) * config.ratio)
    slots, bits = (torch.empty(shape, dtype=torch.int32, device=scores.device) for _ in range(2))
    counts = torch.empty(shape[0], dtype=torch.int32, device=scores.device)
    piece_list_kernel[(shape[0],)](
        scores,
        found,
        page_table,
        rows,
        tiles,
        slots,
        bits,
        counts,
        page_table.stride(0),
        scores.stride(0),
        shape[1],
        part.begin,
        RATIO=config.ratio,
        PAGE=page_size,
        UNROLL=LIST_UNROLL,
        CHUNK=LIST_CHUNK,
        num_warps=max(1, LIST_CHUNK // 128),
    )
    return slots, bits, counts


def attend(
    q: torch.Tensor,
    pools: Pools,
    tiles: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    piece: PieceConfig,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write the attention of the queries of ``tiles`` over what :func:`list_tokens` listed into ``out [T, Hq, D]``; ``q`` has the
    same shape, both are contiguous."""
    slots, bits, counts = listed
    heads, size = q.shape[1:]
    kv_heads = pools.k.shape[1]
    piece_attend_kernel[(kv_heads, tiles.shape[0])](
        q,
        pools.k,
        pools.v,
        tiles,
        slots,
        bits,
        counts,
        out,
        scale * LOG2_E,
        slots.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        PAGE=pools.page_size,
        QUERIES=piece.queries,
        BLOCK_M=piece.block_m,
        BLOCK_D=max(16, next_power_of_two(size)),
        BLOCK_N=piece.block_n,
        num_warps=piece.num_warps,
        num_stages=piece.num_stages,
        enable_fp_fusion=True,
    )
