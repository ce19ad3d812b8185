"""One decode step of a Gated DeltaNet layer in plain torch: the specification of the fused kernel."""

from __future__ import annotations

import torch

from freetoken.kernels.gdn_conv import reference as conv
from freetoken.kernels.gdn_prefill.reference import gated_norm, prepare


def gdn_decode(
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
    sigmoid: bool = False,
) -> torch.Tensor:
    """The next token of each of B sequences through one layer: ``[B, Hv * Dv]`` in the type of ``qkv``.

    ``qkv [B, C]`` holds the raw q, k and v columns (``C = 2 Hk Dk + Hv Dv``), ``z [B, Hv * Dv]`` the output gate, ``a`` and
    ``b`` ``[B, Hv]`` the inputs of decay and beta; their rows may have any stride. Value head h uses key head
    ``h // (Hv // Hk)``. In turn: the convolution with SiLU of :func:`freetoken.kernels.gdn_conv.reference.decode` with
    ``conv_weight [C, W]``, rounded to the type of ``qkv``; the gated delta rule of
    :mod:`freetoken.kernels.gdn_prefill.reference` in float32 with ``A_log`` and ``dt_bias`` ``[Hv]``; its output rounded; and the
    gated RMSNorm of :func:`freetoken.kernels.gdn_prefill.reference.gated_norm` with ``norm_weight [Dv]``,
    ``eps`` and, by ``sigmoid``, its kind of gate.

    ``conv_state [slots, W, C]`` (a ring, see the convolution) and ``rec_state [slots, Hv, Dv, Dk]`` float32 are updated in
    place at ``slots [B]`` int64. Nothing is read of the states of a sequence at position 0 (``positions [B]`` int64). Slot −1
    updates nothing and its output means nothing; lanes that share a slot leave anything in it.
    """
    batch = qkv.shape[0]
    if batch == 0:
        return torch.empty_like(z, memory_format=torch.contiguous_format)
    heads, dv, dk = rec_state.shape[1:]
    mixed = conv.decode(qkv, conv_weight, None, conv_state, slots, positions)
    columns = (mixed.shape[1] - heads * dv) // 2
    q, k, v = mixed.split([columns, columns, heads * dv], 1)
    shapes = ((q, dk), (k, dk), (v, dv))
    wide = prepare(*(x.reshape(batch, -1, width) for x, width in shapes), a, b, A_log, dt_bias)
    q, k, v, g, beta = (x.transpose(0, 1) for x in wide)

    state = rec_state[slots.clamp_min(0)].to(q.dtype)
    state = torch.where((positions > 0)[:, None, None, None], state, 0) * g.exp()[..., None, None]
    delta = beta[..., None] * (v - (state @ k[..., None]).squeeze(-1))
    state = torch.addcmul(state, delta[..., None], k[..., None, :])
    o = (state @ q[..., None]).squeeze(-1)
    conv.update_slots(rec_state, slots, state.to(rec_state.dtype))
    return gated_norm(o.to(qkv.dtype), z.reshape(batch, heads * dv), norm_weight, eps, sigmoid)
