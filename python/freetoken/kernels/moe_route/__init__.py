"""Routing of tokens to experts: softmax, choice and weights in one kernel, and the routes grouped by expert."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.moe_route import reference
from freetoken.kernels.moe_route.reference import block_count

__all__ = ["MoeRoute", "block_count"]


class MoeRoute:
    """The op with its implementation bound once, shared by all layers of a model."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._checked = choice.impl == "check"
        if choice.impl == "reference":
            self._choose, self._group = reference.choose_experts, reference.group_by_expert
        else:
            from freetoken.kernels.moe_route import triton

            self._choose, self._group = triton.choose_experts, triton.group_by_expert

    def __call__(
        self, logits: torch.Tensor, num_experts: int, top_k: int, renormalise: bool, shared: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(ids [T, K] int32, weights [T, K] float32)`` with K routes a token (``top_k``, one more with ``shared``), as
        :func:`reference.choose_experts`."""
        ids, weights = self._choose(logits, num_experts, top_k, renormalise, shared)
        if self._checked:
            checking.refuse_capture("moe_route", self.choice.flag)
            wanted, expected = reference.choose_experts(logits, num_experts, top_k, renormalise, shared)
            self._require_equal("a chosen expert", ids, wanted)
            checking.require_close("moe_route", "the weights", weights, expected)
        return ids, weights

    def group(self, ids: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(order [blocks * block] int32, experts [blocks] int32)``, as :func:`reference.group_by_expert`."""
        order, experts = self._group(ids, num_experts, block)
        if self._checked:
            checking.refuse_capture("moe_route", self.choice.flag)
            wanted, expected = reference.group_by_expert(ids, num_experts, block)
            self._require_equal("the expert of a block", experts, expected)
            used = (expected >= 0).repeat_interleave(block)
            self._require_equal("a place in the order", order[used], wanted[used])
        return order, experts

    @staticmethod
    def _require_equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(actual, expected):
            raise KernelCheckError(f"moe_route: {what} differs from the reference")
