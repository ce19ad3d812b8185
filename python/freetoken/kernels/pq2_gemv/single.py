"""The product of one token: a kernel without a token dimension, bound by reading the weights. A thread takes 64 of them from a row
at a time, 16 bytes of codes: a *piece*. Tensors here are ``[WARPS, 32]``, one value a thread."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.host_kernel import launched
from freetoken.kernels.pq2_gemv.order import along_row, row_codes, row_scales


@triton.jit
def four_words(pointer, STREAM: tl.constexpr, ON_GPU: tl.constexpr):
    """The four neighbouring 32-bit words from each int32 pointer on, as one 16-byte load.

    ``STREAM`` is for weights, which nothing writes and which are used once; without it for activations.
    """
    if ON_GPU:
        if STREAM:
            asm: tl.constexpr = "ld.relaxed.cta.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
        else:
            asm: tl.constexpr = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
        a, b, c, d = tl.inline_asm_elementwise(
            asm,
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
def one_half(pointer, ON_GPU: tl.constexpr):
    """The float16 at each pointer, a weight's scale, loaded in whatever layout its users have."""
    if ON_GPU:
        asm: tl.constexpr = "ld.relaxed.cta.global.b16 $0, [$1];"
        return tl.inline_asm_elementwise(asm, "=h,l", [pointer.to(tl.int64)], dtype=tl.float16, is_pure=False, pack=1)
    else:
        return tl.load(pointer)


@triton.jit
def one_word(pointer, ON_GPU: tl.constexpr):
    """The int32 at each pointer, of an activation, loaded in whatever layout its users have."""
    if ON_GPU:
        asm: tl.constexpr = "ld.global.b32 $0, [$1];"
        return tl.inline_asm_elementwise(asm, "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.load(pointer)


@triton.jit
def dot4(codes, q, total, ON_GPU: tl.constexpr):
    """``total`` plus the products of the four unsigned bytes of ``codes`` with the four signed ones of ``q``; all int32."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, q, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            total += (codes >> (8 * byte) & 0xFF) * (q << (24 - 8 * byte) >> 24)
        return total


@triton.jit
def plane_dot(word, x0, x1, x2, x3, a0, a1, a2, a3, ON_GPU: tl.constexpr):
    """Adds 16 products to four sums, of which sum i holds ``4**i`` times its part: codes are masked, not shifted."""
    a0 = dot4(word & 0x03030303, x0, a0, ON_GPU)
    a1 = dot4(word & 0x0C0C0C0C, x1, a1, ON_GPU)
    a2 = dot4(word & 0x30303030, x2, a2, ON_GPU)
    a3 = dot4(word & -0x3F3F3F40, x3, a3, ON_GPU)
    return a0, a1, a2, a3


@triton.jit
def _whole(a0, a1, a2, a3):
    """The sum of four planes' sums, of which sum i is ``4**i`` times too large; exact, as float32."""
    return ((((a3 >> 2) + a2 >> 2) + a1 >> 2) + a0).to(tl.float32)


@triton.jit
def _sum16(x0, x1, x2, x3, ON_GPU: tl.constexpr):
    """The sum of the sixteen signed bytes of four words."""
    one = tl.zeros_like(x0) + 0x01010101
    return dot4(one, x0, dot4(one, x1, dot4(one, x2, dot4(one, x3, tl.zeros_like(x0), ON_GPU), ON_GPU), ON_GPU), ON_GPU)


@triton.jit
def _piece(step, place, PIECES: tl.constexpr, K_WARPS: tl.constexpr):
    """The piece of a row that a lane takes at a step, ``place`` of ``4 * K_WARPS``; past the end the last one."""
    piece = step * (4 * K_WARPS) + place
    return piece if PIECES % (4 * K_WARPS) == 0 else tl.minimum(piece, PIECES - 1)


@triton.jit
def _ask_rows(
    rows,
    step,
    place,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    TILES: tl.constexpr,
    K_WARPS: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Codes (four words) and scale of one piece of every row of a lane.

    The piece is added to a pointer before constant distances are, which then need no register.
    """
    APART: tl.constexpr = 8 if INTERLEAVED else 1
    piece = _piece(step, place, K // 64, K_WARPS)
    words = along_row(piece, 16, INTERLEAVED) // 4
    group = piece // (GROUP_W // 64) * APART
    asked = ()
    for tile in tl.static_range(TILES):
        if WHOLE:
            codes, scales = rows[0][0] + words, rows[0][1] + group
            codes, scales = codes + tile * (K // 2), scales + tile * (8 * K // GROUP_W)
        else:
            codes, scales = rows[tile][0] + words, rows[tile][1] + group
        a, b, c, d = four_words(codes, True, ON_GPU)
        asked += ((a, b, c, d, one_half(scales, ON_GPU)),)
    return asked


@triton.jit
def _ask_token(
    activation,
    step,
    place,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    K_WARPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The values of a piece (16 words), and scales and sums of its two halves: twice the same unless groups are of 32."""
    values, x_scales, sums = activation
    piece = _piece(step, place, K // 64, K_WARPS)
    x = values + piece * 16
    x0, x1, x2, x3 = four_words(x, False, ON_GPU)
    y0, y1, y2, y3 = four_words(x + 4, False, ON_GPU)
    z0, z1, z2, z3 = four_words(x + 8, False, ON_GPU)
    u0, u1, u2, u3 = four_words(x + 12, False, ON_GPU)
    group = piece * 2 if GROUP_X == 32 else piece // (GROUP_X // 64)
    d_x = one_word(x_scales + group, ON_GPU).to(tl.float32, bitcast=True)
    if GROUP_X <= GROUP_W:
        s = one_word(sums + group, ON_GPU)
        if GROUP_X == 128:
            # The sum over 128 values is taken off once, in the first of its two pieces.
            s = tl.where(piece % 2 == 0, s, 0)
    else:
        s = _sum16(x0, x1, x2, x3, ON_GPU) + _sum16(y0, y1, y2, y3, ON_GPU)
        s += _sum16(z0, z1, z2, z3, ON_GPU) + _sum16(u0, u1, u2, u3, ON_GPU)
    d_x2, s2 = d_x, s
    if GROUP_X == 32:
        d_x2 = one_word(x_scales + group + 1, ON_GPU).to(tl.float32, bitcast=True)
        s2 = one_word(sums + group + 1, ON_GPU)
    if (K // 64) % (4 * K_WARPS) != 0:
        there = step * (4 * K_WARPS) + place < K // 64
        d_x, d_x2 = tl.where(there, d_x, 0.0), tl.where(there, d_x2, 0.0)
    return ((x0, x1, x2, x3), (y0, y1, y2, y3), (z0, z1, z2, z3), (u0, u1, u2, u3)), (d_x, s, d_x2, s2)


@triton.jit
def _add_row(total, asked, token, GROUP_X: tl.constexpr, ON_GPU: tl.constexpr):
    """``total`` plus one piece of one row."""
    x, y, z, u = token[0]
    d_x, s, d_x2, s2 = token[1]
    w0, w1, w2, w3, scale = asked
    wide = scale.to(tl.float32)
    zero = tl.zeros_like(w0)
    a0, a1, a2, a3 = plane_dot(w0, x[0], x[1], x[2], x[3], zero - s, zero, zero, zero, ON_GPU)
    a0, a1, a2, a3 = plane_dot(w1, y[0], y[1], y[2], y[3], a0, a1, a2, a3, ON_GPU)
    if GROUP_X == 32:
        # A piece holds two groups of 32: the first one ends here.
        total += _whole(a0, a1, a2, a3) * (wide * d_x)
        a0, a1, a2, a3 = zero - s2, zero, zero, zero
    a0, a1, a2, a3 = plane_dot(w2, z[0], z[1], z[2], z[3], a0, a1, a2, a3, ON_GPU)
    a0, a1, a2, a3 = plane_dot(w3, u[0], u[1], u[2], u[3], a0, a1, a2, a3, ON_GPU)
    return total + _whole(a0, a1, a2, a3) * (wide * d_x2)


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
    """Pointers to the codes and scales of a lane's first row where programs are ``WHOLE``, else of each of its rows."""
    rows = ()
    for tile in tl.static_range(1 if WHOLE else TILES):
        row = tl.minimum(first_row + tile * 8 + lane // 4, n - 1).to(tl.int64)
        codes = codes_ptr + row_codes(row, K, INTERLEAVED) // 4
        rows += ((codes, scales_ptr + row_scales(row, K, GROUP_W, INTERLEAVED)),)
    return rows


@launched
@triton.jit(do_not_specialize=["n"])
def single_kernel(
    values_ptr,
    x_scales_ptr,
    sums_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    n,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    TILES: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [n]`` of one token. Eight rows by four pieces are a warp's lanes, which interleaved rows hold without gaps; a warp has
    ``8 * TILES`` rows, ``ROW_WARPS`` of them side by side, and of K every ``K_WARPS``-th four pieces, ``AHEAD`` of which are on their
    way. Grid ``(ceil(n / (8 * TILES * ROW_WARPS)),)``.

    Weights are asked for before the wait for the kernel that makes the activation, and arrive in registers. ``WHOLE`` is as in
    ``fragments``.
    """
    STEPS: tl.constexpr = (K // 64 + 4 * K_WARPS - 1) // (4 * K_WARPS)
    LAST: tl.constexpr = (STEPS // AHEAD - 1) * AHEAD
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, ROW_WARPS * K_WARPS)[:, None]
    place = warp // ROW_WARPS * 4 + lane % 4
    first_row = tl.program_id(0) * (8 * TILES * ROW_WARPS)
    if WHOLE:
        first_row = tl.minimum(first_row, n - 8 * TILES * ROW_WARPS)
    mine = first_row + warp % ROW_WARPS * (8 * TILES)
    rows = _row_pointers(codes_ptr, scales_ptr, mine, lane, n, K, GROUP_W, TILES, WHOLE, INTERLEAVED)
    activation = (values_ptr, x_scales_ptr, sums_ptr)
    totals = ()
    for _tile in tl.static_range(TILES):
        totals += (tl.zeros((ROW_WARPS * K_WARPS, 32), tl.float32),)
    if EARLY and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    asked = ()
    for step in tl.static_range(AHEAD):
        asked += (_ask_rows(rows, step, place, K, GROUP_W, TILES, K_WARPS, WHOLE, INTERLEAVED, ON_GPU),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if EARLY and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    for first in tl.range(0, LAST, AHEAD):
        following = ()
        for i in tl.static_range(AHEAD):
            token = _ask_token(activation, first + i, place, K, GROUP_W, GROUP_X, K_WARPS, ON_GPU)
            added = ()
            for tile in tl.static_range(TILES):
                added += (_add_row(totals[tile], asked[i][tile], token, GROUP_X, ON_GPU),)
            totals = added
            new = _ask_rows(rows, first + AHEAD + i, place, K, GROUP_W, TILES, K_WARPS, WHOLE, INTERLEAVED, ON_GPU)
            following += (new,)
        asked = following
    for i in tl.static_range(STEPS % AHEAD):
        step = LAST + AHEAD + i
        asked += (_ask_rows(rows, step, place, K, GROUP_W, TILES, K_WARPS, WHOLE, INTERLEAVED, ON_GPU),)
    for i in tl.static_range(AHEAD + STEPS % AHEAD):
        token = _ask_token(activation, LAST + i, place, K, GROUP_W, GROUP_X, K_WARPS, ON_GPU)
        added = ()
        for tile in tl.static_range(TILES):
            added += (_add_row(totals[tile], asked[i][tile], token, GROUP_X, ON_GPU),)
        totals = added
    for tile in tl.static_range(TILES):
        y = tl.sum(tl.sum(tl.reshape(totals[tile], (K_WARPS, ROW_WARPS, 8, 4)), axis=3), axis=0)
        row = first_row + tile * 8 + tl.arange(0, ROW_WARPS)[:, None] * (8 * TILES) + tl.arange(0, 8)[None, :]
        tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < n)
