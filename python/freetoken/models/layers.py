"""Layers that own weights: linear (sharded by rows or columns), norm, embedding, output head.

Every layer allocates its weights once, in the target type on the target device, and names the checkpoint tensors that
fill them; :func:`load` copies each tensor into its place as it arrives, so no second copy of the model ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from freetoken.errors import StartupError
from freetoken.kernels import block_fp8
from freetoken.kernels.block_fp8 import BLOCK, Fp8Weight, Weight
from freetoken.kernels.fp8_gemm import Fp8Gemm
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.config import Fp8Config


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes.

    ``target`` is the view it fills, in order of elements; ``shape`` the whole tensor's shape in the checkpoint. With
    ``shard_dim`` only rows (or columns) ``start`` to ``start + length`` of it belong to this rank. ``shift`` is added to every
    element. With ``repeat`` (scales of FP8 blocks, held for smaller groups of rows) every row is repeated so often, and the first ``length`` are taken.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    shard_dim: int | None = None
    start: int = 0
    length: int = 0
    shift: float = 0.0
    repeat: int = 1

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy this rank's part, converting type and device."""
        if self.repeat > 1:
            tensor = tensor.repeat_interleave(self.repeat, -2)[..., : self.length, :]
        part = tensor if self.shard_dim is None else tensor.narrow(self.shard_dim, self.start, self.length)
        self.target.copy_(part.reshape(self.target.shape))
        if self.shift:
            self.target.add_(self.shift)


class Weighted(Protocol):
    """A part of a model that owns weights."""

    slots: dict[str, Slot]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All weights, each once."""

    def randomise(self, generator: torch.Generator) -> None:
        """Fill the weights with sensible noise, drawn on their device."""


RANDOM_FP8 = 64.0
"""Standard deviation of random FP8 values, far below their limit of 448."""


def fill_normal(weight: Weight, generator: torch.Generator) -> None:
    """Normal values with the variance of one over the number of inputs, the last dimension of ``weight``."""
    deviation = weight.shape[-1] ** -0.5
    if isinstance(weight, torch.Tensor):
        weight.normal_(0.0, deviation, generator=generator)
        return
    weight.scale.fill_(deviation / RANDOM_FP8)
    # A row (or an expert) at a time: there is no normal draw in FP8, and a wide copy of all would not fit.
    for part in weight.data.split(max(1, 2**24 // weight.data[0].numel())):
        wide = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        part.copy_(wide.normal_(0.0, RANDOM_FP8, generator=generator).clamp_(-448.0, 448.0))


def weight_tensors(weight: Weight) -> Iterator[torch.Tensor]:
    """The tensors that hold ``weight``."""
    if isinstance(weight, Fp8Weight):
        yield from (weight.data, weight.scale)
    else:
        yield weight


def scale_slot(scale: torch.Tensor, shape: tuple[int, ...], group: int) -> Slot:
    """Where the block scales of an FP8 tensor of ``shape`` go: ``scale [..., N / group, ceil(K / 128)]`` or a view of as many."""
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    return Slot(scale, blocks, length=shape[-2] // group, repeat=BLOCK // group)


@dataclass(frozen=True)
class Placement:
    """Type, device and tensor-parallel place of a model's weights, and which of them are FP8."""

    dtype: torch.dtype
    device: torch.device
    tp_rank: int = 0
    tp_size: int = 1
    fp8: Fp8Config | None = None
    fp8_gemm: Fp8Gemm | None = None

    def holds_fp8(self, modules: Iterable[str]) -> bool:
        """Whether the merged weight of these modules is kept in FP8; :class:`StartupError` where it would have to be split."""
        if self.fp8 is None or not self.fp8.holds(modules := list(modules)):
            return False
        if self.tp_size != 1:
            raise StartupError(f"{modules[0]}: FP8 weights are not split over tensor-parallel ranks")
        return True

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialised, of the model's type unless another is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def share(self, size: int, what: str) -> int:
        """This rank's part of ``size``; :class:`StartupError` when it does not divide evenly."""
        if size % self.tp_size != 0:
            raise StartupError(f"{what} ({size}) does not divide over {self.tp_size} tensor-parallel ranks")
        return size // self.tp_size


class Linear:
    """``y = x W^T + b`` with ``weight [N, K]`` of this rank, product by the shared :class:`SmallGemm` or :class:`Fp8Gemm`."""

    feed: None = None
    """Takes activations as they are."""

    def __init__(self, gemm: SmallGemm | Fp8Gemm, weight: Weight, bias: torch.Tensor | None) -> None:
        self._gemm: Any = gemm
        self.weight: Any = weight
        self.bias = bias
        self.slots: dict[str, Slot] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._gemm.linear(x, self.weight, self.bias)
        return y

    def hides(self, x: torch.Tensor) -> bool:
        """Whether :meth:`under` can take ``x``."""
        return isinstance(self._gemm, SmallGemm) and self._gemm.hides(x, self.weight)

    def joins(self, x: torch.Tensor) -> bool:
        """Whether the kernel that makes an input like ``x`` may make this product, too."""
        return self.bias is None and isinstance(self._gemm, SmallGemm) and self._gemm.joins(x, self.weight)

    def under(self, x: torch.Tensor) -> torch.Tensor:
        """The same at the time of the kernel launched right before, by :meth:`SmallGemm.linear_under`."""
        y: torch.Tensor = self._gemm.linear_under(x, self.weight, self.bias)
        return y

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from weight_tensors(self.weight)
        if self.bias is not None:
            yield self.bias

    def randomise(self, generator: torch.Generator) -> None:
        fill_normal(self.weight, generator)
        if self.bias is not None:
            self.bias.zero_()


class ColumnLinear(Linear):
    """Outputs are sharded: each rank holds a share of the rows of every part.

    ``parts`` maps checkpoint prefixes, in order, to output sizes; several parts (q, k, v or gate, up) become one weight. It is in FP8
    where ``fp8_parts`` (default: all parts) are; the scales then are of groups of rows that divide every size in ``units``.
    """

    def __init__(
        self,
        gemm: SmallGemm,
        place: Placement,
        parts: dict[str, int],
        in_size: int,
        *,
        bias: bool = False,
        silu: bool = False,
        fp8_parts: Iterable[str] | None = None,
        units: tuple[int, ...] = (),
    ) -> None:
        shares = {name: place.share(size, name) for name, size in parts.items()}
        total = sum(shares.values())
        offsets = place.empty(total) if bias else None
        fp8 = place.holds_fp8(parts if fp8_parts is None else fp8_parts)
        if fp8 and place.fp8_gemm is not None:
            group = block_fp8.group_rows(*shares.values(), *units)
            super().__init__(place.fp8_gemm, block_fp8.empty((total, in_size), group, place.device), offsets)
        else:
            super().__init__(gemm, place.empty(total, in_size), offsets)
            gemm.reserve(self.weight, silu=silu)
        offset = 0
        for name, share in shares.items():
            rows = slice(offset, offset + share)
            start = place.tp_rank * share
            self._add_slots(name, rows, (parts[name], in_size), start)
            if self.bias is not None:
                self.slots[f"{name}.bias"] = Slot(self.bias[rows], (parts[name],), 0, start, share)
            offset += share

    def _add_slots(self, name: str, rows: slice, shape: tuple[int, int], start: int) -> None:
        if isinstance(self.weight, Fp8Weight):
            group = self.weight.rows
            scales = self.weight.scale[rows.start // group : rows.stop // group]
            self.slots[f"{name}.weight"] = Slot(self.weight.data[rows], shape)
            self.slots[f"{name}.weight_scale_inv"] = scale_slot(scales, shape, group)
        else:
            self.slots[f"{name}.weight"] = Slot(self.weight[rows], shape, 0, start, rows.stop - rows.start)


class GatedLinear(ColumnLinear):
    """A :class:`ColumnLinear` of gate and up whose output is ``silu(gate) * up``."""

    def __init__(
        self, gemm: SmallGemm, place: Placement, parts: dict[str, int], in_size: int, *, bias: bool = False
    ) -> None:
        super().__init__(gemm, place, parts, in_size, bias=bias, silu=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._gemm.linear_silu_mul(x, self.weight, self.bias)
        return y


class RowLinear(Linear):
    """Inputs are sharded: each rank holds a share of the columns, and the ranks' outputs are to be summed.

    The bias lives on rank 0 alone, so that the sum holds it once.
    """

    def __init__(
        self, gemm: SmallGemm, place: Placement, name: str, out_size: int, in_size: int, *, bias: bool = False
    ) -> None:
        share = place.share(in_size, name)
        offsets = place.empty(out_size) if bias else None
        if place.holds_fp8([name]) and place.fp8_gemm is not None:
            weight = block_fp8.empty((out_size, in_size), block_fp8.group_rows(out_size), place.device)
            super().__init__(place.fp8_gemm, weight, offsets)
            self.slots[f"{name}.weight"] = Slot(weight.data, (out_size, in_size))
            self.slots[f"{name}.weight_scale_inv"] = scale_slot(weight.scale, (out_size, in_size), weight.rows)
        else:
            super().__init__(gemm, place.empty(out_size, share), offsets)
            gemm.reserve(self.weight, silu=False)
            self.slots[f"{name}.weight"] = Slot(self.weight, (out_size, in_size), 1, place.tp_rank * share, share)
        if self.bias is not None:
            self.slots[f"{name}.bias"] = Slot(self.bias, (out_size,))
            if place.tp_rank > 0:
                self.slots[f"{name}.bias"] = Slot(torch.empty_like(self.bias), (out_size,))
                self.bias = None


class Norm:
    """RMSNorm weight ``[H]`` with the shared :class:`RmsNorm` op.

    A ``zero_centred`` weight is stored less 1 in the checkpoint and held whole here, with ``float32`` in that type, so that adding 1
    rounds nothing away.
    """

    def __init__(
        self,
        op: RmsNorm,
        place: Placement,
        name: str,
        size: int,
        eps: float,
        *,
        zero_centred: bool = False,
        float32: bool = False,
    ) -> None:
        self._op = op
        self._eps = eps
        self.weight = place.empty(size, dtype=torch.float32 if float32 else None)
        self.slots = {f"{name}.weight": Slot(self.weight, (size,), shift=1.0 if zero_centred else 0.0)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._op(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(normalised, x + residual)``; neither input may be used afterwards."""
        return self._op.add(x, self.weight, self._eps, residual)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.weight

    def randomise(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)


class Embedding:
    """Rows of ``weight [V, H]`` by token id; every rank holds all of them."""

    def __init__(self, place: Placement, name: str, rows: int, size: int) -> None:
        self.shape = (rows, size)
        self.weight = place.empty(rows, size)
        self.slots = {f"{name}.weight": Slot(self.weight, (rows, size))}

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.weight)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.weight

    def randomise(self, generator: torch.Generator) -> None:
        fill_normal(self.weight, generator)


class OutputHead:
    """Logits over the vocabulary, from its own weight or the embedding's, which is given as ``tied``."""

    def __init__(
        self, gemm: SmallGemm, place: Placement, name: str, shape: tuple[int, int], tied: torch.Tensor | None
    ) -> None:
        self._gemm = gemm
        self.weight = place.empty(*shape) if tied is None else tied
        self.slots: dict[str, Slot] = {f"{name}.weight": Slot(self.weight, shape)} if tied is None else {}
        gemm.reserve(self.weight, silu=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [S, H]`` to float32 ``[S, V]``, rounded to the weight's type on the way."""
        return self._gemm.linear(hidden, self.weight, None, torch.float32)

    def tensors(self) -> Iterator[torch.Tensor]:
        if self.slots:
            yield self.weight

    def randomise(self, generator: torch.Generator) -> None:
        for weight in self.tensors():
            fill_normal(weight, generator)


Pieces = Callable[[], dict[str, dict[str, Slot]]]
"""For each tensor that a checkpoint may hold in pieces, the pieces' names and places."""


def load(
    slots: dict[str, Slot],
    ignored: frozenset[str],
    stream: Iterable[tuple[str, torch.Tensor]],
    pieces: Pieces | None = None,
) -> None:
    """Fill every slot from ``(name, tensor)`` pairs in any order.

    Names in ``ignored`` and rotary frequencies, which are computed, are passed over. When a name has no slot, tensors may have come in
    ``pieces`` (asked for then), whose slots take the place of the whole's. :class:`StartupError` names a tensor that has no place, comes
    twice, has another shape, or never comes.
    """
    waiting, known = dict(slots), slots
    split: dict[str, dict[str, Slot]] | None = None
    owners: dict[str, str] = {}
    for name, tensor in stream:
        if name in ignored or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in known and split is None and pieces is not None:
            split = pieces()
            owners = {piece: whole for whole, found in split.items() for piece in found}
        if split is not None and waiting.pop(owners.get(name, ""), None) is not None:
            waiting |= split[owners[name]]
            known = known | split[owners[name]]
        slot = waiting.pop(name, None)
        if slot is None:
            problem = "comes twice in the checkpoint" if name in known else "has no place in this model"
            raise StartupError(f"tensor {name} {problem}")
        if tuple(tensor.shape) != slot.shape:
            raise StartupError(
                f"tensor {name} has shape {list(tensor.shape)}, but the config asks for {list(slot.shape)}"
            )
        slot.fill(tensor)
    if waiting:
        first, more = next(iter(waiting)), len(waiting) - 1
        others = f" and {more} more" if more else ""
        raise StartupError(f"the checkpoint lacks tensor {first}{others}")
