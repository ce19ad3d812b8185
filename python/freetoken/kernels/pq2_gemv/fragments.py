"""The product of 2 to 16 tokens on tensor cores, with operands that are loaded as the fragments they are used as.

An integer product of 16 rows, 8 tokens and 32 values (``m16n8k32``) wants, in lane ``4g + t`` of a warp, the bytes of rows
``g`` and ``g + 8`` and of token ``g`` in four-byte words. A word of codes masked to one of its four planes is such a word, and
so is a word of a quantised activation: nothing passes through shared memory, and a code is unpacked once for all tokens.
Tensors here are ``[WARPS, 32]``, one value a thread; each warp has a part of K for itself and the parts are added at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.pq2_gemv.single import four_words, one_half, one_word


@triton.jit
def _two_words(pointer, ON_GPU: tl.constexpr):
    """Two neighbouring 32-bit words of weights from each int32 pointer on, as one 8-byte load."""
    if ON_GPU:
        a, b = tl.inline_asm_elementwise(
            "ld.relaxed.cta.global.L1::no_allocate.v2.u32 {$0, $1}, [$2];",
            "=r,=r,l",
            [pointer.to(tl.int64)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        a, b = tl.load(pointer), tl.load(pointer + 1)
    return a, b


@triton.jit
def _bytes(word, SIGNED: tl.constexpr):
    """The bytes of words, lowest first, as a last dimension of 4; float32."""
    if SIGNED:
        a, b, c, d = word << 24 >> 24, word << 16 >> 24, word << 8 >> 24, word >> 24
    else:
        a, b, c, d = word & 0xFF, word >> 8 & 0xFF, word >> 16 & 0xFF, word >> 24 & 0xFF
    return tl.join(tl.join(a, c), tl.join(b, d)).to(tl.float32)


@triton.jit
def _product(a0, a1, a2, a3, b0, b1, WARPS: tl.constexpr):
    """The product of one ``m16n8k32`` from its fragments, as fragments: what the instruction does, in plain operations."""
    left = _bytes(tl.join(tl.join(a0, a1), tl.join(a2, a3)), False)
    left = tl.reshape(left, (WARPS, 8, 4, 2, 2, 4)).permute(0, 3, 1, 4, 2, 5).reshape(WARPS, 16, 32)
    right = tl.reshape(_bytes(tl.join(b0, b1), True), (WARPS, 8, 4, 2, 4)).permute(0, 3, 2, 4, 1).reshape(WARPS, 32, 8)
    cells = tl.dot(left, right).to(tl.int32)
    low, high = tl.split(tl.reshape(cells, (WARPS, 2, 32, 2)).permute(0, 2, 3, 1))
    c0, c1 = tl.split(low)
    c2, c3 = tl.split(high)
    return c0, c1, c2, c3


@triton.jit
def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, ON_GPU: tl.constexpr):
    """``c + a @ b`` of unsigned and signed bytes in the register layout of ``mma.m16n8k32``; all int32 ``[WARPS, 32]``."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        p0, p1, p2, p3 = _product(a0, a1, a2, a3, b0, b1, a0.shape[0])
        return c0 + p0, c1 + p1, c2 + p2, c3 + p3


@triton.jit
def _plane(rows, b0, b1, MASK: tl.constexpr, c0, c1, c2, c3, ON_GPU: tl.constexpr):
    """The product of one plane of the codes, ``(row g, row g, row g + 8, row g + 8)`` two words each."""
    low, high, low8, high8 = rows
    return mma(low & MASK, low8 & MASK, high & MASK, high8 & MASK, b0, b1, c0, c1, c2, c3, ON_GPU)


@triton.jit
def _integers(rows, x, s0, s1, ON_GPU: tl.constexpr):
    """``sum(code * q)`` less ``s0`` and ``s1`` (even and odd tokens), exact: four planes, sum i of which is ``4**i`` too large."""
    x0, x1, x2, x3, y0, y1, y2, y3 = x
    zero = tl.zeros_like(x0)
    a0, a1, a2, a3 = _plane(rows, x0, y0, 0x03030303, zero - s0, zero - s1, zero - s0, zero - s1, ON_GPU)
    b0, b1, b2, b3 = _plane(rows, x1, y1, 0x0C0C0C0C, zero, zero, zero, zero, ON_GPU)
    c0, c1, c2, c3 = _plane(rows, x2, y2, 0x30303030, zero, zero, zero, zero, ON_GPU)
    d0, d1, d2, d3 = _plane(rows, x3, y3, -0x3F3F3F40, zero, zero, zero, zero, ON_GPU)
    return (
        (((d0 >> 2) + c0 >> 2) + b0 >> 2) + a0,
        (((d1 >> 2) + c1 >> 2) + b1 >> 2) + a1,
        (((d2 >> 2) + c2 >> 2) + b2 >> 2) + a2,
        (((d3 >> 2) + c3 >> 2) + b3 >> 2) + a3,
    )


@triton.jit
def _keep(x, wanted):
    """The words of the activation where ``wanted``, else zeros."""
    x0, x1, x2, x3, y0, y1, y2, y3 = x
    return (
        tl.where(wanted, x0, 0),
        tl.where(wanted, x1, 0),
        tl.where(wanted, x2, 0),
        tl.where(wanted, x3, 0),
        tl.where(wanted, y0, 0),
        tl.where(wanted, y1, 0),
        tl.where(wanted, y2, 0),
        tl.where(wanted, y3, 0),
    )


@triton.jit
def _ask(codes, scales, block, K: tl.constexpr, GROUP_W: tl.constexpr, ON_GPU: tl.constexpr):
    """Codes and scales of one block of 128 weights of rows g and g + 8. ``codes`` and ``scales`` are pairs of pointers."""
    first, second = codes
    s_first, s_second = scales
    low, high = _two_words(first + block * 8, ON_GPU)
    low8, high8 = _two_words(second + block * 8, ON_GPU)
    PARTS: tl.constexpr = 128 // GROUP_W
    d0, d8 = one_half(s_first + block * PARTS, ON_GPU), one_half(s_second + block * PARTS, ON_GPU)
    e0, e8 = d0, d8
    if PARTS == 2:
        e0, e8 = one_half(s_first + block * 2 + 1, ON_GPU), one_half(s_second + block * 2 + 1, ON_GPU)
    return (low, high, low8, high8), d0, d8, e0, e8


@triton.jit
def _activation(values, block, ON_GPU: tl.constexpr):
    """The eight words of one block of 128 values that a lane's two words of codes meet."""
    x0, x1, x2, x3 = four_words(values + block * 32, False, ON_GPU)
    y0, y1, y2, y3 = four_words(values + block * 32 + 4, False, ON_GPU)
    return x0, x1, x2, x3, y0, y1, y2, y3


@triton.jit
def _sums(x, ON_GPU: tl.constexpr):
    """The sums of even and odd tokens' values, from a product with ones."""
    x0, x1, x2, x3, y0, y1, y2, y3 = x
    zero = tl.zeros_like(x0)
    one = zero + 0x01010101
    a, b, c, d = mma(one, one, one, one, x0, y0, zero, zero, zero, zero, ON_GPU)
    a, b, c, d = mma(one, one, one, one, x1, y1, a, b, c, d, ON_GPU)
    a, b, c, d = mma(one, one, one, one, x2, y2, a, b, c, d, ON_GPU)
    a, b, c, d = mma(one, one, one, one, x3, y3, a, b, c, d, ON_GPU)
    return a, b


@triton.jit
def _scaled(total, rows, x, s0, s1, d0, d8, even, odd, ON_GPU: tl.constexpr):
    """``total`` (four float32 values a thread) plus one group: integers times the scales of rows and tokens."""
    t0, t1, t2, t3 = total
    i0, i1, i2, i3 = _integers(rows, x, s0, s1, ON_GPU)
    w0, w8 = d0.to(tl.float32), d8.to(tl.float32)
    return (
        t0 + i0.to(tl.float32) * (w0 * even),
        t1 + i1.to(tl.float32) * (w0 * odd),
        t2 + i2.to(tl.float32) * (w8 * even),
        t3 + i3.to(tl.float32) * (w8 * odd),
    )


@triton.jit
def _block(step, warp, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """The block of this step of each warp; past the end the last one."""
    block = step * WARPS + warp
    return block if BLOCKS % WARPS == 0 else tl.minimum(block, BLOCKS - 1)


@triton.jit
def _ask_tiles(
    codes,
    scales,
    step,
    warp,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """:func:`_ask` for every tile of 16 rows."""
    block = _block(step, warp, K // 128, WARPS)
    asked = ()
    for tile in tl.static_range(TILES):
        asked += (_ask(codes[tile], scales[tile], block, K, GROUP_W, ON_GPU),)
    return asked


@triton.jit
def _add_block(
    totals,
    asked,
    activation,
    step,
    warp,
    lane,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    WARPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``totals``, one for each half of the tokens and tile, plus one block of K."""
    GROUP: tl.constexpr = min(GROUP_W, GROUP_X)
    PARTS: tl.constexpr = 128 // GROUP
    X_PARTS: tl.constexpr = 128 // GROUP_X
    values, x_scales, sums = activation
    block = _block(step, warp, K // 128, WARPS)
    added = ()
    for half in tl.static_range(HALVES):
        whole = _activation(values[half], block, ON_GPU)
        mine = totals[half]
        for part in tl.static_range(PARTS):
            # A lane's words are numbers 2t and 2t + 1 of the eight of a block.
            x = whole if PARTS == 1 else _keep(whole, lane % 4 // (4 // PARTS) == part)
            group = block * X_PARTS + part * X_PARTS // PARTS
            d_even, d_odd = x_scales[half]
            even = one_word(d_even + group, ON_GPU).to(tl.float32, bitcast=True)
            odd = one_word(d_odd + group, ON_GPU).to(tl.float32, bitcast=True)
            if X_PARTS == PARTS:
                s_even, s_odd = sums[half]
                s0, s1 = one_word(s_even + group, ON_GPU), one_word(s_odd + group, ON_GPU)
            else:
                s0, s1 = _sums(x, ON_GPU)
            if (K // 128) % WARPS != 0:
                there = step * WARPS + warp < K // 128
                even, odd = tl.where(there, even, 0.0), tl.where(there, odd, 0.0)
            done = ()
            for tile in tl.static_range(TILES):
                rows, d0, d8, e0, e8 = asked[tile]
                w0, w8 = (e0, e8) if GROUP_W == 64 and part * 2 >= PARTS else (d0, d8)
                done += (_scaled(mine[tile], rows, x, s0, s1, w0, w8, even, odd, ON_GPU),)
            mine = done
        added += (mine,)
    return added


@triton.jit
def _row_pointers(
    codes_ptr, scales_ptr, first_row, lane, n, K: tl.constexpr, GROUP_W: tl.constexpr, TILES: tl.constexpr
):
    """For every tile the pointers of rows g and g + 8 to a lane's first codes and to the scales."""
    codes, scales = (), ()
    for tile in tl.static_range(TILES):
        low = tl.minimum(first_row + tile * 16 + lane // 4, n - 1).to(tl.int64)
        high = tl.minimum(first_row + tile * 16 + 8 + lane // 4, n - 1).to(tl.int64)
        word = lane % 4 * 2
        codes += ((codes_ptr + low * (K // 16) + word, codes_ptr + high * (K // 16) + word),)
        scales += ((scales_ptr + low * (K // GROUP_W), scales_ptr + high * (K // GROUP_W)),)
    return codes, scales


@triton.jit
def _token_pointers(
    values_ptr, x_scales_ptr, sums_ptr, lane, m, K: tl.constexpr, GROUP_X: tl.constexpr, HALVES: tl.constexpr
):
    """For each half of the tokens: the words of token g, and the scales and sums of the even and odd token of a lane's results."""
    values, x_scales, sums = (), (), ()
    for half in tl.static_range(HALVES):
        token = tl.minimum(half * 8 + lane // 4, m - 1)
        even = tl.minimum(half * 8 + lane % 4 * 2, m - 1) * (K // GROUP_X)
        odd = tl.minimum(half * 8 + lane % 4 * 2 + 1, m - 1) * (K // GROUP_X)
        values += (values_ptr + token * (K // 4) + lane % 4 * 8,)
        x_scales += ((x_scales_ptr + even, x_scales_ptr + odd),)
        sums += ((sums_ptr + even, sums_ptr + odd),)
    return values, x_scales, sums


@triton.jit
def _store(total, out_ptr, first_row, first_token, m, n):
    """Add one tile over the warps and write it."""
    t0, t1, t2, t3 = total
    # As [32, 2, 2]: lane, then odd token, then row g + 8.
    y = tl.sum(tl.join(tl.join(t0, t1), tl.join(t2, t3)), axis=0)
    position = tl.arange(0, 32)[:, None, None]
    odd = tl.arange(0, 2)[None, :, None]
    later = tl.arange(0, 2)[None, None, :]
    row = first_row + position // 4 + later * 8
    token = first_token + position % 4 * 2 + odd
    cell = out_ptr + token.to(tl.int64) * n + row
    tl.store(cell, y.to(out_ptr.dtype.element_ty), mask=(row < n) & (token < m))


@triton.jit(do_not_specialize=["m", "n"])
def fragment_kernel(
    values_ptr,
    x_scales_ptr,
    sums_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    m,
    n,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    HALVES: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [m, n]`` of up to ``8 * HALVES`` tokens; ``16 * TILES`` rows a program, every ``WARPS``-th block of 128 along K a
    warp, ``AHEAD`` of them on their way. ``num_warps`` is ``WARPS``. Grid ``(ceil(n / (16 * TILES)),)``.
    """
    STEPS: tl.constexpr = (K // 128 + WARPS - 1) // WARPS
    LAST: tl.constexpr = (STEPS // AHEAD - 1) * AHEAD
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, WARPS)[:, None]
    first_row = tl.program_id(0) * (16 * TILES)
    codes, scales = _row_pointers(codes_ptr, scales_ptr, first_row, lane, n, K, GROUP_W, TILES)
    activation = _token_pointers(values_ptr, x_scales_ptr, sums_ptr, lane, m, K, GROUP_X, HALVES)
    nothing = tl.zeros((WARPS, 32), tl.float32)
    totals = ()
    for _half in tl.static_range(HALVES):
        mine = ()
        for _tile in tl.static_range(TILES):
            mine += ((nothing, nothing, nothing, nothing),)
        totals += (mine,)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    asked = ()
    for step in tl.static_range(AHEAD):
        asked += (_ask_tiles(codes, scales, step, warp, K, GROUP_W, TILES, WARPS, ON_GPU),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for first in tl.range(0, LAST, AHEAD):
        following = ()
        for i in tl.static_range(AHEAD):
            totals = _add_block(
                totals, asked[i], activation, first + i, warp, lane, K, GROUP_W, GROUP_X, TILES, HALVES, WARPS, ON_GPU
            )
            following += (_ask_tiles(codes, scales, first + AHEAD + i, warp, K, GROUP_W, TILES, WARPS, ON_GPU),)
        asked = following
    for i in tl.static_range(STEPS % AHEAD):
        asked += (_ask_tiles(codes, scales, LAST + AHEAD + i, warp, K, GROUP_W, TILES, WARPS, ON_GPU),)
    for i in tl.static_range(AHEAD + STEPS % AHEAD):
        totals = _add_block(
            totals, asked[i], activation, LAST + i, warp, lane, K, GROUP_W, GROUP_X, TILES, HALVES, WARPS, ON_GPU
        )
    for half in tl.static_range(HALVES):
        for tile in tl.static_range(TILES):
            _store(totals[half][tile], out_ptr, first_row + tile * 16, half * 8, m, n)
