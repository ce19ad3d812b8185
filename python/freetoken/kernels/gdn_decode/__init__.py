"""The decode step of Gated DeltaNet layers: convolution, gates, delta rule and gated norm, both states in place."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.gdn_decode import reference
from freetoken.kernels.gdn_decode.config import DecodeConfig, candidates, pick_config

__all__ = ["CHECK_BOUNDS", "DecodeConfig", "GdnDecode", "candidates", "pick_config"]

CHECK_BOUNDS = {**checking.RELATIVE_RMS, torch.float32: 1e-4}
"""Largest relative RMS of outputs and of states against the reference, by the type of the inputs: the norm divides by the size of a
head's own output, so one that nearly cancels shows the rounding of what it was summed from."""


class GdnDecode:
    """The op with its implementation bound once, shared by all layers of a model.

    Shapes and semantics are those of :func:`reference.gdn_decode`. ``config`` overrides the default settings of the kernel.
    """

    def __init__(self, choice: Choice, config: DecodeConfig | None = None) -> None:
        self.choice = choice
        self._config = config
        self._fused = choice.impl != "reference"
        self._checked = choice.impl == "check"
        if self._fused:
            from freetoken.kernels.gdn_decode import triton

            self._triton = triton
            self._scratch = triton.Scratch()

    def reserve(self, batch: int, rec_state: torch.Tensor) -> None:
        """Prepare for batches of up to ``batch`` with states like ``rec_state`` (scratch memory, where heads are split); called
        before the first step."""
        heads, dv, dk = rec_state.shape[1:]
        configs = [self._config or pick_config(dv, dk, count) for count in (heads, heads * batch)]
        if self._fused and any(config.splits(dv) > 1 for config in configs):
            self._scratch.reserve(batch, heads, dv, rec_state.device)

    def __call__(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_weight: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        conv_state: torch.Tensor,
        rec_state: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        settled: bool = False,
        sigmoid: bool = False,
    ) -> torch.Tensor:
        """``[B, Hv * Dv]``; ``conv_state`` and ``rec_state`` are updated in place. The gate is SiLU or a ``sigmoid``. ``settled`` is a promise of the caller that makes
        the kernel faster, see :func:`triton.gdn_decode`."""
        inputs = (qkv, z, a, b, conv_weight, A_log, dt_bias, norm_weight, eps)
        if not self._fused:
            return reference.gdn_decode(*inputs, conv_state, rec_state, slots, positions, sigmoid=sigmoid)
        if self._checked:
            checking.refuse_capture("gdn_decode", self.choice.flag)
            live = (slots >= 0).nonzero().squeeze(1)
            used = slots[live]
            states = (conv_state[used], rec_state[used])
            lanes = tuple(x[live] for x in (qkv, z, a, b))
            rows = torch.arange(live.shape[0], device=slots.device)
            expected = reference.gdn_decode(*lanes, *inputs[4:], *states, rows, positions[live], sigmoid=sigmoid)
        out = self._triton.gdn_decode(
            *inputs,
            conv_state,
            rec_state,
            slots,
            positions,
            config=self._config,
            scratch=self._scratch,
            settled=settled,
            sigmoid=sigmoid,
        )
        if self._checked:
            bound = CHECK_BOUNDS[qkv.dtype]
            checking.require_close("gdn_decode", "the output", out[live], expected, bound)
            checking.require_close("gdn_decode", "the conv state", conv_state[used], states[0], bound)
            checking.require_close("gdn_decode", "the recurrent state", rec_state[used], states[1], bound)
        return out
