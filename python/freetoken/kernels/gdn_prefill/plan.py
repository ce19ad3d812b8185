"""Which chunk and which piece each program works on: built on the host once a step, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 64
"""Tokens of one chunk. The kernels, the tables and flash-linear-attention's chunk indices all use it."""


@dataclass(frozen=True)
class FlaTables:
    """The tables of flash-linear-attention, over the pieces that are not empty.

    ``pieces [P] int64`` names them; ``cu_seqlens [P + 1]`` and ``chunk_indices [N, 2]`` (piece, chunk inside it) are int64
    on the device, ``cu_seqlens_cpu`` is the first on the host. ``pieces`` is ``None`` when no piece is empty.
    """

    pieces: torch.Tensor | None
    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    chunk_indices: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """The pieces of one step. ``lengths`` are in tokens, on the host; empty pieces have no row in a table.

    ``chunks [N, 2] int32``: first token, tokens (1 to 64). ``pieces [P, 4] int32``: piece, first token, tokens, first chunk;
    the longest piece first, so that the longest chain starts first. Both lie on the device.
    """

    lengths: tuple[int, ...]
    tokens: int
    chunks: torch.Tensor
    pieces: torch.Tensor
    fla: FlaTables | None = None


def chunk_table(lengths: Sequence[int]) -> np.ndarray:
    """``[N, 3] int32`` for each chunk, in order of tokens: piece, chunk inside the piece, first token of the piece."""
    sizes = np.asarray(lengths, dtype=np.int64)
    counts = -(-sizes // CHUNK)
    piece = np.repeat(np.arange(len(sizes)), counts)
    inside = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([piece, inside, (np.cumsum(sizes) - sizes)[piece]], axis=1).astype(np.int32)


def make_plan(lengths: Sequence[int], device: torch.device | str, *, fla: bool = False) -> Plan:
    """Tables for pieces of these lengths, whose tokens follow one another from token 0; one copy, no synchronisation.

    ``fla`` adds the tables of flash-linear-attention. Raises ``ValueError`` for a negative length.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if (sizes < 0).any():
        raise ValueError(f"a piece has a length of {int(sizes.min())} tokens")
    table = chunk_table(lengths)
    piece, inside, first = table.T
    chunks = np.stack([first + inside * CHUNK, np.minimum(sizes[piece] - inside * CHUNK, CHUNK)], axis=1)
    counts = -(-sizes // CHUNK)
    rows = np.stack([np.arange(len(sizes)), np.cumsum(sizes) - sizes, sizes, np.cumsum(counts) - counts], axis=1)
    pieces = rows[np.argsort(-sizes, kind="stable")]
    pieces = pieces[pieces[:, 2] > 0]
    chunk_rows, piece_rows = _upload([chunks.astype(np.int32), pieces.astype(np.int32)], device)
    tables = _fla_tables(sizes, table, device) if fla and len(pieces) else None
    return Plan(tuple(int(size) for size in sizes), int(sizes.sum()), chunk_rows, piece_rows, tables)


def _fla_tables(sizes: np.ndarray, table: np.ndarray, device: torch.device | str) -> FlaTables:
    filled = np.flatnonzero(sizes)
    rank = np.cumsum(sizes > 0) - 1
    indices = np.stack([rank[table[:, 0]], table[:, 1]], axis=1)
    cu_seqlens = np.concatenate([[0], np.cumsum(sizes[filled])])
    kept, starts, chunk_indices = _upload([filled, cu_seqlens, indices], device)
    return FlaTables(None if len(filled) == len(sizes) else kept, starts, torch.from_numpy(cu_seqlens), chunk_indices)


def _upload(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Arrays of one integer type on the device, by one copy from pinned memory."""
    packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    if torch.device(device).type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
