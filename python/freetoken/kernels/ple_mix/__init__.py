"""How looked-up n-gram embeddings enter the residual streams: gates, and the convolution of a decode step."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.ple_mix import reference

__all__ = ["PleMix"]


class PleMix:
    """The op with its implementation bound once; shapes and semantics are those of :mod:`reference`."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._fused = choice.impl != "reference"
        self._checked = choice.impl == "check"
        if self._fused:
            from freetoken.kernels.ple_mix import triton

            self._triton = triton

    def gate(
        self,
        projected: torch.Tensor,
        residual: torch.Tensor,
        norm_key: torch.Tensor,
        norm_query: torch.Tensor,
        norm_conv: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(U, x)``, both ``[T, C]``: see :func:`reference.gate`."""
        arguments = (projected, residual, norm_key, norm_query, norm_conv, eps)
        if not self._fused:
            return reference.gate(*arguments)
        found = self._triton.gate(*arguments)
        if self._checked:
            checking.refuse_capture("ple_mix", self.choice.flag)
            for what, actual, expected in zip(("the gated values", "their norms"), found, reference.gate(*arguments)):
                checking.require_close("ple_mix", what, actual, expected)
        return found

    def decode(
        self,
        residual: torch.Tensor,
        gated: torch.Tensor,
        normed: torch.Tensor,
        weight: torch.Tensor,
        history: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        dilation: int,
    ) -> None:
        """``residual`` and ``history`` are updated in place: see :func:`reference.decode`."""
        inputs = (gated, normed, weight)
        rest = (slots, positions, dilation)
        if not self._fused:
            reference.decode(residual, *inputs, history, *rest)
            return
        if self._checked:
            checking.refuse_capture("ple_mix", self.choice.flag)
            expected, ring = residual.clone(), history.clone()
            reference.decode(expected, *inputs, ring, *rest)
        self._triton.decode(residual, *inputs, history, *rest)
        if self._checked:
            checking.require_close("ple_mix", "the residual", residual, expected)
            checking.require_close("ple_mix", "the history", history[slots], ring[slots])
