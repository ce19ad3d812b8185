"""Random layers of experts and a scalar check of them, for the tests of the products with experts."""

from __future__ import annotations

import math

import torch
from poison import DEVICE

from freetoken.kernels.block_fp8 import BLOCK, Fp8Weight, Weight, group_rows


def make_weight(dtype: torch.dtype | str, *shape: int, parts: tuple[int, ...] = ()) -> Weight:
    """Normal values over the root of the inputs; ``"fp8"`` with uneven scales, rows grouped as ``parts`` allow."""
    n, k = shape[-2:]
    values = torch.randn(shape, device=DEVICE)
    if dtype != "fp8":
        return (values * k**-0.5).to(dtype)
    data = (values * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = group_rows(*(parts or (n,)))
    scale = torch.rand((*shape[:-2], n // rows, -(-k // BLOCK)), device=DEVICE) + 0.25
    return Fp8Weight(data, scale * (k**-0.5 / 60))


def scalar_weight(weight: Weight) -> list[list[list[float]]]:
    """``[E][N][K]`` numbers, FP8 read value by value."""
    if not isinstance(weight, Fp8Weight):
        return weight.double().tolist()
    data, scale = weight.data.double().tolist(), weight.scale.double().tolist()
    return [
        [[v * scale[e][n // weight.rows][k // BLOCK] for k, v in enumerate(line)] for n, line in enumerate(expert)]
        for e, expert in enumerate(data)
    ]


def scalar_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Weight, down: Weight
) -> list[list[float]]:
    """The whole layer by hand, without any rounding."""
    first, second = scalar_weight(gate_up), scalar_weight(down)
    result = []
    for row, chosen, shares in zip(x.double().tolist(), ids.tolist(), weights.double().tolist(), strict=True):
        total = [0.0] * len(row)
        for expert, share in zip(chosen, shares, strict=True):
            if expert < 0:
                continue
            sums = [math.fsum(a * b for a, b in zip(line, row, strict=True)) for line in first[expert]]
            half = len(sums) // 2
            hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(sums[:half], sums[half:], strict=True)]
            for n, line in enumerate(second[expert]):
                total[n] += share * math.fsum(a * b for a, b in zip(line, hidden, strict=True))
        result.append(total)
    return result


def make_routes(name: str, tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[T, K]`` and weights: ``even``, ``skewed`` (some experts have none), ``one`` (all on one), ``holes`` (some negative)."""
    if name == "one":
        ids = torch.full((tokens, top_k), experts - 1)
    elif name == "skewed":
        ids = (torch.rand(tokens, top_k).pow(3) * (experts - 1)).long()
    else:
        ids = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    if name == "holes":
        ids[torch.rand(ids.shape) < 0.3] = -1
        ids[-1] = -1
    return ids.to(DEVICE, torch.int32), torch.rand(tokens, top_k, device=DEVICE) + 0.1
