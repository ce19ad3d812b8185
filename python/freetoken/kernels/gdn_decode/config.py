"""Launch settings of the decode step, from host facts that do not change between replays of a graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from freetoken.kernels.integers import next_power_of_two

LARGEST_TILE = 16384
"""Elements of state that one program holds in registers."""

FEW_HEADS = 128
"""Up to so many heads in a batch, each has a multiprocessor of a data-centre card to itself."""

MANY_HEADS = 320
"""From so many on, every multiprocessor of such a card has enough programs to overlap, and asking for states ahead costs more than it
brings."""


@dataclass(frozen=True)
class DecodeConfig:
    """A program takes ``block_v`` rows of one head's state with ``num_warps`` warps.

    With fewer rows than the head has, the programs of a head leave their outputs in scratch memory, and the last to arrive
    norms them. ``prefetch`` asks for the state to be brought into the L2 cache while the kernel before still runs.
    """

    block_v: int
    num_warps: int
    prefetch: bool = True

    def splits(self, dv: int) -> int:
        """Programs that share a head of ``dv`` rows."""
        return -(-dv // self.block_v)


def pick_config(dv: int, dk: int, heads: int | None = None) -> DecodeConfig:
    """By the head's widths and the ``heads`` of a whole batch, ``None`` for a number in between.

    A program takes as much of a head as fits its registers, 64 elements a thread at most. Of more heads than multiprocessors it takes
    half as much with half the warps: several then fit one multiprocessor, and one loads while another works.
    """
    width = next_power_of_two(dk)
    rows = next_power_of_two(dv)
    block_v = max(1, min(rows, LARGEST_TILE // width))
    if heads is not None and heads > FEW_HEADS and block_v > 1 and block_v * width >= LARGEST_TILE:
        block_v //= 2
    prefetch = heads is None or heads < MANY_HEADS
    return DecodeConfig(block_v, max(1, min(8, block_v * width // 2048)), prefetch)


def candidates(dv: int, dk: int) -> list[DecodeConfig]:
    """Settings worth timing, the default first."""
    width = next_power_of_two(dk)
    found = [pick_config(dv, dk)]
    for block_v, warps, prefetch in itertools.product((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16), (True, False)):
        if block_v <= next_power_of_two(dv) and 16 <= block_v * width // (32 * warps) <= 64:
            found.append(DecodeConfig(block_v, warps, prefetch))
    return list(dict.fromkeys(found))
