"""Hyper-connections (arXiv:2409.19606): several residual streams in place of one, as in ``qwen4_exp`` of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from freetoken.errors import StartupError
from freetoken.kernels.hyper_mix import HyperMix, Pending
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.config import ModelConfig
from freetoken.models.decoder import Mixer, Mlp, Pass
from freetoken.models.layers import ColumnLinear, Placement, Slot, Weighted
from freetoken.models.ple import PerLayerEmbeddings, PleStep

ROW_MULTIPLE = 16
"""Rows of the merged projection are filled up to a multiple of this: products of an odd number are slow."""


class HyperConnection:
    """Reads one input ``[T, H]`` out of the streams; what its block makes of it is written back by the next one that reads.

    ``injects`` says that a block follows. The projections down to the rank and to the weights of the write-back are one product.
    """

    def __init__(
        self, config: ModelConfig, op: HyperMix, gemm: SmallGemm, place: Placement, name: str, *, injects: bool = True
    ) -> None:
        hyper = config.hyper
        assert hyper is not None
        if place.tp_size != 1:
            raise StartupError(f"{name}: hyper-connections are not split over tensor-parallel ranks")
        self._op, self._gemm = op, gemm
        self._eps = config.rms_norm_eps
        self._streams, self._rank = hyper.streams, hyper.rank
        self._injects = injects
        channels = hyper.streams * config.hidden_size
        parts = {f"{name}.input_mix_weight_down": hyper.rank}
        if injects:
            parts[f"{name}.block_inject_weight"] = hyper.streams
        used, filling = sum(parts.values()), f"{name}.filling"
        if used % ROW_MULTIPLE:
            parts[filling] = ROW_MULTIPLE - used % ROW_MULTIPLE
        self.down = ColumnLinear(gemm, place, parts, channels)
        self.down.weight[used:].zero_()
        self.down.slots.pop(f"{filling}.weight", None)
        self.up = ColumnLinear(gemm, place, {f"{name}.input_mix_weight_up": channels}, hyper.rank)
        self.norm = place.empty(hyper.streams, config.hidden_size, dtype=torch.float32)
        self.slots = {f"{name}.hc_norm.weight": Slot(self.norm, (channels,), shift=float(config.zero_centred_norm))}

    def modules(self) -> Iterator[Weighted]:
        yield from (self, self.down, self.up)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.norm

    def randomise(self, generator: torch.Generator) -> None:
        self.norm.fill_(1.0)

    def read(self, residual: torch.Tensor, pending: Pending | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(x [T, H], inject [T, S])`` of the streams, to which ``pending`` is added in place; ``inject`` goes with the block's output."""
        normed = self._op.norm(residual, pending, self.norm, self._eps)
        down, up = self.down.weight, self.up.weight
        plain = isinstance(down, torch.Tensor) and isinstance(up, torch.Tensor)
        if plain and self._gemm.squashes(normed, down) and self._op.gates(normed, up, self._streams):
            low = self._gemm.linear_squashed(normed, down, self._rank, self._streams)
            mixed = self._op.gated_mix(normed, low[:, : self._rank], up, self._streams)
            return mixed, low[:, self._rank : self._rank + self._streams]
        low = self.down(normed)
        gate = self.up(self._op.squash(low[:, : self._rank], self._streams))
        return self._op.mix(normed, gate, self._streams), low[:, self._rank : self._rank + self._streams]


class HyperLayer:
    """One block: token mixer and MLP, each behind a hyper-connection, and n-gram embeddings at its entry where it has them."""

    def __init__(
        self, config: ModelConfig, op: HyperMix, gemm: SmallGemm, place: Placement, index: int, mixer: Mixer, mlp: Mlp
    ) -> None:
        prefix = f"model.layers.{index}"
        self._op = op
        self.index = index
        self.before_mixer = HyperConnection(config, op, gemm, place, f"{prefix}.attn_hyper_connection")
        self.mixer = mixer
        self.before_mlp = HyperConnection(config, op, gemm, place, f"{prefix}.mlp_hyper_connection")
        self.mlp = mlp

    def modules(self) -> Iterator[Weighted]:
        yield from self.before_mixer.modules()
        yield from self.mixer.modules()
        yield from self.before_mlp.modules()
        yield from self.mlp.modules()

    def embed(
        self, ple: PerLayerEmbeddings, streams: torch.Tensor, pending: Pending | None, step: PleStep
    ) -> tuple[torch.Tensor, None]:
        """The n-gram embeddings of this layer added to the streams, which hold all that was pending then."""
        if pending is not None:
            self._op.add(streams, pending)
        return ple.forward(self.index, streams, step), None

    def forward(self, x: torch.Tensor, residual: Pending | None, step: Pass) -> tuple[torch.Tensor, Pending]:
        """The streams ``x [T, S * H]``, changed in place, and what is pending of them."""
        read, inject = self.before_mixer.read(x, residual)
        read, inject = self.before_mlp.read(x, (self.mixer.forward(read, step), inject))
        return x, (self.mlp(read), inject)
