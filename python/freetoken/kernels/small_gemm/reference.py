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
    if x.shape[0] == 1 and x.device.type == "cpu" and torch.get_num_threads() > 1:
        # BLAS sends one row to a matrix-vector routine on one thread, and two rows to one that uses all of them.
        y = torch.nn.functional.linear(x.expand(2, -1), weight, bias)[:1]
    else:
        y = torch.nn.functional.linear(x, weight, bias)
    return y if out_dtype is None else y.to(out_dtype)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`linear` with ``weight [2F, K]`` (gate rows first), then ``silu(gate) * up`` as ``[M, F]``."""
    return silu_mul(linear(x, weight, bias))
