"""Gated DeltaNet over prompts: the chunked delta rule over ragged pieces, and the gated norm after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.gdn_prefill import reference
from freetoken.kernels.gdn_prefill.plan import Plan, make_plan

CHECK_BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Largest relative RMS of outputs and of states against the reference, by the type of the inputs."""


class GdnPrefill:
    """The op with its implementation bound once. Use: ``plan = op.plan(lengths, device)`` once a step, then in every layer
    ``o = op(q, k, v, a, b, A_log, dt_bias, rec_state, slots, starts, plan)`` and ``op.norm(o, z, weight, eps)``.

    Semantics and shapes are those of :mod:`reference`.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._rule: Callable[..., torch.Tensor] = reference.gdn_prefill
        self._norm = reference.gated_norm
        if choice.impl == "fla":
            from freetoken.kernels.gdn_prefill import fla

            self._rule = fla.gdn_prefill
        elif choice.impl != "reference":
            from freetoken.kernels.gdn_prefill import triton

            self._rule, self._norm = triton.gdn_prefill, triton.gated_norm
        self._checked = choice.impl == "check"

    def plan(self, lengths: Sequence[int], device: torch.device | str) -> Plan:
        """Tables of a step whose pieces have these lengths (host integers, 0 allowed); no device read."""
        return make_plan(lengths, device, fla=self.choice.impl == "fla")

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        rec_state: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        """``o [T, Hv, Dv]``; ``rec_state`` is updated in place. ``slots [B] int64``, ``starts [B] int32`` on the device."""
        if not self._checked:
            return self._rule(q, k, v, a, b, A_log, dt_bias, rec_state, slots, starts, plan)
        checking.refuse_capture("gdn_prefill", self.choice.flag)
        states = rec_state.clone()
        expected = reference.gdn_prefill(q, k, v, a, b, A_log, dt_bias, states, slots, starts, plan)
        out = self._rule(q, k, v, a, b, A_log, dt_bias, rec_state, slots, starts, plan)
        bound = CHECK_BOUNDS[v.dtype]
        checking.require_close("gdn_prefill", "the output", out, expected, bound)
        used = slots[torch.tensor(plan.lengths, device=slots.device) > 0]
        used = used[used >= 0]
        checking.require_close("gdn_prefill", "the state", rec_state[used], states[used], bound)
        return out

    def norm(
        self, o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, sigmoid: bool = False
    ) -> torch.Tensor:
        """The gated RMSNorm of ``o [T, Hv, Dv]`` with ``z [T, Hv * Dv]``: ``[T, Hv * Dv]``. The gate is SiLU or a ``sigmoid``."""
        out = self._norm(o, z, weight, eps, sigmoid)
        if self._checked:
            checking.refuse_capture("gdn_prefill", self.choice.flag)
            expected = reference.gated_norm(o, z, weight, eps, sigmoid)
            checking.require_close("gdn_prefill", "the gated norm", out, expected)
        return out
