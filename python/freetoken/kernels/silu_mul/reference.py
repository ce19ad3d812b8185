"""Gating of one half by the other, or by a gate of its own, in plain torch: the specification of the fused kernels."""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2F]`` (gate first) as ``[T, F]``.

    ``silu(g) = g / (1 + exp(-g))`` in float32, rounded to the storage type before ``up`` multiplies it.
    """
    half = gate_up.shape[1] // 2
    return torch.nn.functional.silu(gate_up[:, :half]) * gate_up[:, half:]


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)`` of ``[T, F]`` each: the output of gated attention.

    The sigmoid, taken in float32, is rounded to the storage type before it multiplies.
    """
    return x * torch.sigmoid(gate)
