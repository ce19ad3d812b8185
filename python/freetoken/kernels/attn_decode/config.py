"""Launch parameters of the decode kernel, from host facts that do not change between replays of a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """``block_n`` tokens a step; a sequence is cut into at most ``splits`` parts of at least ``min_share`` tokens."""

    block_n: int
    min_share: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class JoinConfig:
    """``step`` partial results are added at a time."""

    step: int
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
) -> DecodeConfig:
    """Choose block, warps and splits for ``batch`` sequences of at most ``max_seq_len`` tokens.

    The batch counts as the next power of two, so that a batch padded to a graph's bucket is cut like the same batch
    without padding. Few sequences are cut until the card is full several times over. Many are left whole up to
    ``min_share`` tokens, which spares the partial results; beyond that a few parts keep one long sequence from holding
    the step up.
    """
    row_bytes = next_power_of_two(head_dim) * element_size
    block_n = max(16, min(64, 16384 // row_bytes))
    programs = next_power_of_two(batch) * num_kv_heads
    if programs >= 2 * num_sms:
        min_share, splits = 1024, 4
    else:
        min_share, splits = block_n, -(-4 * num_sms // programs)
    splits = max(1, min(splits, -(-max_seq_len // min_share)))
    num_warps = 8 if group > 16 or element_size > 2 else 4
    return DecodeConfig(block_n=block_n, min_share=min_share, splits=splits, num_warps=num_warps, num_stages=3)


def join_config(head_dim: int) -> JoinConfig:
    """Launch parameters of the kernel that joins the parts of a sequence; one program for each query head."""
    return JoinConfig(step=8, num_warps=4 if head_dim >= 128 else 2, num_stages=2)
