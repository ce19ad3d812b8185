"""Implementations for tests of the replay: each wrong in a way of its own."""

from __future__ import annotations

import torch

from freetoken.bench.replay_attention import PagedAttention
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.rope_kv import RopeKv
from freetoken.kernels.small_gemm import SmallGemm


class Norm(RmsNorm):
    """A thousandth too large."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().__call__(x, weight, eps) * 1.001


class Gate(SmallGemm):
    """Gate and up are off, everything else is right."""

    def linear_silu_mul(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().linear_silu_mul(x, weight, bias) * 1.001


class Backwards(PagedAttention):
    """Looks at the pages in another order."""

    def prepare(self, q, fb, k, v, scale):
        return super().prepare(q, fb, k.flip(0), v.flip(0), scale)


class Forgetful(RopeKv):
    """Right in what it returns; v is not written."""

    def __call__(self, qkv, k_pool, v_pool, *args, **kwargs):
        return super().__call__(qkv, k_pool, v_pool.clone(), *args, **kwargs)


class Ragged(RmsNorm):
    """Loses a row."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().__call__(x, weight, eps)[1:]
