"""Products with two-bit weights (PQ2): the weight, the quantised activation, and the one public call for both."""

from __future__ import annotations

import torch

from freetoken.kernels.pq2_gemv import reference
from freetoken.kernels.pq2_gemv.activation import (
    ACTIVATION_GROUPS,
    QuantisedActivation,
    activation_group,
    quantise_reference,
)
from freetoken.kernels.pq2_gemv.weight import BLOCK, WEIGHT_GROUPS, PQ2Weight

__all__ = [
    "ACTIVATION_GROUPS",
    "BLOCK",
    "WEIGHT_GROUPS",
    "PQ2Weight",
    "QuantisedActivation",
    "activation_group",
    "pq2_linear",
    "quantise",
]


def quantise(x: torch.Tensor, group: int) -> QuantisedActivation:
    """Quantise ``x [M, K]`` as :mod:`activation` states."""
    return quantise_reference(x, group)


def pq2_linear(
    activation: QuantisedActivation | torch.Tensor,
    weight: PQ2Weight,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[M, N]`` in ``out_dtype``, into ``out`` where given. A plain tensor ``[M, K]`` is multiplied as it is, in float32."""
    if isinstance(activation, torch.Tensor):
        y = reference.float_linear(activation, weight, out_dtype)
    else:
        y = reference.linear(activation, weight, out_dtype)
    return y if out is None else out.copy_(y)
