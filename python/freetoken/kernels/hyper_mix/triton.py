"""Hyper-connections: one program a token and stream (or block of columns); for few tokens the gates' product and the mix in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv, next_power_of_two
from freetoken.kernels.pq2_gemv.single import one_half
from freetoken.kernels.small_gemm.narrow import _ask_rows, _ask_tokens, _mma

MIX_BLOCK = 512
GATED_TOKENS = 16
"""Tokens up to which the gates' product and the mix are one kernel."""
GATED_RANK = 512
"""Rank up to which a thread can hold its weights of two columns."""


@launched
@triton.jit
def add_norm_kernel(
    residual_ptr,
    y_ptr,
    inject_ptr,
    weight_ptr,
    normed_ptr,
    y_stride,
    inject_stride,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(S, T)``: one stream of one token is added to, then normalised as it was stored."""
    stream = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    place = token * (STREAMS * HIDDEN) + stream * HIDDEN + column
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        weight = tl.load(weight_ptr + stream * HIDDEN + column, mask=inside, other=0.0, volatile=EARLY)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual_ptr + place, mask=inside, other=0.0)
    if ADD:
        y = tl.load(y_ptr + token * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(inject_ptr + token * inject_stride + stream).to(tl.float32)
        x = (x.to(tl.float32) + y * (2.0 / (1.0 + tl.exp(-s / STREAMS)))).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + place, x, mask=inside)
    if NORM:
        wide = x.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
        tl.store(normed_ptr + place, (wide * root * weight).to(normed_ptr.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor,
    pending: tuple[torch.Tensor, torch.Tensor] | None,
    weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """:func:`reference.add` of ``pending``, then :func:`reference.norm` with ``weight``, each where given; without a norm the
    streams are returned. ``residual`` is contiguous, columns have stride 1."""
    tokens, width = residual.shape
    normed = residual if weight is None else torch.empty_like(residual)
    if tokens == 0:
        return normed
    if pending is not None:
        y, inject = pending
        streams = inject.shape[1]
    else:
        assert weight is not None
        y = inject = residual
        streams = weight.shape[0]
    block = next_power_of_two(width // streams)
    early = launch.early(residual)
    add_norm_kernel[(streams, tokens)](
        residual,
        y,
        inject,
        residual if weight is None else weight,
        normed,
        y.stride(0),
        inject.stride(0),
        eps,
        STREAMS=streams,
        HIDDEN=width // streams,
        BLOCK=block,
        ADD=pending is not None,
        NORM=weight is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(8, block // 256)),
    )
    return normed


@launched
@triton.jit
def squash_kernel(
    low_ptr,
    out_ptr,
    low_stride,
    STREAMS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(T,)``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < RANK
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(low_ptr + token * low_stride + column, mask=inside, other=0.0).to(tl.float32) / STREAMS
    tl.store(out_ptr + token * RANK + column, (x / (1.0 + tl.exp(-x))).to(out_ptr.dtype.element_ty), mask=inside)


def squash(low: torch.Tensor, streams: int) -> torch.Tensor:
    """As :func:`freetoken.kernels.hyper_mix.reference.squash`."""
    tokens, rank = low.shape
    out = low.new_empty(tokens, rank)
    if tokens:
        block = next_power_of_two(rank)
        early = launch.early(low)
        sizes = {"STREAMS": streams, "RANK": rank, "BLOCK": block}
        squash_kernel[(tokens,)](low, out, low.stride(0), **sizes, EARLY=early, launch_pdl=early, num_warps=2)
    return out


@launched
@triton.jit
def mix_kernel(
    normed_ptr,
    gate_ptr,
    out_ptr,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(ceil(H / BLOCK), T)``."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for stream in tl.static_range(STREAMS):
        place = token * (STREAMS * HIDDEN) + stream * HIDDEN + column
        gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(normed_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total += value / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * HIDDEN + column, (total / STREAMS).to(out_ptr.dtype.element_ty), mask=inside)


def mix(normed: torch.Tensor, gate: torch.Tensor, streams: int) -> torch.Tensor:
    """As :func:`freetoken.kernels.hyper_mix.reference.mix`; both inputs are contiguous."""
    tokens, width = normed.shape
    hidden = width // streams
    out = normed.new_empty(tokens, hidden)
    if tokens:
        grid = (cdiv(hidden, MIX_BLOCK), tokens)
        early = launch.early(normed)
        sizes = {"STREAMS": streams, "HIDDEN": hidden, "BLOCK": MIX_BLOCK}
        mix_kernel[grid](normed, gate, out, **sizes, EARLY=early, launch_pdl=early, num_warps=2)
    return out


@launched
@triton.jit(do_not_specialize=["m", "low_stride"])
def gated_mix_kernel(
    low_ptr,
    weight_ptr,
    normed_ptr,
    out_ptr,
    m,
    low_stride,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    HALVES: tl.constexpr,
    BF16: tl.constexpr,
    EARLY: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """16 columns of the output of all ``m`` tokens: each warp makes the gates of one stream, as :mod:`~freetoken.kernels.small_gemm.narrow`
    does. ``low`` and the weight are seen as words of two values; ``low_stride`` is in words. Grid ``(H / 16,)``."""
    STORAGE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    lane = tl.arange(0, 32)[None, :]
    stream = tl.arange(0, STREAMS)[:, None] + lane * 0
    g, word = lane // 4, lane % 4 * 4
    column = tl.program_id(0) * 16 + g
    line = weight_ptr + (stream * HIDDEN + column) * (RANK // 2) + word
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    rows = _ask_rows(line, line + 8 * (RANK // 2), stream * 0, RANK, 1, RANK // 32, ON_GPU)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    low = ()
    for half in tl.static_range(HALVES):
        low += (low_ptr + tl.minimum(half * 8 + g + stream * 0, m - 1) * low_stride + word,)
    tokens = _ask_tokens(low, stream * 0, RANK, 1, RANK // 32, True, True, ON_GPU)
    normed = ()
    for cell in tl.static_range(4 * HALVES):
        token = tl.minimum(cell // 4 * 8 + lane % 4 * 2 + cell % 2, m - 1)
        place = token * (STREAMS * HIDDEN) + stream * HIDDEN + column + cell % 4 // 2 * 8
        normed += (one_half(normed_ptr + place, ON_GPU).to(STORAGE, bitcast=True).to(tl.float32),)
    for half in tl.static_range(HALVES):
        nothing = tl.zeros((STREAMS, 32), tl.float32)
        total = (nothing, nothing, nothing, nothing)
        for step in tl.static_range(RANK // 32):
            upper, lower = rows[step]
            x = tokens[step][half]
            total = _mma(upper[0], lower[0], upper[1], lower[1], x[0], x[1], total, STREAMS, BF16, ON_GPU)
            total = _mma(upper[2], lower[2], upper[3], lower[3], x[2], x[3], total, STREAMS, BF16, ON_GPU)
        weighted = ()
        for cell in tl.static_range(4):
            gate = total[cell].to(STORAGE).to(tl.float32)
            weighted += (normed[half * 4 + cell] / (1.0 + tl.exp(-gate)),)
        c0, c1, c2, c3 = weighted
        value = tl.sum(tl.join(tl.join(c0, c1), tl.join(c2, c3)), axis=0) / STREAMS
        position = tl.arange(0, 32)[:, None, None]
        token = half * 8 + position % 4 * 2 + tl.arange(0, 2)[None, :, None]
        place = tl.program_id(0) * 16 + position // 4 + tl.arange(0, 2)[None, None, :] * 8
        tl.store(out_ptr + token * HIDDEN + place, value.to(STORAGE), mask=token < m)


def gates(normed: torch.Tensor, weight: torch.Tensor, streams: int) -> bool:
    """Whether :func:`gated_mix` can take these."""
    (tokens, width), rank = normed.shape, weight.shape[1]
    halves = (torch.float16, torch.bfloat16)
    whole = rank % 32 == 0 and rank <= GATED_RANK and width % (16 * streams) == 0 and streams & (streams - 1) == 0
    typed = normed.dtype in halves and weight.dtype == normed.dtype
    return whole and 0 < tokens <= GATED_TOKENS and streams <= 16 and typed


def gated_mix(normed: torch.Tensor, low: torch.Tensor, weight: torch.Tensor, streams: int) -> torch.Tensor:
    """As :func:`freetoken.kernels.hyper_mix.reference.gated_mix`, where :func:`gates`; rows of ``low`` begin at multiples of 16 bytes."""
    tokens, width = normed.shape
    out = normed.new_empty(tokens, width // streams)
    early = launch.early(normed)
    gated_mix_kernel[(width // streams // 16,)](
        low.view(torch.int32),
        weight.view(torch.int32),
        normed,
        out,
        tokens,
        low.stride(0) // 2,
        STREAMS=streams,
        HIDDEN=width // streams,
        RANK=weight.shape[1],
        HALVES=1 if tokens <= 8 else 2,
        BF16=normed.dtype == torch.bfloat16,
        EARLY=early,
        ON_GPU=normed.is_cuda,
        launch_pdl=early,
        num_warps=streams,
    )
    return out
