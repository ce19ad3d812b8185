"""FP8 products of few rows on tensor cores, with operands that are loaded as the fragments they are used as.

As :mod:`freetoken.kernels.small_gemm.narrow`, with weights of one byte: lane ``4g + t`` of a warp reads 16 bytes, 16 columns, of rows ``g``
and ``g + 8`` and the same columns of token ``g``, for four products ``m16n8k16``. A word of four weights becomes two of two values by
shifts and masks, of which one has columns 0 and 2, the other 1 and 3; the activations are put in that order. Nothing waits in shared
memory, and a thread has many loads on their way at once. Tensors are ``[WARPS, 32]``, one value a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.block_fp8 import BLOCK, Fp8Weight, Weight
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv
from freetoken.kernels.moe_gemm.config import FragmentConfig
from freetoken.kernels.moe_gemm.reference import Shared
from freetoken.kernels.pq2_gemv.single import four_words, one_word
from freetoken.kernels.small_gemm.narrow import _mma
from freetoken.kernels.small_gemm.triton import _activate

SCALE_BLOCK = tl.constexpr(BLOCK)
CHUNK = 64
"""Columns a warp takes of 16 rows at a time."""


@triton.jit
def _float_at(pointer, FIXED: tl.constexpr, ON_GPU: tl.constexpr):
    """The float32 at each pointer in whatever layout its users have; ``FIXED`` is for what no kernel writes."""
    if ON_GPU:
        asm: tl.constexpr = "ld.relaxed.cta.global.f32 $0, [$1];" if FIXED else "ld.global.f32 $0, [$1];"
        return tl.inline_asm_elementwise(asm, "=f,l", [pointer.to(tl.int64)], dtype=tl.float32, is_pure=False, pack=1)
    else:
        return tl.load(pointer)


@triton.jit
def _widened(word, BF16: tl.constexpr, ON_GPU: tl.constexpr):
    """Four e4m3 values of each word as two words of two, the first and third and the second and fourth: float16 at 2^-8 of their
    worth, or bfloat16."""
    if BF16:
        even = ((word << 8) & -2147450880) | ((word << 4) & 0x07F007F0)
        odd = (word & -2147450880) | ((word >> 4) & 0x07F007F0)
        even, odd = _raised(even, ON_GPU), _raised(odd, ON_GPU)
    else:
        even = ((word << 8) & -2147450880) | ((word << 7) & 0x3F803F80)
        odd = (word & -2147450880) | ((word >> 1) & 0x3F803F80)
    return even, odd


@triton.jit
def _raised(word, ON_GPU: tl.constexpr):
    """Both bfloat16 values times 2^120: exact, as e4m3 has fewer exponents."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [word, 0x7B807B80, -2147450880],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = ((word << 16).to(tl.float32, bitcast=True) * 2.0**120).to(tl.int32, bitcast=True)
        high = ((word & -65536).to(tl.float32, bitcast=True) * 2.0**120).to(tl.int32, bitcast=True)
        return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def _ask(low, high, scale, chunk, there, ON_GPU: tl.constexpr):
    """The words of both rows in 64 columns, and their scale: zero where the chunk is past the end."""
    factor = _float_at(scale + chunk * 64 // SCALE_BLOCK, True, ON_GPU)
    rows = four_words(low + chunk * 16, True, ON_GPU), four_words(high + chunk * 16, True, ON_GPU)
    return rows, tl.where(there, factor, 0.0)


@triton.jit
def _activations(pointer, AT_ONCE: tl.constexpr, ON_GPU: tl.constexpr):
    """The 16 columns of a token from each pointer on, two in a word; ``AT_ONCE`` by loads that the assembler does not put off until
    their values are needed."""
    if ON_GPU and AT_ONCE:
        asm: tl.constexpr = "ld.relaxed.cta.global.v4.u32 {$0, $1, $2, $3}, [$8]; ld.relaxed.cta.global.v4.u32 {$4, $5, $6, $7}, [$8+16];"
        words = tl.inline_asm_elementwise(
            asm,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l",
            [pointer.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        words = four_words(pointer, False, ON_GPU) + four_words(pointer + 4, False, ON_GPU)
    return words


@triton.jit
def _columns(words):
    """Those as :func:`_widened` orders them."""
    a, b, c, d, e, f, g, h = words
    return (_crossed(a, b), _crossed(c, d), _crossed(e, f), _crossed(g, h))


@triton.jit
def _crossed(first, second):
    """Of two words of two values the words of their lower and of their upper values."""
    return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)


@triton.jit
def _add(total, rows, factor, x, WARPS: tl.constexpr, BF16: tl.constexpr, ON_GPU: tl.constexpr):
    """``total`` plus ``factor`` times the products of 64 columns."""
    low, high = rows
    nothing = tl.zeros((WARPS, 32), tl.float32)
    part = (nothing, nothing, nothing, nothing)
    for index in tl.static_range(4):
        a0, a2 = _widened(low[index], BF16, ON_GPU)
        a1, a3 = _widened(high[index], BF16, ON_GPU)
        b0, b1 = x[index]
        part = _mma(a0, a1, a2, a3, b0, b1, part, WARPS, BF16, ON_GPU)
    return (
        total[0] + factor * part[0],
        total[1] + factor * part[1],
        total[2] + factor * part[2],
        total[3] + factor * part[3],
    )


@triton.jit
def _whole(total, BF16: tl.constexpr):
    """Sums ``[32, 2, 2]`` over the warps: lane, lower or upper row, even or odd token."""
    c0, c1, c2, c3 = total
    result = tl.sum(tl.join(tl.join(c0, c1), tl.join(c2, c3)), axis=0)
    return result if BF16 else result * 256.0


@triton.jit
def _activations_round(x, begin, STEP: tl.constexpr, CHUNKS: tl.constexpr, UNROLL: tl.constexpr, ON_GPU: tl.constexpr):
    """For every step of a round and eight tokens of ``x`` (pointers) their columns."""
    found = ()
    for step in tl.static_range(UNROLL):
        chunk = tl.minimum(begin + step * STEP, CHUNKS - 1)
        columns = ()
        for half in tl.static_range(len(x)):
            columns += (_activations(x[half] + chunk * 32, len(x) == 1, ON_GPU),)
        found += (columns,)
    return found


@triton.jit
def _add_round(totals, asked, columns, WARPS: tl.constexpr, BF16: tl.constexpr, ON_GPU: tl.constexpr):
    """``totals`` of each matrix and eight tokens, plus the products of one round of chunks."""
    for step in tl.static_range(len(asked)):
        added = ()
        for matrix in tl.static_range(len(totals)):
            rows, factor = asked[step][matrix]
            sums = ()
            for half in tl.static_range(len(columns[step])):
                x = _columns(columns[step][half])
                sums += (_add(totals[matrix][half], rows, factor, x, WARPS, BF16, ON_GPU),)
            added += (sums,)
        totals = added
    return totals


@triton.jit
def _ask_round(
    lows,
    highs,
    scales,
    begin,
    STEP: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNROLL: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """For every step of a round what :func:`_ask` gives of each matrix."""
    asked = ()
    for step in tl.static_range(UNROLL):
        chunk = begin + step * STEP
        there = chunk < CHUNKS
        chunk = tl.minimum(chunk, CHUNKS - 1)
        parts = ()
        for matrix in tl.static_range(len(lows)):
            parts += (_ask(lows[matrix], highs[matrix], scales[matrix], chunk, there, ON_GPU),)
        asked += (parts,)
    return asked


@launched
@triton.jit(do_not_specialize=["m"])
def rows_kernel(
    x_ptr,
    ids_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    m,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    HALVES: tl.constexpr,
    BF16: tl.constexpr,
    SILU: tl.constexpr,
    ROUTED: tl.constexpr,
    EARLY: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [m, N] = x [m, K] @ weight [N, K]^T``, with ``SILU`` gate and up of a weight ``[2N, K]`` and their activation. ``ROUTED``: one
    row of ``out [routes, N]`` a program, with its expert's weight and row ``route // TOP_K`` of x.

    x and the weight are seen as words of four bytes. Each of ``WARPS`` warps takes every ``WARPS``-th chunk of columns, ``UNROLL`` of
    them on their way at a time. Grid ``(N / 16, routes or ceil(m / (8 * HALVES)))``.
    """
    STORAGE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    CHUNKS: tl.constexpr = K // 64
    ROUND: tl.constexpr = WARPS * UNROLL
    COLUMNS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
    MATRICES: tl.constexpr = 2 if SILU else 1
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, WARPS)[:, None] + lane * 0
    g, word = lane // 4, lane % 4 * 4
    first_row = tl.program_id(0) * 16
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if ROUTED:
        first_token = tl.program_id(1)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        x = (x_ptr + (first_token // TOP_K + g * 0) * (K // 2) + word * 2,)
        columns = _activations_round(x, warp, WARPS, CHUNKS, UNROLL, ON_GPU)
        expert = tl.load(ids_ptr + first_token).to(tl.int64)
        if expert < 0:
            return
        weight_ptr += expert * (MATRICES * N * (K // 4))
        scale_ptr += expert * (MATRICES * N // ROWS * COLUMNS)
    else:
        first_token = tl.program_id(1) * (8 * HALVES)
        x = ()
        for half in tl.static_range(HALVES):
            x += (x_ptr + tl.minimum(first_token + half * 8 + g, m - 1) * (K // 2) + word * 2,)
    lows, highs, scales, totals = (), (), (), ()
    nothing = tl.zeros((WARPS, 32), tl.float32)
    for matrix in tl.static_range(MATRICES):
        line = weight_ptr + (matrix * N + first_row + g).to(tl.int64) * (K // 4) + word
        lows += (line,)
        highs += (line + 8 * (K // 4),)
        scales += (scale_ptr + (matrix * N + first_row) // ROWS * COLUMNS,)
        sums = ()
        for _half in tl.static_range(HALVES):
            sums += ((nothing, nothing, nothing, nothing),)
        totals += (sums,)
    asked = _ask_round(lows, highs, scales, warp, WARPS, CHUNKS, UNROLL, ON_GPU)
    if not ROUTED:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        columns = _activations_round(x, warp, WARPS, CHUNKS, UNROLL, ON_GPU)
    totals = _add_round(totals, asked, columns, WARPS, BF16, ON_GPU)
    for start in tl.range(ROUND, (CHUNKS + ROUND - 1) // ROUND * ROUND, ROUND):
        asked = _ask_round(lows, highs, scales, start + warp, WARPS, CHUNKS, UNROLL, ON_GPU)
        columns = _activations_round(x, start + warp, WARPS, CHUNKS, UNROLL, ON_GPU)
        totals = _add_round(totals, asked, columns, WARPS, BF16, ON_GPU)

    position = tl.arange(0, 32)[:, None, None]
    row = first_row + position // 4 + tl.arange(0, 2)[None, None, :] * 8
    token = position % 4 * 2 + tl.arange(0, 2)[None, :, None]
    for half in tl.static_range(HALVES):
        value = _whole(totals[0][half], BF16)
        if SILU:
            value = _activate(value.to(STORAGE), _whole(totals[1][half], BF16).to(STORAGE), STORAGE)
        if ROUTED:
            inside = token < 1
        else:
            inside = token + (first_token + half * 8) < m
        out = out_ptr + (first_token + half * 8 + token).to(tl.int64) * N + row
        tl.store(out, value.to(STORAGE), mask=inside)


@launched
@triton.jit
def routes_down_kernel(
    hidden_ptr,
    ids_ptr,
    route_weights_ptr,
    weight_ptr,
    scale_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    gate_stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    BF16: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """``out [T, N]``: the routes' down products, weighted and summed, and the shared expert. Grid ``(N / 16, T)``.

    The chunks of all routes of a token are dealt to the warps in turn.
    """
    STORAGE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    CHUNKS: tl.constexpr = K // 64
    PIECES: tl.constexpr = TOP_K * CHUNKS
    ROUND: tl.constexpr = WARPS * UNROLL
    COLUMNS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, WARPS)[:, None] + lane * 0
    g, word = lane // 4, lane % 4 * 4
    first_row = tl.program_id(0) * 16
    token = tl.program_id(1)
    line = weight_ptr + (first_row + g).to(tl.int64) * (K // 4) + word
    scale = scale_ptr + first_row // ROWS * COLUMNS
    nothing = tl.zeros((WARPS, 32), tl.float32)
    total = (nothing, nothing, nothing, nothing)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, (PIECES + ROUND - 1) // ROUND * ROUND, ROUND):
        named, columns = (), ()
        for step in tl.static_range(UNROLL):
            piece = start + step * WARPS + warp
            route = token * TOP_K + tl.minimum(piece, PIECES - 1) // CHUNKS
            expert = one_word(ids_ptr + route, ON_GPU)
            there = (piece < PIECES) & (expert >= 0)
            share = _float_at(route_weights_ptr + route, False, ON_GPU)
            named += ((tl.where(there, expert, 0).to(tl.int64), tl.where(there, share, 0.0), there),)
            x = hidden_ptr + route.to(tl.int64) * (K // 2) + word * 2
            columns += (_activations(x + tl.minimum(piece, PIECES - 1) % CHUNKS * 32, True, ON_GPU),)
        asked = ()
        for step in tl.static_range(UNROLL):
            expert, _, there = named[step]
            chunk = (start + step * WARPS + warp) % CHUNKS
            low = line + expert * (N * (K // 4))
            factors = scale + expert * (N // ROWS * COLUMNS)
            asked += (_ask(low, low + 8 * (K // 4), factors, chunk, there, ON_GPU),)
        for step in tl.static_range(UNROLL):
            _, share, there = named[step]
            rows, factor = asked[step]
            x = _columns(columns[step])
            kept = ()
            for index in tl.static_range(4):
                # A route without an expert has activations that were never written.
                kept += ((tl.where(there, x[index][0], 0), tl.where(there, x[index][1], 0)),)
            total = _add(total, rows, factor * share, kept, WARPS, BF16, ON_GPU)

    position = tl.arange(0, 32)[:, None, None]
    column = position % 4 * 2 + tl.arange(0, 2)[None, :, None]
    row = first_row + position // 4 + tl.arange(0, 2)[None, None, :] * 8 + column * 0
    inside = (column < 1) & (row < N)
    value = _whole(total, BF16)
    if SHARED:
        logit = tl.load(gate_ptr + token * gate_stride).to(tl.float32)
        value += tl.load(shared_ptr + token * N + row, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-logit))
    tl.store(out_ptr + token.to(tl.int64) * N + row, value.to(STORAGE), mask=inside)


def fits(x: torch.Tensor, weight: Weight, *, silu: bool = False) -> bool:
    """Whether these kernels can read ``x [.., K]`` and ``weight [.., N, K]`` (with ``silu`` twice the rows)."""
    if not isinstance(weight, Fp8Weight) or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    n, k = weight.shape[-2] // (2 if silu else 1), weight.shape[-1]
    return k % CHUNK == 0 and n % 16 == 0 and weight.rows % 16 == 0


def _words(weight: Fp8Weight) -> torch.Tensor:
    return weight.data.view(torch.uint8).view(torch.int32)


def rows(
    x: torch.Tensor, ids: torch.Tensor | None, weight: Fp8Weight, config: FragmentConfig, *, silu: bool
) -> torch.Tensor:
    """``[M, N]`` of ``x [M, K]`` contiguous, up to 16 rows, and ``weight [N, K]``; with ``silu`` gate and up of ``[2N, K]`` and their
    activation. With ``ids [T, K]``: ``[T * K, N]`` of every route, whose expert is one of ``weight [E, …]``; rows of negative ids are
    not written."""
    n, k = weight.shape[-2] // (2 if silu else 1), weight.shape[-1]
    m = x.shape[0] if ids is None else ids.numel()
    halves = 1 if ids is not None or m <= 8 else 2
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    early = launch.early(x)
    rows_kernel[(n // 16, cdiv(m, 8 * halves) if ids is None else m)](
        x.view(torch.int32),
        x if ids is None else ids,
        _words(weight),
        weight.scale,
        out,
        m,
        TOP_K=1 if ids is None else ids.shape[1],
        N=n,
        K=k,
        ROWS=weight.rows,
        WARPS=config.num_warps,
        UNROLL=config.unroll,
        HALVES=halves,
        BF16=x.dtype == torch.bfloat16,
        SILU=silu,
        ROUTED=ids is not None,
        EARLY=early,
        ON_GPU=x.is_cuda,
        launch_pdl=early,
        num_warps=config.num_warps,
    )
    return out


def routes_down(
    hidden: torch.Tensor,
    routes: tuple[torch.Tensor, torch.Tensor],
    weight: Fp8Weight,
    shared: Shared | None,
    config: FragmentConfig,
) -> torch.Tensor:
    """``[T, N]`` as :func:`freetoken.kernels.moe_gemm.triton.down_routes` with ``routes``."""
    n, k = weight.shape[-2:]
    ids, shares = routes
    tokens, top_k = ids.shape
    out = torch.empty((tokens, n), dtype=hidden.dtype, device=hidden.device)
    output, gate = (hidden, hidden[:, 0]) if shared is None else shared
    early = launch.early(hidden)
    routes_down_kernel[(n // 16, tokens)](
        hidden.view(torch.int32),
        ids,
        shares,
        _words(weight),
        weight.scale,
        output,
        gate,
        out,
        gate.stride(0),
        TOP_K=top_k,
        N=n,
        K=k,
        ROWS=weight.rows,
        WARPS=config.num_warps,
        UNROLL=config.unroll,
        BF16=hidden.dtype == torch.bfloat16,
        SHARED=shared is not None,
        EARLY=early,
        ON_GPU=hidden.is_cuda,
        launch_pdl=early,
        num_warps=config.num_warps,
    )
    return out
