"""Gates of n-gram embeddings and their convolution over single tokens, in plain torch: the specification of the kernels."""

from __future__ import annotations

import math

import torch

BLOCK_TOKENS = 1024
"""Tokens gated at once: bounds the float32 copies of residual streams that a prompt needs."""


def grouped_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [T, S, H]`` in float32, each of the S groups over its root mean square, times ``weight [S, H]`` (float32, whole)."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def gate(
    projected: torch.Tensor,
    residual: torch.Tensor,
    norm_key: torch.Tensor,
    norm_query: torch.Tensor,
    norm_conv: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(U, x)``, both ``[T, S * H]`` in the type of ``residual``: the gated values, and what the convolution takes of them.

    ``projected [T, S * H + H]`` holds a key for each of the S residual streams and one value; ``residual [T, S * H]`` the streams;
    norm weights are ``[S, H]`` float32. With u the product of a stream's normed key and normed content over ``sqrt(H)``, its gate
    is ``sigmoid(sign(u) sqrt(max(|u|, 1e-6)))``; U is gate times value, and x the norm of U by streams. All in float32, U rounded
    before it is normed.
    """
    streams, hidden = norm_key.shape
    channels = streams * hidden
    gated, normed = torch.empty_like(residual), torch.empty_like(residual)
    for start in range(0, residual.shape[0], BLOCK_TOKENS):
        part = slice(start, start + BLOCK_TOKENS)
        key = projected[part, :channels].unflatten(1, (streams, hidden))
        value = projected[part, None, channels:].float()
        query = residual[part].unflatten(1, (streams, hidden))
        products = grouped_norm(key, norm_key, eps) * grouped_norm(query, norm_query, eps)
        u = products.sum(-1, keepdim=True) / math.sqrt(hidden)
        opening = torch.sigmoid(u.sign() * u.abs().clamp_min(1e-6).sqrt())
        gated[part] = (opening * value).flatten(1)
        normed[part] = grouped_norm(gated[part].unflatten(1, (streams, hidden)), norm_conv, eps).flatten(1)
    return gated, normed


def decode(
    residual: torch.Tensor,
    gated: torch.Tensor,
    normed: torch.Tensor,
    weight: torch.Tensor,
    history: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    dilation: int,
) -> None:
    """Add ``gated + silu(conv(normed))`` to ``residual``, all ``[B, C]``, for one token of each sequence.

    ``weight [K, C]`` has the oldest tap first; taps lie ``dilation`` tokens apart. ``history [slots, (K - 1) dilation, C]`` is a ring:
    entry ``p % L`` holds the input of position p, and that of this token is written; what lies before position 0 is zero whatever a
    slot holds. ``slots`` and ``positions`` are ``[B]`` int64. Sums in float32; what is added is rounded first.
    """
    size = history.shape[1]
    total = weight[-1].float() * normed.float()
    for back in range(1, weight.shape[0]):
        distance = back * dilation
        past = history[slots, (positions - distance) % size].float()
        past.masked_fill_((positions < distance)[:, None], 0.0)
        total.addcmul_(weight[-1 - back].float(), past)
    history[slots, positions % size] = normed
    residual += (gated + torch.nn.functional.silu(total)).to(residual.dtype)
