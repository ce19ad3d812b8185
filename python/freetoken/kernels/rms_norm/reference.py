"""RMSNorm in plain torch: the specification of the fused kernel."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension of ``x [T, H]``.

    With ``residual [T, H]`` the sum ``x + residual``, rounded to the storage type, is normalised and returned too:
    ``(y, sum)``. Statistics are float32. With ``weight [H]`` in the type of ``x`` the normalised value is rounded to it before
    the weight multiplies it, as in Llama and Qwen3; with a float32 weight the product alone is rounded, as in Qwen3.5.
    """
    if residual is not None:
        x = x + residual
    if x.dtype == torch.float32:
        y = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    else:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = (weight * normal.to(weight.dtype)).to(x.dtype)
    return y if residual is None else (y, x)
