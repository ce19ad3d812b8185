"""Sampling again, slowly: plain Python integers and float64, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import torch

from freetoken.kernels.sample import TOP_K_OFF, SampleParams
from freetoken.kernels.sample.hashing import row_keys

WRAP64, WRAP32 = (1 << 64) - 1, (1 << 32) - 1
TILE = 1024


def mix64(word: int) -> int:
    word ^= word >> 31
    word = word * 0xB3C9A5F1D2E4786B & WRAP64
    word ^= word >> 29
    word = word * 0x9FB21C651E98DF25 & WRAP64
    return word ^ word >> 32


def key_words(seed: int, out_index: int) -> tuple[int, int]:
    stream = mix64((seed + 0xA3EC647659359ACD) & WRAP64)
    word = mix64((stream + (out_index + 1) * 0xD6E8FEB86659FD93) & WRAP64)
    return word & WRAP32, word >> 32


def hash_word(key: tuple[int, int], counter: int) -> int:
    word = (counter * 0x9E3779B1 + key[0]) & WRAP32
    word ^= word >> 16
    word = (word * 0x7FEB352D & WRAP32) ^ key[1]
    word ^= word >> 15
    word = word * 0x846CA68B & WRAP32
    return word ^ word >> 16


def gumbel(key: tuple[int, int], counter: int) -> float:
    v = min(((hash_word(key, counter) >> 1) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def kept_ids(values: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """Ids kept of one row of scaled float32 values, and how near the top-p sum came to ``top_p`` at the cut."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top_k]
    weights = [math.exp(float(values[i]) - float(values[order[0]])) for i in order]
    whole, running, margin = math.fsum(weights), 0.0, 1.0
    if top_p < 1.0:
        for count, weight in enumerate(weights, 1):
            margin = min(margin, abs(running / whole - top_p))
            running += weight
            if running >= top_p * whole:
                margin = min(margin, abs(running / whole - top_p))
                order = order[:count]
                break
    floor = -math.inf if min_p == 0.0 else float(values[order[0]]) + math.log(min_p)
    return {i for i in order if float(values[i]) >= floor}, margin


def draw(values: np.ndarray, kept: set[int], key: tuple[int, int]) -> tuple[int, float]:
    """The drawn id, and by how much the winner of either level beat the next."""
    tiles: dict[int, list[int]] = {}
    for i in sorted(kept):
        tiles.setdefault(i // TILE, []).append(i)
    top = max(float(values[i]) for i in kept)
    scores = []
    for tile, ids in tiles.items():
        total = math.fsum(math.exp(float(values[i]) - top) for i in ids)
        if total > 0.0:
            scores.append((math.log(total) + gumbel(key, tile + 0x80000000), tile))
    scores.sort(reverse=True)
    inner = sorted(((float(values[i]) + gumbel(key, i), i) for i in tiles[scores[0][1]]), reverse=True)
    margins = [part[0][0] - part[1][0] for part in (scores, inner) if len(part) > 1]
    return inner[0][1], min(margins, default=math.inf)


def make_params(rows: list[dict[str, float]], seeds: list[int] | None = None, out_index: int = 0) -> SampleParams:
    """Parameters from one dict a row with ``temperature``, ``top_k``, ``top_p``, ``min_p``; temperature 0 is greedy."""
    heat = [row.get("temperature", 1.0) for row in rows]
    greedy = np.array([t == 0.0 for t in heat])
    top_k = np.array([int(row.get("top_k", TOP_K_OFF)) for row in rows], np.int32)
    top_k[greedy] = 1
    top_p = np.array([row.get("top_p", 1.0) for row in rows], np.float32)
    min_p = np.array([row.get("min_p", 0.0) for row in rows], np.float32)
    top_p[greedy], min_p[greedy] = 1.0, 0.0
    with np.errstate(divide="ignore"):
        log_min_p = np.log(min_p)
    keys = row_keys(np.array(seeds or range(len(rows)), np.uint64), np.full(len(rows), out_index))
    limits = top_k[~greedy]
    limits = limits[limits < TOP_K_OFF]
    return SampleParams(
        inv_temperature=torch.tensor([1.0 if t == 0.0 else 1.0 / t for t in heat], dtype=torch.float32),
        top_k=torch.from_numpy(top_k),
        top_p=torch.from_numpy(top_p),
        log_min_p=torch.from_numpy(log_min_p),
        greedy=torch.from_numpy(greedy.astype(np.int32)),
        key=torch.from_numpy(keys),
        has_top_k=len(limits) > 0,
        has_top_p=bool((top_p < 1).any()),
        has_min_p=bool((min_p > 0).any()),
        has_greedy=bool(greedy.any()),
        max_top_k=int(limits.max()) if len(limits) else 0,
        all_top_k=len(limits) == int((~greedy).sum()),
    )
