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


def pick_config(dk: int, dv: int, group: int, dtype: torch.dtype, capability: tuple[int, int]) -> PrefillConfig:
    """Choose by head widths, value heads per key head, element type and compute capability.

    The state of a program, ``block_v`` by ``dk`` float32, stays in registers, 16 rows or more a warp; Hopper's matrix
    instructions want 64 rows and four warps. The loads in flight stay below 227 KiB of shared memory on Hopper, 163 KiB on Ampere,
    99 KiB elsewhere.
    """
    wide_keys = block_of(dk) > 128
    if dtype == torch.float32 or wide_keys:
        return PrefillConfig(1, 8 if dtype == torch.float32 else 4, 16, 4 if dtype == torch.float32 else 2, 1)
    rows = min(64, block_of(dv))
    if capability[0] == 9:
        return PrefillConfig(group, 4, rows, 4, 3)
    if capability == (8, 0):
        return PrefillConfig(group, 4, rows, rows // 16, 2)
    return PrefillConfig(group, 4, rows, rows // 16, 1)


def candidates(dv: int, group: int) -> list[PrefillConfig]:
    """Variants worth timing for 16-bit inputs and key heads of up to 128; those that need too much shared memory fail to launch."""
    found = []
    for heads in sorted({1, group}):
        for chunk_warps in (4, 8):
            found.append(PrefillConfig(heads, chunk_warps, min(64, block_of(dv)), 4, 3))
    for block_v, warps in ((16, 1), (32, 2), (64, 4), (128, 8)):
        if block_v <= block_of(dv):
            found += [PrefillConfig(group, 4, block_v, warps, stages) for stages in (1, 2, 3, 4)]
    return list(dict.fromkeys(found))
