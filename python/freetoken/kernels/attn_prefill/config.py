"""Launch parameters of the prefill kernel, and its list of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillConfig:
    """``block_m`` queries a program against ``block_n`` tokens a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> PrefillConfig:
    """Choose blocks and warps by head dimension, element type and compute capability.

    The sizes are the largest that keep every register out of memory; Hopper's matrix instructions read both operands
    from shared memory, which leaves room for more. Up to 99 KiB of shared memory elsewhere, 131 KiB on Hopper.
    """
    hopper = capability[0] == 9
    if dtype == torch.float32:
        return PrefillConfig(32 if head_dim <= 128 else 16, 16, 8, 1)
    if head_dim <= 64:
        return PrefillConfig(128, 64, 4 if hopper else 8, 3)
    if head_dim <= 128:
        return PrefillConfig(128, 64 if hopper else 32, 8, 3)
    return PrefillConfig(128 if hopper else 64, 32, 8, 2)


def prefill_tiles(q_lens: Sequence[int], seq_lens: Sequence[int], block_m: int) -> list[tuple[int, int]]:
    """Pairs (prefill, query block) that together cover all queries; those that read most tokens come first."""
    tiles = [(j, block) for j, q_len in enumerate(q_lens) for block in range(-(-q_len // block_m))]
    return sorted(tiles, key=lambda t: q_lens[t[0]] - seq_lens[t[0]] - min(q_lens[t[0]], (t[1] + 1) * block_m))
