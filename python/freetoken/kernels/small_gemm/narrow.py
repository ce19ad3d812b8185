"""The product of up to 32 rows with a weight of few rows, on tensor cores, with operands that are loaded as the fragments they are used as.

A product of 16 weight rows, 8 tokens and 16 columns (``m16n8k16``) takes words of two values. Lane ``4g + t`` of a warp reads 16 bytes,
eight columns, of rows ``g`` and ``g + 8`` and of token ``g``: four such words each, for two products. Both sides number the columns in
the same way, so a sum is over the right pairs. Nothing waits in shared memory, of which a program needs little: it can run beside
programs of a kernel that lives on its L1 cache. Tensors here are ``[WARPS, 32]``, one value a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.host_kernel import launched
from freetoken.kernels.pq2_gemv.single import four_words


@triton.jit
def _fresh_words(pointer, ON_GPU: tl.constexpr):
    """The four words from each int32 pointer on, from the L2 cache: the L1 cache may hold what was there in an earlier layer."""
    if ON_GPU:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.v4.u32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [pointer.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        a, b, c, d = tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)
    return a, b, c, d


@triton.jit
def _values(word, BF16: tl.constexpr):
    """The two values of words, lower half first, as a last dimension; float32."""
    if BF16:
        return tl.join((word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True))
    low, high = word.to(tl.int16).to(tl.float16, bitcast=True), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high).to(tl.float32)


@triton.jit
def _product(a0, a1, a2, a3, b0, b1, WARPS: tl.constexpr, BF16: tl.constexpr):
    """The product of one ``m16n8k16`` from its fragments, as fragments: what the instruction does, in plain operations."""
    left = _values(tl.join(tl.join(a0, a1), tl.join(a2, a3)), BF16)
    left = tl.reshape(left, (WARPS, 8, 4, 2, 2, 2)).permute(0, 3, 1, 4, 2, 5).reshape(WARPS, 16, 16)
    right = tl.reshape(_values(tl.join(b0, b1), BF16), (WARPS, 8, 4, 2, 2)).permute(0, 3, 2, 4, 1)
    cells = tl.dot(left, right.reshape(WARPS, 16, 8), input_precision="ieee")
    low, high = tl.split(tl.reshape(cells, (WARPS, 2, 32, 2)).permute(0, 2, 3, 1))
    c0, c1 = tl.split(low)
    c2, c3 = tl.split(high)
    return c0, c1, c2, c3


@triton.jit
def _mma(a0, a1, a2, a3, b0, b1, total, WARPS: tl.constexpr, BF16: tl.constexpr, ON_GPU: tl.constexpr):
    """``total`` (four float32 values a thread) plus one product in the register layout of ``mma.m16n8k16``."""
    c0, c1, c2, c3 = total
    if ON_GPU:
        kind: tl.constexpr = "bf16.bf16" if BF16 else "f16.f16"
        asm: tl.constexpr = (
            "mma.sync.aligned.m16n8k16.row.col.f32." + kind + ".f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            asm,
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        p0, p1, p2, p3 = _product(a0, a1, a2, a3, b0, b1, WARPS, BF16)
        c0, c1, c2, c3 = c0 + p0, c1 + p1, c2 + p2, c3 + p3
    return c0, c1, c2, c3


@triton.jit
def _ask_rows(low, high, block, K: tl.constexpr, STEP: tl.constexpr, UNROLL: tl.constexpr, ON_GPU: tl.constexpr):
    """For every step of a round the words of rows g and g + 8 in block ``block`` of 32 columns, ``STEP`` blocks on at each; past the end
    those of the last block."""
    asked = ()
    for step in tl.static_range(UNROLL):
        at = tl.minimum(block + step * STEP, K // 32 - 1) * 16
        asked += ((four_words(low + at, True, ON_GPU), four_words(high + at, True, ON_GPU)),)
    return asked


@triton.jit
def _ask_tokens(
    x,
    block,
    K: tl.constexpr,
    STEP: tl.constexpr,
    UNROLL: tl.constexpr,
    WHOLE: tl.constexpr,
    UNDER: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """For every step of a round and eight tokens of ``x`` (pointers) the words of token g, zero past the end."""
    rounds = ()
    for step in tl.static_range(UNROLL):
        at = block + step * STEP
        there = at < K // 32
        at = tl.minimum(at, K // 32 - 1) * 16
        halves = ()
        for half in tl.static_range(len(x)):
            if UNDER:
                a, b, c, d = _fresh_words(x[half] + at, ON_GPU)
            else:
                a, b, c, d = four_words(x[half] + at, False, ON_GPU)
            if not WHOLE:
                a, b, c, d = tl.where(there, a, 0), tl.where(there, b, 0), tl.where(there, c, 0), tl.where(there, d, 0)
            halves += ((a, b, c, d),)
        rounds += (halves,)
    return rounds


@triton.jit
def _add_round(
    totals,
    rows,
    tokens,
    UNROLL: tl.constexpr,
    HALVES: tl.constexpr,
    WARPS: tl.constexpr,
    BF16: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The totals of every eight tokens plus the products of one round."""
    for step in tl.static_range(UNROLL):
        low, high = rows[step]
        added = ()
        for half in tl.static_range(HALVES):
            x = tokens[step][half]
            total = _mma(low[0], high[0], low[1], high[1], x[0], x[1], totals[half], WARPS, BF16, ON_GPU)
            added += (_mma(low[2], high[2], low[3], high[3], x[2], x[3], total, WARPS, BF16, ON_GPU),)
        totals = added
    return totals


@triton.jit
def _squash(value, row, ROWS: tl.constexpr, DIVISOR: tl.constexpr, STORAGE: tl.constexpr):
    """``silu(value / DIVISOR)`` of the first ``ROWS`` rows, others as they are; in and out in the storage type."""
    if ROWS > 0:
        wide = value.to(tl.float32) / DIVISOR
        value = tl.where(row < ROWS, (wide / (1.0 + tl.exp(-wide))).to(STORAGE), value)
    return value


@launched
@triton.jit(do_not_specialize=["m"])
def narrow_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HALVES: tl.constexpr,
    BF16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SQUASHED: tl.constexpr,
    DIVISOR: tl.constexpr,
    EARLY: tl.constexpr,
    UNDER: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [m, N] = x [m, K] @ weight [N, K]^T``; x and weight are seen as words of two values, in bfloat16 or (without ``BF16``)
    float16.

    K is a multiple of 32. A program has 16 rows of the weight and ``8 * HALVES`` tokens; each of its ``WARPS`` warps takes every
    ``WARPS``-th block of 32 columns, ``UNROLL`` of them on their way at a time. Grid ``(ceil(N / 16), SPLIT_K, ceil(m / (8 * HALVES)))``.
    """
    STORAGE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    BLOCKS: tl.constexpr = K // 32
    ROUND: tl.constexpr = WARPS * UNROLL
    ROUNDS: tl.constexpr = (BLOCKS + ROUND * SPLIT_K - 1) // (ROUND * SPLIT_K)
    WHOLE: tl.constexpr = BLOCKS % (ROUND * SPLIT_K) == 0
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, WARPS)[:, None]
    g, word = lane // 4, lane % 4 * 4
    first_row = tl.program_id(0) * 16
    first_token = tl.program_id(2) * (8 * HALVES)
    low = weight_ptr + tl.minimum(first_row + g, N - 1) * (K // 2) + word
    high = weight_ptr + tl.minimum(first_row + 8 + g, N - 1) * (K // 2) + word
    x = ()
    totals = ()
    nothing = tl.zeros((WARPS, 32), tl.float32)
    for half in tl.static_range(HALVES):
        x += (x_ptr + tl.minimum(first_token + half * 8 + g, m - 1) * (K // 2) + word,)
        totals += ((nothing, nothing, nothing, nothing),)
    begin = tl.program_id(1) * (ROUNDS * ROUND) + warp
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    rows = _ask_rows(low, high, begin, K, WARPS, UNROLL, ON_GPU)
    if EARLY and not UNDER:
        tl.extra.cuda.gdc_wait()
    tokens = _ask_tokens(x, begin, K, WARPS, UNROLL, WHOLE, UNDER, ON_GPU)
    totals = _add_round(totals, rows, tokens, UNROLL, HALVES, WARPS, BF16, ON_GPU)
    for block in tl.range(ROUND, ROUNDS * ROUND, ROUND):
        rows = _ask_rows(low, high, begin + block, K, WARPS, UNROLL, ON_GPU)
        tokens = _ask_tokens(x, begin + block, K, WARPS, UNROLL, WHOLE, UNDER, ON_GPU)
        totals = _add_round(totals, rows, tokens, UNROLL, HALVES, WARPS, BF16, ON_GPU)

    position = tl.arange(0, 32)[:, None, None]
    row = first_row + position // 4 + tl.arange(0, 2)[None, None, :] * 8
    token = position % 4 * 2 + tl.arange(0, 2)[None, :, None]
    parts = parts_ptr + tl.program_id(2) * (SPLIT_K * 8 * HALVES * N) + token * N + row
    arrivals = arrivals_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    token += first_token
    sums = ()
    for half in tl.static_range(HALVES):
        c0, c1, c2, c3 = totals[half]
        total = tl.sum(tl.join(tl.join(c0, c1), tl.join(c2, c3)), axis=0)
        sums += (total,)
        if SPLIT_K > 1:
            mine = parts + tl.program_id(1) * (8 * HALVES * N) + half * 8 * N
            tl.store(mine, total, mask=(row < N) & (token + half * 8 < m))
    last = True
    if SPLIT_K > 1:
        tl.debug_barrier()
        last = tl.atomic_add(arrivals, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        values = ()
        for half in tl.static_range(HALVES):
            total = sums[half]
            if SPLIT_K > 1:
                total = tl.zeros((32, 2, 2), tl.float32)
                for part in tl.static_range(SPLIT_K):
                    source = parts + part * (8 * HALVES * N) + half * 8 * N
                    inside = (row < N) & (token + half * 8 < m)
                    total += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
            if HAS_BIAS:
                total += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
            values += (_squash(total.to(STORAGE), row, SQUASHED, DIVISOR, STORAGE),)
        if SPLIT_K > 1:
            tl.store(arrivals, 0)
        if EARLY and UNDER:
            tl.extra.cuda.gdc_wait()
        for half in tl.static_range(HALVES):
            out = out_ptr + (token + half * 8) * N + row
            tl.store(out, values[half].to(out_ptr.dtype.element_ty), mask=(row < N) & (token + half * 8 < m))
