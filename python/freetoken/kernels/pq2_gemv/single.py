"""The product of one token: a kernel without a token dimension, bound by reading the weights."""

from __future__ import annotations

import triton
import triton.language as tl

PIECE = 64
"""Weights a thread takes from one row at a time: 16 bytes of codes."""


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
def ask_pieces(
    codes, scales, step, lane, LANES: tl.constexpr, PIECES: tl.constexpr, GROUP_W: tl.constexpr, ON_GPU: tl.constexpr
):
    """Codes (four words) and scale of one piece a row and lane, ``[ROWS, LANES]``; past the end those of the last piece."""
    piece = step * LANES + lane
    if PIECES % LANES != 0:
        piece = tl.minimum(piece, PIECES - 1)
    a, b, c, d = four_words(codes + piece[None, :] * 4, True, ON_GPU)
    scale = one_half(scales + (piece // (GROUP_W // 64))[None, :], ON_GPU)
    return a, b, c, d, scale


@triton.jit
def add_pieces(
    total,
    asked,
    values_ptr,
    x_scales_ptr,
    sums_ptr,
    step,
    lane,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``total [ROWS, LANES]`` plus one piece a row and lane."""
    piece = step * LANES + lane
    safe = piece if PIECES % LANES == 0 else tl.minimum(piece, PIECES - 1)
    w0, w1, w2, w3, scale = asked
    zero = tl.zeros((ROWS, LANES), tl.int32)
    x = values_ptr + safe * 16
    a0, a1, a2, a3 = zero, zero, zero, zero
    x0, x1, x2, x3 = four_words(x, False, ON_GPU)
    y0, y1, y2, y3 = four_words(x + 4, False, ON_GPU)
    z0, z1, z2, z3 = four_words(x + 8, False, ON_GPU)
    u0, u1, u2, u3 = four_words(x + 12, False, ON_GPU)
    wide = scale.to(tl.float32)
    group = safe * 2 if GROUP_X == 32 else safe // (GROUP_X // 64)
    d_x = one_word(x_scales_ptr + group, ON_GPU).to(tl.float32, bitcast=True)
    if GROUP_X <= GROUP_W:
        s = one_word(sums_ptr + group, ON_GPU)
        if GROUP_X == 128:
            # The sum over 128 values is taken off once, in the first of its two pieces.
            s = tl.where(safe % 2 == 0, s, 0)
    else:
        s = _sum16(x0, x1, x2, x3, ON_GPU) + _sum16(y0, y1, y2, y3, ON_GPU)
        s += _sum16(z0, z1, z2, z3, ON_GPU) + _sum16(u0, u1, u2, u3, ON_GPU)
    if PIECES % LANES != 0:
        d_x = tl.where(piece < PIECES, d_x, 0.0)
    a0 -= s[None, :]
    a0, a1, a2, a3 = plane_dot(w0, x0[None, :], x1[None, :], x2[None, :], x3[None, :], a0, a1, a2, a3, ON_GPU)
    a0, a1, a2, a3 = plane_dot(w1, y0[None, :], y1[None, :], y2[None, :], y3[None, :], a0, a1, a2, a3, ON_GPU)
    if GROUP_X == 32:
        # A piece holds two groups of 32: the first one ends here.
        total += _whole(a0, a1, a2, a3) * (wide * d_x[None, :])
        d_x = one_word(x_scales_ptr + group + 1, ON_GPU).to(tl.float32, bitcast=True)
        if PIECES % LANES != 0:
            d_x = tl.where(piece < PIECES, d_x, 0.0)
        a0, a1, a2, a3 = zero - one_word(sums_ptr + group + 1, ON_GPU)[None, :], zero, zero, zero
    a0, a1, a2, a3 = plane_dot(w2, z0[None, :], z1[None, :], z2[None, :], z3[None, :], a0, a1, a2, a3, ON_GPU)
    a0, a1, a2, a3 = plane_dot(w3, u0[None, :], u1[None, :], u2[None, :], u3[None, :], a0, a1, a2, a3, ON_GPU)
    return total + _whole(a0, a1, a2, a3) * (wide * d_x[None, :])


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
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [n]`` of one token; ``ROWS`` rows a program, ``LANES`` pieces of K a step, ``AHEAD`` steps on their way.

    Weights are asked for before the wait for the kernel that makes the activation, and arrive in registers. Grid
    ``(ceil(n / ROWS),)``.
    """
    PIECES: tl.constexpr = K // 64
    STEPS: tl.constexpr = (PIECES + LANES - 1) // LANES
    LAST: tl.constexpr = (STEPS // AHEAD - 1) * AHEAD
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    safe = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    codes = codes_ptr + safe * (K // 16)
    scales = scales_ptr + safe * (K // GROUP_W)
    total = tl.zeros((ROWS, LANES), tl.float32)
    if EARLY and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    asked = ()
    for step in tl.static_range(AHEAD):
        asked += (ask_pieces(codes, scales, step, lane, LANES, PIECES, GROUP_W, ON_GPU),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if EARLY and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    for first in tl.range(0, LAST, AHEAD):
        following = ()
        for i in tl.static_range(AHEAD):
            total = add_pieces(
                total, asked[i], values_ptr, x_scales_ptr, sums_ptr, first + i, lane,
                ROWS, LANES, PIECES, GROUP_W, GROUP_X, ON_GPU,
            )  # fmt: skip
            following += (ask_pieces(codes, scales, first + AHEAD + i, lane, LANES, PIECES, GROUP_W, ON_GPU),)
        asked = following
    for i in tl.static_range(STEPS % AHEAD):
        asked += (ask_pieces(codes, scales, LAST + AHEAD + i, lane, LANES, PIECES, GROUP_W, ON_GPU),)
    for i in tl.static_range(AHEAD + STEPS % AHEAD):
        total = add_pieces(
            total, asked[i], values_ptr, x_scales_ptr, sums_ptr, LAST + i, lane,
            ROWS, LANES, PIECES, GROUP_W, GROUP_X, ON_GPU,
        )  # fmt: skip
    tl.store(out_ptr + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=row < n)
