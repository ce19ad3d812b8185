"""Causal depthwise convolution with its state ring: a kernel for ragged pieces and one for single tokens.

Weights may have any strides. Programs read 16 bytes a thread along the channels, so ``weight [C, W]`` is read best as the
transpose of a contiguous ``[W, C]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.gdn_conv.config import ConvConfig, pick_decode, pick_prefill
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv

SEARCH = 64
"""Pieces that the search for a program's piece looks at in one step."""


@triton.jit
def silu(x, ON_GPU: tl.constexpr):
    """``x * sigmoid(x)`` in float32; on a GPU by the approximate instructions (2 ulp), without their care for denormals."""
    if ON_GPU:
        asm: tl.constexpr = """
        {
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
        }
        """
        return x * tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x / (1.0 + tl.exp(-x))


@triton.jit
def bound_if(count, SIZE: tl.constexpr):
    """``SIZE`` where the scalar ``count`` is positive, else 0: the end of a masked range."""
    return tl.minimum(tl.maximum(count, 0), 1).to(tl.int32) * SIZE


@triton.jit
def ring_past(
    ring_ptr,
    weight_ptr,
    bias_ptr,
    channel,
    index,
    position,
    tap_stride,
    channel_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """What the tokens before this one give to its channels ``channel``: the bias and all taps but the last, in float32.

    ``ring_ptr`` is at entry 0 of the token's slot. Of ``index``, shaped as ``channel``, what is not below ``SIZE`` is left out.
    """
    inside = index < SIZE
    if HAS_BIAS:
        total = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(channel.shape, tl.float32)
    for column in tl.static_range(W - 1):
        # A tap of this column lies W - 1 - column positions back.
        existing = index < bound_if(position - (W - 2 - column), SIZE)
        entry = (position + column + 1) % W
        past = tl.load(ring_ptr + entry * C + channel, mask=existing, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column * tap_stride + channel * channel_stride, mask=inside, other=0.0)
        total = tl.fma(weight.to(tl.float32), past, total)
    return total


@triton.jit
def ring_now(
    x_ptr,
    total,
    weight,
    channel,
    index,
    SIZE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """The token's own channels: their raw values, and their activated sums in float32.

    ``x_ptr`` is at the token's row, ``total`` what :func:`ring_past` gave and ``weight`` the last tap.
    """
    raw = tl.load(x_ptr + channel, mask=index < SIZE, other=0.0)
    return raw, silu(tl.fma(weight.to(tl.float32), raw.to(tl.float32), total), ON_GPU)


@launched
@triton.jit
def conv_decode_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    positions_ptr,
    out_ptr,
    x_stride,
    slot_stride,
    tap_stride,
    channel_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(ceil(C / BLOCK_C), B)``. A step reads ring entries ``p - 1`` to ``p - W + 1`` and writes entry ``p``."""
    lane = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Slots and positions were there before the step began; x was not.
    slot = tl.load(slots_ptr + lane)
    position = tl.load(positions_ptr + lane)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if slot < 0:
        return
    ring = state_ptr + slot * slot_stride
    past = ring_past(
        ring, weight_ptr, bias_ptr, channel, channel, position, tap_stride, channel_stride, C, W, C, HAS_BIAS
    )  # fmt: skip
    last = tl.load(weight_ptr + (W - 1) * tap_stride + channel * channel_stride, mask=channel < C, other=0.0)
    raw, value = ring_now(x_ptr + lane * x_stride, past, last, channel, channel, C, ON_GPU)
    inside = channel < C
    tl.store(ring + (position % W) * C + channel, raw.to(state_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + lane * C + channel, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _history(
    x_ptr, ring_ptr, position, row, channel, x_stride, first, BACK: tl.constexpr, C: tl.constexpr, W: tl.constexpr
):
    """The raw row ``BACK`` before the program's first token: from the ring for the ``first`` tile of a piece, else from x."""
    if first:
        source = ring_ptr + ((position + W - BACK) % W) * C
    else:
        source = x_ptr + (row - BACK) * x_stride
    existing = channel < bound_if(position - (BACK - 1), C)
    return tl.load(source + channel, mask=existing, other=0.0).to(tl.float32)


@triton.jit
def _row(x_ptr, row, left, channel, x_stride, C: tl.constexpr):
    """Row ``row`` of x while tokens are ``left``, else zeros."""
    return tl.load(x_ptr + row * x_stride + channel, mask=channel < bound_if(left, C), other=0.0)


@triton.jit
def _emit(
    out_ptr, row, left, channel, x3, x2, x1, x0, w0, w1, w2, w3, bias,
    C: tl.constexpr, W: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Store the activated sum of a token whose raw rows are ``x0``, and ``x1`` to ``x3`` before it; ``w3`` is for ``x0``."""
    total = bias
    if W > 3:
        total = tl.fma(w0, x3, total)
    if W > 2:
        total = tl.fma(w1, x2, total)
    total = tl.fma(w2, x1, total)
    total = tl.fma(w3, x0, total)
    value = silu(total, ON_GPU).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * C + channel, value, mask=channel < bound_if(left, C))


@triton.jit
def _find_piece(q_starts_ptr, pieces, tile, BLOCK_T: tl.constexpr, SEARCH_: tl.constexpr):
    """The piece that tile number ``tile`` belongs to. Piece i has the tiles from ``q_starts[i] // BLOCK_T + i`` on."""
    found = 0
    for first in range(0, pieces, SEARCH_):
        index = first + tl.arange(0, SEARCH_)
        begin = tl.load(q_starts_ptr + index, mask=index < pieces, other=0)
        tiles = tl.where(index < pieces, begin // BLOCK_T + index, 2147483647)
        found += tl.sum((tiles <= tile).to(tl.int32), axis=0)
    return found - 1


@launched
@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["q_starts_ptr", "slots_ptr", "starts_ptr"])
def conv_prefill_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    q_starts_ptr,
    slots_ptr,
    starts_ptr,
    out_ptr,
    pieces,
    x_stride,
    slot_stride,
    tap_stride,
    channel_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SEARCH_: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``ceil(C / BLOCK_C) * (T // BLOCK_T + pieces)``, channels fastest: enough tiles for any way to cut T tokens.

    Every raw row is read once and kept in registers for the tokens after it. The program of a piece's first tile is the
    only one that reads and the only one that writes the ring for its channels.
    """
    BLOCKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    channel = (tl.program_id(0) % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = tl.program_id(0) // BLOCKS
    inside = channel < C
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Where the pieces lie and what belongs to the model was there before the step began; x was not.
    piece = _find_piece(q_starts_ptr, pieces, tile, BLOCK_T, SEARCH_)
    begin = tl.load(q_starts_ptr + piece)
    length = tl.load(q_starts_ptr + piece + 1) - begin
    slot = tl.load(slots_ptr + piece)
    start = tl.load(starts_ptr + piece)
    weight = weight_ptr + channel * channel_stride
    w3 = tl.load(weight + (W - 1) * tap_stride, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + (W - 2) * tap_stride, mask=inside, other=0.0).to(tl.float32)
    w1 = w2
    w0 = w2
    if W > 2:
        w1 = tl.load(weight + (W - 3) * tap_stride, mask=inside, other=0.0).to(tl.float32)
    if W > 3:
        w0 = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BLOCK_C,), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()

    number = tile - (begin // BLOCK_T + piece)
    offset = number * BLOCK_T
    left = tl.minimum(length - offset, BLOCK_T)
    if (left <= 0) | (slot < 0):
        return
    row = begin.to(tl.int64) + offset
    position = start + offset
    ring = state_ptr + slot * slot_stride
    a = _row(x_ptr, row, left, channel, x_stride, C)
    b = _row(x_ptr, row + 1, left - 1, channel, x_stride, C)
    c = _row(x_ptr, row + 2, left - 2, channel, x_stride, C)
    d = _row(x_ptr, row + 3, left - 3, channel, x_stride, C)
    x1 = _history(x_ptr, ring, position, row, channel, x_stride, number == 0, 1, C, W)
    x2 = x1
    x3 = x1
    if W > 2:
        x2 = _history(x_ptr, ring, position, row, channel, x_stride, number == 0, 2, C, W)
    if W > 3:
        x3 = _history(x_ptr, ring, position, row, channel, x_stride, number == 0, 3, C, W)
    if number == 0:
        # All old entries are read before any is overwritten, whichever thread holds a channel.
        tl.debug_barrier()
        last = row + length - 1
        for back in tl.static_range(W):
            kept = _row(x_ptr, last - back, length - back, channel, x_stride, C)
            entry = (start + length + (W - 1) - back) % W
            stored = channel < bound_if(length - back, C)
            tl.store(ring + entry * C + channel, kept.to(state_ptr.dtype.element_ty), mask=stored)

    for done in range(0, left, 4):
        # The next four rows are asked for before these are used.
        rest = left - done - 4
        following = row + done + 4
        next_a = _row(x_ptr, following, rest, channel, x_stride, C)
        next_b = _row(x_ptr, following + 1, rest - 1, channel, x_stride, C)
        next_c = _row(x_ptr, following + 2, rest - 2, channel, x_stride, C)
        next_d = _row(x_ptr, following + 3, rest - 3, channel, x_stride, C)
        xa = a.to(tl.float32)
        xb = b.to(tl.float32)
        xc = c.to(tl.float32)
        xd = d.to(tl.float32)
        now = following - 4
        _emit(out_ptr, now, rest + 4, channel, x3, x2, x1, xa, w0, w1, w2, w3, bias, C, W, ON_GPU)
        _emit(out_ptr, now + 1, rest + 3, channel, x2, x1, xa, xb, w0, w1, w2, w3, bias, C, W, ON_GPU)
        _emit(out_ptr, now + 2, rest + 2, channel, x1, xa, xb, xc, w0, w1, w2, w3, bias, C, W, ON_GPU)
        _emit(out_ptr, now + 3, rest + 1, channel, xa, xb, xc, xd, w0, w1, w2, w3, bias, C, W, ON_GPU)
        x3 = xb
        x2 = xc
        x1 = xd
        a = next_a
        b = next_b
        c = next_c
        d = next_d


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    q_starts: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    max_q_len: int,
    config: ConvConfig | None = None,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.gdn_conv.reference.prefill`.

    The grid follows from the number of rows of ``x``, so no token can be left out: ``max_q_len`` only sizes the tiles.
    ``x`` and a slot of ``conv_state`` need stride 1 along channels, a slot's entries must be contiguous.
    """
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    pieces = slots.shape[0]
    if tokens == 0 or pieces == 0:
        return out
    config = config or pick_prefill(channels, max_q_len)
    early = launch.early(x)
    blocks = cdiv(channels, config.block_c)
    conv_prefill_kernel[(blocks * (tokens // config.block_t + pieces),)](
        x,
        weight,
        weight if bias is None else bias,
        conv_state,
        q_starts,
        slots,
        starts,
        out,
        pieces,
        x.stride(0),
        conv_state.stride(0),
        weight.stride(1),
        weight.stride(0),
        C=channels,
        W=weight.shape[1],
        BLOCK_T=config.block_t,
        BLOCK_C=config.block_c,
        SEARCH_=SEARCH,
        HAS_BIAS=bias is not None,
        ON_GPU=x.is_cuda,
        EARLY=early,
        launch_pdl=early,
        num_warps=config.num_warps,
        num_stages=1,
    )
    return out


def decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    config: ConvConfig | None = None,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.gdn_conv.reference.decode`; layouts as for :func:`prefill`."""
    batch, channels = x.shape
    out = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    if batch == 0:
        return out
    config = config or pick_decode(channels, batch)
    early = launch.early(x)
    conv_decode_kernel[(cdiv(channels, config.block_c), batch)](
        x,
        weight,
        weight if bias is None else bias,
        conv_state,
        slots,
        positions,
        out,
        x.stride(0),
        conv_state.stride(0),
        weight.stride(1),
        weight.stride(0),
        C=channels,
        W=weight.shape[1],
        BLOCK_C=config.block_c,
        HAS_BIAS=bias is not None,
        ON_GPU=x.is_cuda,
        EARLY=early,
        launch_pdl=early,
        num_warps=config.num_warps,
    )
    return out
