"""How the pieces of prompts of one step are cut: tiles of neighbouring queries, in parts whose scratch memory is bounded.

All of it follows from lengths that the host knows; nothing here depends on an element of a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from freetoken.kernels.attn_prefill.config import prefill_config
from freetoken.kernels.integers import next_power_of_two
from freetoken.kernels.qsa.reference import Geometry

MOST_QUERIES = 32
"""Queries of a tile have one bit each in a word."""

Tile = tuple[int, int, int, int]


@dataclass(frozen=True)
class PieceConfig:
    """``queries`` of a request share what they read: with all query heads of a KV head they fill ``block_m`` rows of a program, which
    takes ``block_n`` tokens a step. Scores are made for ``score_m`` queries and ``score_n`` blocks at a time."""

    queries: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    score_m: int
    score_n: int


def piece_config(
    head_dim: int, group: int, index_dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> PieceConfig:
    """Choose tiles by head width, query heads of a KV head, width of an index key, element type and compute capability.

    64 rows rather than the 128 of dense prefill: queries that choose differently read what any of them chose, so that fewer share
    less that is not their own; and two programs fit a multiprocessor.
    """
    base = prefill_config(head_dim, dtype, capability)
    narrow = capability[0] == 9 and dtype.itemsize <= 2
    rows = min(base.block_m, 64, next_power_of_two(MOST_QUERIES * group))
    rows = max(16, rows, next_power_of_two(group))
    # Products of float32 hold whole rows in registers.
    score = (16, 16) if dtype.itemsize > 2 else (64, min(128, max(32, 16384 // next_power_of_two(index_dim))))
    return PieceConfig(
        queries=min(MOST_QUERIES, rows // group),
        block_m=rows,
        block_n=base.block_n,
        num_warps=4 if narrow else base.num_warps,
        num_stages=base.num_stages,
        score_m=score[0],
        score_n=score[1],
    )


def piece_candidates(
    head_dim: int, group: int, index_dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> list[PieceConfig]:
    """Settings of attention worth timing on one GPU, that of :func:`piece_config` first; it may have no room for some."""
    default = piece_config(head_dim, group, index_dim, dtype, capability)
    found = [default]
    for rows, tokens, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3)):
        # More outputs would not fit the registers of a program.
        if rows < group or rows * max(16, next_power_of_two(head_dim)) > warps * 4096:
            continue
        queries = min(MOST_QUERIES, rows // group)
        changed = {"block_m": rows, "block_n": tokens, "num_warps": warps, "num_stages": stages, "queries": queries}
        if (one := replace(default, **changed)) != default:
            found.append(one)
    return found


@dataclass(frozen=True)
class Part:
    """Tokens ``begin .. end`` of a step's pieces, of which none sees more than ``blocks`` whole blocks; rows of
    :attr:`PiecePlan.tiles` for their scores and for their attention."""

    begin: int
    end: int
    blocks: int
    score: slice
    attend: slice


@dataclass(frozen=True)
class PiecePlan:
    """``tiles [N, 4]`` int32 on the device: first token (of those of the pieces), how many, position of the first in its text, number
    of the request in the batch. ``seq_lens`` and ``q_lens`` of the pieces' requests, the first of which is number ``decodes``."""

    config: PieceConfig
    tiles: torch.Tensor
    parts: tuple[Part, ...]
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    decodes: int


def _split(q_lens: Sequence[int], seq_lens: Sequence[int], queries: int, config: Geometry) -> list[list[Tile]]:
    """Parts as lists of runs ``(first token, count, position, request)``, all of about as many tiles. With t tiles, of texts of b
    blocks, a part has ``max(queries, ratio) * t * b <= score_elements``, if more than one tile."""
    longest = max(seq_lens) // config.ratio + 1
    room = max(1, config.score_elements // (max(queries, config.ratio) * longest))
    total = sum(-(-q_len // queries) for q_len in q_lens)
    share = -(-total // -(-total // room))
    parts: list[list[Tile]] = [[]]
    tiles = token = 0
    for number, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        position, left = seq_len - q_len, q_len
        while left:
            if tiles == share:
                parts.append([])
                tiles = 0
            count = min(left, (share - tiles) * queries)
            parts[-1].append((token, count, position, number))
            tiles += -(-count // queries)
            token, position, left = token + count, position + count, left - count
    return parts


def _tiles(runs: Sequence[Tile], size: int) -> list[Tile]:
    """Runs cut into tiles of ``size`` queries, those that see most first."""
    tiles = [
        (token + at, min(size, count - at), position + at, number)
        for token, count, position, number in runs
        for at in range(0, count, size)
    ]
    return sorted(tiles, key=lambda tile: -tile[2])


def plan_pieces(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    decodes: int,
    config: Geometry,
    piece: PieceConfig,
    device: torch.device,
) -> PiecePlan:
    """Cut pieces of ``q_lens`` tokens at the ends of texts of ``seq_lens``; their requests follow ``decodes`` others in the batch."""
    tiles: list[Tile] = []
    parts = []
    for runs in _split(q_lens, seq_lens, piece.queries, config):
        runs = [(token, count, position, number + decodes) for token, count, position, number in runs]
        bounds = [len(tiles)]
        for size in (piece.score_m, piece.queries):
            tiles += _tiles(runs, size)
            bounds.append(len(tiles))
        blocks = max((position + count) // config.ratio for _, count, position, _ in runs)
        end = runs[-1][0] + runs[-1][1]
        parts.append(Part(runs[0][0], end, blocks, slice(*bounds[:2]), slice(*bounds[1:])))
    table = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
    if device.type == "cuda":
        table = table.pin_memory()
    return PiecePlan(piece, table.to(device, non_blocking=True), tuple(parts), tuple(seq_lens), tuple(q_lens), decodes)
