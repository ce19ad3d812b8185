"""Texts behind an indexer, their pages and what scalar Python makes of them."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

import torch
from poison import DEVICE, choice

from freetoken.kernels.qsa import IndexStep, Pools, Qsa, flat_slots
from freetoken.kernels.rope_kv import reference as rope
from freetoken.models.config import IndexerConfig

HEADS, KV_HEADS, SIZE, INDEX_HEADS, INDEX_SIZE, ROTATED = 4, 2, 12, 3, 10, 4
SCALE, EPS = SIZE**-0.5, 1e-6


@dataclass
class Text:
    """One request: everything about its tokens, index queries and keys ``raw [L, Hi + 1, Di]`` as projected."""

    row: int
    raw: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor


def normed_and_rotated(row: list[float], weight: torch.Tensor, position: int, table: torch.Tensor) -> list[float]:
    root = math.sqrt(sum(x * x for x in row) / INDEX_SIZE + EPS)
    row = [x / root * w for x, w in zip(row, weight.tolist())]
    half = ROTATED // 2
    cos, sin = table[position, :half].tolist(), table[position, half:].tolist()
    low = [row[i] * cos[i] - row[half + i] * sin[i] for i in range(half)]
    return low + [row[half + i] * cos[i] + row[i] * sin[i] for i in range(half)] + row[ROTATED:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(IndexerConfig):
    """Temporary memory for one lane, and for two or three rows of a mask."""

    gather_elements = 1
    mask_elements = 60
    score_elements = 200


class World:
    """Texts on shuffled pages, memory that was not written NaN; index keys are stored piece by piece."""

    def __init__(
        self, lengths: list[int], page: int, config: IndexerConfig, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(sum(lengths) + page)
        width = -(-max(lengths) // page)
        count = 1 + len(lengths) * width
        order = random.Random(page).sample(range(1, count), count - 1)
        self.page, self.config = page, config
        self.page_table = torch.zeros(len(lengths) + 1, width, dtype=torch.int32)
        self.table = torch.randn(max(lengths), ROTATED)
        self.norms = (torch.rand(INDEX_SIZE) + 0.5, torch.rand(INDEX_SIZE) + 0.5)
        shapes = ((KV_HEADS, page, SIZE), (KV_HEADS, page, SIZE), (page, INDEX_SIZE))
        pools = [torch.full((count, *shape), float("nan"), dtype=dtype) for shape in shapes]
        self.texts = []
        for row, length in enumerate(lengths):
            pages = torch.tensor([order.pop() for _ in range(-(-length // page))], dtype=torch.int32)
            self.page_table[row, : len(pages)] = pages
            parts = ((INDEX_HEADS + 1, INDEX_SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE), (HEADS, SIZE))
            text = Text(row, *(torch.randn(length, *shape).to(dtype) for shape in parts))
            for token in range(length):
                place = (pages[token // page], slice(None), token % page)
                pools[0][place], pools[1][place] = text.k[token], text.v[token]
            self.texts.append(text)
        self.pools = Pools(*(pool.to(DEVICE) for pool in pools))
        self.rows = torch.arange(len(lengths), device=DEVICE)

    def op(self, impl: str) -> Qsa:
        return Qsa(choice("qsa", impl), self.table.to(DEVICE), self.config)

    def store(self, texts: list[Text], start: list[int], end: list[int], op: Qsa) -> torch.Tensor:
        """Keys of the tokens from ``start`` to ``end`` of each text go to their pages; the index queries of all."""
        pieces = [torch.arange(a, b) for a, b in zip(start, end)]
        positions = torch.cat(pieces).to(DEVICE)
        rows = torch.cat([torch.full_like(p, t.row) for p, t in zip(pieces, texts)]).to(DEVICE)
        table = self.page_table.to(DEVICE)
        ratio = self.config.ratio
        first = (positions - ratio + 1).clamp_min(0)
        slots = flat_slots(table, rows, positions[:, None], self.page)[:, 0]
        step = IndexStep(
            query_lines=rope.prepare(op.table, positions, slots, self.page),
            key_lines=rope.prepare(op.table, first, slots, self.page),
            out_slots=slots,
            block_slots=flat_slots(table, rows, first[:, None] + torch.arange(ratio, device=DEVICE), self.page),
            ends=(positions + 1) % ratio == 0,
        )
        raw = torch.cat([t.raw[a:b].flatten(1) for t, a, b in zip(texts, start, end)]).to(DEVICE)
        norms = tuple(weight.to(DEVICE) for weight in self.norms)
        where = (table, rows, positions, slots)
        before = torch.cat([piece - piece[0] for piece in pieces]).to(DEVICE) if len(positions) > len(texts) else None
        return op.index(raw, self.pools.index, norms, EPS, where, step, before)

    def fill(self, op: Qsa) -> torch.Tensor:
        """Every text: half of it as a prompt, the rest token by token beside the others; index queries of the last tokens."""
        lengths = [len(text.q) for text in self.texts]
        for text, length in zip(self.texts, lengths):
            if length > 1:
                self.store([text], [0], [length // 2], op)
        for back in range(max(lengths) - max(lengths) // 2, 0, -1):
            live = [text for text in self.texts if len(text.q) // 2 <= len(text.q) - back]
            starts = [len(text.q) - back for text in live]
            queries = self.store(live, starts, [start + 1 for start in starts], op)
        return queries

    def attend_pieces(self, live: list[tuple[Text, int, int]], op: Qsa) -> torch.Tensor:
        """Tokens from ``start`` to ``end`` of each text, as pieces of a step behind one decode."""
        texts, starts, ends = (list(part) for part in zip(*live))
        index_q = self.store(texts, starts, ends, op)
        plan = op.plan([b - a for a, b in zip(starts, ends)], ends, 1, self.pools.k, HEADS)
        q = torch.cat([text.q[start:end] for text, start, end in live]).to(DEVICE)
        rows = torch.tensor([0] + [text.row for text in texts], device=DEVICE)
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends)]).to(DEVICE)
        return op.attend_pieces(q, index_q, self.pools, self.page_table.to(DEVICE), rows, positions, plan, SCALE)

    def attended(self, text: Text, at: int) -> list[float]:
        """The scalar rule for the query at position ``at``, head after head."""
        ratio, whole = self.config.ratio, (at + 1) // self.config.ratio
        heads = [
            normed_and_rotated(text.raw[at, h].tolist(), self.norms[0], at, self.table) for h in range(INDEX_HEADS)
        ]
        scores = []
        for block in range(whole):
            rows = text.raw[block * ratio : (block + 1) * ratio, -1].tolist()
            mean = [sum(column) / ratio for column in zip(*rows)]
            key = normed_and_rotated(mean, self.norms[1], block * ratio, self.table)
            dots = [sum(a * b for a, b in zip(head, key)) for head in heads]
            scores.append(sum(max(dot, 0.0) for dot in dots) / math.sqrt(INDEX_SIZE))
        best = sorted(range(whole), key=lambda block: (-scores[block], block))[: self.config.blocks]
        seen = [block * ratio + i for block in best for i in range(ratio)] + list(range(whole * ratio, at + 1))
        out: list[float] = []
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            dots = [float(text.q[at, head] @ text.k[token, kv]) * SCALE for token in seen]
            weights = [math.exp(dot - max(dots)) for dot in dots]
            rows = [[w * float(x) for x in text.v[token, kv]] for w, token in zip(weights, seen)]
            out += [sum(column) / sum(weights) for column in zip(*rows)]
        return out

    def last_queries(self) -> torch.Tensor:
        return torch.stack([text.q[-1] for text in self.texts]).to(DEVICE)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([len(text.q) for text in self.texts], dtype=torch.int32, device=DEVICE)


def check(actual: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual.cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def geometry(budget: int, ratio: int) -> IndexerConfig:
    return IndexerConfig(num_heads=INDEX_HEADS, head_dim=INDEX_SIZE, budget=budget, ratio=ratio)


GEOMETRIES = [geometry(8, 4), geometry(9, 3), geometry(5, 1)]
