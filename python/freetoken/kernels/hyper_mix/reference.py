"""Hyper-connections in plain torch: the specification of the fused kernels.

A token has S residual streams of H elements side by side, ``residual [T, S * H]``. Before a block they are normalised, each by itself,
and mixed into one input by gates of low rank; after it the block's output is added to every stream with a weight of its own. The
products between these steps are the caller's. Formulas are those of ``qwen4_exp`` in transformers; arithmetic is float32, rounded once.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def add(residual: torch.Tensor, y: torch.Tensor, inject: torch.Tensor) -> None:
    """``residual_i += 2 sigmoid(inject_i / S) y`` in place, with ``y [T, H]`` and ``inject [T, S]`` (any row stride)."""
    streams = inject.shape[1]
    weight = 2 * torch.sigmoid(inject.float() / streams)
    wide = residual.view(-1, streams, y.shape[1])
    wide.copy_(torch.addcmul(wide.float(), weight[:, :, None], y.float()[:, None]))


def norm(residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``[T, S * H]``: RMSNorm of every stream with its row of ``weight [S, H]`` float32."""
    wide = residual.float().view(-1, *weight.shape)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(residual.dtype).flatten(1)


def squash(low: torch.Tensor, streams: int) -> torch.Tensor:
    """``silu(low / S)`` of ``low [T, rank]`` (any row stride), contiguous."""
    return silu(low.float() / streams).to(low.dtype)


def mix(normed: torch.Tensor, gate: torch.Tensor, streams: int) -> torch.Tensor:
    """``[T, H]``: the mean over the streams of ``sigmoid(gate) * normed``, both ``[T, S * H]``."""
    weighted = torch.sigmoid(gate.float()) * normed.float()
    return weighted.unflatten(1, (streams, -1)).mean(1).to(normed.dtype)


def gated_mix(normed: torch.Tensor, low: torch.Tensor, weight: torch.Tensor, streams: int) -> torch.Tensor:
    """:func:`mix` by the gates ``low [T, rank] @ weight [S * H, rank]^T``."""
    return mix(normed, torch.nn.functional.linear(low, weight), streams)
