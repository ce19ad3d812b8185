"""Launch parameters of the prefill kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillConfig:
    """``heads`` value heads a program of the chunk kernel (a divisor of the value heads per key head) with ``chunk_warps``
    warps; ``block_v`` columns of the value head a program of the scan, with ``scan_warps`` warps and ``scan_stages`` chunks of
    loads in flight."""

    heads: int
    chunk_warps: int
    block_v: int
    scan_warps: int
    scan_stages: int


def block_of(width: int) -> int:
    """The smallest power of two, 16 or more, that holds ``width``."""
    return max(16, 1 << (width - 1).bit_length())


def pick_config(dk: int, dv: int, dtype: torch.dtype, capability: tuple[int, int]) -> PrefillConfig:
    """Choose by head widths, element type and compute capability.

    The state of a program, ``block_v`` by ``dk`` float32, stays in registers. Hopper's matrix instructions want 64 of its rows and four
    warps; elsewhere a warp takes fewer. Two chunks of loads in flight leave room for two programs in Hopper's shared memory and fit
    the 99 KiB of the smallest.
    """
    if dtype == torch.float32 or block_of(dk) > 128:
        return PrefillConfig(1, 8, 16, 8, 1)
    rows = min(64, block_of(dv))
    if capability[0] == 9 and rows == 64:
        return PrefillConfig(1, 4, rows, 4, 2)
    return PrefillConfig(1, 8, rows, rows // 8, 2)


def candidates(dv: int, group: int) -> list[PrefillConfig]:
    """Variants worth timing on a GPU for 16-bit inputs and key heads of up to 128: first those of the chunk kernel, then those of the
    scan. One that needs more shared memory than there is fails to launch."""
    rows = min(64, block_of(dv))
    found = [PrefillConfig(heads, warps, rows, 4, 3) for heads in (1, group) for warps in (4, 8)]
    for block_v, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)):
        if block_v <= block_of(dv):
            found += [PrefillConfig(1, 4, block_v, warps, stages) for stages in (1, 2, 3, 4)]
    return list(dict.fromkeys(found))
