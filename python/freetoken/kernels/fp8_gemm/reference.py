"""Dense products with block-scaled FP8 weights in plain torch: the specification of the fused kernels."""

from __future__ import annotations

import torch

from freetoken.kernels.block_fp8 import Fp8Weight, dequantise
from freetoken.kernels.silu_mul.reference import silu_mul


def linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [M, K] @ weight [N, K]^T + bias [N]`` as ``[M, N]``, with the weight dequantised to the type of ``x``."""
    return torch.nn.functional.linear(x, dequantise(weight, x.dtype), bias)


def linear_silu_mul(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`linear` with ``weight [2F, K]`` (gate rows first), then ``silu(gate) * up`` as ``[M, F]``."""
    return silu_mul(linear(x, weight, bias))
