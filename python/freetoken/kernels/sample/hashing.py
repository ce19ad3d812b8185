"""The counter-based generator behind every draw: a pure function of (seed, output index, counter).

``row_keys`` runs on the host in 64-bit wrap-around arithmetic and gives each draw two 32-bit words; ``hash_words`` turns
those and a counter into 32 well-mixed bits on any device. Both are integer arithmetic alone, so numpy, torch, Triton and
plain Python agree bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch

SEED_STEP = 0xA3EC647659359ACD
INDEX_STEP = 0xD6E8FEB86659FD93
MIX_A = 0xB3C9A5F1D2E4786B
MIX_B = 0x9FB21C651E98DF25

COUNTER_STEP = 0x9E3779B1
WORD_A = 0x7FEB352D
WORD_B = 0x846CA68B
TILE_DOMAIN = 0x80000000
"""Added to a tile's number, so that choosing a tile and choosing an id inside one never share a counter."""

_WRAP = (1 << 32) - 1


def mix64(words: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every input bit reaches every output bit (xor-shifts and odd multipliers)."""
    words = words ^ (words >> np.uint64(31))
    words = words * np.uint64(MIX_A)
    words = words ^ (words >> np.uint64(29))
    words = words * np.uint64(MIX_B)
    return words ^ (words >> np.uint64(32))


def row_keys(seeds: np.ndarray, out_index: np.ndarray) -> np.ndarray:
    """``seeds [S] uint64``, ``out_index [S]`` (0 for the first output token) -> ``[2, S] int32`` keys (low, high word)."""
    stream = mix64(seeds + np.uint64(SEED_STEP))
    words = mix64(stream + (out_index.astype(np.uint64) + np.uint64(1)) * np.uint64(INDEX_STEP))
    low, high = words & np.uint64(_WRAP), words >> np.uint64(32)
    return np.stack([low, high]).astype(np.uint32).view(np.int32)


def signed32(word: int) -> int:
    """The int32 that has the bits of the unsigned ``word``."""
    word &= _WRAP
    return word - (1 << 32) if word >> 31 else word


def hash_words(key: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """``key [2, S, 1] int32`` and ``counters [..., N] int32`` -> ``[S, N] int32`` random words."""
    words = counters * signed32(COUNTER_STEP) + key[0]
    words = words ^ ((words >> 16) & 0xFFFF)
    words = words * signed32(WORD_A) ^ key[1]
    words = words ^ ((words >> 15) & 0x1FFFF)
    words = words * signed32(WORD_B)
    return words ^ ((words >> 16) & 0xFFFF)


def exponential(words: torch.Tensor) -> torch.Tensor:
    """Random int32 words -> float32 Exponential(1) variates from their upper 31 bits.

    With ``v = (bits + 0.5) / 2**31`` this is ``-log(1 - v)``, by its series below 1/64, where ``1 - v`` would round the
    small values that decide a draw.
    """
    v = ((words >> 1) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return torch.where(v < 1.0 / 64.0, series, -torch.log(1.0 - v))
