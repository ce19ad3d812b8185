"""Launch settings of the products of many tokens, and which of their forms is used, by shape and GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

Form = Literal["int8", "float", "dense"]
FORMS: tuple[Form, ...] = ("int8", "float", "dense")
Capability = tuple[int, int]

SPLIT_PROGRAMS = 512
SPLIT_CELLS = 128 * 64
"""A split product has at most this many programs, of at most this many outputs each: what scratch memory is sized by."""
SLICE_BYTES = 32 * 2**20
"""Weights decoded at a time by the dense form: few enough to stay in the L2 cache until they are multiplied."""


@dataclass(frozen=True)
class GemmConfig:
    """A program multiplies ``block_n`` weight rows with ``block_m`` tokens; ``num_stages`` deep copies, ``num_warps`` warps.
    ``split_k`` programs share an output tile and add their parts in a fixed order."""

    block_n: int
    block_m: int
    num_warps: int = 4
    num_stages: int = 3
    split_k: int = 1

    def fits_scratch(self, m: int, n: int) -> bool:
        """Whether the parts of a split product fit the scratch memory."""
        programs = -(-m // self.block_m) * -(-n // self.block_n) * self.split_k
        return self.split_k == 1 or (programs <= SPLIT_PROGRAMS and self.block_n * self.block_m <= SPLIT_CELLS)


CONFIGS: dict[Capability, dict[tuple[str, int, int, int], GemmConfig]] = {}
"""Measured settings by compute capability, then by ``(form, N, K, class)`` with the class of :func:`m_class`."""

DENSE_FROM: dict[Capability, int] = {}
"""Measured number of tokens from which the dense form is the fastest, by compute capability."""
USUAL_DENSE_FROM = 512


def m_class(m: int) -> int:
    """The class of a number of tokens: the power of two at or above it, from 32 to 4096."""
    return min(4096, max(32, 1 << max(m - 1, 0).bit_length()))


def pick_form(m: int, capability: Capability | None = None) -> Form:
    """The form for ``m`` tokens: decoding whole slices of weights costs the same for every number of tokens, so it is for many."""
    first = DENSE_FROM.get(capability, USUAL_DENSE_FROM) if capability is not None else USUAL_DENSE_FROM
    return "dense" if m >= first else "int8"


def pick_config(form: str, n: int, k: int, m: int, capability: Capability | None = None) -> GemmConfig:
    """The measured settings of this shape, or a default whose shared memory every served GPU has (99 KiB)."""
    found = CONFIGS.get(capability, {}).get((form, n, k, m_class(m))) if capability is not None else None
    if found is not None and found.fits_scratch(m, n):
        return found
    block_m = 32 if m <= 32 else 64
    tiles = -(-n // 128) * -(-m // block_m)
    split = 1
    while split < 8 and tiles * split * 2 <= 264 and k // (split * 2) >= 1024:
        split *= 2
    stages = 3 if form == "int8" else 2
    return GemmConfig(128, block_m, 4 if form == "int8" else 8, stages, split)


def candidates(form: str, n: int, k: int, m: int, capability: Capability | None = None) -> list[GemmConfig]:
    """Settings worth timing, the default first; some may ask for more than a given GPU has and fail to launch."""
    found = [pick_config(form, n, k, m, capability)]
    grid = itertools.product((64, 128), (32, 64, 128, 256), (4, 8), (2, 3, 4), (1, 2, 4, 8))
    for block_n, block_m, warps, stages, split in grid:
        config = GemmConfig(block_n, block_m, warps, stages, split)
        per_thread = block_n * block_m // (32 * warps)
        useful = block_m <= m_class(m) and 16 <= per_thread <= 64 and k // split >= 1024
        crowded = split > 1 and -(-n // block_n) * -(-m // block_m) * split > 528
        if useful and not crowded and config.fits_scratch(m, n):
            found.append(config)
    return list(dict.fromkeys(found))
