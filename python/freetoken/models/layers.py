"""Layers that own weights: linear (sharded by rows or columns), norm, embedding, output head.

Every layer allocates its weights once, in the target type on the target device, and names the checkpoint tensors that
fill them; :func:`load` copies each tensor into its place as it arrives, so no second copy of the model ever exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from freetoken.errors import StartupError
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.small_gemm import SmallGemm


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes.

    ``target`` is the view it fills, in order of elements; ``shape`` the whole tensor's shape in the checkpoint. With
    ``shard_dim`` only rows (or columns) ``start`` to ``start + length`` of it belong to this rank. ``shift`` is added to every
    element.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    shard_dim: int | None = None
    start: int = 0
    length: int = 0
    shift: float = 0.0

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy this rank's part, converting type and device."""
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


def fill_normal(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Normal values with the variance of one over the number of inputs, the last dimension of ``weight``."""
    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


@dataclass(frozen=True)
class Placement:
    """Type, device and tensor-parallel place of a model's weights."""

    dtype: torch.dtype
    device: torch.device
    tp_rank: int = 0
    tp_size: int = 1

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialised, of the model's type unless another is given."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def share(self, size: int, what: str) -> int:
        """This rank's part of ``size``; :class:`StartupError` when it does not divide evenly."""
        if size % self.tp_size != 0:
            raise StartupError(f"{what} ({size}) does not divide over {self.tp_size} tensor-parallel ranks")
        return size // self.tp_size


class Linear:
    """``y = x W^T + b`` with ``weight [N, K]`` of this rank, product by the shared :class:`SmallGemm`."""

    feed = None
    """Takes activations as they are."""

    def __init__(self, gemm: SmallGemm, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._gemm = gemm
        self.weight = weight
        self.bias = bias
        self.slots: dict[str, Slot] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemm.linear(x, self.weight, self.bias)

    def planes(self) -> dict[str, torch.Tensor]:
        """The tensors whose rows are outputs, by the kind in their checkpoint names."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.planes().values()

    def randomise(self, generator: torch.Generator) -> None:
        fill_normal(self.weight, generator)
        if self.bias is not None:
            self.bias.zero_()


class ColumnLinear(Linear):
    """Outputs are sharded: each rank holds a share of the rows of every part.

    ``parts`` maps checkpoint prefixes, in order, to output sizes; several parts (q, k, v or gate, up) become one weight.
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
    ) -> None:
        shares = {name: place.share(size, name) for name, size in parts.items()}
        total = sum(shares.values())
        super().__init__(gemm, place.empty(total, in_size), place.empty(total) if bias else None)
        gemm.reserve(self.weight, silu=silu)
        offset = 0
        for name, share in shares.items():
            rows = slice(offset, offset + share)
            start = place.tp_rank * share
            self.slots[f"{name}.weight"] = Slot(self.weight[rows], (parts[name], in_size), 0, start, share)
            if self.bias is not None:
                self.slots[f"{name}.bias"] = Slot(self.bias[rows], (parts[name],), 0, start, share)
            offset += share


class GatedLinear(ColumnLinear):
    """A :class:`ColumnLinear` of gate and up whose output is ``silu(gate) * up``."""

    def __init__(
        self, gemm: SmallGemm, place: Placement, parts: dict[str, int], in_size: int, *, bias: bool = False
    ) -> None:
        super().__init__(gemm, place, parts, in_size, bias=bias, silu=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemm.linear_silu_mul(x, self.weight, self.bias)


class RowLinear(Linear):
    """Inputs are sharded: each rank holds a share of the columns, and the ranks' outputs are to be summed.

    The bias lives on rank 0 alone, so that the sum holds it once.
    """

    def __init__(
        self, gemm: SmallGemm, place: Placement, name: str, out_size: int, in_size: int, *, bias: bool = False
    ) -> None:
        share = place.share(in_size, name)
        super().__init__(gemm, place.empty(out_size, share), place.empty(out_size) if bias else None)
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


def load(slots: dict[str, Slot], ignored: frozenset[str], stream: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill every slot from ``(name, tensor)`` pairs in any order.

    Names in ``ignored`` and rotary frequencies, which are computed, are passed over. :class:`StartupError` names a tensor
    that has no place, comes twice, has another shape, or never comes.
    """
    waiting = dict(slots)
    for name, tensor in stream:
        if name in ignored or name.endswith("rotary_emb.inv_freq"):
            continue
        slot = waiting.pop(name, None)
        if slot is None:
            problem = "comes twice in the checkpoint" if name in slots else "has no place in this model"
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
