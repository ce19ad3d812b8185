"""Makes the layers of a model, packed or not as its configuration says."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from freetoken.kernels.dispatch import Choice
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.config import ModelConfig
from freetoken.models.layers import ColumnLinear, Embedding, GatedLinear, Linear, Norm, OutputHead, Placement, RowLinear
from freetoken.models.packed import (
    Feed,
    FeedingNorm,
    Feeds,
    PackedEmbedding,
    PackedGated,
    PackedHead,
    PackedLinear,
)


class Builder:
    """Layers over the ops of one model. Names are checkpoint prefixes, without ``.weight``."""

    def __init__(
        self, config: ModelConfig, device: torch.device, norm: RmsNorm, gemm: SmallGemm, silu_mul: SiluMul
    ) -> None:
        self._config = config
        self._norm = norm
        self._gemm = gemm
        self._silu_mul = silu_mul
        self._feeds = Feeds(config.packed, device) if config.packed is not None else None

    @property
    def choices(self) -> list[Choice]:
        """The ops that only packed weights have."""
        return self._feeds.choices if self._feeds is not None else []

    def packing(self, names: Iterable[str], width: int) -> tuple[Feed, int] | None:
        """Feed and elements a scale of the packed matrix that ``names`` make up together; ``None`` where it is not packed."""
        packed = self._config.packed
        weights = [f"{name}.weight" for name in names]
        if packed is None or self._feeds is None or weights[0] not in packed.groups:
            return None
        kinds = {(packed.groups.get(name), name in packed.rotated) for name in weights}
        assert len(kinds) == 1, f"{weights} are packed in different ways"
        return self._feeds.feed(width, weights[0] in packed.rotated), packed.groups[weights[0]]

    def column(
        self,
        place: Placement,
        parts: dict[str, int],
        in_size: int,
        *,
        bias: bool = False,
    ) -> ColumnLinear | PackedLinear:
        """A projection whose outputs may be split over ranks, several parts in one."""
        packing = self.packing(parts, in_size)
        if packing is None:
            return ColumnLinear(self._gemm, place, parts, in_size, bias=bias)
        return PackedLinear(packing[0], place, parts, in_size, packing[1], bias=bias)

    def row(
        self, place: Placement, name: str, out_size: int, in_size: int, *, bias: bool = False
    ) -> RowLinear | PackedLinear:
        """A projection whose inputs may be split over ranks."""
        packing = self.packing([name], in_size)
        if packing is None:
            return RowLinear(self._gemm, place, name, out_size, in_size, bias=bias)
        return PackedLinear(packing[0], place, {name: out_size}, in_size, packing[1], bias=bias)

    def gated(
        self,
        place: Placement,
        parts: dict[str, int],
        in_size: int,
        *,
        down: RowLinear | PackedLinear,
        bias: bool = False,
    ) -> GatedLinear | PackedGated:
        """Gate and up with the SwiGLU, before ``down``."""
        packing = self.packing(parts, in_size)
        if packing is None:
            return GatedLinear(self._gemm, place, parts, in_size, bias=bias)
        feed, group = packing
        return PackedGated(feed, place, parts, in_size, group, silu_mul=self._silu_mul, down=down.feed, bias=bias)

    def norm(self, place: Placement, name: str, size: int) -> Norm:
        """A norm whose output is taken as it is."""
        c = self._config
        centred, float32 = c.zero_centred_norm, c.float32_norm
        return Norm(self._norm, place, name, size, c.rms_norm_eps, zero_centred=centred, float32=float32)

    def norm_before(
        self,
        place: Placement,
        name: str,
        size: int,
        feed: Feed | None,
        beside: Linear | PackedLinear | None = None,
    ) -> Norm | FeedingNorm:
        """A norm before projections with ``feed``, and ``beside``, which takes plain activations."""
        if feed is None:
            return self.norm(place, name, size)
        c = self._config
        return FeedingNorm(
            self._norm,
            place,
            name,
            size,
            c.rms_norm_eps,
            feed=feed,
            beside=beside,
            zero_centred=c.zero_centred_norm,
            float32=c.float32_norm,
        )

    def embedding(self, place: Placement, name: str, rows: int, size: int) -> Embedding | PackedEmbedding:
        """The table of tokens."""
        packing = self.packing([name], size)
        if packing is None:
            return Embedding(place, name, rows, size)
        return PackedEmbedding(packing[0], place, name, rows, size, packing[1])

    def head(
        self, place: Placement, name: str, embedding: Embedding | PackedEmbedding, *, tied: bool
    ) -> OutputHead | PackedHead:
        """The output head: of its own, or with the table of ``embedding``, packed where that is."""
        rows, size = embedding.shape
        packing = self.packing(["model.embed_tokens" if tied else name], size)
        if packing is not None:
            shared = embedding.weight if tied and isinstance(embedding, PackedEmbedding) else None
            return PackedHead(packing[0], place, name, (rows, size), packing[1], shared)
        shared_dense = embedding.weight if tied and isinstance(embedding, Embedding) else None
        return OutputHead(self._gemm, place, name, (rows, size), shared_dense)
