"""Launch parameters of the decode kernel, from host facts that do not change between replays of a graph."""

from __future__ import annotations

from dataclasses import dataclass

SHARE_STEP = 16
"""Parts of a sequence are whole multiples of this many tokens, but for the last one."""
WHOLE_BYTES = 192 << 10
"""K and V of one head that one program reads sooner than several would read and join them."""
PART_BYTES = 64 << 10
"""K and V of one head that are a part's least."""
JOINED_BYTES = 256 << 10
"""Partial results of one KV head: the program that comes last reads them all by itself."""
SMALL_TILES = 88 << 10
"""Bytes of tiles that fit any GPU beside what else a program keeps in shared memory."""
LARGE_TILES = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities whose programs may have 150 KiB of shared memory."""
JOIN_REGISTERS = 64
"""Registers a thread for the partial results that are read at a time."""


@dataclass(frozen=True)
class DecodeConfig:
    """Launch parameters of one batch size.

    A sequence of up to ``whole`` tokens is left whole; a longer one is cut into at most ``splits`` equal parts, of ``min_share``
    tokens or little less. A program reads ``block_n`` tokens a step.
    """

    block_n: int
    whole: int
    min_share: int
    splits: int
    num_warps: int
    num_stages: int


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def decode_config(
    head_dim: int,
    group: int,
    batch: int,
    max_seq_len: int,
    num_sms: int,
    *,
    num_kv_heads: int,
    element_size: int = 2,
    large_tiles: bool = False,
) -> DecodeConfig:
    """Choose block, warps and splits for ``batch`` sequences of at most ``max_seq_len`` tokens.

    The batch counts as the next power of two, so that a batch padded to a graph's bucket is cut like the same batch
    without padding. Few sequences are cut until every multiprocessor has one program, which with ``large_tiles`` (150 KiB of shared
    memory or more) holds twice the tokens. Many are left whole up to 1,024 tokens; beyond that a few parts keep one long
    sequence from holding the step up.
    """
    row_bytes = next_power_of_two(head_dim) * element_size
    programs = next_power_of_two(batch) * num_kv_heads
    joined = max(4, JOINED_BYTES // (group * head_dim * 4))
    splits = min(joined, max(4, num_sms // programs))
    alone = programs * splits <= num_sms
    if 4 * programs >= 3 * num_sms:
        whole, min_share = 1024, 512
    else:
        whole, min_share = (max(SHARE_STEP, size // (2 * row_bytes)) for size in (WHOLE_BYTES, PART_BYTES))
    large = alone and large_tiles and group <= 16 and element_size <= 2
    block_n = max(16, min(64, 16384 // row_bytes)) * (2 if large else 1)
    num_warps = 8 if large or group > 16 or element_size > 2 else 4
    splits = 1 if max_seq_len <= whole else min(splits, -(-max_seq_len // min_share))
    fits = large or tile_bytes(block_n, group, row_bytes) <= SMALL_TILES
    return DecodeConfig(block_n, whole, min_share, splits, num_warps, num_stages=3 if fits else 2)


def tile_bytes(block_n: int, group: int, row_bytes: int) -> int:
    """Shared memory for two steps' K, V and queries, with ``num_stages`` 3."""
    return 2 * (2 * block_n + max(16, next_power_of_two(group))) * row_bytes


def join_step(head_dim: int, group: int, num_warps: int, splits: int) -> int:
    """Partial results of each head that a program reads at a time, a power of two."""
    tile = next_power_of_two(head_dim) * next_power_of_two(group)
    return max(1, min(next_power_of_two(splits), JOIN_REGISTERS * 32 * num_warps // tile))
