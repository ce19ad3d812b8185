"""q/k norm, rotary embedding and KV write as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import next_power_of_two

FEW_TOKENS = 64


@launched
@triton.jit
def rope_kv_kernel(
    qkv_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    row_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(T, (Q_HEADS + 2 * KV_HEADS) / HEADS)``: a program takes ``HEADS`` heads of one kind of one token.

    A head is held as its two rotated halves and the rest that is not rotated.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)[:, None]
    low = tl.arange(0, BLOCK_HALF)[None, :]
    rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
    in_half = (low < HALF) & (head >= 0)
    in_rest = (rest < HEAD_DIM) & (head >= 0)
    source = qkv_ptr + token * row_stride + head * HEAD_DIM
    x1 = tl.load(source + low, mask=in_half, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF + low, mask=in_half, other=0.0).to(tl.float32)
    x3 = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)

    STORAGE: tl.constexpr = qkv_ptr.dtype.element_ty
    if first < Q_HEADS + KV_HEADS:
        if HAS_NORM:
            norm = q_norm_ptr if first < Q_HEADS else k_norm_ptr
            squares = tl.sum(x1 * x1 + x2 * x2, axis=1) + tl.sum(x3 * x3, axis=1)
            scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            w1 = tl.load(norm + low, mask=low < HALF, other=0.0).to(tl.float32)
            w2 = tl.load(norm + HALF + low, mask=low < HALF, other=0.0).to(tl.float32)
            w3 = tl.load(norm + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)
            ROUND: tl.constexpr = q_norm_ptr.dtype.element_ty
            x1 = ((x1 * scale).to(ROUND).to(tl.float32) * w1).to(STORAGE).to(tl.float32)
            x2 = ((x2 * scale).to(ROUND).to(tl.float32) * w2).to(STORAGE).to(tl.float32)
            x3 = ((x3 * scale).to(ROUND).to(tl.float32) * w3).to(STORAGE).to(tl.float32)
        angles = table_ptr + tl.load(positions_ptr + token) * ROTARY_DIM
        cos = tl.load(angles + low, mask=low < HALF, other=0.0)
        sin = tl.load(angles + HALF + low, mask=low < HALF, other=0.0)
        turned = x1 * cos - x2 * sin
        x2 = x2 * cos + x1 * sin
        x1 = turned

    if first < Q_HEADS:
        target = q_ptr + (token * Q_HEADS + head) * HEAD_DIM
        tl.store(target + low, x1.to(STORAGE), mask=in_half)
        tl.store(target + HALF + low, x2.to(STORAGE), mask=in_half)
        tl.store(target + rest, x3.to(STORAGE), mask=in_rest)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            pool = k_pool_ptr if first < Q_HEADS + KV_HEADS else v_pool_ptr
            kv_head = (head - Q_HEADS) % KV_HEADS
            page = slot // PAGE_SIZE
            line = (page * KV_HEADS + kv_head) * PAGE_SIZE + (slot - page * PAGE_SIZE)
            target = pool + line * HEAD_DIM
            KIND: tl.constexpr = k_pool_ptr.dtype.element_ty
            tl.store(target + low, x1.to(STORAGE).to(KIND), mask=in_half)
            tl.store(target + HALF + low, x2.to(STORAGE).to(KIND), mask=in_half)
            tl.store(target + rest, x3.to(STORAGE).to(KIND), mask=in_rest)


def heads_per_program(q_heads: int, kv_heads: int, tokens: int) -> int:
    """One head a program for few tokens; for many, the largest power of two up to 8 that divides both head counts."""
    if tokens <= FEW_TOKENS:
        return 1
    return next(size for size in (8, 4, 2, 1) if q_heads % size == 0 and kv_heads % size == 0)


def rope_kv(
    qkv: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.rope_kv.reference.rope_kv`, from the table ``[max_pos, R]`` float32 and flat slots.

    ``positions [T]`` and ``slots [T]`` are int64; slot −1 skips the write. All tensors are contiguous, but
    the rows of ``qkv`` may have any stride.
    """
    kv_heads, page_size, size = k_pool.shape[1:]
    tokens, width = qkv.shape
    q_heads = width // size - 2 * kv_heads
    rotary = table.shape[1]
    q = torch.empty((tokens, q_heads, size), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    heads = heads_per_program(q_heads, kv_heads, tokens)
    early = launch.early(qkv)
    rope_kv_kernel[(tokens, (q_heads + 2 * kv_heads) // heads)](
        qkv,
        table,
        positions,
        slots,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
        k_pool,
        v_pool,
        qkv.stride(0),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=size,
        ROTARY_DIM=rotary,
        PAGE_SIZE=page_size,
        HEADS=heads,
        BLOCK_HALF=next_power_of_two(rotary // 2),
        BLOCK_REST=next_power_of_two(max(size - rotary, 1)),
        HAS_NORM=q_norm is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=1 if heads < 4 else 4,
    )
    return q
