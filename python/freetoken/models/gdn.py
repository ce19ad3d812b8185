"""The mixers of hybrid models: Gated DeltaNet (arXiv:2412.06464), and attention whose output is gated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from freetoken.errors import StartupError
from freetoken.kernels.block_fp8 import Fp8Weight
from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.gdn_conv import GdnConv, pack_weight
from freetoken.kernels.gdn_decode import GdnDecode
from freetoken.kernels.gdn_prefill import GdnPrefill
from freetoken.kernels.gdn_prefill.plan import Plan
from freetoken.models.config import LinearAttentionConfig, ModelConfig
from freetoken.models.decoder import Attention, Ops, Pass
from freetoken.models.layers import ColumnLinear, Placement, Slot, Weighted, scale_slot
from freetoken.models.packed import Fed, Feed, PackedLinear
from freetoken.models.state import CONV_STATE, REC_STATE

if TYPE_CHECKING:
    from freetoken.runner.forward_batch import ForwardBatch


class HybridOps(Ops):
    """The fused ops of a decoder with Gated DeltaNet layers."""

    def __init__(self, config: ModelConfig, device: torch.device, max_positions: int) -> None:
        super().__init__(config, device, max_positions)
        kind = device.type
        self.conv = GdnConv(choose_op("gdn_conv", kind))
        self.decode = GdnDecode(choose_op("gdn_decode", kind))
        self.prefill = GdnPrefill(choose_op("gdn_prefill", kind))
        self.choices += [self.conv.choice, self.decode.choice, self.prefill.choice]


@dataclass(frozen=True)
class Pieces:
    """The prompt pieces of one step, whose tokens follow the decodes: the same for every Gated DeltaNet layer."""

    slots: torch.Tensor
    starts: torch.Tensor
    q_starts: torch.Tensor
    max_q_len: int
    plan: Plan


def make_pieces(ops: HybridOps, fb: ForwardBatch) -> Pieces | None:
    """Tables for the pieces of ``fb``, ``None`` without any. Lengths come from the host; nothing is read back."""
    if not fb.num_prefills:
        return None
    first = fb.num_decodes
    plan = ops.prefill.plan(fb.q_lens_host[first:], fb.rows.device)
    return Pieces(fb.rows[first:], fb.starts, fb.q_starts, fb.max_q_len, plan)


class GdnWeights:
    """What a Gated DeltaNet layer has beside its projections.

    ``conv [C, W]`` (channels contiguous), ``norm [Dv]``, and in float32 ``A_log`` and ``dt_bias`` ``[Hv]``.
    """

    def __init__(self, linear: LinearAttentionConfig, place: Placement, name: str) -> None:
        heads, width = linear.num_value_heads, linear.conv_width
        self.conv = pack_weight(place.empty(linear.channels, width))
        self.norm = place.empty(linear.value_head_dim)
        self.A_log = place.empty(heads, dtype=torch.float32)
        self.dt_bias = place.empty(heads, dtype=torch.float32)
        self.slots = {
            f"{name}.conv1d.weight": Slot(self.conv.unsqueeze(1), (linear.channels, 1, width)),
            f"{name}.norm.weight": Slot(self.norm, (linear.value_head_dim,)),
            f"{name}.A_log": Slot(self.A_log, (heads,)),
            f"{name}.dt_bias": Slot(self.dt_bias, (heads,)),
        }

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.conv, self.norm, self.A_log, self.dt_bias)

    def randomise(self, generator: torch.Generator) -> None:
        """Decay rates as a fresh model of the family has them: ``A`` uniform up to 16, ``dt_bias`` 1."""
        self.conv.normal_(0.0, self.conv.shape[1] ** -0.5, generator=generator)
        self.norm.fill_(1.0)
        self.A_log.uniform_(0.01, 16.0, generator=generator).log_()
        self.dt_bias.fill_(1.0)


class GatedDeltaNet:
    """Linear attention with a state of fixed size a request; ``index`` counts the layers of this kind.

    q, k, v, z, b and a come from one merged projection, in this order; where q, k, v and z are packed, b and a come from one of their own,
    of plain activations. Decodes go through one fused step, prompt pieces through the convolution, the chunked delta rule and the
    gated norm.
    """

    def __init__(self, config: ModelConfig, ops: HybridOps, place: Placement, name: str, index: int) -> None:
        linear = config.linear_attention
        assert linear is not None
        if place.tp_size != 1:
            raise StartupError(f"{name}: linear attention is not split over tensor-parallel ranks")
        self.index = index
        self.geometry = linear
        self.eps = config.rms_norm_eps
        self.ops = ops
        heads, hidden, build = linear.num_value_heads, config.hidden_size, ops.build
        wide = {f"{name}.in_proj_qkv": linear.channels, f"{name}.in_proj_z": linear.value_size}
        gates = {f"{name}.in_proj_b": heads, f"{name}.in_proj_a": heads}
        self.widths = [linear.channels, linear.value_size, heads, heads]
        # Gates stay out of FP8 and of 2 bits, and then cannot be part of the same product.
        packed = build.packing(wide, hidden) is not None
        apart = packed or place.holds_fp8(wide)
        self.projection = build.column(place, wide if apart else wide | gates, hidden)
        self.gates = build.column(place, gates, hidden) if apart else None
        self.beside = self.gates if packed else None
        self.weights = GdnWeights(linear, place, name)
        self.out = build.row(place, f"{name}.out_proj", hidden, linear.value_size)

    @property
    def feed(self) -> Feed | None:
        return self.projection.feed

    def modules(self) -> Iterator[Weighted]:
        yield self.projection
        if self.gates is not None:
            yield self.gates
        yield from (self.weights, self.out)

    def forward(self, x: torch.Tensor | Fed, step: Pass) -> torch.Tensor:
        assert step.states is not None
        projected = self._project(x)
        conv = step.states.layer(CONV_STATE, self.index)
        rec = step.states.layer(REC_STATE, self.index)
        decodes, pieces = step.fb.num_decodes, step.extra
        parts = []
        if decodes:
            parts.append(self._decode([part[:decodes] for part in projected], step.fb, conv, rec))
        if pieces is not None:
            z = projected[1][decodes:]
            o = self._prefill([part[decodes:] for part in projected], pieces, conv, rec)
            if not decodes and self.out.feed is not None:
                return self.out(self.out.feed.gated_norm(o, z, self.weights.norm, self.eps))
            parts.append(self.ops.prefill.norm(o, z, self.weights.norm, self.eps, self.geometry.sigmoid_gate))
        return self.out(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _project(self, x: torch.Tensor | Fed) -> list[torch.Tensor]:
        """q, k and v together, z, b and a of ``x [T, hidden]``, each ``[T, …]`` of any row stride."""
        if self.gates is None:
            return list(self.projection(x).split(self.widths, 1))
        if isinstance(x, Fed) and isinstance(self.projection, PackedLinear):
            wide, gates = self.projection.beside(x, self.gates)
        else:
            gates = self.gates(x)
            wide = self.projection(x)
        return [*wide.split(self.widths[:2], 1), *gates.split(self.widths[2:], 1)]

    def _decode(
        self, projected: list[torch.Tensor], fb: ForwardBatch, conv: torch.Tensor, rec: torch.Tensor
    ) -> torch.Tensor:
        """``[decodes, Hv * Dv]``: one token of each decoding request, states in place."""
        qkv, z, b, a = projected
        count, w = fb.num_decodes, self.weights
        inputs = (qkv, z, a, b, w.conv, w.A_log, w.dt_bias, w.norm, self.eps)
        # A slot is written once a step, and every step begins by gathering ids and embeddings, which waits for the step before.
        return self.ops.decode(
            *inputs, conv, rec, fb.rows[:count], fb.positions[:count], settled=True, sigmoid=self.geometry.sigmoid_gate
        )

    def _prefill(
        self, projected: list[torch.Tensor], pieces: Pieces, conv: torch.Tensor, rec: torch.Tensor
    ) -> torch.Tensor:
        """``[tokens, Hv, Dv]`` of all prompt pieces before the gated norm, states in place."""
        qkv, _, b, a = projected
        g, w = self.geometry, self.weights
        p = pieces
        mixed = self.ops.conv.prefill(qkv, w.conv, None, conv, p.q_starts, p.slots, p.starts, p.max_q_len)
        q, k, v = mixed.split([g.key_size, g.key_size, g.value_size], 1)
        q, k = (heads.unflatten(1, (g.num_key_heads, g.key_head_dim)) for heads in (q, k))
        v = v.unflatten(1, (g.num_value_heads, g.value_head_dim))
        return self.ops.prefill(q, k, v, a, b, w.A_log, w.dt_bias, rec, p.slots, p.starts, p.plan)


def _by_head(whole: torch.Tensor, query: Slot, gate: Slot, heads: int, rows: int) -> torch.Tensor:
    """``whole`` seen as ``[heads, 2, rows, …]``: of each head the rows where ``query`` lies, then those where ``gate`` does."""
    apart = gate.target.storage_offset() - query.target.storage_offset()
    row = whole.stride(0)
    strides = (rows * row, apart, row, *whole.stride()[1:])
    return whole.as_strided((heads, 2, rows, *whole.shape[1:]), strides, whole.storage_offset())


class GatedProjection(ColumnLinear):
    """Queries, keys, values and output gates in one weight, its rows in this order.

    In the checkpoint ``q_proj`` holds for each head its query rows, then its gate rows.
    """

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, name: str) -> None:
        q_size, kv_size, hidden = config.q_size, config.kv_size, config.hidden_size
        q_name, gate_name = f"{name}.q_proj", f"{name}.gate"
        kv = {f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        super().__init__(
            ops.gemm,
            place,
            {q_name: q_size, **kv, gate_name: q_size},
            hidden,
            bias=config.attention_bias,
            fp8_parts=[q_name, *kv],
            units=(config.head_dim,),
        )
        heads, dim = config.num_heads // place.tp_size, config.head_dim
        fp8 = isinstance(self.weight, Fp8Weight)
        group = self.weight.rows if fp8 else 1
        wholes = [("weight", self.weight.data if fp8 else self.weight, dim)]
        if fp8:
            wholes.append(("weight_scale_inv", self.weight.scale, dim // group))
        if self.bias is not None:
            wholes.append(("bias", self.bias, dim))
        for kind, whole, rows in wholes:
            query, gate = (self.slots.pop(f"{part}.{kind}") for part in (q_name, gate_name))
            target = _by_head(whole, query, gate, heads, rows)
            if kind == "weight_scale_inv":
                self.slots[f"{q_name}.{kind}"] = scale_slot(target, (2 * q_size, hidden), group)
                continue
            shape = (2 * query.shape[0], *query.shape[1:])
            self.slots[f"{q_name}.{kind}"] = Slot(target, shape, 0, 2 * query.start, 2 * (query.length or q_size))


class PackedGatedProjection(PackedLinear):
    """The same in 2 bits."""

    def __init__(self, feed: Feed, group: int, config: ModelConfig, place: Placement, name: str) -> None:
        q_size, kv_size = config.q_size, config.kv_size
        q_name, gate_name = f"{name}.q_proj", f"{name}.gate"
        parts = {q_name: q_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size, gate_name: q_size}
        super().__init__(feed, place, parts, config.hidden_size, group, bias=config.attention_bias)
        for kind, whole in self.planes().items():
            query, gate = (self.slots.pop(f"{part}.{kind}") for part in (q_name, gate_name))
            target = _by_head(whole, query, gate, config.num_heads, config.head_dim)
            self.slots[f"{q_name}.{kind}"] = Slot(target, (2 * query.shape[0], *query.shape[1:]))


class GatedAttention(Attention):
    """Attention each of whose heads is multiplied by the sigmoid of a gate projected from the layer's input."""

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, name: str, kv_layer: int) -> None:
        super().__init__(config, ops, place, name, kv_layer)
        self._gate = ops.silu_mul
        self.gate_width = config.q_size // place.tp_size

    def make_projection(
        self, config: ModelConfig, ops: Ops, place: Placement, name: str
    ) -> ColumnLinear | PackedLinear:
        stored = [f"{name}.{part}_proj" for part in ("q", "k", "v")]
        packing = ops.build.packing(stored, config.hidden_size)
        if packing is None:
            return GatedProjection(config, ops, place, name)
        return PackedGatedProjection(*packing, config, place, name)

    def forward(self, x: torch.Tensor | Fed, step: Pass) -> torch.Tensor:
        projected = self.qkv(x)
        heads = self.attend(projected[:, : -self.gate_width], step)
        gate = projected[:, -self.gate_width :]
        feed = self.o.feed
        return self.o(self._gate.sigmoid_mul(heads, gate) if feed is None else feed.sigmoid_mul(heads, gate))
