"""The gated delta rule over ragged pieces in plain torch, token by token (the specification) and in chunks.

For each value head, with the state ``S [Dv, Dk]``, ``q`` and ``k`` divided by ``sqrt(sum of squares + 1e-6)``, ``q`` also
multiplied by ``Dk ** -0.5``, ``beta = sigmoid(b)`` and ``g = -exp(A_log) * softplus(a + dt_bias)`` (Gated Delta Networks,
arXiv:2412.06464, as in the ``qwen3_5`` model of transformers)::

    S = exp(g) S;  delta = beta (v - S k);  S = S + delta k^T;  o = S q

Arithmetic is float32 (float64 for float64 inputs). ``gated_norm`` is the RMSNorm that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.nn.functional import pad, silu, softplus

from freetoken.kernels.gdn_prefill.plan import CHUNK, Plan

L2_EPS = 1e-6
MOST_DECAY = -45.0
"""Lower bound of a token's ``g`` in a chunk: what is left is below any rounding, and sums keep their precision."""


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the arithmetic for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(q, k, v, g, beta)`` in the type of the arithmetic, head first: ``[Hv, T, D]`` and ``[Hv, T]``."""
    wide, group = wide_type(q.dtype), v.shape[1] // k.shape[1]
    q, k, v, a, b = (x.to(wide).transpose(0, 1) for x in (q, k, v, a, b))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q = (q * q.shape[-1] ** -0.5).repeat_interleave(group, 0)
    g = -A_log.to(wide).exp()[:, None] * softplus(a + dt_bias.to(wide)[:, None])
    return q, k.repeat_interleave(group, 0), v, g, b.sigmoid()


def delta_rule_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece token by token. Inputs as :func:`prepare` returns them, ``state [Hv, Dv, Dk]``; ``(o [Hv, T, Dv], state)``."""
    out = torch.empty_like(v)
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[:, None, None]
        delta = beta[:, t, None] * (v[:, t] - torch.einsum("hvk,hk->hv", state, k[:, t]))
        state = state + delta[:, :, None] * k[:, t, None, :]
        out[:, t] = torch.einsum("hvk,hk->hv", state, q[:, t])
    return out, state


def delta_rule_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`delta_rule_tokens`, chunk by chunk.

    With ``G`` the decay summed inside the chunk and ``D[i, j] = exp(G[i] - G[j])`` for ``j <= i``, the deltas of a chunk solve
    ``(I + strict_lower(beta K K^T D)) deltas = beta (V - exp(G) K S^T)``.
    """
    heads, tokens, width = v.shape
    size = min(CHUNK, tokens)
    count = -(-tokens // size)
    padding = count * size - tokens
    q, k, v = (pad(x, (0, 0, 0, padding)).view(heads, count, size, -1) for x in (q, k, v))
    g, beta = (pad(x, (0, padding)).view(heads, count, size) for x in (g, beta))
    total = g.clamp(min=MOST_DECAY).cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    decay = torch.where(lower, total[..., :, None] - total[..., None, :], -torch.inf).exp()
    coupling = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    right = torch.cat([v, k * total.exp()[..., None]], -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
    values, keys = solved.split([width, k.shape[-1]], -1)
    scores = (q @ k.mT) * decay
    queries = q * total.exp()[..., None]
    last = total[..., -1]
    carried = k * (last[..., None] - total).exp()[..., None]
    out = torch.empty_like(v)
    for c in range(count):
        delta = values[:, c] - keys[:, c] @ state.mT
        out[:, c] = queries[:, c] @ state.mT + scores[:, c] @ delta
        state = state * last[:, c, None, None].exp() + delta.mT @ carried[:, c]
    return out.view(heads, count * size, width)[:, :tokens], state


def gdn_prefill(
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
    *,
    chunked: bool = True,
) -> torch.Tensor:
    """Run the delta rule over the pieces of ``plan``; ``o [T, Hv, Dv]`` in the type of ``v``, states updated in place.

    ``q, k [T, Hk, Dk]`` and ``v [T, Hv, Dv]`` are unnormalised and may be views; ``a, b [T, Hv]``; ``A_log, dt_bias [Hv]``;
    ``rec_state [slots, Hv, Dv, Dk]`` float32. Piece i goes on from ``rec_state[slots[i]]``, or from zero when ``starts[i]`` is 0,
    and leaves its last state there. A piece with slot −1 starts from zero and leaves no state; an empty piece leaves the state
    alone. Reads ``slots`` and ``starts`` on the host.
    """
    rule: Callable[..., tuple[torch.Tensor, torch.Tensor]] = delta_rule_chunks if chunked else delta_rule_tokens
    wide = prepare(q, k, v, a, b, A_log, dt_bias)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    ends = list(accumulate(plan.lengths))
    for length, end, slot, start in zip(plan.lengths, ends, slots.tolist(), starts.tolist(), strict=True):
        if length == 0:
            continue
        piece = slice(end - length, end)
        state = wide[0].new_zeros(rec_state.shape[1:])
        if start > 0 and slot >= 0:
            state = rec_state[slot].to(state.dtype)
        o, state = rule(*(x[:, piece] for x in wide), state)
        out[piece] = o.transpose(0, 1).to(out.dtype)
        if slot >= 0:
            rec_state[slot] = state.to(rec_state.dtype)
    return out


def gated_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, sigmoid: bool = False
) -> torch.Tensor:
    """``weight * o / sqrt(mean(o^2) + eps) * silu(z)`` (or ``sigmoid(z)``) over each head of ``o [T, Hv, Dv]``; ``[T, Hv * Dv]`` in its type.

    ``z [T, Hv * Dv]`` may be a view with a row stride. Statistics and the gate are float32; the normalised value is rounded to the
    type of ``o`` before ``weight [Dv]``, of the same type, multiplies it, and so is the product, as in transformers.
    """
    wide = o.to(wide_type(o.dtype))
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(o.dtype)
    gate = (torch.sigmoid if sigmoid else silu)(z.to(wide.dtype)).view(o.shape)
    return ((weight * normal).to(wide.dtype) * gate).to(o.dtype).flatten(1)
