"""The chunked gated delta rule as three kernels, and the gated norm.

``gate_kernel`` and ``chunk_kernel`` do, for all chunks at once, what needs no state: gates, then norms, ``K K^T``, ``Q K^T`` and the inverse of the
triangular system that couples the tokens of a chunk. ``scan_kernel`` then walks each piece chunk by chunk with the state in
registers; rows of the state (value dimensions) never meet, so blocks of them are programs of their own. It works on transposed
chunks: the state and all that follows from it are left operands, which the matrix instructions take from registers.

``q`` and ``k`` enter the products as they are; their norms are factors of rows and columns. With ``r`` the inverse norms, ``s`` the
scale, ``G`` the decay summed inside the chunk and ``L`` the sum over the whole chunk::

    T = (I + strict_lower(beta_i r_i r_j exp(G_i - G_j) K K^T))^-1 diag(beta)       "inverse"
    P = lower(s r_i r_j exp(G_i - G_j) Q K^T)                                       "scores"
    deltas = T (V - exp(G) r K S^T);  O = s exp(G) r Q S^T + P deltas;  S = exp(L) S + (exp(L - G) r deltas)^T K

No exponent is above 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.gdn_prefill.config import PrefillConfig, block_of, pick_config
from freetoken.kernels.gdn_prefill.plan import CHUNK, Plan
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv

LOG2_E = tl.constexpr(1.4426950408889634)
L2_EPS = tl.constexpr(1e-6)
SCALES = tl.constexpr(4)
GATE_HEADS = 16
MOST_DECAY = tl.constexpr(-64.0)
"""Lower bound of a token's log2 decay: what is left is below any rounding, and sums keep their precision."""


@launched
@triton.jit
def gate_kernel(
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    gates_ptr,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``gates [N, HEADS, 2, CHUNK]`` float32 of one chunk: the log2 decay summed from its first token, and beta. Past the last token
    the sum stays and beta is 0."""
    chunk = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, CHUNK)
    token = tl.load(chunks_ptr + 2 * chunk).to(tl.int64)
    inside = (i < tl.load(chunks_ptr + 2 * chunk + 1))[:, None] & (head < HEADS)[None, :]
    dt_bias = tl.load(dt_bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)) * LOG2_E
    a_tile = a_ptr + token * a_stride + i[:, None] * a_stride + head[None, :]
    step = tl.load(a_tile, mask=inside, other=0.0).to(tl.float32) + dt_bias[None, :]
    step = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    decay = tl.cumsum(tl.where(inside, tl.maximum(-rate[None, :] * step, MOST_DECAY), 0.0), 0)
    b_tile = b_ptr + token * b_stride + i[:, None] * b_stride + head[None, :]
    beta = tl.where(inside, tl.sigmoid(tl.load(b_tile, mask=inside, other=0.0).to(tl.float32)), 0.0)
    gates = gates_ptr + chunk.to(tl.int64) * (HEADS * 2 * CHUNK) + head[None, :] * (2 * CHUNK) + i[:, None]
    tl.store(gates, decay, mask=(head < HEADS)[None, :])
    tl.store(gates + CHUNK, beta, mask=(head < HEADS)[None, :])


@triton.jit
def _inside_tile(rows, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``rows & (columns < WIDTH)``; the rows alone where the block is no wider than ``WIDTH``."""
    return rows if WIDTH % BLOCK == 0 else rows & (columns < WIDTH)


@triton.jit
def _inverse_norm(x):
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + L2_EPS)


@triton.jit
def _below(a, LEVEL: tl.constexpr, CHUNK: tl.constexpr):
    """The elements of ``a [CHUNK, CHUNK]`` in the lower left quarters of the diagonal blocks of ``2 << LEVEL`` rows; else 0."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    first = i >> (LEVEL + 1) << (LEVEL + 1)
    return tl.where((j >= first) & (j < first + (i & (1 << LEVEL))), a, 0.0)


@triton.jit
def _invert_unit_lower(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr):
    """Inverse of ``I`` plus the part of ``a [CHUNK, CHUNK]`` float32 below the diagonal, by blocks of 1, 2, 4 … rows: the inverse of
    ``[[L, 0], [M, N]]`` is ``[[L^-1, 0], [-N^-1 M L^-1, N^-1]]``. Operands are of type ``NARROW``."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    x = tl.where(i == j, 1.0, -_below(a, 0, CHUNK))
    for level in tl.static_range(1, 6):
        narrow = x.to(NARROW)
        product = tl.dot(_below(a, level, CHUNK).to(NARROW), narrow, input_precision=PRECISION)
        x -= tl.dot(narrow, product.to(NARROW), input_precision=PRECISION)
    return x


@launched
@triton.jit
def chunk_kernel(
    q_ptr,
    k_ptr,
    gates_ptr,
    chunks_ptr,
    inverse_ptr,
    scores_ptr,
    scales_ptr,
    scale,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_HERE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """``HEADS_HERE`` value heads of one chunk: ``inverse`` and ``scores [N, HEADS, CHUNK, CHUNK]``, and in
    ``scales [N, HEADS, 4, CHUNK]`` the factors of ``K S^T``, of ``Q S^T``, of the deltas in the update, and the chunk's decay."""
    head_blocks: tl.constexpr = HEADS // HEADS_HERE
    chunk = tl.program_id(0) // head_blocks
    first_head = tl.program_id(0) % head_blocks * HEADS_HERE
    first_token = tl.load(chunks_ptr + 2 * chunk)
    tokens = tl.load(chunks_ptr + 2 * chunk + 1)

    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    inside = i < tokens
    token = first_token.to(tl.int64)
    key_head = first_head // GROUP * DK
    mask = _inside_tile(inside[:, None], d[None, :], DK, BLOCK_K)
    q = tl.load(q_ptr + token * Q_STRIDE + key_head + i[:, None] * Q_STRIDE + d[None, :], mask=mask, other=0.0)
    k = tl.load(k_ptr + token * K_STRIDE + key_head + i[:, None] * K_STRIDE + d[None, :], mask=mask, other=0.0)
    q_norm = _inverse_norm(q) * scale
    k_norm = _inverse_norm(k)
    keys = tl.dot(k, tl.trans(k), input_precision=PRECISION) * k_norm[:, None] * k_norm[None, :]
    queries = tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_norm[:, None] * k_norm[None, :]

    square = i[:, None] * CHUNK + i[None, :]
    for h in range(HEADS_HERE):
        place = chunk.to(tl.int64) * HEADS + first_head + h
        decay = tl.load(gates_ptr + place * (2 * CHUNK) + i)
        beta = tl.load(gates_ptr + place * (2 * CHUNK) + CHUNK + i)
        between = tl.exp2(tl.minimum(decay[:, None] - decay[None, :], 0.0))
        scores = tl.where(i[:, None] >= i[None, :], queries * between, 0.0)
        tl.store(scores_ptr + place * (CHUNK * CHUNK) + square, scores.to(scores_ptr.dtype.element_ty))
        inverse = _invert_unit_lower(keys * between * beta[:, None], CHUNK, PRECISION, NARROW) * beta[None, :]
        tl.store(inverse_ptr + place * (CHUNK * CHUNK) + square, inverse.to(inverse_ptr.dtype.element_ty))
        whole = tl.min(decay, axis=0)
        reached, left = tl.exp2(decay), tl.exp2(tl.minimum(whole - decay, 0.0))
        factors = scales_ptr + place * (SCALES * CHUNK)
        tl.store(factors + i, reached * k_norm)
        tl.store(factors + CHUNK + i, reached * q_norm)
        tl.store(factors + 2 * CHUNK + i, left * k_norm)
        tl.store(factors + 3 * CHUNK, tl.exp2(whole))


@launched
@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "pieces_ptr"])
def scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    inverse_ptr,
    scores_ptr,
    scales_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    pieces_ptr,
    out_ptr,
    state_stride,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``BLOCK_V`` rows of one head's state through all chunks of one piece."""
    blocks: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    offs_v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    row = pieces_ptr + 4 * tl.program_id(1)
    piece = tl.load(row)
    first_token, tokens, first_chunk = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    slot = tl.load(slots_ptr + piece).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    element = v_ptr.dtype.element_ty

    state_base = state_ptr + tl.maximum(slot, 0) * state_stride + head * (DV * DK)
    state_tile = offs_v[:, None] * DK + d[None, :]
    held = (offs_v < DV)[:, None] & (d < DK)[None, :]
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if (slot >= 0) & (tl.load(starts_ptr + piece) > 0):
        state = tl.load(state_base + state_tile, mask=held, other=0.0)

    token = first_token.to(tl.int64)
    q_base = q_ptr + token * Q_STRIDE + head // GROUP * DK
    k_base = k_ptr + token * K_STRIDE + head // GROUP * DK
    v_base = v_ptr + token * V_STRIDE + head * DV
    out_base = out_ptr + token * (HEADS * DV) + head * DV
    place = first_chunk.to(tl.int64) * HEADS + head
    inverse_base, scores_base = inverse_ptr + place * (CHUNK * CHUNK), scores_ptr + place * (CHUNK * CHUNK)
    scales_base = scales_ptr + place * (SCALES * CHUNK)
    square = i[:, None] * CHUNK + i[None, :]
    for chunk in range(tl.cdiv(tokens, CHUNK)):
        inside = i < tokens - chunk * CHUNK
        mask = _inside_tile(inside[:, None], d[None, :], DK, BLOCK_K)
        seen = _inside_tile(inside[None, :], offs_v[:, None], DV, BLOCK_V)
        k = tl.load(k_base + i[:, None] * K_STRIDE + d[None, :], mask=mask, other=0.0)
        q = tl.load(q_base + i[:, None] * Q_STRIDE + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_base + i[None, :] * V_STRIDE + offs_v[:, None], mask=seen, other=0.0)
        inverse = tl.load(inverse_base + square)
        scores = tl.load(scores_base + square)

        narrow = state.to(element)
        known = tl.dot(narrow, tl.trans(k), input_precision=PRECISION) * tl.load(scales_base + i)[None, :]
        out = tl.dot(narrow, tl.trans(q), input_precision=PRECISION) * tl.load(scales_base + CHUNK + i)[None, :]
        surprise = (v.to(tl.float32) - known).to(element)
        deltas = tl.dot(surprise, tl.trans(inverse), input_precision=PRECISION)
        out = tl.dot(deltas.to(element), tl.trans(scores), acc=out, input_precision=PRECISION)
        tl.store(out_base + i[None, :] * (HEADS * DV) + offs_v[:, None], out.to(element), mask=seen)
        deltas = (deltas * tl.load(scales_base + 2 * CHUNK + i)[None, :]).to(element)
        state *= tl.load(scales_base + 3 * CHUNK)
        state = tl.dot(deltas, k, acc=state, input_precision=PRECISION)

        q_base += CHUNK * Q_STRIDE
        k_base += CHUNK * K_STRIDE
        v_base += CHUNK * V_STRIDE
        out_base += CHUNK * HEADS * DV
        inverse_base += HEADS * CHUNK * CHUNK
        scores_base += HEADS * CHUNK * CHUNK
        scales_base += HEADS * SCALES * CHUNK
    if slot >= 0:
        tl.store(state_base + state_tile, state, mask=held)


def gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    rec_state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    plan: Plan,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.gdn_prefill.reference.gdn_prefill`.

    Heads lie side by side inside a token, tokens may lie further apart (a new stride compiles anew);
    a slot of ``rec_state`` is contiguous. ``config`` replaces the settings chosen for the device. Scratch memory: for each chunk and value
    head two 64 x 64 matrices in the type of ``v`` and 1.5 KiB, in 16 bits 108 MB for 8,192 tokens of 48 heads.
    """
    heads, dv = v.shape[1:]
    dk, group = k.shape[2], heads // k.shape[1]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    count = plan.chunks.shape[0]
    if count == 0:
        return out
    if config is None:
        config = pick_config(dk, dv, v.dtype, launch.capability(v.device) or (9, 0))
    inverse, scores = (v.new_empty(count, heads, CHUNK, CHUNK) for _ in range(2))
    scales = v.new_empty(count, heads, SCALES.value, CHUNK, dtype=torch.float32)
    full = v.dtype == torch.float32
    shared: dict[str, Any] = {"HEADS": heads, "GROUP": group, "DK": dk, "BLOCK_K": block_of(dk), "CHUNK": CHUNK}
    shared |= {"Q_STRIDE": q.stride(0), "K_STRIDE": k.stride(0), "PRECISION": "tf32x3" if full else "tf32"}
    gates = scales.new_empty(count, heads, 2, CHUNK)
    gate_kernel[(count, cdiv(heads, GATE_HEADS))](
        a,
        b,
        A_log,
        dt_bias,
        plan.chunks,
        gates,
        a.stride(0),
        b.stride(0),
        HEADS=heads,
        BLOCK_HEADS=GATE_HEADS,
        CHUNK=CHUNK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    chunk_kernel[(count * (heads // config.heads),)](
        q,
        k,
        gates,
        plan.chunks,
        inverse,
        scores,
        scales,
        dk**-0.5,
        HEADS_HERE=config.heads,
        NARROW=tl.float32 if full else tl.float16,
        num_warps=config.chunk_warps,
        num_stages=1,
        enable_fp_fusion=True,
        **shared,
    )
    scan_kernel[(heads * -(-dv // config.block_v), plan.pieces.shape[0])](
        q,
        k,
        v,
        inverse,
        scores,
        scales,
        rec_state,
        slots,
        starts,
        plan.pieces,
        out,
        rec_state.stride(0),
        V_STRIDE=v.stride(0),
        DV=dv,
        BLOCK_V=config.block_v,
        num_warps=config.scan_warps,
        num_stages=config.scan_stages,
        enable_fp_fusion=True,
        **shared,
    )
    return out


@launched
@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    o_ptr, z_ptr, weight_ptr, out_ptr, eps, rows, z_stride, HEADS: tl.constexpr, DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """``BLOCK_ROWS`` heads of ``rows`` in all; ``o`` and ``out`` are contiguous, tokens of ``z`` lie ``z_stride`` apart."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_V)
    mask = (row < rows)[:, None] & (d < DV)[None, :]
    o = tl.load(o_ptr + row[:, None] * DV + d[None, :], mask=mask, other=0.0).to(tl.float32)
    z_offset = row // HEADS * z_stride + row % HEADS * DV
    z = tl.load(z_ptr + z_offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < DV, other=0.0).to(tl.float32)
    element = out_ptr.dtype.element_ty
    normal = (o * tl.rsqrt(tl.sum(o * o, axis=1) / DV + eps)[:, None]).to(element).to(tl.float32)
    scaled = (normal * weight[None, :]).to(element).to(tl.float32)
    gate = tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    tl.store(out_ptr + row[:, None] * DV + d[None, :], (scaled * gate).to(element), mask=mask)


def gated_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, sigmoid: bool = False
) -> torch.Tensor:
    """As :func:`freetoken.kernels.gdn_prefill.reference.gated_norm`; ``o`` contiguous."""
    tokens, heads, dv = o.shape
    out = o.new_empty(tokens, heads * dv)
    if tokens > 0:
        rows, block = tokens * heads, block_of(dv)
        block_rows = max(1, 4096 // block)
        gated_norm_kernel[(cdiv(rows, block_rows),)](
            o, z, weight, out, eps, rows, z.stride(0), HEADS=heads, DV=dv, BLOCK_ROWS=block_rows, BLOCK_V=block,
            SIGMOID=sigmoid, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out
