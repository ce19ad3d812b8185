"""Activations of eight bits: the other side of a product with :class:`PQ2Weight`.

Every producer makes the same integers from the same float32 values. For a group with largest magnitude ``a``::

    scale   = fl(a * fl(1/127))
    inverse = fl(127 / a)                                a division rounded to nearest, not an approximation
    q       = round_half_even(clamp(fl(x * inverse), -127, 127))

where ``fl`` rounds to float32. A group with ``a`` below :data:`SMALLEST` counts as zero: scale, inverse and all q are 0.
Values are finite; an infinity makes the scale infinite, and with it what is computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetoken import environ

ACTIVATION_GROUPS = (32, 64, 128)
SMALLEST = 2.0**-100
"""Below this a group is zero, which keeps the inverse finite and all arithmetic clear of subnormal numbers."""
GROUP_NAME = "FREETOKEN_PQ2_ACTIVATION_GROUP"


@dataclass(frozen=True)
class QuantisedActivation:
    """``[M, K]`` values ``q * scale``.

    ``values`` is int8 ``[M, K]``, and within every run of 16 transposed as 4 by 4: ``values[m, 16t + 4i + b]`` holds q of element
    ``16t + 4b + i``. Then ``word >> 2i & 0x03030303`` of a little-endian 32-bit word of weight codes meets four neighbours.
    ``scales`` is float32 ``[M, K/group]``, ``sums`` int32 ``[M, K/group]`` the sum of q over the group; ``group`` is 32, 64 or
    128. ``ValueError`` for parts that do not fit each other.
    """

    values: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    group: int

    def __post_init__(self) -> None:
        if self.group not in ACTIVATION_GROUPS:
            raise ValueError(f"an activation group of {self.group}; it is one of {ACTIVATION_GROUPS}")
        if (self.values.dtype, self.scales.dtype, self.sums.dtype) != (torch.int8, torch.float32, torch.int32):
            raise ValueError("values are int8, scales float32 and sums int32")
        if self.values.dim() != 2 or self.width % 128 != 0:
            raise ValueError(f"values of shape {tuple(self.values.shape)}: not [M, K] with K a multiple of 128")
        expected = (self.tokens, self.width // self.group)
        if self.scales.shape != expected or self.sums.shape != expected:
            raise ValueError(
                f"scales of shape {tuple(self.scales.shape)} and sums of shape {tuple(self.sums.shape)}, not {expected}"
            )
        if not all(part.is_contiguous() for part in (self.values, self.scales, self.sums)):
            raise ValueError("the parts of an activation are contiguous")

    @property
    def tokens(self) -> int:
        """M."""
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """K."""
        return self.values.shape[1]

    def natural(self) -> torch.Tensor:
        """int8 ``[M, K]``: q in the order of the elements."""
        return transpose_runs(self.values)

    def dequantise(self) -> torch.Tensor:
        """float32 ``[M, K]``: ``q * scale`` in the order of the elements."""
        q = self.natural().float().view(self.tokens, self.width // self.group, self.group)
        return (q * self.scales[:, :, None]).view(self.tokens, self.width)

    def rows(self) -> QuantisedActivation:
        """Itself."""
        return self

    def tiled(self) -> TiledActivation:
        """The same in tiles."""
        halves = -(-self.tokens // 8)
        blocks, groups = self.width // 128, self.width // self.group
        words = torch.zeros((halves * 8, self.width // 4), dtype=torch.int32, device=self.values.device)
        words[: self.tokens] = self.values.view(torch.int32)
        words = words.view(halves, 8, blocks, 4, 2, 4).permute(2, 0, 4, 1, 3, 5).contiguous()
        beside = torch.zeros((groups, halves * 8, 2), dtype=torch.int32, device=self.values.device)
        beside[:, : self.tokens, 0] = self.scales.view(torch.int32).t()
        beside[:, : self.tokens, 1] = self.sums.t()
        return TiledActivation(words.view(blocks, halves, 2, 32, 4), beside, self.tokens, self.group)


@dataclass(frozen=True)
class TiledActivation:
    """The same of 1 to 32 tokens in the order that tensor cores take: a warp reads a block of 128 of eight tokens without gaps.

    ``words`` is int32 ``[K/128, H, 2, 32, 4]`` for ``H`` times eight tokens: ``words[b, h, p, 4 * g + t]`` holds words
    ``8 * t + 4 * p`` to ``8 * t + 4 * p + 3`` of block b of row ``8 * h + g`` of the values. ``beside`` is int32
    ``[K/group, 8 * H, 2]``: the bits of a scale, and the sum. What belongs to tokens from ``tokens`` on is undefined.
    ``ValueError`` for parts that do not fit each other.
    """

    words: torch.Tensor
    beside: torch.Tensor
    tokens: int
    group: int

    def __post_init__(self) -> None:
        blocks, halves = self.words.shape[:2]
        expected = (blocks * (128 // self.group), halves * 8, 2)
        if self.words.shape != (blocks, halves, 2, 32, 4) or self.beside.shape != expected:
            raise ValueError(f"tiles of shapes {tuple(self.words.shape)} and {tuple(self.beside.shape)}")
        if not 0 < self.tokens <= 8 * halves:
            raise ValueError(f"{self.tokens} tokens in {halves} times eight")

    @property
    def width(self) -> int:
        """K."""
        return self.words.shape[0] * 128

    def tiled(self) -> TiledActivation:
        """Itself."""
        return self

    def rows(self) -> QuantisedActivation:
        """The same in rows."""
        blocks, halves = self.words.shape[:2]
        words = self.words.view(blocks, halves, 2, 8, 4, 4).permute(1, 3, 0, 4, 2, 5)
        words = words.reshape(halves * 8, self.width // 4)[: self.tokens].contiguous()
        scales, sums = (self.beside[:, : self.tokens, i].t().contiguous() for i in range(2))
        return QuantisedActivation(words.view(torch.int8), scales.view(torch.float32), sums, self.group)

    def dequantise(self) -> torch.Tensor:
        """float32 ``[M, K]``: ``q * scale`` in the order of the elements."""
        return self.rows().dequantise()


Quantised = QuantisedActivation | TiledActivation


def empty_activation(tokens: int, width: int, group: int, device: torch.device, *, tiles: bool) -> Quantised:
    """An uninitialised activation, in rows or in tiles."""
    if tiles:
        halves = -(-tokens // 8)
        words = torch.empty((width // 128, halves, 2, 32, 4), dtype=torch.int32, device=device)
        beside = torch.empty((width // group, halves * 8, 2), dtype=torch.int32, device=device)
        return TiledActivation(words, beside, tokens, group)
    small = (tokens, width // group)
    return QuantisedActivation(
        torch.empty((tokens, width), dtype=torch.int8, device=device),
        torch.empty(small, dtype=torch.float32, device=device),
        torch.empty(small, dtype=torch.int32, device=device),
        group,
    )


def transpose_runs(values: torch.Tensor) -> torch.Tensor:
    """Transposes every 16 neighbours of ``[M, K]`` as 4 by 4; its own inverse."""
    return values.reshape(values.shape[0], values.shape[1] // 16, 4, 4).transpose(2, 3).reshape(values.shape)


def activation_group() -> int:
    """The group that activations are quantised in here: 32, 64 or 128, or 0 where they stay floating point."""
    return int(environ.get(GROUP_NAME))


def quantise_reference(x: torch.Tensor, group: int) -> QuantisedActivation:
    """Quantise ``x [M, K]`` (any float type, K a multiple of 128) in groups along K, as this module states."""
    grouped = x.float().reshape(x.shape[0], x.shape[1] // group, group)
    largest = grouped.abs().amax(dim=2)
    present = largest >= SMALLEST
    # Two tensors: dividing a number by a tensor multiplies with a rounded reciprocal.
    inverse = torch.where(present, torch.full_like(largest, 127.0) / largest, 0.0)
    scales = torch.where(present, largest * torch.tensor(1 / 127, dtype=torch.float32, device=x.device), 0.0)
    q = (grouped * inverse[:, :, None]).clamp_(-127, 127).round_()
    sums = q.sum(dim=2).to(torch.int32)
    return QuantisedActivation(transpose_runs(q.to(torch.int8).view(x.shape)), scales, sums, group)
