"""The steps of hyper-connections between their products: normalise, mix, write back."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.hyper_mix import reference

__all__ = ["HyperMix"]

Pending = tuple[torch.Tensor, torch.Tensor]
"""A block's output ``y [T, H]`` and the logits ``inject [T, S]`` of its weights, not yet added to the streams."""


class HyperMix:
    """The op with its implementation bound once; shapes and semantics are those of :mod:`reference`."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._fused = choice.impl != "reference"
        self._checked = choice.impl == "check"
        if self._fused:
            from freetoken.kernels.hyper_mix import triton

            self._triton = triton

    def add(self, residual: torch.Tensor, pending: Pending) -> None:
        """Add what is pending to ``residual [T, S * H]``, in place."""
        if not self._fused:
            reference.add(residual, *pending)
            return
        expected = residual.clone() if self._checked else residual
        self._triton.add_norm(residual, pending, None, 0.0)
        if self._checked:
            checking.refuse_capture("hyper_mix", self.choice.flag)
            reference.add(expected, *pending)
            checking.require_close("hyper_mix", "the streams", residual, expected)

    def norm(self, residual: torch.Tensor, pending: Pending | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The streams normalised, after what is pending was added to them in place."""
        if not self._fused:
            if pending is not None:
                reference.add(residual, *pending)
            return reference.norm(residual, weight, eps)
        expected = residual.clone() if self._checked else residual
        normed = self._triton.add_norm(residual, pending, weight, eps)
        if self._checked:
            checking.refuse_capture("hyper_mix", self.choice.flag)
            if pending is not None:
                reference.add(expected, *pending)
            checking.require_close("hyper_mix", "the streams", residual, expected)
            checking.require_close("hyper_mix", "their norms", normed, reference.norm(residual, weight, eps))
        return normed

    def squash(self, low: torch.Tensor, streams: int) -> torch.Tensor:
        """See :func:`reference.squash`."""
        if not self._fused:
            return reference.squash(low, streams)
        out = self._triton.squash(low, streams)
        if self._checked:
            checking.refuse_capture("hyper_mix", self.choice.flag)
            checking.require_close("hyper_mix", "the low-rank gates", out, reference.squash(low, streams))
        return out

    def mix(self, normed: torch.Tensor, gate: torch.Tensor, streams: int) -> torch.Tensor:
        """See :func:`reference.mix`."""
        if not self._fused:
            return reference.mix(normed, gate, streams)
        out = self._triton.mix(normed, gate, streams)
        if self._checked:
            checking.refuse_capture("hyper_mix", self.choice.flag)
            checking.require_close("hyper_mix", "the input", out, reference.mix(normed, gate, streams))
        return out

    def gates(self, normed: torch.Tensor, weight: torch.Tensor, streams: int) -> bool:
        """Whether :meth:`gated_mix` is one kernel for these."""
        return self._fused and bool(self._triton.gates(normed, weight, streams))

    def gated_mix(self, normed: torch.Tensor, low: torch.Tensor, weight: torch.Tensor, streams: int) -> torch.Tensor:
        """See :func:`reference.gated_mix`; rows of ``low`` begin at multiples of 16 bytes."""
        if not self.gates(normed, weight, streams):
            return reference.gated_mix(normed, low, weight, streams)
        out = self._triton.gated_mix(normed, low, weight, streams)
        if self._checked:
            checking.refuse_capture("hyper_mix", self.choice.flag)
            expected = reference.gated_mix(normed, low, weight, streams)
            checking.require_close("hyper_mix", "the input", out, expected)
        return out
