"""Launch settings of the convolution kernels, from host facts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from freetoken.kernels.integers import next_power_of_two


@dataclass(frozen=True)
class ConvConfig:
    """A program takes ``block_t`` consecutive tokens (a multiple of 4) and ``block_c`` channels with ``num_warps`` warps."""

    block_t: int
    block_c: int
    num_warps: int


def pick_prefill(channels: int, max_q_len: int) -> ConvConfig:
    """Settings for pieces of at most ``max_q_len`` tokens: eight channels a thread, tiles no longer than the pieces."""
    block_c = max(32, min(512, next_power_of_two(channels)))
    block_t = max(4, min(16, next_power_of_two(max_q_len)))
    return ConvConfig(block_t, block_c, num_warps=max(1, block_c // 256))


def pick_decode(channels: int, batch: int) -> ConvConfig:
    """Settings for one token a sequence: narrow programs while there are few sequences."""
    block_c = max(32, min(256 if batch < 16 else 1024, next_power_of_two(channels)))
    return ConvConfig(1, block_c, num_warps=max(1, block_c // 256))


def candidates(channels: int, max_q_len: int) -> list[ConvConfig]:
    """Prefill settings worth timing, the default first."""
    found = [pick_prefill(channels, max_q_len)]
    for block_t, block_c, warps in itertools.product((8, 16, 32, 64), (256, 512, 1024), (1, 2, 4, 8)):
        if 2 <= block_c // (32 * warps) <= 8:
            found.append(ConvConfig(block_t, block_c, warps))
    return list(dict.fromkeys(found))
