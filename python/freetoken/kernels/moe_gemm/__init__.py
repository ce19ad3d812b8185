"""A layer of experts: gate and up with their activation, down with the weights of the routes, the sum over a token's routes."""

from __future__ import annotations

from typing import Any

import torch

from freetoken.kernels import checking
from freetoken.kernels.block_fp8 import Fp8Weight, Weight
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.moe_gemm import reference
from freetoken.kernels.moe_gemm.config import (
    SLICE_TOKENS,
    block_m,
    pick_down_fragments,
    pick_down_route,
    pick_fragments,
    pick_gate_up_route,
    pick_tile,
    route_by_route,
)
from freetoken.kernels.moe_gemm.reference import Shared
from freetoken.kernels.moe_route import MoeRoute

__all__ = ["SLICE_TOKENS", "MoeGemm", "Shared"]


class MoeGemm:
    """The op with its implementation bound once, shared by all layers of a model.

    Few routes go one by one through matrix-vector kernels (two launches); more are grouped by expert and go through tiles whose
    size follows the routes an expert has on average. Everything that decides is known on the host.
    """

    def __init__(self, choice: Choice, route: MoeRoute) -> None:
        self.choice = choice
        self._route = route
        self._checked = choice.impl == "check"
        self._triton: Any = None
        if choice.impl != "reference":
            from freetoken.kernels.moe_gemm import fragments, triton

            self._triton, self._fragments = triton, fragments

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        shared: Shared | None = None,
    ) -> torch.Tensor:
        """``[T, H]``, as :func:`reference.experts`; all inputs contiguous but the logits in ``shared``."""
        if self._triton is None or x.shape[0] == 0:
            return reference.experts(x, ids, weights, gate_up, down, shared)
        if route_by_route(*ids.shape, down.shape[0]):
            out = self._by_route(x, ids, weights, gate_up, down, shared)
        elif x.shape[0] <= SLICE_TOKENS:
            out = self._grouped(x, ids, weights, gate_up, down, shared)
        else:
            out = self._sliced(x, ids, weights, gate_up, down, shared)
        if self._checked:
            checking.refuse_capture("moe_gemm", self.choice.flag)
            expected = reference.experts(x, ids, weights, gate_up, down, shared)
            checking.require_close("moe_gemm", "the output", out, expected)
        return out

    def _by_route(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        shared: Shared | None,
    ) -> torch.Tensor:
        if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight) and self._fragmentary(x, gate_up, down):
            config = pick_fragments(gate_up.shape[1] // 2, x.shape[1], ids.numel(), gated=True)
            hidden = self._fragments.rows(x, ids, gate_up, config, silu=True)
            config = pick_down_fragments(hidden.shape[1], ids.shape[1])
            return self._fragments.routes_down(hidden, (ids, weights), down, shared, config)
        size = _element_size(gate_up)
        hidden = self._triton.gate_up_routes(x, ids, gate_up, pick_gate_up_route(x.shape[1], size))
        return self._triton.down_routes(hidden, (ids, weights), down, shared, pick_down_route(hidden.shape[1], size))

    def _fragmentary(self, x: torch.Tensor, gate_up: Weight, down: Weight) -> bool:
        return bool(self._fragments.fits(x, gate_up, silu=True) and self._fragments.fits(x, down))

    def _grouped(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        shared: Shared | None,
    ) -> torch.Tensor:
        routes, num_experts, size = ids.numel(), down.shape[0], x.element_size()
        m = block_m(routes, num_experts)
        groups = self._route.group(ids, num_experts, m)
        tile = pick_tile(m, x.shape[1], size, gated=True)
        hidden = self._triton.tiles(x, groups, gate_up, tile, routes=routes, silu=True)
        tile = pick_tile(m, hidden.shape[1], size, gated=False)
        parts = self._triton.tiles(hidden, groups, down, tile, routes=routes, silu=False)
        return self._triton.combine(parts, ids, weights, shared)

    def _sliced(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        shared: Shared | None,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        for start in range(0, x.shape[0], SLICE_TOKENS):
            part = slice(start, start + SLICE_TOKENS)
            beside = None if shared is None else (shared[0][part], shared[1][part])
            out[part] = self._grouped(x[part], ids[part], weights[part], gate_up, down, beside)
        return out


def _element_size(weight: Weight) -> int:
    return weight.element_size() if isinstance(weight, torch.Tensor) else 1
