"""Dequantisation of a block-scaled FP8 weight as one kernel; the products themselves are those of a single expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.block_fp8 import BLOCK, Fp8Weight
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv
from freetoken.kernels.moe_gemm.triton import _values, has_fp8

ELEMENTS = 4096
SCALE_BLOCK = tl.constexpr(BLOCK)


@launched
@triton.jit
def dequantise_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [N, K]``: one program a column block of ``BLOCK_N`` rows. Grid ``(ceil(N / BLOCK_N), ceil(K / 128))``."""
    FACTOR: tl.constexpr = 1.0 if NATIVE else 256.0
    COLUMNS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)
    inside = (row[:, None] < N) & (column[None, :] < K)
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    values = _values(tl.load(weight_ptr + place, mask=inside, other=0.0), True, NATIVE, tl.float32)
    scale = tl.load(scale_ptr + row // ROWS * COLUMNS + tl.program_id(1), mask=row < N, other=0.0) * FACTOR
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tl.store(out_ptr + place, (values * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def dequantise(weight: Fp8Weight, dtype: torch.dtype, *, native: bool | None = None) -> torch.Tensor:
    """As :func:`freetoken.kernels.block_fp8.dequantise`, for ``weight [N, K]``."""
    n, k = weight.shape
    native = has_fp8(weight.device) if native is None else native
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    block_n = ELEMENTS // BLOCK
    early = launch.early(weight.data)
    dequantise_kernel[(cdiv(n, block_n), cdiv(k, BLOCK))](
        weight.data if native else weight.data.view(torch.uint8),
        weight.scale,
        out,
        N=n,
        K=k,
        ROWS=weight.rows,
        BLOCK_N=block_n,
        NATIVE=native,
        EARLY=early,
        launch_pdl=early,
        num_warps=4,
    )
    return out
