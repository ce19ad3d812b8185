"""Random inputs of the Gated DeltaNet prefill, laid out as the conv and the projections of a layer give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from poison import DEVICE
from torch.nn.functional import silu

from freetoken.kernels.gdn_prefill.plan import Plan, make_plan


@dataclass
class Inputs:
    """The arguments of one call; ``rec_state`` has two slots more than pieces, and the slots of fresh pieces hold NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    rec_state: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    plan: Plan

    def call(self, rule, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """``(o, rec_state after)``; the inputs stay as they are."""
        state = self.rec_state.clone()
        arguments = {**vars(self), "rec_state": state}
        return rule(**arguments, **options), state

    def piece(self, first: int, last: int, state: torch.Tensor) -> Inputs:
        """The tokens ``first .. last`` of a single sequence, as a piece that goes on from ``state`` (fresh at token 0)."""
        tokens = {name: getattr(self, name)[first:last] for name in ("q", "k", "v", "a", "b")}
        starts = torch.tensor([first], dtype=torch.int32, device=state.device)
        return replace(self, **tokens, rec_state=state, starts=starts, plan=make_plan([last - first], state.device))


def make_inputs(
    lengths: Sequence[int],
    *,
    key_heads: int = 1,
    group: int = 2,
    dk: int = 16,
    dv: int = 16,
    dtype: torch.dtype = torch.float32,
    likeness: float = 0.0,
    seed: int = 0,
    device: str = DEVICE,
    fla: bool = False,
) -> Inputs:
    """``likeness`` is how much the keys have in common. Every second piece goes on from a state; decays a token go from below 0.001
    to several units."""
    torch.manual_seed(seed)
    tokens, pieces, heads = sum(lengths), len(lengths), key_heads * group
    widths = [key_heads * dk, key_heads * dk, heads * dv]
    wide = torch.randn(tokens, sum(widths), device=device)
    wide += likeness * torch.randn(1, sum(widths), device=device)
    q, k, v = silu(wide).to(dtype).split(widths, 1)
    gates = torch.randn(tokens, 2 * heads + 3, device=device).to(dtype)
    rates = torch.linspace(-6, 2, heads, device=device)
    state = torch.randn(pieces + 2, heads, dv, dk, device=device)
    slots = torch.randperm(pieces + 2, device=device)[:pieces]
    starts = torch.arange(pieces, dtype=torch.int32, device=device) % 2 * 7
    state[slots[starts == 0]] = float("nan")
    return Inputs(
        q.view(tokens, key_heads, dk),
        k.view(tokens, key_heads, dk),
        v.view(tokens, heads, dv),
        gates[:, 1 : heads + 1],
        gates[:, heads + 2 : 2 * heads + 2],
        rates,
        torch.randn(heads, device=device),
        state,
        slots,
        starts,
        make_plan(lengths, device, fla=fla),
    )
