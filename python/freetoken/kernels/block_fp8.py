"""Weights in FP8 (e4m3) with one scale for each block of 128 x 128: how they are held, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

BLOCK = 128
"""Rows and columns that share a scale in a checkpoint."""


@dataclass(frozen=True)
class Fp8Weight:
    """``data [..., N, K]`` float8_e4m3fn with ``scale [..., N / G, ceil(K / 128)]`` float32.

    An element is worth its value times the scale of its group of ``G`` rows (:attr:`rows`) and its 128 columns. G is 128 where the merged
    parts of a weight allow it: blocks count from the first row of each part, and no group crosses parts.
    """

    data: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def rows(self) -> int:
        """Rows that share a scale."""
        return self.data.shape[-2] // self.scale.shape[-2]

    @property
    def device(self) -> torch.device:
        return self.data.device


Weight = torch.Tensor | Fp8Weight


def group_rows(*sizes: int) -> int:
    """The largest G for parts of these numbers of rows."""
    return gcd(BLOCK, *sizes)


def empty(shape: tuple[int, ...], rows: int, device: torch.device) -> Fp8Weight:
    """Uninitialised, with ``rows`` rows a group."""
    *outer, n, k = shape
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Weight(data, torch.empty((*outer, n // rows, -(-k // BLOCK)), dtype=torch.float32, device=device))


def dequantise(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """``[..., N, K]``: the product of value and scale in float32, rounded to ``dtype``."""
    k = weight.shape[-1]
    scale = weight.scale.repeat_interleave(weight.rows, -2).repeat_interleave(BLOCK, -1)[..., :k]
    return (weight.data.float() * scale).to(dtype)


def plain(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` itself, or what it is worth."""
    return dequantise(weight, dtype) if isinstance(weight, Fp8Weight) else weight


def part(weight: Weight, index: int) -> Weight:
    """One of a stack of weights."""
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.data[index], weight.scale[index])
    return weight[index]
