"""Dense products of 1 to 16 rows: a matrix-vector kernel for one row, a tensor-core kernel for more."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.small_gemm.configs import MAX_TOKENS, GemmConfig, m_class, pick_config

PADDED_TOKENS = 16


class Scratch:
    """Memory for the parts of split products, sized before any graph is captured and shared by all calls of a stream.

    ``parts`` is float32; ``arrivals`` counts programs that delivered theirs and is zero between calls.
    """

    def __init__(self) -> None:
        self.parts: torch.Tensor | None = None
        self.arrivals: torch.Tensor | None = None

    def reserve(self, n: int, split_k: int, halves: int, block_n: int, device: torch.device | str) -> None:
        """Make room for ``split_k`` parts of ``[16, halves * n]``; a no-op for unsplit products."""
        if split_k == 1:
            return
        parts, blocks = split_k * PADDED_TOKENS * halves * n, triton.cdiv(n, block_n)
        if self.parts is None or self.parts.numel() < parts:
            self.parts = torch.empty(parts, dtype=torch.float32, device=device)
        if self.arrivals is None or self.arrivals.numel() < blocks:
            self.arrivals = torch.zeros(blocks, dtype=torch.int32, device=device)


@triton.jit
def _finish(total, bias_ptr, column, inside, HAS_BIAS: tl.constexpr, STORAGE: tl.constexpr):
    """Adds the bias ``[.., BLOCK_N]`` to a float32 block and rounds it to the storage type."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return total.to(STORAGE)


@triton.jit
def _activate(gate, up, STORAGE: tl.constexpr):
    """``silu(gate) * up`` with the roundings of the unfused op; both arrive in the storage type."""
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(STORAGE).to(tl.float32)
    return (active * up.to(tl.float32)).to(STORAGE)


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row: ``out [N] = x [K] @ weight [N, K]^T``; with ``SILU`` the weight is ``[2N, K]``.

    Grid ``(ceil(N / BLOCK_N), SPLIT_K)``. Each thread keeps its own partial sums along K and the block reduces once at
    the end; the next tile of weights is requested before the current one is used.
    """
    STORAGE: tl.constexpr = x_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * (STEPS * BLOCK_K)
    column = begin + tl.arange(0, BLOCK_K)
    row_inside = row[:, None] < N
    gate_tile = weight_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    up_tile = gate_tile + N * K
    inside = row_inside & (column[None, :] < K)
    gate = tl.load(gate_tile, mask=inside, other=0.0, eviction_policy="evict_first")
    gate_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if SILU:
        up = tl.load(up_tile, mask=inside, other=0.0, eviction_policy="evict_first")
        up_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for _ in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        column += BLOCK_K
        gate_tile += BLOCK_K
        inside = row_inside & (column[None, :] < tl.minimum(begin + STEPS * BLOCK_K, K))
        next_gate = tl.load(gate_tile, mask=inside, other=0.0, eviction_policy="evict_first")
        gate_sum += gate.to(tl.float32) * x
        gate = next_gate
        if SILU:
            up_tile += BLOCK_K
            next_up = tl.load(up_tile, mask=inside, other=0.0, eviction_policy="evict_first")
            up_sum += up.to(tl.float32) * x
            up = next_up

    total = tl.sum(gate_sum, axis=1)
    other = tl.sum(up_sum, axis=1) if SILU else total
    inside = row < N
    last = True
    if SPLIT_K > 1:
        HALVES: tl.constexpr = 2 if SILU else 1
        mine = parts_ptr + tl.program_id(1) * (N * HALVES) + row
        tl.store(mine, total, mask=inside)
        if SILU:
            tl.store(mine + N, other, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_N,), tl.float32)
            other = tl.zeros((BLOCK_N,), tl.float32)
            for part in tl.static_range(SPLIT_K):
                source = parts_ptr + part * (N * HALVES) + row
                total += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
                if SILU:
                    other += tl.load(source + N, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tl.program_id(0), 0)
    if last:
        value = _finish(total, bias_ptr, row, inside, HAS_BIAS, STORAGE)
        if SILU:
            value = _activate(value, _finish(other, bias_ptr + N, row, inside, HAS_BIAS, STORAGE), STORAGE)
        tl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``m`` (up to 16) rows: ``out [m, N] = x [m, K] @ weight [N, K]^T``; with ``SILU`` the weight is ``[2N, K]``.

    Grid ``(ceil(N / BLOCK_N), SPLIT_K)``; rows of x above ``m`` count as zero.
    """
    STORAGE: tl.constexpr = x_ptr.dtype.element_ty
    M: tl.constexpr = 16
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    token = tl.arange(0, M)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * (STEPS * BLOCK_K)
    column = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + token[:, None] * K + column[None, :]
    gate_tile = weight_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros((M, BLOCK_N), tl.float32)
    other = tl.zeros((M, BLOCK_N), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for step in range(STEPS):
        start = begin + step * BLOCK_K
        k_inside = column[None, :] < K - start
        x = tl.load(x_tile + start, mask=(token[:, None] < m) & k_inside, other=0.0)
        inside = (row[:, None] < N) & k_inside
        gate = tl.load(gate_tile + start, mask=inside, other=0.0, eviction_policy="evict_first")
        total = tl.dot(x, tl.trans(gate), total, input_precision="ieee")
        if SILU:
            up = tl.load(gate_tile + N * K + start, mask=inside, other=0.0, eviction_policy="evict_first")
            other = tl.dot(x, tl.trans(up), other, input_precision="ieee")

    inside = (token[:, None] < m) & (row[None, :] < N)
    last = True
    if SPLIT_K > 1:
        HALVES: tl.constexpr = 2 if SILU else 1
        cell = token[:, None] * (N * HALVES) + row[None, :]
        mine = parts_ptr + tl.program_id(1) * (M * N * HALVES) + cell
        tl.store(mine, total, mask=inside)
        if SILU:
            tl.store(mine + N, other, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((M, BLOCK_N), tl.float32)
            other = tl.zeros((M, BLOCK_N), tl.float32)
            for part in tl.static_range(SPLIT_K):
                source = parts_ptr + part * (M * N * HALVES) + cell
                total += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
                if SILU:
                    other += tl.load(source + N, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tl.program_id(0), 0)
    if last:
        value = _finish(total, bias_ptr, row[None, :], row[None, :] < N, HAS_BIAS, STORAGE)
        if SILU:
            second = _finish(other, bias_ptr + N, row[None, :], row[None, :] < N, HAS_BIAS, STORAGE)
            value = _activate(value, second, STORAGE)
        out = out_ptr + token[:, None].to(tl.int64) * N + row[None, :]
        tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    silu: bool,
    config: GemmConfig,
    scratch: Scratch | None,
) -> None:
    m, k = x.shape
    n = out.shape[1]
    parts, arrivals = out, out
    if config.split_k > 1:
        if scratch is None or scratch.parts is None or scratch.arrivals is None:
            raise ValueError("a split product needs reserved scratch memory")
        parts, arrivals = scratch.parts, scratch.arrivals
    settings = {
        "N": n,
        "K": k,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "HAS_BIAS": bias is not None,
        "SILU": silu,
        "EARLY": launch.early(x),
        "launch_pdl": launch.early(x),
        "num_warps": config.num_warps,
    }
    grid = (triton.cdiv(n, config.block_n), config.split_k)
    tensors = (x, weight, weight if bias is None else bias, out, parts, arrivals)
    if m == 1:
        gemv_kernel[grid](*tensors, UNROLL=config.unroll, **settings)
    else:
        gemm_kernel[grid](*tensors, m, num_stages=config.num_stages, **settings)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    config: GemmConfig | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.small_gemm.reference.linear` for contiguous ``x [M, K]`` with M from 0 to 16."""
    n, k = weight.shape
    out = torch.empty((x.shape[0], n), dtype=out_dtype or x.dtype, device=x.device)
    if x.shape[0] > 0:
        _launch(x, weight, bias, out, False, config or pick_config(n, k, x.shape[0]), scratch)
    return out


def linear_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: GemmConfig | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.small_gemm.reference.linear_silu_mul`, for M from 0 to 16."""
    n, k = weight.shape
    out = torch.empty((x.shape[0], n // 2), dtype=x.dtype, device=x.device)
    if x.shape[0] > 0:
        _launch(x, weight, bias, out, True, config or pick_config(n, k, x.shape[0]), scratch)
    return out


def reserve(scratch: Scratch, n: int, k: int, *, silu: bool, device: torch.device | str) -> None:
    """Size ``scratch`` for every M of a ``[n, k]`` weight."""
    halves = 2 if silu else 1
    for m in sorted({m_class(m) for m in range(1, MAX_TOKENS + 1)}):
        config = pick_config(n, k, m)
        scratch.reserve(n // halves, config.split_k, halves, config.block_n, device)
