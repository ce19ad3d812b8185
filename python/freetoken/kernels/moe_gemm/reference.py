"""A layer of experts in plain torch: the specification of the fused kernels."""

from __future__ import annotations

import torch

from freetoken.kernels.block_fp8 import Weight, part, plain
from freetoken.kernels.small_gemm.reference import linear, linear_silu_mul

Shared = tuple[torch.Tensor, torch.Tensor]
"""Output ``[T, H]`` of an expert that every token has, and the logits ``[T]`` of its gate."""


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    shared: Shared | None = None,
) -> torch.Tensor:
    """``[T, H]``: for each token the sum over its routes of ``weight * down(silu(gate x) * up x)``.

    ``x [T, H]``, ``ids [T, K]`` int32 into the stacks (a negative one adds nothing), ``weights [T, K]`` float32,
    ``gate_up [E, 2F, H]`` (gate rows first) and ``down [E, H, F]``. With ``shared``, ``sigmoid(logit) * output`` is added. Each expert's
    two products are rounded to the type of ``x``, sums are float32. Reads on the host which experts are used, except in
    a CUDA graph, where all of them see all tokens.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    used = range(down.shape[0]) if captured else [e for e in ids.unique().tolist() if e >= 0]
    for expert in used:
        mine = (ids == expert).any(1)
        rows = slice(None) if captured else mine.nonzero().squeeze(1)
        share = (weights[rows] * (ids[rows] == expert)).sum(1, keepdim=True)
        hidden = linear_silu_mul(x[rows], plain(part(gate_up, expert), x.dtype))
        total[rows] += share * linear(hidden, plain(part(down, expert), x.dtype)).float()
    if shared is not None:
        output, logits = shared
        total += logits.float().sigmoid()[:, None] * output.float()
    return total.to(x.dtype)
