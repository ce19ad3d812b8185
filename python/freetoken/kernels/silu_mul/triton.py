"""The SwiGLU activation, and a gate by a sigmoid, as one kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv

BLOCK = 1024


@launched
@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Grid ``(T, ceil(width / BLOCK))`` over contiguous ``gate_up [T, 2 * width]`` and ``out [T, width]``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = gate_up_ptr + token * (2 * width) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * width + column, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As :func:`freetoken.kernels.silu_mul.reference.silu_mul`; ``gate_up`` contiguous."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    if tokens > 0:
        early = launch.early(gate_up)
        grid = (tokens, cdiv(width, BLOCK))
        silu_mul_kernel[grid](gate_up, out, width=width, BLOCK=BLOCK, EARLY=early, launch_pdl=early, num_warps=4)
    return out


@launched
@triton.jit
def sigmoid_mul_kernel(
    x_ptr, gate_ptr, out_ptr, x_stride, gate_stride, width: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Grid ``(T, ceil(width / BLOCK))`` over ``x`` and ``gate`` of any row stride and contiguous ``out [T, width]``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    STORAGE: tl.constexpr = out_ptr.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    open_part = (1.0 / (1.0 + tl.exp(-gate))).to(STORAGE).to(tl.float32)
    tl.store(out_ptr + token * width + column, (x * open_part).to(STORAGE), mask=inside)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As :func:`freetoken.kernels.silu_mul.reference.sigmoid_mul`; rows of any stride."""
    tokens, width = x.shape
    out = x.new_empty(tokens, width)
    if tokens > 0:
        early = launch.early(x)
        strides = (x.stride(0), gate.stride(0))
        grid = (tokens, cdiv(width, BLOCK))
        sigmoid_mul_kernel[grid](
            x, gate, out, *strides, width=width, BLOCK=BLOCK, EARLY=early, launch_pdl=early, num_warps=4
        )
    return out
