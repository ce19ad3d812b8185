"""Signs and the Walsh-Hadamard rotation in plain torch: the specification of the fused kernels.

``H`` is the normalised Sylvester matrix ``H[r, c] = (-1)^popcount(r & c) / sqrt(block)``, symmetric and its own inverse. It acts
on every run of ``block`` values of the last axis. A weight stored as ``W diag(s) H`` takes the input ``H (s x)``; a table row
``z`` stored so comes back as ``s (H z)``. With ``block`` 1 there is no rotation.

The transform is a ladder of sums and differences in float32 (float64 for float64 inputs), neighbours first: at step
``h = 1, 2, 4, ...`` elements ``i`` and ``i + h`` (bit h of i clear) become their sum and difference, in place. The factor is applied
last; for a block that is a power of four (1024) it is exact.
"""

from __future__ import annotations

import torch


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
