"""Launch parameters of the decode kernels, from host facts that do not change between replays of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.kernels.integers import next_power_of_two

SHARE_STEP = 16
"""Parts of a sequence are whole multiples of this many tokens, but for the last one."""
STEP_BYTES = 32 << 10
"""K and V of one head that a program reads a step; two steps are on their way or in use."""
WHOLE_STEPS = 4
"""Steps that one program makes about as soon as several would make one each and have their results joined."""
SMALL_TILES = 88 << 10
"""Bytes of tiles that fit any GPU beside what else a program keeps in shared memory."""
MULTIPROCESSOR_BYTES = 228 << 10
"""Shared memory of a multiprocessor of the accelerators of data centres. With less, programs of few sequences come in several waves."""
PROGRAM_BYTES = 3 << 10
"""Shared memory of a program beside its tiles, at the most."""
MOST_PROGRAMS = 3
"""Programs of 8 warps for which a multiprocessor has registers."""
MOST_SPLITS = 512
"""Partial results of a head that are joined at once."""
JOINED_VALUES = 4096
"""Values of partial results that a joining program reads, 32 a thread."""


@dataclass(frozen=True)
class DecodeConfig:
    """Launch parameters of one batch size.

    A sequence of up to ``whole`` tokens is left whole; a longer one is cut into at most ``splits`` equal parts, of ``min_share``
    tokens or little less. A program reads ``block_n`` tokens a step. Where kernels start early it has the L2 cache fetch K and V ahead:
    of no step (``ahead`` 0), of the first 2, or of 4 where it has no more.
    """

    block_n: int
    whole: int
    min_share: int
    splits: int
    num_warps: int
    num_stages: int
    ahead: int = 2


@dataclass(frozen=True)
class JoinConfig:
    """A program joins ``width`` neighbours of a head's output from up to ``parts`` partial results; both are powers of two."""

    parts: int
    width: int
    num_warps: int


def rounded_down(splits: int) -> int:
    """``splits``, or the power of two below where little is lost: a joining program reads a power of two of partial results, so that 66
    cost what 128 do."""
    power = 1 << splits.bit_length() - 1
    return power if splits - power <= splits // 8 else splits


def decode_config(
    head_dim: int,
    group: int,
    batch: int,
    max_seq_len: int,
    num_sms: int,
    *,
    num_kv_heads: int,
    element_size: int = 2,
) -> DecodeConfig:
    """Choose block, warps and splits for ``batch`` sequences of at most ``max_seq_len`` tokens.

    The batch counts as the next power of two, so that a batch padded to a graph's bucket is cut like the same batch
    without padding. Few sequences are cut until all programs that fit the GPU at once have a part. Many are left whole up
    to 1,024 tokens; beyond that a few parts keep one long sequence from holding the step up.
    """
    row_bytes = next_power_of_two(head_dim) * element_size
    block_n = max(16, min(64, STEP_BYTES // (2 * row_bytes)))
    tiles = tile_bytes(block_n, group, row_bytes)
    places = num_sms * max(1, min(MOST_PROGRAMS, MULTIPROCESSOR_BYTES // (tiles + PROGRAM_BYTES)))
    programs = next_power_of_two(batch) * num_kv_heads
    if 2 * programs >= places:
        whole, min_share, splits = 1024, 512, 4
    else:
        whole, min_share, splits = WHOLE_STEPS * block_n, block_n, rounded_down(min(MOST_SPLITS, places // programs))
    splits = 1 if max_seq_len <= whole else min(splits, -(-max_seq_len // min_share))
    return DecodeConfig(block_n, whole, min_share, splits, num_warps=8, num_stages=3 if tiles <= SMALL_TILES else 2)


def tile_bytes(block_n: int, group: int, row_bytes: int) -> int:
    """Shared memory for two steps' K, V and queries, with ``num_stages`` 3."""
    return 2 * (2 * block_n + max(16, next_power_of_two(group))) * row_bytes


def join_config(head_dim: int, splits: int) -> JoinConfig:
    """Choose slices of ``head_dim`` so narrow that a program reads up to ``splits`` partial results of its own at once."""
    parts = next_power_of_two(splits)
    width = min(next_power_of_two(head_dim), max(8, JOINED_VALUES // parts))
    return JoinConfig(parts, width, num_warps=max(1, min(4, parts * width // 1024)))
