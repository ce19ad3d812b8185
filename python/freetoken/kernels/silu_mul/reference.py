"""The SwiGLU activation in plain torch: the specification of the fused kernel."""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2F]`` (gate first) as ``[T, F]``.

    ``silu(g) = g / (1 + exp(-g))`` in float32, rounded to the storage type before ``up`` multiplies it.
    """
    half = gate_up.shape[1] // 2
    return torch.nn.functional.silu(gate_up[:, :half]) * gate_up[:, half:]
