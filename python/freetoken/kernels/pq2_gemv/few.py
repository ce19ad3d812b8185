"""The product of a few tokens without tensor cores: codes are masked once and meet each token in turn."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.pq2_gemv.single import add_pieces, ask_pieces


@triton.jit
def _add_tokens(
    totals,
    asked,
    values,
    x_scales,
    sums,
    step,
    lane,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP_X: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """:func:`add_pieces` for every token; the masked codes are the same values and are computed once."""
    added = ()
    for i in tl.static_range(TOKENS):
        added += (
            add_pieces(
                totals[i], asked, values[i], x_scales[i], sums[i], step, lane,
                ROWS, LANES, PIECES, GROUP_W, GROUP_X, ON_GPU,
            ),
        )  # fmt: skip
    return added


@triton.jit(do_not_specialize=["m", "n"])
def few_kernel(
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [m, n]``; as the one-token kernel with ``TOKENS`` tokens a program. Grid ``(ceil(n / ROWS), ceil(m / TOKENS))``."""
    PIECES: tl.constexpr = K // 64
    STEPS: tl.constexpr = (PIECES + LANES - 1) // LANES
    LAST: tl.constexpr = (STEPS // AHEAD - 1) * AHEAD
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_token = tl.program_id(1) * TOKENS
    lane = tl.arange(0, LANES)
    safe = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    codes = codes_ptr + safe * (K // 16)
    scales = scales_ptr + safe * (K // GROUP_W)
    values, x_scales, sums, totals = (), (), (), ()
    for i in tl.static_range(TOKENS):
        token = tl.minimum(first_token + i, m - 1)
        values += (values_ptr + token * (K // 4),)
        x_scales += (x_scales_ptr + token * (K // GROUP_X),)
        sums += (sums_ptr + token * (K // GROUP_X),)
        totals += (tl.zeros((ROWS, LANES), tl.float32),)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    asked = ()
    for step in tl.static_range(AHEAD):
        asked += (ask_pieces(codes, scales, step, lane, LANES, PIECES, GROUP_W, ON_GPU),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for first in tl.range(0, LAST, AHEAD):
        following = ()
        for i in tl.static_range(AHEAD):
            totals = _add_tokens(
                totals, asked[i], values, x_scales, sums, first + i, lane,
                TOKENS, ROWS, LANES, PIECES, GROUP_W, GROUP_X, ON_GPU,
            )  # fmt: skip
            following += (ask_pieces(codes, scales, first + AHEAD + i, lane, LANES, PIECES, GROUP_W, ON_GPU),)
        asked = following
    for i in tl.static_range(STEPS % AHEAD):
        asked += (ask_pieces(codes, scales, LAST + AHEAD + i, lane, LANES, PIECES, GROUP_W, ON_GPU),)
    for i in tl.static_range(AHEAD + STEPS % AHEAD):
        totals = _add_tokens(
            totals, asked[i], values, x_scales, sums, LAST + i, lane,
            TOKENS, ROWS, LANES, PIECES, GROUP_W, GROUP_X, ON_GPU,
        )  # fmt: skip
    for i in tl.static_range(TOKENS):
        token = first_token + i + tl.zeros((ROWS,), tl.int32)
        cell = out_ptr + token.to(tl.int64) * n + row
        tl.store(cell, tl.sum(totals[i], axis=1).to(out_ptr.dtype.element_ty), mask=(row < n) & (token < m))
