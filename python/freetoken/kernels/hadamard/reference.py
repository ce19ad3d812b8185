"""Signs and the Walsh-Hadamard rotation in plain torch: the specification of the fused kernels.

``H`` is the normalised Sylvester matrix ``H[r, c] = (-1)^popcount(r & c) / sqrt(block)``, symmetric and its own inverse. It acts
on every run of ``block`` values of the last axis. A weight stored as ``W diag(s) H`` takes the input ``H (s x)``; a table row
``z`` stored so comes back as ``s (H z)``. With ``block`` 1 there is no rotation.

The producers rotate what a norm or an activation function makes, without a rounding in between: their arithmetic is float32 from the
inputs on (float64 for float64), and rounds to the storage type only where they say so. They end in integers of eight bits
(``group`` 128, 64 or 32, see :mod:`freetoken.kernels.pq2_gemv.activation`), or with ``group`` 0 in floats of the type of ``x``.

The transform is a ladder of sums and differences in float32 (float64 for float64 inputs), neighbours first: at step
``h = 1, 2, 4, ...`` elements ``i`` and ``i + h`` (bit h of i clear) become their sum and difference, in place. The factor is applied
last; for a block that is a power of four (1024) it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetoken.kernels.pq2_gemv.activation import Quantised, quantise_reference
from freetoken.kernels.pq2_gemv.weight import PQ2Weight

Activation = Quantised | torch.Tensor
"""What a product of two-bit weights takes: eight-bit integers, or floats as they are."""


@dataclass(frozen=True)
class Rotation:
    """How the weights of one input width are stored: rotated in blocks of ``block`` (1: not at all), after ``signs`` (int8 ``[width]``
    of 1 and -1; ``None``: all 1)."""

    block: int = 1
    signs: torch.Tensor | None = None


@dataclass(frozen=True)
class Normed:
    """``activation`` is rotated; ``residual`` the new residual stream ``[T, H]``; ``plain``, where asked for, the normed input
    without signs, rotation and quantisation, in the type of the input; ``beside [T, N]`` the product of that with a narrow
    weight, where one was given."""

    activation: Activation
    residual: torch.Tensor
    plain: torch.Tensor | None
    beside: torch.Tensor | None = None


def require_shape(width: int, signs: torch.Tensor | None, block: int) -> None:
    """``ValueError`` unless ``block`` is a power of two that divides ``width`` and ``signs`` has one entry an element."""
    if block < 1 or block & (block - 1):
        raise ValueError(f"rotation block {block} is not a power of two")
    if width % block:
        raise ValueError(f"width {width} is no multiple of the rotation block {block}")
    if signs is not None and signs.shape != (width,):
        raise ValueError(f"signs have shape {tuple(signs.shape)}, the input is {width} wide")


def transform(x: torch.Tensor, block: int) -> torch.Tensor:
    """``H x`` on every ``block`` of the last axis, in float32 (float64 for float64)."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    shape = wide.shape
    h = 1
    while h < block:
        low, high = wide.reshape(*shape[:-1], shape[-1] // (2 * h), 2, h).unbind(-2)
        wide = torch.stack((low + high, low - high), -2).reshape(shape)
        h *= 2
    return wide if block == 1 else wide * block**-0.5


def rotate(
    x: torch.Tensor, signs: torch.Tensor | None, block: int, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``H (signs * x)`` on the last axis of ``x [..., width]``: what a folded projection takes.

    ``signs [width]`` holds 1 and -1 in any type; ``None`` means all 1. The result has ``out_dtype``, by default that of ``x``.
    ``ValueError`` where the shapes do not fit.
    """
    require_shape(x.shape[-1], signs, block)
    signed = x if signs is None else x * signs.to(x.dtype)
    return transform(signed, block).to(out_dtype or x.dtype)


def unrotate(
    z: torch.Tensor, signs: torch.Tensor | None, block: int, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``signs * (H z)``, the inverse of :func:`rotate`: what a row of a folded embedding table means. Types as there."""
    require_shape(z.shape[-1], signs, block)
    wide = transform(z, block)
    return (wide if signs is None else wide * signs.to(wide.dtype)).to(out_dtype or z.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype == torch.float64 else x.float()


def produce(
    x: torch.Tensor, signs: torch.Tensor | None, block: int, group: int, out_dtype: torch.dtype | None = None
) -> Activation:
    """Sign, rotate and quantise ``x [T, width]``; with ``group`` 0 the floats have ``out_dtype``, by default the type of ``x``."""
    if group == 0:
        return rotate(x, signs, block, out_dtype)
    return quantise_reference(rotate(x, signs, block, torch.float32), group)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    signs: torch.Tensor | None,
    block: int,
    group: int,
    residual: torch.Tensor | None = None,
    *,
    plain: bool = False,
    beside: torch.Tensor | None = None,
) -> Normed:
    """RMSNorm of ``x [T, H]``, or of ``x + residual`` rounded to the type of ``x``, then :func:`produce`.

    As in :func:`freetoken.kernels.rms_norm.reference.rms_norm`, the normalised value is rounded to the type of ``weight [H]`` before
    the weight multiplies it. ``beside [N, H]``, of the type of ``x``, is a weight that takes the plain output.
    """
    total = x if residual is None else x + residual
    wide = _wide(total)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled = normal.to(weight.dtype).to(wide.dtype) * weight.to(wide.dtype)
    activation = produce(scaled, signs, block, group, x.dtype)
    rounded = scaled.to(x.dtype)
    product = None if beside is None else torch.nn.functional.linear(rounded, beside)
    return Normed(activation, total, rounded if plain else None, product)


def silu_mul(gate_up: torch.Tensor, signs: torch.Tensor | None, block: int, group: int) -> Activation:
    """``silu(gate) * up`` of ``gate_up [T, 2F]`` (gate first), then :func:`produce`."""
    gate, up = _wide(gate_up).chunk(2, 1)
    return produce(torch.nn.functional.silu(gate) * up, signs, block, group, gate_up.dtype)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor, signs: torch.Tensor | None, block: int, group: int) -> Activation:
    """``x * sigmoid(gate)`` of ``[T, width]`` each, then :func:`produce`: the output of gated attention."""
    return produce(_wide(x) * _wide(gate).sigmoid(), signs, block, group, x.dtype)


def gated_norm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    signs: torch.Tensor | None,
    block: int,
    group: int,
) -> Activation:
    """RMSNorm over each head of ``o [T, Hv, Dv]`` with ``weight [Dv]``, times ``silu(z)`` of ``z [T, Hv * Dv]``, then
    :func:`produce`: the output of Gated DeltaNet."""
    wide = _wide(o)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    gated = normal.flatten(1) * torch.nn.functional.silu(_wide(z))
    return produce(gated, signs, block, group, o.dtype)


def embed(
    ids: torch.Tensor, table: PQ2Weight, signs: torch.Tensor | None, block: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Rows ``ids`` (int64 ``[T]``) of a folded table as the model means them: decoded, then :func:`unrotate`; ``[T, K]``."""
    return unrotate(table.rows(ids).dequantise(), signs, block, out_dtype)
