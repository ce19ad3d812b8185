"""The causal depthwise convolution of Gated DeltaNet layers, SiLU included, and its per-request state."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.gdn_conv import reference
from freetoken.kernels.gdn_conv.config import ConvConfig, candidates

__all__ = ["MAX_WIDTH", "MIN_WIDTH", "ConvConfig", "GdnConv", "candidates", "pack_weight"]

MIN_WIDTH, MAX_WIDTH = 2, 4
"""Widths of the convolution that the kernels take."""


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The same ``[C, W]`` with channels contiguous in memory, which the kernels read fastest; once, at load."""
    return weight.t().contiguous().t()


class GdnConv:
    """The op with its implementation bound once; shapes and semantics are those of :mod:`reference`."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._fused = choice.impl != "reference"
        self._checked = choice.impl == "check"
        if self._fused:
            from freetoken.kernels.gdn_conv import triton

            self._triton = triton

    def prefill(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        q_starts: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        max_q_len: int,
    ) -> torch.Tensor:
        """``[T, C]`` of ragged pieces, the rings of ``conv_state`` updated: see :func:`reference.prefill`."""
        arguments = (q_starts, slots, starts, max_q_len)
        if not self._fused:
            return reference.prefill(x, weight, bias, conv_state, *arguments)
        if not self._checked:
            return self._triton.prefill(x, weight, bias, conv_state, *arguments)
        checking.refuse_capture("gdn_conv", self.choice.flag)
        ring = conv_state.clone()
        expected = reference.prefill(x, weight, bias, ring, *arguments)
        y = self._triton.prefill(x, weight, bias, conv_state, *arguments)
        rows = torch.repeat_interleave(slots >= 0, q_starts.diff().long())
        self._compare(y[rows], expected[rows], conv_state, ring, slots)
        return y

    def decode(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """``[B, C]`` of one token a sequence, the rings of ``conv_state`` updated: see :func:`reference.decode`."""
        if not self._fused:
            return reference.decode(x, weight, bias, conv_state, slots, positions)
        if not self._checked:
            return self._triton.decode(x, weight, bias, conv_state, slots, positions)
        checking.refuse_capture("gdn_conv", self.choice.flag)
        ring = conv_state.clone()
        expected = reference.decode(x, weight, bias, ring, slots, positions)
        y = self._triton.decode(x, weight, bias, conv_state, slots, positions)
        self._compare(y[slots >= 0], expected[slots >= 0], conv_state, ring, slots)
        return y

    def _compare(
        self,
        y: torch.Tensor,
        expected: torch.Tensor,
        state: torch.Tensor,
        expected_state: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        checking.require_close("gdn_conv", "the output", y, expected)
        used = slots[slots >= 0]
        different = (state[used] != expected_state[used]) & ~(state[used].isnan() & expected_state[used].isnan())
        if bool(different.any()):
            raise checking.KernelCheckError(
                f"gdn_conv: the state differs from the reference in {int(different.sum())} values"
            )
