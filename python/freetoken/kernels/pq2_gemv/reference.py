"""Products of two-bit weights in plain torch: the specification of the fused kernels."""

from __future__ import annotations

import math

import torch

from freetoken.kernels.pq2_gemv.activation import Quantised
from freetoken.kernels.pq2_gemv.weight import PQ2Weight, unpack


def linear(activation: Quantised, weight: PQ2Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """``[M, N]``: ``sum over groups of d_w * d_x * (sum(code * q) - sum(q))``, rounded to ``out_dtype`` at the end.

    A group is the smaller one of the two sides. The integers are exact, as float32 holds them; the rest is float32.
    """
    activation, weight = activation.rows(), weight.row_order()
    group = math.gcd(activation.group, weight.group)
    q = activation.natural()
    total = torch.zeros(activation.tokens, weight.out_features, dtype=torch.float32, device=q.device)
    for start in range(0, activation.width, group):
        codes = unpack(weight.codes[:, start // 4 : (start + group) // 4])
        integers = q[:, start : start + group].float() @ (codes.float() - 1).t()
        d_x = activation.scales[:, start // activation.group, None]
        total += integers * (d_x * weight.scales[:, start // weight.group].float())
    return total.to(out_dtype)


def float_linear(x: torch.Tensor, weight: PQ2Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """``[M, N]``: ``x [M, K]`` as it is times the dequantised weights, in float32, rounded to ``out_dtype``."""
    return torch.nn.functional.linear(x.float(), weight.dequantise()).to(out_dtype)
