"""One decode step of a Gated DeltaNet layer as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.gdn_conv.triton import bound_if, ring_now, ring_past, silu
from freetoken.kernels.gdn_decode.config import DecodeConfig, pick_config
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import next_power_of_two

L2_EPS = tl.constexpr(1e-6)
ROW_PART = 32
"""Consecutive elements of a state row that are read together: one line of the cache in float32."""
ROW_AXIS = 0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 1
"""Which of the first two axes of a tile of state the compiler spreads over the threads of a warp: rows belong there, so that a
thread holds several parts of a row and sums over few lanes. The other choice is correct and takes half as many registers again."""


class Scratch:
    """Memory for the outputs of heads that several programs share, sized before any graph is captured.

    ``parts`` is float32; ``arrivals`` counts programs that delivered theirs and is zero between calls. Calls of one stream
    share it.
    """

    def __init__(self) -> None:
        self.parts: torch.Tensor | None = None
        self.arrivals: torch.Tensor | None = None

    def reserve(self, batch: int, heads: int, dv: int, device: torch.device | str) -> None:
        """Make room for ``batch`` sequences of ``heads`` heads of ``dv`` rows."""
        if self.parts is None or self.parts.numel() < batch * heads * dv:
            self.parts = torch.empty(batch * heads * dv, dtype=torch.float32, device=device)
        if self.arrivals is None or self.arrivals.numel() < batch * heads:
            self.arrivals = torch.zeros(batch * heads, dtype=torch.int32, device=device)


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))`` to float32 precision at any x; the logarithm is ``2 atanh(u / (2 + u))`` for u of 0 to 1."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    t = s * s
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13 + t * (1 / 15)))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _prefetch(address, BYTES: tl.constexpr, LANES: tl.constexpr):
    """Bring ``LANES * BYTES`` bytes into the L2 cache, a piece a thread."""
    piece = address.to(tl.int64) + tl.arange(0, LANES) * BYTES
    if BYTES == 256:
        asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;"
    elif BYTES == 128:
        asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 128; mov.b32 $0, 0;"
    else:
        asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 64; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [piece], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _gated_norm(
    o,
    z,
    weight_ptr,
    row,
    eps,
    DV: tl.constexpr,
    STORAGE: tl.constexpr,
    SIGMOID: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """RMSNorm of one head's ``o`` (float32, zero past DV) times ``silu(z)`` or ``sigmoid(z)``, with the roundings of the reference."""
    o = o.to(STORAGE).to(tl.float32)
    weight = tl.load(weight_ptr + row, mask=row < DV, other=0.0).to(tl.float32)
    normal = (o * tl.rsqrt(tl.sum(o * o, axis=0) / DV + eps)).to(STORAGE).to(tl.float32)
    wide = z.to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-wide)) if SIGMOID else silu(wide, ON_GPU)
    return ((normal * weight).to(STORAGE).to(tl.float32) * gate).to(STORAGE)


@triton.jit
def _over_rows(x, ROW_AXIS: tl.constexpr):
    """``x [rows]`` in three dimensions, rows along ``ROW_AXIS``."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1 - ROW_AXIS)


@triton.jit
def _over_columns(x, ROW_AXIS: tl.constexpr):
    """``x [parts, part]`` in three dimensions, around rows along ``ROW_AXIS``."""
    return tl.expand_dims(x, ROW_AXIS)


@launched
@triton.jit
def gdn_decode_kernel(
    qkv_ptr,
    z_ptr,
    a_ptr,
    b_ptr,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    conv_ptr,
    rec_ptr,
    slots_ptr,
    positions_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    eps,
    qkv_stride,
    z_stride,
    a_stride,
    b_stride,
    conv_stride,
    rec_stride,
    tap_stride,
    channel_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEAD_V: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    ROW_AXIS: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    PREFETCH: tl.constexpr,
    SETTLED: tl.constexpr,
    SIGMOID: tl.constexpr,
    ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(V_HEADS * SPLITS, B)``: a program takes ``BLOCK_V`` rows of the state of one head of one sequence.

    A row of the state is held as ``PARTS`` parts of ``PART`` elements, the parts in one thread: a product with k or q is then
    summed over few lanes. Each conv channel is written by one program, at a ring entry that nobody reads in this step.
    """
    C: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    STORAGE: tl.constexpr = qkv_ptr.dtype.element_ty
    head = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    lane = tl.program_id(1).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Slots and positions were there before the step began.
    slot = tl.load(slots_ptr + lane)
    position = tl.load(positions_ptr + lane)
    # Without SETTLED nothing shows that the last writer of the states, an earlier call, has ended by now. What comes into the L2 cache
    # ahead of the wait is the same memory to every writer, so it can be early but never stale.
    if PREFETCH:
        tile = rec_ptr + tl.maximum(slot, 0) * rec_stride + head * (DV * DK) + split * (BLOCK_V * DK)
        _prefetch(tile, BLOCK_V * DK * 4 // LANES, LANES)
    if EARLY and not SETTLED:
        tl.extra.cuda.gdc_wait()

    # A lane of padding reads nothing, and leaves behind the wait: a kernel that ends without one would let the next run ahead.
    known = tl.where(slot < 0, 0, position)
    home = tl.maximum(slot, 0)
    head_row = split * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    rows = _over_rows(head_row, ROW_AXIS)
    columns = _over_columns(column, ROW_AXIS)
    cell = rec_ptr + home * rec_stride + head * (DV * DK) + rows * DK + columns
    state = tl.load(cell, mask=(rows < bound_if(known, DV)) & (columns < DK), other=0.0)

    key_head = head // GROUP
    ring = conv_ptr + home * conv_stride
    # q and k as one block: twice the work for the threads there are, and half the loads and sums to wait for. It has them along
    # another axis than the state has its rows, so that the compiler does not take one for the layout of the other.
    KIND_AXIS: tl.constexpr = 1 - ROW_AXIS
    kind = _over_rows(tl.arange(0, 2), KIND_AXIS)
    both = kind * 0 + _over_columns(column, KIND_AXIS)
    qk_channel = (kind * K_HEADS + key_head) * DK + both
    v_channel = 2 * K_HEADS * DK + head * DV + head_row
    qk_past = ring_past(
        ring, weight_ptr, weight_ptr, qk_channel, both, known, tap_stride, channel_stride, C, W, DK, False
    )  # fmt: skip
    v_past = ring_past(
        ring, weight_ptr, weight_ptr, v_channel, head_row, known, tap_stride, channel_stride, C, W, DV, False
    )  # fmt: skip
    last = weight_ptr + (W - 1) * tap_stride
    qk_last = tl.load(last + qk_channel * channel_stride, mask=both < DK, other=0.0)
    v_last = tl.load(last + v_channel * channel_stride, mask=head_row < DV, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if EARLY and SETTLED:
        tl.extra.cuda.gdc_wait()
    if slot < 0:
        return

    source = qkv_ptr + lane * qkv_stride
    qk_raw, qk = ring_now(source, qk_past, qk_last, qk_channel, both, DK, ON_GPU)
    v_raw, v = ring_now(source, v_past, v_last, v_channel, head_row, DV, ON_GPU)
    a = tl.load(a_ptr + lane * a_stride + head).to(tl.float32) + bias
    b = tl.load(b_ptr + lane * b_stride + head).to(tl.float32)
    whole_row = tl.arange(0, HEAD_V)
    if SPLITS == 1:
        z = tl.load(z_ptr + lane * z_stride + head * DV + head_row, mask=head_row < DV, other=0.0)

    RING: tl.constexpr = conv_ptr.dtype.element_ty
    now = ring + (position % W) * C
    tl.store(now + v_channel, v_raw.to(RING), mask=head_row < DV)
    if (head % GROUP == 0) & (split == 0):
        tl.store(now + qk_channel, qk_raw.to(RING), mask=both < DK)

    v = v.to(STORAGE).to(tl.float32)
    qk = qk.to(STORAGE).to(tl.float32)
    squares = tl.sum(tl.sum(qk * qk, axis=2), axis=1 - KIND_AXIS)
    qk = qk * _over_rows(tl.rsqrt(squares + L2_EPS), KIND_AXIS)
    q = tl.sum(tl.where(kind == 0, qk, 0.0), axis=KIND_AXIS) * (DK**-0.5)
    k = tl.sum(tl.where(kind == 1, qk, 0.0), axis=KIND_AXIS)
    k_dot_q = tl.sum(tl.sum(k * q, axis=1), axis=0)
    decay = tl.exp(-rate * _softplus(a))
    beta = 1.0 / (1.0 + tl.exp(-b))

    # S' q = decay S q + delta (k . q): both products are of the old state and do not wait for each other.
    keys = _over_columns(k, ROW_AXIS)
    along_k = tl.sum(tl.sum(state * keys, axis=1 - ROW_AXIS), axis=1)
    along_q = tl.sum(tl.sum(state * _over_columns(q, ROW_AXIS), axis=1 - ROW_AXIS), axis=1)
    delta = beta * (v - decay * along_k)
    o = decay * along_q + delta * k_dot_q
    tl.store(cell, decay * state + _over_rows(delta, ROW_AXIS) * keys, mask=(rows < DV) & (columns < DK))

    out = out_ptr + (lane * V_HEADS + head) * DV
    if SPLITS == 1:
        tl.store(
            out + head_row, _gated_norm(o, z, norm_ptr, head_row, eps, DV, STORAGE, SIGMOID, ON_GPU), mask=head_row < DV
        )
    else:
        number = lane * V_HEADS + head
        tl.store(parts_ptr + number * DV + head_row, o, mask=head_row < DV)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + number, 1, sem="acq_rel") == SPLITS - 1:
            inside = whole_row < DV
            o_all = tl.load(parts_ptr + number * DV + whole_row, mask=inside, other=0.0, cache_modifier=".cg")
            z_all = tl.load(z_ptr + lane * z_stride + head * DV + whole_row, mask=inside, other=0.0)
            tl.store(
                out + whole_row,
                _gated_norm(o_all, z_all, norm_ptr, whole_row, eps, DV, STORAGE, SIGMOID, ON_GPU),
                mask=inside,
            )
            tl.store(arrivals_ptr + number, 0)


def prefetch_bytes(config: DecodeConfig, dv: int, dk: int) -> int:
    """Bytes that each thread asks the L2 cache for; 0 where a program's tile is no whole number of such pieces."""
    pieces, rest = divmod(config.block_v * dk * 4, 32 * config.num_warps)
    return pieces if config.prefetch and dv % config.block_v == 0 and not rest and pieces in (64, 128, 256) else 0


def gdn_decode(
    qkv: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_state: torch.Tensor,
    rec_state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    config: DecodeConfig | None = None,
    scratch: Scratch | None = None,
    settled: bool = False,
    sigmoid: bool = False,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.gdn_decode.reference.gdn_decode`.

    ``settled`` says that a kernel launched in the ordinary way lies between the last writer of these slots and this call, as the
    first kernels of a step do: both states may then be read while the kernel before this one still runs.

    Columns need stride 1, and a slot of either state is contiguous; rows and slots may have any stride. A ``config`` that
    splits heads needs ``scratch`` reserved for the batch: ``ValueError`` without it.
    """
    batch, (heads, dv, dk) = qkv.shape[0], rec_state.shape[1:]
    out = torch.empty((batch, heads * dv), dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    config = config or pick_config(dv, dk, batch * heads)
    splits = config.splits(dv)
    parts, arrivals = out, slots
    if splits > 1:
        if scratch is None or scratch.parts is None or scratch.arrivals is None:
            raise ValueError("heads shared by several programs need reserved scratch memory")
        parts, arrivals = scratch.parts, scratch.arrivals
        if parts.numel() < out.numel() or arrivals.numel() < batch * heads:
            raise ValueError(f"scratch memory is reserved for fewer than {batch} sequences")
    width = next_power_of_two(dk)
    early = launch.early(qkv)
    gdn_decode_kernel[(heads * splits, batch)](
        qkv,
        z,
        a,
        b,
        conv_weight,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        rec_state,
        slots,
        positions,
        out,
        parts,
        arrivals,
        eps,
        qkv.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        conv_state.stride(0),
        rec_state.stride(0),
        conv_weight.stride(1),
        conv_weight.stride(0),
        K_HEADS=(qkv.shape[1] - heads * dv) // (2 * dk),
        V_HEADS=heads,
        DK=dk,
        DV=dv,
        W=conv_weight.shape[1],
        BLOCK_V=config.block_v,
        HEAD_V=next_power_of_two(dv),
        PARTS=max(1, width // ROW_PART),
        PART=min(ROW_PART, width),
        ROW_AXIS=ROW_AXIS,
        SPLITS=splits,
        LANES=32 * config.num_warps,
        PREFETCH=early and not settled and prefetch_bytes(config, dv, dk) > 0,
        SETTLED=settled,
        SIGMOID=sigmoid,
        ON_GPU=qkv.is_cuda,
        EARLY=early,
        launch_pdl=early,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
    return out
