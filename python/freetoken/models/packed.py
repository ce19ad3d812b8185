"""Layers whose weights stay in 2 bits, and what feeds them.

A packed projection takes activations of 8 bits, after the sign and rotation that its weight was stored under. Projections of one
input share that: the layer before them (a norm, the SwiGLU) makes it through their :class:`Feed`, and where a neighbour is not
packed it hands on the plain activations, too (:class:`Fed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from freetoken.errors import StartupError
from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.hadamard import Activation, Hadamard, Rotation
from freetoken.kernels.pq2_gemm import PQ2Gemm
from freetoken.kernels.pq2_gemv import PQ2Weight, activation_group, group_for, leads, pq2_linear
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.silu_mul import SiluMul
from freetoken.models.config import PackedWeights
from freetoken.models.layers import Linear, Norm, Placement, Slot

# Codes are drawn in pieces, so that drawing needs little beside the weights.
DRAWN_BYTES = 2**26
CODE_BITS = (0, 2, 4, 6)


@dataclass(frozen=True)
class Fed:
    """Input of projections behind one feed: ``taken`` by packed ones, ``plain [T, K]`` by another (``None`` without any), whose output
    ``product [T, N]`` is there instead where the norm has made that, too."""

    taken: Activation
    plain: torch.Tensor | None = None
    product: torch.Tensor | None = None


class Feed:
    """Turns activations into what packed projections of one input take: signs, rotation, int8 groups.

    ``rotation`` is that of the weights. ``group`` is how many neighbours share a scale in 8 bits, 0 to leave all in floating point; for
    many tokens the products may ask for floats, too. Shapes are those of ``op``.
    """

    def __init__(self, op: Hadamard, rotation: Rotation, group: int) -> None:
        self.op = op
        self.rotation = rotation
        self.group = group

    def _how(self, x: torch.Tensor) -> tuple[Rotation, int]:
        return self.rotation, group_for(x.shape[0], self.group, x.device)

    def take(self, x: torch.Tensor) -> Fed:
        """``x [T, width]`` as it is."""
        return Fed(self.op.rotate(x, *self._how(x)))

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        *,
        beside: Linear | PackedLinear | None = None,
    ) -> tuple[Fed, torch.Tensor]:
        """RMSNorm of ``x``, or of ``x + residual``, and that sum; also for ``beside``, which takes plain activations."""
        if isinstance(beside, Linear) and beside.joins(x) and self.op.joins(x, self.rotation):
            normed = self.op.norm(x, weight, eps, *self._how(x), residual, beside=beside.weight)
        else:
            normed = self.op.norm(x, weight, eps, *self._how(x), residual, plain=beside is not None)
        return Fed(normed.activation, normed.plain, normed.beside), normed.residual

    def silu_mul(self, gate_up: torch.Tensor) -> Fed:
        """``silu(gate) * up`` of ``gate_up [T, 2 width]``."""
        return Fed(self.op.silu_mul(gate_up, *self._how(gate_up)))

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> Fed:
        """``x * sigmoid(gate)``."""
        return Fed(self.op.sigmoid_mul(x, gate, *self._how(x)))

    def gated_norm(self, o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> Fed:
        """RMSNorm of each head times ``silu(z)``."""
        return Fed(self.op.gated_norm(o, z, weight, eps, *self._how(o)))


class Feeds:
    """The feeds of one model, one for each input width and rotation; the activation group is read here, once."""

    def __init__(self, packed: PackedWeights, device: torch.device) -> None:
        kind = device.type
        self.choices = [choose_op(name, kind) for name in ("hadamard", "pq2_gemv", "pq2_single", "pq2_gemm")]
        self._op = Hadamard(self.choices[0])
        PQ2Gemm(self.choices[3]).reserve(device)
        self._group = activation_group()
        self._packed = packed
        self._device = device
        self._made: dict[tuple[int, bool], Feed] = {}

    def feed(self, width: int, rotated: bool) -> Feed:
        """The feed of projections ``width`` wide, rotated as the file says, or not at all."""
        key = (width, rotated)
        if key not in self._made:
            rotation = Rotation(self._packed.block, self._signs(width)) if rotated else Rotation()
            self._made[key] = Feed(self._op, rotation, self._group)
        return self._made[key]

    def _signs(self, width: int) -> torch.Tensor | None:
        values = self._packed.signs.get(width)
        return None if values is None else torch.frombuffer(bytearray(values), dtype=torch.int8).to(self._device)


def empty_planes(place: Placement, rows: int, width: int, group: int, what: str) -> PQ2Weight:
    """Uninitialised planes; :class:`StartupError` where weights are split over ranks: a part would not be whole blocks."""
    if place.tp_size != 1:
        raise StartupError(f"{what}: 2-bit weights are not split over tensor-parallel ranks")
    codes = place.empty(rows, width // 4, dtype=torch.uint8)
    return PQ2Weight(codes, place.empty(rows, width // group, dtype=torch.float16), group)


def plane_slots(name: str, weight: PQ2Weight, start: int, rows: int) -> dict[str, Slot]:
    """Places of tensors ``name.codes`` and ``name.scales``, which are ``rows`` rows of ``weight`` from ``start`` on."""
    planes = {"codes": weight.codes, "scales": weight.scales}
    return {
        f"{name}.{kind}": Slot(plane[start : start + rows], (rows, plane.shape[1]), 0, 0, rows)
        for kind, plane in planes.items()
    }


def randomise_planes(weight: PQ2Weight, generator: torch.Generator) -> None:
    """Ternary values in equal shares with the variance of one over the number of inputs, in scales that differ by up to a half."""
    digits = (
        torch.arange(81, device=weight.codes.device).unsqueeze(1)
        // torch.tensor([1, 3, 9, 27], device=weight.codes.device)
        % 3
    )
    shifts = torch.tensor(CODE_BITS, device=weight.codes.device)
    bytes_of = (digits << shifts).sum(1).to(torch.uint8)
    flat = weight.codes.view(-1)
    for start in range(0, flat.numel(), DRAWN_BYTES):
        piece = flat[start : start + DRAWN_BYTES]
        drawn = torch.randint(81, piece.shape, generator=generator, device=piece.device, dtype=torch.int32)
        torch.index_select(bytes_of, 0, drawn, out=piece)
    scale = (1.5 / weight.in_features) ** 0.5
    weight.scales.uniform_(0.8 * scale, 1.2 * scale, generator=generator)


class PackedLinear:
    """``y = x W^T + b`` with ``W [N, K]`` in planes; ``parts`` maps checkpoint prefixes, in order, to output sizes."""

    def __init__(
        self, feed: Feed, place: Placement, parts: dict[str, int], in_size: int, group: int, *, bias: bool = False
    ) -> None:
        self.feed = feed
        self.dtype = place.dtype
        total = sum(parts.values())
        self.weight = empty_planes(place, total, in_size, group, next(iter(parts)))
        self.bias = place.empty(total) if bias else None
        self.slots: dict[str, Slot] = {}
        start = 0
        for name, size in parts.items():
            self.slots |= plane_slots(name, self.weight, start, size)
            if self.bias is not None:
                self.slots[f"{name}.bias"] = Slot(self.bias[start : start + size], (size,), 0, 0, size)
            start += size

    def __call__(self, x: torch.Tensor | Fed) -> torch.Tensor:
        fed = x if isinstance(x, Fed) else self.feed.take(x)
        y = pq2_linear(fed.taken, self.weight, self.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def beside(self, fed: Fed, small: Linear | PackedLinear) -> tuple[torch.Tensor, torch.Tensor]:
        """This product, and that of ``small`` with the plain activations, which runs under it where it can, or has been made."""
        if fed.product is not None:
            return self(fed), fed.product
        if fed.plain is None:
            raise ValueError("a product beside a packed one takes plain activations, and the norm made none")
        if self.bias is None and leads(fed.taken) and isinstance(small, Linear) and small.hides(fed.plain):
            y = pq2_linear(fed.taken, self.weight, self.dtype, late=True)
            return y, small.under(fed.plain)
        other = small(fed.plain)
        return self(fed), other

    def interleave(self) -> None:
        """Interleave the weight's rows where they can be: :attr:`slots` are of no more use then."""
        self.weight = self.weight.interleave()

    def planes(self) -> dict[str, torch.Tensor]:
        """The tensors whose rows are outputs, by the kind in their checkpoint names."""
        found = {"codes": self.weight.codes, "scales": self.weight.scales}
        return found if self.bias is None else {**found, "bias": self.bias}

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.planes().values()

    def randomise(self, generator: torch.Generator) -> None:
        randomise_planes(self.weight, generator)
        if self.bias is not None:
            self.bias.zero_()


class PackedGated(PackedLinear):
    """A :class:`PackedLinear` of gate and up whose output is ``silu(gate) * up``, ready for ``down`` where that is packed."""

    def __init__(
        self,
        feed: Feed,
        place: Placement,
        parts: dict[str, int],
        in_size: int,
        group: int,
        *,
        silu_mul: SiluMul,
        down: Feed | None,
        bias: bool = False,
    ) -> None:
        super().__init__(feed, place, parts, in_size, group, bias=bias)
        self._silu_mul = silu_mul
        self._down = down

    def __call__(self, x: torch.Tensor | Fed) -> torch.Tensor | Fed:  # type: ignore[override]
        y = super().__call__(x)
        return self._silu_mul(y) if self._down is None else self._down.silu_mul(y)


class FeedingNorm(Norm):
    """A norm before packed projections; ``beside`` takes its output as it is."""

    def __init__(
        self,
        op: RmsNorm,
        place: Placement,
        name: str,
        size: int,
        eps: float,
        *,
        feed: Feed,
        beside: Linear | PackedLinear | None,
        zero_centred: bool = False,
        float32: bool = False,
    ) -> None:
        super().__init__(op, place, name, size, eps, zero_centred=zero_centred, float32=float32)
        self._feed = feed
        self._beside = beside

    def __call__(self, x: torch.Tensor) -> Fed:  # type: ignore[override]
        return self._feed.norm(x, self.weight, self._eps, None, beside=self._beside)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[Fed, torch.Tensor]:  # type: ignore[override]
        return self._feed.norm(x, self.weight, self._eps, residual, beside=self._beside)


class PackedEmbedding:
    """Rows by token id of a table in planes ``[V, H]``, decoded and turned back as they are gathered."""

    def __init__(self, feed: Feed, place: Placement, name: str, rows: int, size: int, group: int) -> None:
        self.shape = (rows, size)
        self.weight = empty_planes(place, rows, size, group, name)
        self.slots = plane_slots(name, self.weight, 0, rows)
        self._dtype = place.dtype
        self.feed = feed

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.feed.op.embed(ids, self.weight, self.feed.rotation, self._dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.weight.codes, self.weight.scales)

    def randomise(self, generator: torch.Generator) -> None:
        randomise_planes(self.weight, generator)


class PackedHead:
    """Logits over the vocabulary from a table in planes: its own, or the embedding's, which is given as ``tied``."""

    def __init__(
        self, feed: Feed, place: Placement, name: str, shape: tuple[int, int], group: int, tied: PQ2Weight | None
    ) -> None:
        self.feed = feed
        self.weight = empty_planes(place, *shape, group, name) if tied is None else tied
        self.slots = plane_slots(name, self.weight, 0, shape[0]) if tied is None else {}

    def interleave(self) -> None:
        """As :meth:`PackedLinear.interleave`; an embedding's table stays as it is, since single rows are taken of it."""
        if self.slots:
            self.weight = self.weight.interleave()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [S, H]`` to float32 ``[S, V]``."""
        return pq2_linear(self.feed.take(hidden).taken, self.weight, torch.float32)

    def tensors(self) -> Iterator[torch.Tensor]:
        if self.slots:
            yield from (self.weight.codes, self.weight.scales)

    def randomise(self, generator: torch.Generator) -> None:
        if self.slots:
            randomise_planes(self.weight, generator)
