"""``qwen4_exp`` (Qwen3.8-Flash-Next), text only: hyper-connections around Gated DeltaNet or indexed attention and experts, and n-gram
embeddings at the entry of some layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.kernels.hyper_mix import HyperMix
from freetoken.models.config import LINEAR_ATTENTION, ModelConfig
from freetoken.models.decoder import AttentionBackend, Layer, Mixer, Pass
from freetoken.models.gdn import GatedDeltaNet, HybridOps
from freetoken.models.hyper import HyperConnection, HyperLayer
from freetoken.models.layers import Placement, Slot, Weighted
from freetoken.models.ple import PerLayerEmbeddings
from freetoken.models.qsa import IndexedAttention, make_index_pass, make_qsa
from freetoken.models.qwen3_5 import Qwen35Model

if TYPE_CHECKING:
    from freetoken.runner.forward_batch import ForwardBatch
    from freetoken.runner.kv_pool import KVPool
    from freetoken.runner.state_pool import StatePool


class HyperOps(HybridOps):
    """The fused ops of a hybrid decoder with hyper-connections and an indexer."""

    def __init__(self, config: ModelConfig, device: torch.device, max_positions: int) -> None:
        super().__init__(config, device, max_positions)
        self.hyper = HyperMix(choose_op("hyper_mix", device.type))
        self.qsa = make_qsa(config, self.rope.table)
        self.choices += [self.hyper.choice, self.qsa.choice]


class Qwen4ExpModel(Qwen35Model):
    """``config.layer_types`` says which mixer each layer has; every layer has experts and a shared one."""

    ops: HyperOps

    def make_ops(self) -> HyperOps:
        return HyperOps(self.config, self.device, self.max_positions)

    def make_layer(self, place: Placement, index: int) -> Layer:
        mixer, mlp = self.make_mixer(place, index), self.make_mlp(place, index)
        return HyperLayer(self.config, self.ops.hyper, self.ops.gemm, place, index, mixer, mlp)

    def make_mixer(self, place: Placement, index: int) -> Mixer:
        kinds, prefix = self.config.layer_types, f"model.layers.{index}"
        rank = kinds[:index].count(kinds[index])
        if kinds[index] == LINEAR_ATTENTION:
            return GatedDeltaNet(self.config, self.ops, place, f"{prefix}.linear_attn", rank)
        return IndexedAttention(self.config, self.ops, self.ops.qsa, place, f"{prefix}.self_attn", rank)

    def make_norm(self, place: Placement) -> HyperConnection:
        """The last read of the streams, which has a norm of its own; n-gram embeddings are made here, too."""
        c = self.config
        if c.ple is not None:
            centred = c.zero_centred_norm
            self.ple = PerLayerEmbeddings(c.ple, self.ops.gemm, place, eps=c.rms_norm_eps, zero_centred=centred)
        name = "model.hyper_connection_mixer"
        return HyperConnection(c, self.ops.hyper, self.ops.gemm, place, name, injects=False)

    def modules(self) -> Iterator[Weighted]:
        yield self.embedding
        for layer in self.layers:
            yield from layer.modules()
        if self.ple is not None:
            yield from self.ple.modules()
        yield from self.norm.modules()
        yield self.head

    def pieces(self) -> dict[str, dict[str, Slot]]:
        found = super().pieces()
        for layer in self.layers:
            if isinstance(layer, HyperLayer) and isinstance(layer.mixer, IndexedAttention):
                found |= layer.mixer.indexer.pieces()
        return found

    @torch.inference_mode()
    def forward(
        self, fb: ForwardBatch, kv: KVPool, backend: AttentionBackend, states: StatePool | None = None
    ) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` as the head takes them; K, V, index keys and states of all T tokens are stored afterwards."""
        hyper = self.config.hyper
        assert hyper is not None
        embedded = None
        if self.ple is not None:
            assert states is not None
            embedded = self.ple.begin(fb, states)
        rope = self.ops.rope.prepare(fb.positions, fb.out_slots, kv.page_size)
        index = make_index_pass(self.ops.qsa, fb, kv, self.config)
        step = Pass(fb, kv, rope, backend, states, self.prepare(fb), index)
        streams, pending = self.embedding(fb.input_ids).repeat(1, hyper.streams), None
        for layer in self.layers:
            assert isinstance(layer, HyperLayer)
            if self.ple is not None and embedded is not None and layer.index in self.ple.layers:
                streams, pending = layer.embed(self.ple, streams, pending, embedded)
            streams, pending = layer.forward(streams, pending, step)
        return self.norm.read(streams, pending)[0]

    def kernel_choices(self) -> list[Choice]:
        return super().kernel_choices() + ([] if self.ple is None else self.ple.choices)
