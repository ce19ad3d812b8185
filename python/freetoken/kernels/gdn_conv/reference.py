"""Causal depthwise convolution with its state ring in plain torch: the specification of the fused kernels."""

from __future__ import annotations

import torch


def update_slots(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """``pool[slots[i]] = values[i]`` where ``slots[i] >= 0``, without reading anything on the host.

    A skipped lane repeats the write of the first live one, so that the shapes do not depend on the data; with no live
    lane the pool gets back what it holds.
    """
    live = slots >= 0
    lanes = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(live, lanes, live.to(torch.uint8).argmax())
    target = slots[source].clamp_min(0)
    shape = (-1,) + (1,) * (values.dim() - 1)
    pool[target] = torch.where(live[source].view(shape), values[source], pool[target])


def _taps(
    taps: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """SiLU of the weighted sum of ``taps`` (oldest first, each ``[N, C]`` float32), rounded once to ``dtype``."""
    wide = weight.float()
    total = torch.zeros_like(taps[0]) if bias is None else bias.float().expand_as(taps[0])
    for column, tap in enumerate(taps):
        total = torch.addcmul(total, wide[:, column], tap)
    return torch.nn.functional.silu(total).to(dtype)


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    q_starts: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    max_q_len: int,
) -> torch.Tensor:
    """Convolve ragged pieces of sequences and bring their rings up to date; returns ``[T, C]`` in the type of ``x``.

    Piece i is the rows ``q_starts[i]`` to ``q_starts[i + 1]`` of ``x [T, C]`` (token-major, any row stride), the tokens of
    one sequence from position ``starts[i]`` on. ``weight`` is ``[C, W]``, W from 2 to 4, its last column for the current
    token; ``bias`` is ``[C]``. The output of a token at position p is ``silu(bias + sum_j weight[:, j] x[p - W + 1 + j])``,
    summed in float32.

    ``conv_state [slots, W, C]`` is a ring: entry ``p % W`` of a slot holds the raw row of position p. Rows before a piece
    come from there, those before position 0 are zero whatever the slot holds, and the last W rows of a piece are
    written. Slots of live pieces are distinct; a piece in slot −1 writes no state and its outputs mean nothing. To keep
    the state of a position (a checkpoint), end a piece there and copy the slot.

    ``q_starts [B + 1]`` and ``starts [B]`` are int32, ``slots [B]`` int64. ``max_q_len`` is the longest piece or more.
    """
    tokens, width = x.shape[0], weight.shape[1]
    if tokens == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    row = torch.arange(tokens, device=x.device)
    begin, end = q_starts[:-1].long(), q_starts[1:].long()
    piece = torch.bucketize(row, end, right=True).clamp_max(slots.shape[0] - 1)
    position = starts.long()[piece] + row - begin[piece]
    slot = slots.clamp_min(0)[piece]
    taps = []
    for back in range(width - 1, 0, -1):
        inside, exists = row - back >= begin[piece], position >= back
        past = torch.where(inside[:, None], x[(row - back).clamp_min(0)], conv_state[slot, (position - back) % width])
        taps.append(torch.where(exists[:, None], past, 0).float())
    out = _taps([*taps, x.float()], weight, bias, x.dtype)

    ring = conv_state[slots.clamp_min(0)]
    lane = torch.arange(slots.shape[0], device=x.device)
    for back in range(width, 0, -1):
        entry = (starts.long() + end - begin - back) % width
        written = (end - back >= begin)[:, None]
        source = x[(end - back).clamp(0, tokens - 1)].to(ring.dtype)
        ring[lane, entry] = torch.where(written, source, ring[lane, entry])
    update_slots(conv_state, slots, ring)
    return out


def decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """:func:`prefill` for one token a sequence: ``x [B, C]``, ``slots`` and ``positions`` ``[B]`` int64."""
    if x.shape[0] == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    width = weight.shape[1]
    slot = slots.clamp_min(0)
    taps = []
    for back in range(width - 1, 0, -1):
        past = conv_state[slot, (positions - back) % width]
        taps.append(torch.where((positions >= back)[:, None], past, 0).float())
    out = _taps([*taps, x.float()], weight, bias, x.dtype)
    ring = conv_state[slot]
    ring[torch.arange(x.shape[0], device=x.device), positions % width] = x.to(ring.dtype)
    update_slots(conv_state, slots, ring)
    return out
