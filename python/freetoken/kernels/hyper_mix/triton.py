"""Hyper-connections: one program a token and stream (or block of columns)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MIX_BLOCK = 512


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
):
    """Grid ``(S, T)``: one stream of one token is added to, then normalised as it was stored."""
    stream = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    place = token * (STREAMS * HIDDEN) + stream * HIDDEN + column
    x = tl.load(residual_ptr + place, mask=inside, other=0.0)
    if ADD:
        y = tl.load(y_ptr + token * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(inject_ptr + token * inject_stride + stream).to(tl.float32)
        x = (x.to(tl.float32) + y * (2.0 / (1.0 + tl.exp(-s / STREAMS)))).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + place, x, mask=inside)
    if NORM:
        wide = x.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
        weight = tl.load(weight_ptr + stream * HIDDEN + column, mask=inside, other=0.0)
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
    block = triton.next_power_of_2(width // streams)
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
        num_warps=max(1, min(8, block // 256)),
    )
    return normed


@triton.jit
def squash_kernel(low_ptr, out_ptr, low_stride, STREAMS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Grid ``(T,)``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < RANK
    x = tl.load(low_ptr + token * low_stride + column, mask=inside, other=0.0).to(tl.float32) / STREAMS
    tl.store(out_ptr + token * RANK + column, (x / (1.0 + tl.exp(-x))).to(out_ptr.dtype.element_ty), mask=inside)


def squash(low: torch.Tensor, streams: int) -> torch.Tensor:
    """As :func:`freetoken.kernels.hyper_mix.reference.squash`."""
    tokens, rank = low.shape
    out = low.new_empty(tokens, rank)
    if tokens:
        block = triton.next_power_of_2(rank)
        squash_kernel[(tokens,)](low, out, low.stride(0), STREAMS=streams, RANK=rank, BLOCK=block, num_warps=2)
    return out


@triton.jit
def mix_kernel(normed_ptr, gate_ptr, out_ptr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Grid ``(ceil(H / BLOCK), T)``."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
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
        grid = (triton.cdiv(hidden, MIX_BLOCK), tokens)
        mix_kernel[grid](normed, gate, out, STREAMS=streams, HIDDEN=hidden, BLOCK=MIX_BLOCK, num_warps=2)
    return out
