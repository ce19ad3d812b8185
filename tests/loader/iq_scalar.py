"""Decoders of scalar Python for the IQ, ternary and MXFP4 types: one block of bytes to its values, element by element.

Only the grids (tables of the format) are taken from the ``gguf`` package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

from gguf import quants


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def u16(block: bytes, at: int) -> int:
    return struct.unpack_from("<H", block, at)[0]


def u32(block: bytes, at: int) -> int:
    return struct.unpack_from("<I", block, at)[0]


@cache
def grid(name: str) -> list[list[float]]:
    kind = getattr(quants, name)
    kind.init_grid()
    return kind.grid[0, 0].tolist()


def signs(seven: int) -> list[int]:
    """Eight signs of seven bits: the eighth makes the number of negative ones even."""
    bits = seven | (seven.bit_count() & 1) << 7
    return [-1 if bits >> place & 1 else 1 for place in range(8)]


def eight_signs(byte: int) -> list[int]:
    return [-1 if byte >> place & 1 else 1 for place in range(8)]


def iq2_xxs(block: bytes) -> list[float]:
    values = []
    for part in range(8):
        at = 2 + 8 * part
        packed = u32(block, at + 4)
        scale = half(block, 0) * (0.5 + (packed >> 28)) / 4
        for index in range(4):
            row = grid("IQ2_XXS")[block[at + index]]
            values += [scale * v * s for v, s in zip(row, signs(packed >> 7 * index & 127))]
    return values


def iq2_xs(block: bytes) -> list[float]:
    values = []
    for index in range(32):
        packed, scales = u16(block, 2 + 2 * index), block[66 + index // 4]
        scale = half(block, 0) * (0.5 + (scales >> 4 * (index % 4 // 2) & 15)) / 4
        values += [scale * v * s for v, s in zip(grid("IQ2_XS")[packed & 511], signs(packed >> 9))]
    return values


def iq2_s(block: bytes) -> list[float]:
    values = []
    for index in range(32):
        high = block[66 + index // 4] >> 2 * (index % 4) & 3
        scale = half(block, 0) * (0.5 + (block[74 + index // 4] >> 4 * (index % 4 // 2) & 15)) / 4
        row = grid("IQ2_S")[block[2 + index] | high << 8]
        values += [scale * v * s for v, s in zip(row, eight_signs(block[34 + index]))]
    return values


def iq3_xxs(block: bytes) -> list[float]:
    values = []
    for part in range(8):
        packed = u32(block, 66 + 4 * part)
        scale = half(block, 0) * (0.5 + (packed >> 28)) / 2
        for index in range(4):
            at = 2 + 8 * part + 2 * index
            row = grid("IQ3_XXS")[block[at]] + grid("IQ3_XXS")[block[at + 1]]
            values += [scale * v * s for v, s in zip(row, signs(packed >> 7 * index & 127))]
    return values


def iq3_s(block: bytes) -> list[float]:
    values = []
    for index in range(64):
        ninth = block[66 + index // 8] >> index % 8 & 1
        scale = half(block, 0) * (1 + 2 * (block[106 + index // 16] >> 4 * (index // 8 % 2) & 15))
        row = grid("IQ3_S")[block[2 + index] | ninth << 8]
        found = eight_signs(block[74 + index // 2])[4 * (index % 2) :]
        values += [scale * v * s for v, s in zip(row, found)]
    return values


def iq1_s(block: bytes) -> list[float]:
    values = []
    for part in range(8):
        packed = u16(block, 34 + 2 * part)
        scale = half(block, 0) * (2 * (packed >> 12 & 7) + 1)
        shift = -0.125 if packed >> 15 else 0.125
        for index in range(4):
            row = grid("IQ1_S")[block[2 + 4 * part + index] | (packed >> 3 * index & 7) << 8]
            values += [scale * (v + shift) for v in row]
    return values


def iq1_m(block: bytes) -> list[float]:
    words = [u16(block, 48 + 2 * index) for index in range(4)]
    bits = sum((word >> 12) << 4 * index for index, word in enumerate(words))
    d = struct.unpack("<e", struct.pack("<H", bits))[0]
    values = []
    for index in range(32):
        pair = index // 2
        scale = d * (2 * (words[pair // 4] >> 3 * (pair % 4) & 7) + 1)
        high = block[32 + pair] >> 4 * (index % 2) & 15
        row = grid("IQ1_M")[block[index] | (high & 7) << 8]
        values += [scale * (v + (-0.125 if high & 8 else 0.125)) for v in row]
    return values


NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(block: bytes) -> list[float]:
    return [half(block, 0) * NON_LINEAR[block[2 + i % 16] >> 4 * (i // 16) & 15] for i in range(32)]


def iq4_xs(block: bytes) -> list[float]:
    values = []
    for i in range(256):
        part = i // 32
        scale = (block[4 + part // 2] >> 4 * (part % 2) & 15) | (u16(block, 2) >> 2 * part & 3) << 4
        code = block[8 + 16 * part + i % 16] >> 4 * (i % 32 // 16) & 15
        values.append(half(block, 0) * (scale - 32) * NON_LINEAR[code])
    return values


def digit(byte: int, place: int) -> int:
    """Base-3 digit of a byte that holds a fraction, most significant first."""
    for _ in range(place):
        byte = byte * 3 % 256
    return byte * 3 // 256


def tq1_0(block: bytes) -> list[float]:
    order = [(byte, place) for place in range(5) for byte in range(32)]
    order += [(byte, place) for place in range(5) for byte in range(32, 48)]
    order += [(byte, place) for place in range(4) for byte in range(48, 52)]
    return [half(block, 52) * (digit(block[byte], place) - 1) for byte, place in order]


def tq2_0(block: bytes) -> list[float]:
    return [half(block, 64) * ((block[32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3) - 1) for i in range(256)]


FOUR_BITS = (0, 1, 2, 3, 4, 6, 8, 12)


def mxfp4(block: bytes) -> list[float]:
    values = []
    for i in range(32):
        code = block[1 + i % 16] >> 4 * (i // 16) & 15
        values.append(2.0 ** (block[0] - 128) * FOUR_BITS[code & 7] * (-1 if code & 8 else 1))
    return values


# Decoder, and the offsets of half-precision scales.
IQ_SCALAR: dict[str, tuple[Callable[[bytes], list[float]], tuple[int, ...]]] = {
    "IQ1_S": (iq1_s, (0,)),
    "IQ1_M": (iq1_m, ()),
    "IQ2_XXS": (iq2_xxs, (0,)),
    "IQ2_XS": (iq2_xs, (0,)),
    "IQ2_S": (iq2_s, (0,)),
    "IQ3_XXS": (iq3_xxs, (0,)),
    "IQ3_S": (iq3_s, (0,)),
    "IQ4_NL": (iq4_nl, (0,)),
    "IQ4_XS": (iq4_xs, (0,)),
    "TQ1_0": (tq1_0, (52,)),
    "TQ2_0": (tq2_0, (64,)),
    "MXFP4": (mxfp4, ()),
}
