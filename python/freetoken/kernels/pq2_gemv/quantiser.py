"""Quantising an activation: one program a token and stretch of K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv
from freetoken.kernels.pq2_gemv.activation import SMALLEST, Quantised, TiledActivation, empty_activation

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
def tile_word(token, word, halves):
    """Where tiles hold 32-bit word ``word`` of the values of a token's row."""
    block, word = word // 32, word % 32
    place = ((block * halves + token // 8) * 2 + word % 8 // 4) * 32 + token % 8 * 4 + word // 8
    return place * 4 + word % 4


@triton.jit
def put_beside(scales_ptr, sums_ptr, token, group, scale, total, here, halves, groups, TILED: tl.constexpr):
    """Store scales and sums of a token's ``group``, of ``groups`` in a row."""
    if TILED:
        cell = (group * (8 * halves) + token) * 2
        tl.store(scales_ptr + cell, scale.to(tl.int32, bitcast=True), mask=here)
        tl.store(scales_ptr + cell + 1, total, mask=here)
    else:
        tl.store(scales_ptr + token * groups + group, scale, mask=here)
        tl.store(sums_ptr + token * groups + group, total, mask=here)


@launched
@triton.jit(do_not_specialize=["halves"])
def quantise_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    sums_ptr,
    x_stride,
    halves,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    STRETCH: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``x [M, K]`` of row stride ``x_stride`` to values, scales and sums, or in tiles of ``halves`` times eight tokens. Grid ``(M, ceil(K / STRETCH))``."""
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
    target = group[:, None] * GROUP + place[None, :]
    target = tile_word(token, target // 4, halves) * 4 + target % 4 if TILED else token * K + target
    tl.store(values_ptr + target, q.to(tl.int8), mask=inside[:, None])
    put_beside(scales_ptr, sums_ptr, token, group, scale, total, inside, halves, K // GROUP, TILED)


def buffers(activation: Quantised) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """What a kernel writes an activation to: values (or the words of tiles), scales and sums (or what is beside tiles, twice), and
    how many times eight tokens tiles are for, 0 for rows."""
    if isinstance(activation, TiledActivation):
        return activation.words, activation.beside, activation.beside, activation.words.shape[1]
    return activation.values, activation.scales, activation.sums, 0


def quantise(x: torch.Tensor, group: int, *, tiles: bool = False) -> Quantised:
    """As :func:`freetoken.kernels.pq2_gemv.activation.quantise_reference`; neighbours in K must be neighbours in memory. In tiles
    where asked for."""
    tokens, width = x.shape
    if x.stride(1) != 1:
        raise ValueError("an activation to quantise has its columns next to each other")
    done = empty_activation(tokens, width, group, x.device, tiles=tiles)
    if tokens > 0:
        values, scales, sums, halves = buffers(done)
        early = launch.early(x)
        quantise_kernel[(tokens, cdiv(width, STRETCH))](
            x,
            values.view(torch.int8),
            scales,
            sums,
            x.stride(0),
            halves,
            K=width,
            GROUP=group,
            STRETCH=STRETCH,
            SMALLEST=SMALLEST,
            TILED=halves > 0,
            EARLY=early,
            launch_pdl=early,
            num_warps=4,
        )
    return done
