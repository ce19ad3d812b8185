"""Dense products in plain torch: the specification of the fused kernels."""

from __future__ import annotations

import torch

from freetoken.kernels.silu_mul.reference import silu_mul


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x [M, K] @ weight [N, K]^T + bias [N]`` as ``[M, N]``: accumulated in float32, rounded to the type of ``x``.

    ``out_dtype`` widens that rounded result.
    """
    y = torch.nn.functional.linear(x, weight, bias)
    return y if out_dtype is None else y.to(out_dtype)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`linear` with ``weight [2F, K]`` (gate rows first), then ``silu(gate) * up`` as ``[M, F]``."""
    return silu_mul(linear(x, weight, bias))


def linear_squashed(x: torch.Tensor, weight: torch.Tensor, rows: int, divisor: int) -> torch.Tensor:
    """:func:`linear`, and of its first ``rows`` columns ``silu(y / divisor)``."""
    y = linear(x, weight)
    y[:, :rows] = torch.nn.functional.silu(y[:, :rows].float() / divisor).to(y.dtype)
    return y
