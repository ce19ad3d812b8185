"""RMSNorm with the residual add as one kernel, one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import next_power_of_two

LARGEST_WIDTH = 32768


@launched
@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    eps,
    width: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """All rows are contiguous ``[T, width]``; ``residual_ptr`` and ``sum_ptr`` are read only with ``HAS_RESIDUAL``."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(y_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + column, stored, mask=inside)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    normal = (x * scale).to(weight_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row + column, (normal * weight).to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As :func:`freetoken.kernels.rms_norm.reference.rms_norm`; ``x`` and ``residual`` contiguous, ``H`` up to 32,768."""
    tokens, width = x.shape
    y = torch.empty_like(x)
    total = y if residual is None else torch.empty_like(x)
    if tokens > 0:
        early = launch.early(x)
        block = next_power_of_two(width)
        rms_norm_kernel[(tokens,)](
            x,
            x if residual is None else residual,
            weight,
            y,
            total,
            eps,
            width=width,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            EARLY=early,
            launch_pdl=early,
            num_warps=num_warps(block),
        )
    return y if residual is None else (y, total)


def num_warps(block: int) -> int:
    """Warps of one program: 16 bytes a thread at bfloat16, from 1 to 16."""
    return max(1, min(16, block // 256))
