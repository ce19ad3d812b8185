"""Launch settings of the rotation kernels, from host facts that do not change between replays of a graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

COMMON_TILE = 1024
LARGEST_BLOCK = 8192
"""Rotation blocks above this are left to the reference."""
FEW_PROGRAMS = 1024
"""Up to this many tiles in all, the time of one program counts; above, instructions do."""


@dataclass(frozen=True)
class RotateConfig:
    """``num_warps`` warps a program. A program of the kernel that norms whole rows takes ``tiles`` tiles of one row (0: all of
    them): each program sums the squares of the row itself, so few tiles are quick and many spare reads."""

    num_warps: int
    tiles: int = 1


def tile_of(width: int, block: int, *parts: int) -> int:
    """Columns a program rotates at once: a power of two that holds whole blocks and whole ``parts`` (all powers of two)."""
    return max(block, *parts, min(COMMON_TILE, 1 << max(width - 1, 0).bit_length()))


def pick_config(tokens: int, width: int, tile: int) -> RotateConfig:
    """8 values a thread where time to finish counts, 16 where there is work for the whole GPU."""
    few = tokens * -(-width // tile) <= FEW_PROGRAMS
    return RotateConfig(max(1, min(16, tile // (256 if few else 512))), 1 if few else 0)


def holds_row(width: int, config: RotateConfig) -> bool:
    """Whether a program keeps a whole row and two rows of weights in registers: 64 elements a thread of each."""
    return width <= 2048 * config.num_warps


def candidates(tokens: int, width: int, tile: int) -> list[RotateConfig]:
    """Settings worth timing, the default first."""
    found = [pick_config(tokens, width, tile)]
    found += [RotateConfig(*pair) for pair in itertools.product((1, 2, 4, 8), (1, 0)) if tile // (32 * pair[0]) <= 32]
    return list(dict.fromkeys(found))
