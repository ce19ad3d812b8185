"""Sparse attention behind an indexer: keys, selection and attention against scalar Python, over pages in any order."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from freetoken.kernels.qsa import reference as qsa
from freetoken.kernels.rope_kv import reference as rope
from freetoken.models.config import IndexerConfig

HEADS, KV_HEADS, SIZE, INDEX_HEADS, INDEX_SIZE, ROTATED = 4, 2, 6, 3, 8, 4
SCALE = SIZE**-0.5


@dataclass
class Text:
    """One request: its pages and everything about its tokens, as the scalar rule sees them."""

    row: int
    pages: list[int]
    raw: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    index_q: torch.Tensor


def rotate(row: list[float], position: int, table: torch.Tensor) -> list[float]:
    half = ROTATED // 2
    cos, sin = table[position, :half].tolist(), table[position, half:].tolist()
    low = [row[i] * cos[i] - row[half + i] * sin[i] for i in range(half)]
    return low + [row[half + i] * cos[i] + row[i] * sin[i] for i in range(half)] + row[ROTATED:]


def block_key(raw: torch.Tensor, first: int, ratio: int, table: torch.Tensor) -> list[float]:
    mean = [sum(float(raw[first + i, j]) for i in range(ratio)) / ratio for j in range(INDEX_SIZE)]
    root = math.sqrt(sum(x * x for x in mean) / INDEX_SIZE + 1e-6)
    return rotate([x / root for x in mean], first, table)


def attended(text: Text, at: int, config: IndexerConfig, table: torch.Tensor) -> list[float]:
    """The scalar rule for the query at position ``at``, head after head."""
    ratio, whole = config.ratio, (at + 1) // config.ratio
    scores = []
    for block in range(whole):
        key = block_key(text.raw, block * ratio, ratio, table)
        dots = [sum(float(a) * b for a, b in zip(text.index_q[at, h], key)) for h in range(INDEX_HEADS)]
        scores.append(sum(max(dot, 0.0) for dot in dots) / math.sqrt(INDEX_SIZE))
    best = sorted(range(whole), key=lambda block: (-scores[block], block))[: config.blocks]
    seen = [block * ratio + i for block in best for i in range(ratio)] + list(range(whole * ratio, at + 1))
    out: list[float] = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        dots = [float(text.q[at, head] @ text.k[token, kv]) * SCALE for token in seen]
        weights = [math.exp(dot - max(dots)) for dot in dots]
        rows = [[w * float(x) for x in text.v[token, kv]] for w, token in zip(weights, seen)]
        out += [sum(column) / sum(weights) for column in zip(*rows)]
    return out


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (INDEX_SIZE,), eps=1e-6)


class World:
    """Texts on shuffled pages, unwritten memory NaN, their index keys stored piece by piece."""

    def __init__(self, lengths: list[int], page: int, config: IndexerConfig) -> None:
        torch.manual_seed(sum(lengths) + page)
        width = -(-max(lengths) // page)
        count = 1 + len(lengths) * width
        order = random.Random(page).sample(range(1, count), count - 1)
        self.page, self.config = page, config
        self.page_table = torch.zeros(len(lengths) + 1, width, dtype=torch.int32)
        self.table = torch.randn(max(lengths), ROTATED)
        self.pools = qsa.Pools(
            torch.full((count, KV_HEADS, page, SIZE), float("nan")),
            torch.full((count, KV_HEADS, page, SIZE), float("nan")),
            torch.full((count, page, INDEX_SIZE), float("nan")),
        )
        self.texts = []
        for row, length in enumerate(lengths):
            pages = [order.pop() for _ in range(-(-length // page))]
            self.page_table[row, : len(pages)] = torch.tensor(pages)
            shapes = ((INDEX_SIZE,), (KV_HEADS, SIZE), (KV_HEADS, SIZE), (HEADS, SIZE), (INDEX_HEADS, INDEX_SIZE))
            self.texts.append(Text(row, pages, *(torch.randn(length, *shape) for shape in shapes)))
            for token in range(length):
                place = (pages[token // page], slice(None), token % page)
                self.pools.k[place], self.pools.v[place] = self.texts[-1].k[token], self.texts[-1].v[token]

    def store(self, text: Text, start: int, end: int) -> None:
        if start == end:
            return
        positions = torch.arange(start, end)
        rows = torch.full((end - start,), text.row)
        ratio = self.config.ratio
        first = (positions - ratio + 1).clamp_min(0)
        slots = qsa.flat_slots(self.page_table, rows[:1], positions[None], self.page)[0]
        step = qsa.IndexStep(
            query_lines=rope.prepare(self.table, positions, slots, self.page),
            key_lines=rope.prepare(self.table, first, slots, self.page),
            out_slots=slots,
            block_slots=qsa.flat_slots(self.page_table, rows, first[:, None] + torch.arange(ratio), self.page),
            ends=(positions + 1) % ratio == 0,
            sparse=True,
        )
        qsa.store_keys(text.raw[start:end], self.pools.index, norm, step)


def check(actual: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-5)


GEOMETRIES = [
    IndexerConfig(num_heads=INDEX_HEADS, head_dim=INDEX_SIZE, budget=8, ratio=4),
    IndexerConfig(num_heads=INDEX_HEADS, head_dim=INDEX_SIZE, budget=9, ratio=3),
    IndexerConfig(num_heads=INDEX_HEADS, head_dim=INDEX_SIZE, budget=5, ratio=1),
]


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("config", GEOMETRIES, ids=lambda config: f"{config.budget}-{config.ratio}")
def test_decodes(config: IndexerConfig, page: int) -> None:
    """Lengths below, at and past what is always seen, one lane at a time and together, with room for longer ones."""
    lengths = [1, config.ratio, config.visible, config.visible + 1, 31]
    world = World(lengths, page, config)
    for text, length in zip(world.texts, lengths):
        cut = length // 2
        world.store(text, 0, cut)
        for token in range(cut, length):
            world.store(text, token, token + 1)
    q, index_q = (torch.stack([getattr(t, name)[-1] for t in world.texts]) for name in ("q", "index_q"))
    expected = [attended(text, length - 1, config, world.table) for text, length in zip(world.texts, lengths)]
    where = (world.page_table, torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int32))
    for longest in (31, world.page_table.shape[1] * page):
        out = qsa.attend_decodes(q, index_q, world.pools, *where, longest, config, SCALE)
        check(out, expected)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Small(IndexerConfig):
        gather_elements = 1

    alone = Small(**dataclasses.asdict(config))
    check(qsa.attend_decodes(q, index_q, world.pools, *where, 31, alone, SCALE), expected)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("config", GEOMETRIES, ids=lambda config: f"{config.budget}-{config.ratio}")
def test_pieces(config: IndexerConfig, page: int) -> None:
    """A whole prompt, then pieces that begin and end inside blocks, queries taken a few at a time."""
    world = World([26], page, config)
    (text,) = world.texts

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Small(IndexerConfig):
        mask_elements = 60

    few = Small(**dataclasses.asdict(config))
    expected = [attended(text, at, config, world.table) for at in range(26)]
    for bounds, geometry in (([0, 26], config), ([0, 3, 10, 11, 24, 26], few)):
        world.pools.index.fill_(float("nan"))
        for start, end in itertools.pairwise(bounds):
            world.store(text, start, end)
            queries = (text.q[start:end], text.index_q[start:end])
            out = qsa.attend_piece(*queries, world.pools, world.page_table, torch.tensor([0]), end, geometry, SCALE)
            check(out, expected[start:end])


def test_of_equal_scores_the_earlier_block_wins() -> None:
    scores = torch.tensor([[0.0, 2.0, -0.0, 1.0, 2.0, 0.0, 9.0]])
    for count, wanted in ((1, {1}), (2, {1, 4}), (4, {0, 1, 3, 4}), (5, {0, 1, 2, 3, 4})):
        best, found = qsa._best(scores, count, torch.tensor([6]))
        assert set(best[0].tolist()) == wanted and bool(found.all())
    best, found = qsa._best(scores, 7, torch.tensor([2]))
    assert set(best[found].tolist()) == {0, 1}
