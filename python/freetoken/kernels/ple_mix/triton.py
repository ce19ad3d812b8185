"""Gates of n-gram embeddings, one program a token and residual stream; their convolution over single tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv, next_power_of_two

BLOCK_C = 512


@launched
@triton.jit
def gate_kernel(
    projected_ptr,
    residual_ptr,
    key_norm_ptr,
    query_norm_ptr,
    conv_norm_ptr,
    gated_ptr,
    normed_ptr,
    projected_stride,
    eps,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(S, T)``."""
    stream = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    projected = projected_ptr + token * projected_stride
    place = token * (STREAMS * HIDDEN) + stream * HIDDEN + column
    norm = stream * HIDDEN + column
    key = tl.load(projected + stream * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    query = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(projected + STREAMS * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    key_norm = tl.load(key_norm_ptr + norm, mask=inside, other=0.0)
    query_norm = tl.load(query_norm_ptr + norm, mask=inside, other=0.0)
    conv_norm = tl.load(conv_norm_ptr + norm, mask=inside, other=0.0)

    key_root = tl.rsqrt(tl.sum(key * key, 0) / HIDDEN + eps)
    query_root = tl.rsqrt(tl.sum(query * query, 0) / HIDDEN + eps)
    u = tl.sum((key * key_root * key_norm) * (query * query_root * query_norm), 0) * (HIDDEN**-0.5)
    root = tl.sqrt(tl.maximum(tl.abs(u), 1e-6))
    signed = tl.where(u > 0, root, tl.where(u < 0, -root, 0.0))
    opening = 1.0 / (1.0 + tl.exp(-signed))
    gated = (opening * value).to(gated_ptr.dtype.element_ty)
    tl.store(gated_ptr + place, gated, mask=inside)
    rounded = gated.to(tl.float32)
    conv_root = tl.rsqrt(tl.sum(rounded * rounded, 0) / HIDDEN + eps)
    tl.store(normed_ptr + place, (rounded * conv_root * conv_norm).to(normed_ptr.dtype.element_ty), mask=inside)


def gate(
    projected: torch.Tensor,
    residual: torch.Tensor,
    norm_key: torch.Tensor,
    norm_query: torch.Tensor,
    norm_conv: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`freetoken.kernels.ple_mix.reference.gate`; ``projected`` may have any row stride, the rest is contiguous."""
    streams, hidden = norm_key.shape
    gated, normed = torch.empty_like(residual), torch.empty_like(residual)
    if residual.shape[0] == 0:
        return gated, normed
    block = next_power_of_two(hidden)
    gate_kernel[(streams, residual.shape[0])](
        projected,
        residual,
        norm_key,
        norm_query,
        norm_conv,
        gated,
        normed,
        projected.stride(0),
        eps,
        STREAMS=streams,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return gated, normed


@launched
@triton.jit
def conv_decode_kernel(
    residual_ptr,
    gated_ptr,
    normed_ptr,
    weight_ptr,
    history_ptr,
    slots_ptr,
    positions_ptr,
    slot_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK_: tl.constexpr,
):
    """Grid ``(ceil(C / BLOCK_), B)``. The oldest tap and the new entry share a place of the ring: read first, by the same thread."""
    SIZE: tl.constexpr = (K - 1) * DILATION
    lane = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_ + tl.arange(0, BLOCK_)
    inside = channel < C
    position = tl.load(positions_ptr + lane)
    ring = history_ptr + tl.load(slots_ptr + lane) * slot_stride
    place = lane * C + channel
    raw = tl.load(normed_ptr + place, mask=inside, other=0.0)
    total = tl.load(weight_ptr + (K - 1) * C + channel, mask=inside, other=0.0).to(tl.float32) * raw.to(tl.float32)
    for back in tl.static_range(1, K):
        # An empty range where the tap lies before the text.
        existing = channel < (position >= back * DILATION).to(tl.int32) * C
        entry = (position + SIZE - back * DILATION) % SIZE
        past = tl.load(ring + entry * C + channel, mask=existing, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + (K - 1 - back) * C + channel, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(weight, past, total)
    tl.store(ring + (position % SIZE) * C + channel, raw.to(history_ptr.dtype.element_ty), mask=inside)
    added = tl.load(gated_ptr + place, mask=inside, other=0.0).to(tl.float32) + total / (1.0 + tl.exp(-total))
    old = tl.load(residual_ptr + place, mask=inside, other=0.0)
    new = old.to(tl.float32) + added.to(residual_ptr.dtype.element_ty).to(tl.float32)
    tl.store(residual_ptr + place, new.to(residual_ptr.dtype.element_ty), mask=inside)


def decode(
    residual: torch.Tensor,
    gated: torch.Tensor,
    normed: torch.Tensor,
    weight: torch.Tensor,
    history: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    dilation: int,
) -> None:
    """As :func:`freetoken.kernels.ple_mix.reference.decode`; rows are contiguous, and so are the entries of a slot."""
    batch, channels = normed.shape
    if batch == 0:
        return
    conv_decode_kernel[(cdiv(channels, BLOCK_C), batch)](
        residual,
        gated,
        normed,
        weight,
        history,
        slots,
        positions,
        history.stride(0),
        C=channels,
        K=weight.shape[0],
        DILATION=dilation,
        BLOCK_=BLOCK_C,
        num_warps=2,
    )
