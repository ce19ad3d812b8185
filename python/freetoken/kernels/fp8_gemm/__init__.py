"""Dense products with block-scaled FP8 weights, with the SwiGLU activation as an optional epilogue."""

from __future__ import annotations

from typing import Any

import torch

from freetoken.kernels import checking
from freetoken.kernels.block_fp8 import Fp8Weight
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.fp8_gemm import reference
from freetoken.kernels.moe_gemm.config import block_m, pick_dense_route, pick_fragments, pick_gate_up_route, pick_tile
from freetoken.kernels.silu_mul import SiluMul

__all__ = ["MAX_TOKENS", "Fp8Gemm"]

MAX_TOKENS = 128
"""Rows of x up to which weights are read as they are; for more, dequantising one weight and torch's matmul cost less."""
FRAGMENT_TOKENS = 16
"""Rows of x up to which a thread loads its operands as the fragments it multiplies."""


class Fp8Gemm:
    """The op with its implementation bound once, shared by all FP8 layers of a model. Inputs must be contiguous.

    Up to :data:`FRAGMENT_TOKENS` rows go through fragments where they can (else one row through a matrix-vector kernel), up to
    :data:`MAX_TOKENS` through tensor-core tiles.
    """

    def __init__(self, choice: Choice, silu_mul: SiluMul) -> None:
        self.choice = choice
        self._silu_mul = silu_mul
        self._checked = choice.impl == "check"
        self._fused = choice.impl != "reference"
        self._experts: Any = None
        self._fragments: Any = None
        self._dequantise: Any = None
        if self._fused:
            from freetoken.kernels.fp8_gemm import triton
            from freetoken.kernels.moe_gemm import fragments
            from freetoken.kernels.moe_gemm import triton as experts

            self._experts, self._fragments, self._dequantise = experts, fragments, triton.dequantise

    def linear(self, x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[M, N]``, as :func:`reference.linear`."""
        if not self._fused or x.shape[0] == 0:
            return reference.linear(x, weight, bias)
        y = self._product(x, weight, bias)
        if self._checked:
            self._compare(y, reference.linear(x, weight, bias))
        return y

    def linear_silu_mul(self, x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[M, F]``, as :func:`reference.linear_silu_mul`."""
        rows = x.shape[0]
        if not self._fused or rows == 0:
            return reference.linear_silu_mul(x, weight, bias)
        if rows > MAX_TOKENS or bias is not None:
            y = self._silu_mul(self._product(x, weight, bias))
        elif rows <= FRAGMENT_TOKENS and self._fragments.fits(x, weight, silu=True):
            config = pick_fragments(weight.shape[0] // 2, x.shape[1], gated=True)
            y = self._fragments.rows(x, None, weight, config, silu=True)
        elif rows == 1:
            y = self._experts.gate_up_routes(x, None, weight, pick_gate_up_route(x.shape[1], 1))
        else:
            width = weight.shape[0] // 2
            tile = pick_tile(block_m(rows, 1), x.shape[1], x.element_size(), gated=True, alone=width)
            y = self._experts.tiles(x, None, weight, tile, routes=rows, silu=True)
        if self._checked:
            self._compare(y, reference.linear_silu_mul(x, weight, bias))
        return y

    def _product(self, x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        if rows > MAX_TOKENS:
            return torch.nn.functional.linear(x, self._dequantise(weight, x.dtype), bias)
        if rows <= FRAGMENT_TOKENS and self._fragments.fits(x, weight):
            y = self._fragments.rows(x, None, weight, pick_fragments(*weight.shape), silu=False)
        elif rows == 1:
            y = self._experts.down_routes(x, None, weight, None, pick_dense_route(*weight.shape))
        else:
            n = weight.shape[0]
            tile = pick_tile(block_m(rows, 1), x.shape[1], x.element_size(), gated=False, alone=n)
            y = self._experts.tiles(x, None, weight, tile, routes=rows, silu=False)
        return y if bias is None else y.add_(bias)

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        checking.refuse_capture("fp8_gemm", self.choice.flag)
        checking.require_close("fp8_gemm", "the output", actual, expected)
