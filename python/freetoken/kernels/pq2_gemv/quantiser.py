"""Quantising an activation: one program a token and stretch of K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.pq2_gemv.activation import SMALLEST, QuantisedActivation

STRETCH = 1024


@triton.jit
def quantise_groups(x, SMALLEST: tl.constexpr):
    """``x [groups, width]`` float32 to ``(q as float32, scale [groups], sum of q as int32 [groups])``.

    The statement is in :mod:`freetoken.kernels.pq2_gemv.activation`; clamping stands between the product and the addition
    that rounds it, so that no compiler makes one rounding of the two.
    """
    largest = tl.max(tl.abs(x), axis=1)
    present = largest >= SMALLEST
    inverse = tl.where(
        present, tl.div_rn(tl.full(largest.shape, 127.0, tl.float32), tl.where(present, largest, 1.0)), 0.0
    )
    scale = tl.where(present, largest * 0.007874015748031496, 0.0)
    clamped = tl.minimum(tl.maximum(x * inverse[:, None], -127.0), 127.0)
    # Adding 1.5 * 2**23 rounds to an integer, halves to even.
    q = (clamped + 12582912.0) - 12582912.0
    return q, scale, tl.sum(q, axis=1).to(tl.int32)


@triton.jit
def quantise_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    sums_ptr,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    STRETCH: tl.constexpr,
    SMALLEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``x [M, K]`` of row stride ``x_stride`` to values, scales and sums. Grid ``(M, ceil(K / STRETCH))``."""
    GROUPS: tl.constexpr = STRETCH // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, GROUP)
    # What ends up at this place of the group: every 16 are transposed as 4 by 4.
    source = place // 16 * 16 + place % 4 * 4 + place % 16 // 4
    inside = group < K // GROUP
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offset = group[:, None] * GROUP + source[None, :]
    x = tl.load(x_ptr + token * x_stride + offset, mask=inside[:, None], other=0.0).to(tl.float32)
    q, scale, total = quantise_groups(x, SMALLEST)
    tl.store(values_ptr + token * K + group[:, None] * GROUP + place[None, :], q.to(tl.int8), mask=inside[:, None])
    tl.store(scales_ptr + token * (K // GROUP) + group, scale, mask=inside)
    tl.store(sums_ptr + token * (K // GROUP) + group, total, mask=inside)


def quantise(x: torch.Tensor, group: int) -> QuantisedActivation:
    """As :func:`freetoken.kernels.pq2_gemv.activation.quantise_reference`; neighbours in K must be neighbours in memory."""
    tokens, width = x.shape
    if x.stride(1) != 1:
        raise ValueError("an activation to quantise has its columns next to each other")
    values = torch.empty((tokens, width), dtype=torch.int8, device=x.device)
    scales = torch.empty((tokens, width // group), dtype=torch.float32, device=x.device)
    sums = torch.empty((tokens, width // group), dtype=torch.int32, device=x.device)
    if tokens > 0:
        early = launch.early(x)
        quantise_kernel[(tokens, triton.cdiv(width, STRETCH))](
            x,
            values,
            scales,
            sums,
            x.stride(0),
            K=width,
            GROUP=group,
            STRETCH=STRETCH,
            SMALLEST=SMALLEST,
            EARLY=early,
            launch_pdl=early,
            num_warps=4,
        )
    return QuantisedActivation(values, scales, sums, group)
