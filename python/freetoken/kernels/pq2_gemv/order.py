"""Where kernels find the codes and scales of a weight, one row after the other or interleaved (:class:`PQ2Weight`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_codes(row, K: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the codes of ``row`` (int64) begin, in bytes."""
    if INTERLEAVED:
        return row // 8 * (2 * K) + row % 8 * 32
    else:
        return row * (K // 4)


@triton.jit
def row_scales(row, K: tl.constexpr, GROUP_W: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the scales of ``row`` (int64) begin; those of neighbouring groups are 8 apart where rows are interleaved, else 1."""
    if INTERLEAVED:
        return row // 8 * (8 * K // GROUP_W) + row % 8
    else:
        return row * (K // GROUP_W)


@triton.jit
def along_row(index, BYTES: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Bytes from the start of a row's codes to piece ``index`` of ``BYTES`` (a power of two up to 32, or multiples of 32)."""
    if not INTERLEAVED:
        return index * BYTES
    elif BYTES % 32 == 0:
        return index * (BYTES * 8)
    else:
        PIECES: tl.constexpr = 32 // BYTES
        return index // PIECES * 256 + index % PIECES * BYTES
