"""The product of 2 to 32 tokens on tensor cores, with operands that are loaded as the fragments they are used as.

An integer product of 16 rows, 8 tokens and 32 values (``m16n8k32``) wants, in lane ``4g + t`` of a warp, the bytes of rows
``g`` and ``g + 8`` and of token ``g`` in four-byte words. A word of codes, shifted and masked to one of its four planes, is such
a word, and so is a word of a quantised activation, which comes in tiles for this: nothing passes through shared memory, and a
code is unpacked once for all tokens. Tensors here are ``[WARPS, 32]``, one value a thread. Warps share out rows and parts of K; the parts are added at the end.

Integers are summed on top of the bits of 1.5 * 2^23, whose lowest bit counts one: what the tensor cores hand back is a float32
as it stands, and no conversion, which a GPU does at an eighth of the rate of a sum, is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.host_kernel import launched
from freetoken.kernels.pq2_gemv.order import along_row, row_codes, row_scales
from freetoken.kernels.pq2_gemv.single import four_words, one_half

SHIFT = tl.constexpr(12582912.0)
"""1.5 * 2^23, which has the bits 0x4B400000; sums of one group stay below 2^16."""


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
def _planes(word):
    """The four planes of words of codes: in each, four values of two bits at the bottom of bytes."""
    return word & 0x03030303, word >> 2 & 0x03030303, word >> 4 & 0x03030303, word >> 6 & 0x03030303


@triton.jit
def _unpacked(asked):
    """What the four products of a block of 128 take of one tile: for every plane the words of a fragment."""
    low, high, low8, high8 = asked[0]
    return _planes(low), _planes(low8), _planes(high), _planes(high8)


@triton.jit
def _integers(rows, x, s0, s1, ON_GPU: tl.constexpr):
    """``sum(code * q)`` less ``s0`` and ``s1`` (even and odd tokens), exact, as float32."""
    p, q, r, s = rows
    x0, x1, x2, x3, y0, y1, y2, y3 = x
    even, odd = 0x4B400000 - s0, 0x4B400000 - s1
    a, b, c, d = mma(p[0], q[0], r[0], s[0], x0, y0, even, odd, even, odd, ON_GPU)
    a, b, c, d = mma(p[1], q[1], r[1], s[1], x1, y1, a, b, c, d, ON_GPU)
    a, b, c, d = mma(p[2], q[2], r[2], s[2], x2, y2, a, b, c, d, ON_GPU)
    a, b, c, d = mma(p[3], q[3], r[3], s[3], x3, y3, a, b, c, d, ON_GPU)
    return (
        a.to(tl.float32, bitcast=True) - SHIFT,
        b.to(tl.float32, bitcast=True) - SHIFT,
        c.to(tl.float32, bitcast=True) - SHIFT,
        d.to(tl.float32, bitcast=True) - SHIFT,
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
def _ask(
    codes,
    codes8,
    scales,
    scales8,
    ahead: tl.constexpr,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    APART: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Codes and scales of one block of 128 weights, ``ahead`` rows (in eights) past the pointers' rows g and g + 8; ``APART`` from scale to
    scale."""
    low, high = _two_words(codes + ahead * (K // 16), ON_GPU)
    low8, high8 = _two_words(codes8 + ahead * (K // 16), ON_GPU)
    first, first8 = scales + ahead * (K // GROUP_W), scales8 + ahead * (K // GROUP_W)
    d0, d8 = one_half(first, ON_GPU), one_half(first8, ON_GPU)
    e0, e8 = d0, d8
    if GROUP_W == 64:
        e0, e8 = one_half(first + APART, ON_GPU), one_half(first8 + APART, ON_GPU)
    return (low, high, low8, high8), d0, d8, e0, e8


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
def _scaled(total, rows, x, s0, s1, w0, w8, even, odd, ON_GPU: tl.constexpr):
    """``total`` (four float32 values a thread) plus one group: integers times the scales of rows and tokens."""
    t0, t1, t2, t3 = total
    i0, i1, i2, i3 = _integers(rows, x, s0, s1, ON_GPU)
    return t0 + i0 * (w0 * even), t1 + i1 * (w0 * odd), t2 + i2 * (w8 * even), t3 + i3 * (w8 * odd)


@triton.jit
def _block(step, part, BLOCKS: tl.constexpr, K_WARPS: tl.constexpr):
    """The block of this step of each warp, ``part`` of ``K_WARPS``; past the end the last one."""
    return tl.minimum(step * K_WARPS + part, BLOCKS - 1)


@triton.jit
def _ask_tiles(
    rows,
    step,
    part,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    TILES: tl.constexpr,
    K_WARPS: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """:func:`_ask` for every tile of 16 rows.

    The block is added to a pointer before constant distances are, which then need no register.
    """
    APART: tl.constexpr = 8 if INTERLEAVED else 1
    block = _block(step, part, K // 128, K_WARPS)
    words = along_row(block, 32, INTERLEAVED) // 4
    groups = block * (128 // GROUP_W * APART)
    asked = ()
    for tile in tl.static_range(TILES):
        if WHOLE:
            codes, scales = rows[0][0] + words, rows[0][1] + groups
            codes8, scales8 = codes + 8 * (K // 16), scales + 8 * (K // GROUP_W)
            asked += (_ask(codes, codes8, scales, scales8, tile * 16, K, GROUP_W, APART, ON_GPU),)
        else:
            codes, scales, codes8, scales8 = rows[tile]
            codes, codes8, scales, scales8 = codes + words, codes8 + words, scales + groups, scales8 + groups
            asked += (_ask(codes, codes8, scales, scales8, 0, K, GROUP_W, APART, ON_GPU),)
    return asked


@triton.jit
def _ask_tokens(
    activation,
    half: tl.constexpr,
    step,
    part,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    HALVES: tl.constexpr,
    K_WARPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Values of one block of eight tokens, and for each of its groups scales and sums of the even and odd token of a lane: three loads
    without gaps, where those of rows would touch eight lines each, and lines are what the cache near the programs serves few of."""
    X_PARTS: tl.constexpr = 128 // GROUP_X
    words, beside = activation
    block = _block(step, part, K // 128, K_WARPS)
    values = words + block * (HALVES * 256) + half * 256
    x0, x1, x2, x3 = four_words(values, False, ON_GPU)
    y0, y1, y2, y3 = four_words(values + 128, False, ON_GPU)
    beside = beside + block * (X_PARTS * HALVES * 16) + half * 16
    found = ()
    for i in tl.static_range(X_PARTS):
        even, s0, odd, s1 = four_words(beside + i * (HALVES * 16), False, ON_GPU)
        even, odd = even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
        if (K // 128) % K_WARPS != 0:
            there = step * K_WARPS + part < K // 128
            even, odd = tl.where(there, even, 0.0), tl.where(there, odd, 0.0)
        found += ((even, odd, s0, s1),)
    return (x0, x1, x2, x3, y0, y1, y2, y3), found


@triton.jit
def _add_half(
    mine,
    rows,
    asked,
    tokens,
    lane,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    TILES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The totals of eight tokens, one for each tile, plus one block."""
    PARTS: tl.constexpr = 128 // min(GROUP_W, GROUP_X)
    whole, beside = tokens
    for part in tl.static_range(PARTS):
        # A lane's words are numbers 2t and 2t + 1 of the eight of a block.
        x = whole if PARTS == 1 else _keep(whole, lane % 4 // (4 // PARTS) == part)
        even, odd, s0, s1 = beside[part * (128 // GROUP_X) // PARTS]
        if GROUP_X > GROUP_W:
            s0, s1 = _sums(x, ON_GPU)
        done = ()
        for tile in tl.static_range(TILES):
            _codes, d0, d8, e0, e8 = asked[tile]
            w0, w8 = (e0, e8) if GROUP_W == 64 and part * 2 >= PARTS else (d0, d8)
            done += (
                _scaled(mine[tile], rows[tile], x, s0, s1, w0.to(tl.float32), w8.to(tl.float32), even, odd, ON_GPU),
            )
        mine = done
    return mine


@triton.jit
def _add_block(
    totals,
    asked,
    activation,
    tokens,
    step,
    part,
    lane,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    K_WARPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``totals``, one for each eight tokens and tile, plus one block of K; and the ``tokens`` that come after, two times eight.

    Values are asked for two ahead: the assembler puts loads as late as it can, and the cache near the programs may be small.
    """
    rows = ()
    for tile in tl.static_range(TILES):
        rows += (_unpacked(asked[tile]),)
    added = ()
    for half in tl.static_range(HALVES):
        new = _ask_tokens(
            activation,
            (half + 2) % HALVES,
            step + (half + 2) // HALVES,
            part,
            K,
            GROUP_W,
            GROUP_X,
            HALVES,
            K_WARPS,
            ON_GPU,
        )
        added += (_add_half(totals[half], rows, asked, tokens[0], lane, GROUP_W, GROUP_X, TILES, ON_GPU),)
        tokens = (tokens[1], new)
    return added, tokens


@triton.jit
def _row_pointers(
    codes_ptr,
    scales_ptr,
    first_row,
    lane,
    n,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Pointers to a lane's first codes and to the scales: of row g where programs are ``WHOLE``, else for every tile those of rows g
    and g + 8."""
    word = lane % 4 * 2
    if WHOLE:
        row = (first_row + lane // 4).to(tl.int64)
        codes = codes_ptr + row_codes(row, K, INTERLEAVED) // 4 + word
        return ((codes, scales_ptr + row_scales(row, K, GROUP_W, INTERLEAVED)),)
    else:
        rows = ()
        for tile in tl.static_range(TILES):
            low = tl.minimum(first_row + tile * 16 + lane // 4, n - 1).to(tl.int64)
            high = tl.minimum(first_row + tile * 16 + 8 + lane // 4, n - 1).to(tl.int64)
            codes = codes_ptr + row_codes(low, K, INTERLEAVED) // 4 + word
            codes8 = codes_ptr + row_codes(high, K, INTERLEAVED) // 4 + word
            scales = scales_ptr + row_scales(low, K, GROUP_W, INTERLEAVED)
            rows += ((codes, scales, codes8, scales_ptr + row_scales(high, K, GROUP_W, INTERLEAVED)),)
        return rows


@triton.jit
def _moved_up(asked, new, AHEAD: tl.constexpr):
    """``asked`` without its first, ``new`` at its end."""
    following = ()
    for i in tl.static_range(1, AHEAD):
        following += (asked[i],)
    following += (new,)
    return following


@triton.jit
def _store(total, out_ptr, first_row, first_token, m, n, TILES: tl.constexpr, ROW_WARPS: tl.constexpr):
    """Add one tile over the warps that shared K and write it."""
    t0, t1, t2, t3 = total
    # As [row warps, 32, 2, 2]: then lane, odd token, row g + 8.
    y = tl.join(tl.join(t0, t1), tl.join(t2, t3))
    y = tl.sum(tl.reshape(y, (y.shape[0] // ROW_WARPS, ROW_WARPS, 32, 2, 2)), axis=0)
    warp = tl.arange(0, ROW_WARPS)[:, None, None, None]
    position = tl.arange(0, 32)[None, :, None, None]
    odd = tl.arange(0, 2)[None, None, :, None]
    later = tl.arange(0, 2)[None, None, None, :]
    row = first_row + warp * (16 * TILES) + position // 4 + later * 8
    token = first_token + position % 4 * 2 + odd
    cell = out_ptr + token.to(tl.int64) * n + row
    tl.store(cell, y.to(out_ptr.dtype.element_ty), mask=(row < n) & (token < m))


@launched
@triton.jit(do_not_specialize=["m", "n"])
def fragment_kernel(
    words_ptr,
    beside_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    m,
    n,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    TILES: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
    HALVES: tl.constexpr,
    AHEAD: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [m, n]`` of up to ``8 * HALVES`` tokens. A warp has ``16 * TILES`` rows, ``ROW_WARPS`` of them side by side, and of K
    every ``K_WARPS``-th block of 128, ``AHEAD`` of which are on their way. ``num_warps`` is ``ROW_WARPS * K_WARPS``. Grid
    ``(ceil(n / (16 * TILES * ROW_WARPS)),)``.

    ``WHOLE`` says that ``n`` is at least the rows of a program; the last one then shares rows with its neighbour, and both write
    the same.
    """
    STEPS: tl.constexpr = (K // 128 + K_WARPS - 1) // K_WARPS
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, ROW_WARPS * K_WARPS)[:, None]
    part = warp // ROW_WARPS
    first_row = tl.program_id(0) * (16 * TILES * ROW_WARPS)
    if WHOLE:
        first_row = tl.minimum(first_row, n - 16 * TILES * ROW_WARPS)
    mine = first_row + warp % ROW_WARPS * (16 * TILES)
    rows = _row_pointers(codes_ptr, scales_ptr, mine, lane, n, K, GROUP_W, TILES, WHOLE, INTERLEAVED)
    activation = (words_ptr + lane * 4, beside_ptr + lane % 4 * 4)
    nothing = tl.zeros((ROW_WARPS * K_WARPS, 32), tl.float32)
    totals = ()
    for _half in tl.static_range(HALVES):
        tiles = ()
        for _tile in tl.static_range(TILES):
            tiles += ((nothing, nothing, nothing, nothing),)
        totals += (tiles,)
    if EARLY and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    asked = ()
    for step in tl.static_range(AHEAD):
        asked += (_ask_tiles(rows, step, part, K, GROUP_W, TILES, K_WARPS, WHOLE, INTERLEAVED, ON_GPU),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if EARLY and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    tokens = (
        _ask_tokens(activation, 0, 0, part, K, GROUP_W, GROUP_X, HALVES, K_WARPS, ON_GPU),
        _ask_tokens(activation, 1 % HALVES, 1 // HALVES, part, K, GROUP_W, GROUP_X, HALVES, K_WARPS, ON_GPU),
    )
    # One step a round: more of them are interleaved, which costs registers, and pays only where these hold few warps anyway.
    UNROLL: tl.constexpr = AHEAD if TILES > 1 and HALVES == 4 else 1
    ROUNDS: tl.constexpr = (STEPS - AHEAD) // UNROLL
    for turn in tl.range(0, ROUNDS):
        for i in tl.static_range(UNROLL):
            totals, tokens = _add_block(
                totals, asked[0], activation, tokens, turn * UNROLL + i, part, lane,
                K, GROUP_W, GROUP_X, TILES, HALVES, K_WARPS, ON_GPU,
            )  # fmt: skip
            further = turn * UNROLL + i + AHEAD
            new = _ask_tiles(rows, further, part, K, GROUP_W, TILES, K_WARPS, WHOLE, INTERLEAVED, ON_GPU)
            asked = _moved_up(asked, new, AHEAD)
    for step in tl.range(ROUNDS * UNROLL, STEPS):
        totals, tokens = _add_block(
            totals, asked[0], activation, tokens, step, part, lane,
            K, GROUP_W, GROUP_X, TILES, HALVES, K_WARPS, ON_GPU,
        )  # fmt: skip
        new = asked[0]
        if UNROLL > 1:
            new = _ask_tiles(rows, step + AHEAD, part, K, GROUP_W, TILES, K_WARPS, WHOLE, INTERLEAVED, ON_GPU)
        asked = _moved_up(asked, new, AHEAD)
    for half in tl.static_range(HALVES):
        for tile in tl.static_range(TILES):
            _store(totals[half][tile], out_ptr, first_row + tile * 16, half * 8, m, n, TILES, ROW_WARPS)
