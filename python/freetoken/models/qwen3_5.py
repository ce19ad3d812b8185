"""Qwen3.5, 3.6 and 3.8 dense (``qwen3_5`` in transformers), text only: three Gated DeltaNet layers to one of gated attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.models.config import LINEAR_ATTENTION
from freetoken.models.decoder import DecoderModel, Mixer
from freetoken.models.gdn import GatedAttention, GatedDeltaNet, HybridOps, Pieces, make_pieces
from freetoken.models.layers import Placement
from freetoken.models.state import REC_STATE

if TYPE_CHECKING:
    from freetoken.runner.forward_batch import ForwardBatch
    from freetoken.runner.state_pool import StatePool


class Qwen35Model(DecoderModel):
    """``layer_types`` says which mixer each layer has; a part of each attention head is rotated, norms are zero-centred."""

    ops: HybridOps

    def make_ops(self) -> HybridOps:
        return HybridOps(self.config, self.device, self.max_positions)

    def make_mixer(self, place: Placement, index: int) -> Mixer:
        kinds, prefix = self.config.layer_types, f"model.layers.{index}"
        rank = kinds[:index].count(kinds[index])
        if kinds[index] == LINEAR_ATTENTION:
            return GatedDeltaNet(self.config, self.ops, place, f"{prefix}.linear_attn", rank)
        return GatedAttention(self.config, self.ops, place, f"{prefix}.self_attn", rank)

    def reserve(self, states: StatePool) -> None:
        if self.config.num_linear_layers:
            self.ops.decode.reserve(states.slots, states.layer(REC_STATE, 0))

    def prepare(self, fb: ForwardBatch) -> Pieces | None:
        return make_pieces(self.ops, fb) if self.config.num_linear_layers else None
