"""Sparse attention behind an indexer: keys, selection and attention against scalar Python, over pages in any order."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels.checking import RELATIVE_RMS, KernelCheckError, relative_rms
from freetoken.kernels.qsa import IndexStep, PieceConfig, Pools, Qsa, flat_slots, reference
from freetoken.kernels.qsa.plan import plan_pieces
from freetoken.kernels.rope_kv import reference as rope
from freetoken.models.config import IndexerConfig

triton = pytest.importorskip("freetoken.kernels.qsa.triton", exc_type=ImportError)
pieces = pytest.importorskip("freetoken.kernels.qsa.pieces", exc_type=ImportError)

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


DECODES = [("reference", page, number) for page in (1, 4, 16) for number in range(3)]
DECODES += [("triton", 1, 0), ("triton", 16, 1), ("triton", 4, 2), ("check", 4, 0)]


@pytest.mark.parametrize(("impl", "page", "number"), DECODES)
def test_decodes(impl: str, page: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths below, at and past what is always seen, side by side, in a page table with room for longer ones."""
    config = GEOMETRIES[number]
    world = World([1, config.ratio, config.visible, config.visible + 1, 23], page, config)
    op = world.op(impl)
    with poisoned_outputs(monkeypatch):
        index_q = world.fill(op)
        expected = [world.attended(text, len(text.q) - 1) for text in world.texts]
        where = (world.page_table.to(DEVICE), world.rows, world.lengths)
        for longest in (23, world.page_table.shape[1] * page):
            out = op.attend_decodes(world.last_queries(), index_q, world.pools, *where, longest, SCALE)
            check(out, expected)
    if impl == "reference":
        few = Qsa(op.choice, op.table, Small(**dataclasses.asdict(config)))
        check(few.attend_decodes(world.last_queries(), index_q, world.pools, *where, 23, SCALE), expected)


PIECES = [("reference", page, number) for page in (1, 4, 16) for number in range(3)]
PIECES += [("triton", 1, 0), ("triton", 16, 1), ("check", 4, 2)]


@pytest.mark.parametrize(("impl", "page", "number"), PIECES)
def test_pieces(impl: str, page: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts beside each other, then pieces that begin and end inside blocks, a few queries at a time."""
    config = GEOMETRIES[number]
    world = World([23, 1, 6], page, config)
    expected = [[world.attended(text, at) for at in range(len(text.q))] for text in world.texts]
    cuts = [[0, 3, 10, 11, 23], [0, 0, 0, 1, 1], [0, 1, 1, 3, 6]]
    with poisoned_outputs(monkeypatch):
        for bounds, own in (([[0, 23], [0, 1], [0, 6]], config), (cuts, Small(**dataclasses.asdict(config)))):
            world.pools.index.fill_(float("nan"))
            op = Qsa(choice("qsa", impl), world.table.to(DEVICE), own)
            for step in range(len(bounds[0]) - 1):
                live = [
                    (text, cut[step], cut[step + 1])
                    for text, cut in zip(world.texts, bounds)
                    if cut[step + 1] > cut[step]
                ]
                out = world.attend_pieces(live, op)
                check(out, [row for text, start, end in live for row in expected[text.row][start:end]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_equal_the_reference(dtype: torch.dtype) -> None:
    """Rounded alike where the type is narrow: index queries, keys and scores, and attention over the same choice."""
    world = World([26, 3, 45], 4, geometry(16, 4), dtype)
    results = []
    for impl in ("reference", "triton"):
        op = world.op(impl)
        world.pools.index.fill_(0)
        queries = world.fill(op)
        results.append((queries, world.pools.index.clone()))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert relative_rms(ours, theirs) < RELATIVE_RMS[dtype]
    table = world.page_table.to(DEVICE)
    scores = triton.score(queries, world.pools, table, world.rows, world.lengths, 48, world.config)
    wanted = reference.score(queries, world.pools, table, world.rows, 48, world.config)
    assert relative_rms(scores[2, :11], wanted[2, :11]) < RELATIVE_RMS[torch.float32]
    op = world.op("check")
    op.attend_decodes(world.last_queries(), queries, world.pools, table, world.rows, world.lengths, 48, SCALE)


def test_keys_of_a_piece_do_not_wait_for_each_other() -> None:
    """Programs run in any order on a GPU: raw keys of the step come from its own input. Here they are stored where nobody looks."""
    world = World([4, 13], 4, geometry(8, 4))
    op = world.op("reference")
    world.store(world.texts, [0, 0], [2, 6], op)
    start = world.pools.index.clone()
    wanted = world.store(world.texts, [2, 6], [4, 13], op)
    table, page = world.page_table.to(DEVICE), world.page
    positions = torch.cat([torch.arange(2, 4), torch.arange(6, 13)]).to(DEVICE)
    rows = torch.tensor([0] * 2 + [1] * 7, device=DEVICE)
    slots = flat_slots(table, rows, positions[:, None], page)[:, 0]
    elsewhere = start.shape[0] * page + torch.arange(9, device=DEVICE)
    pool = torch.cat([start, torch.zeros(3, page, INDEX_SIZE, device=DEVICE)])
    raw = torch.cat([world.texts[0].raw[2:4], world.texts[1].raw[6:13]]).flatten(1).to(DEVICE)
    before = torch.cat([torch.arange(2), torch.arange(7)]).to(DEVICE)
    norms = tuple(weight.to(DEVICE) for weight in world.norms)
    found = triton.index(raw, pool, op.table, norms, EPS, table, rows, positions, elsewhere, 4, before)
    torch.testing.assert_close(found, wanted)
    keys, expected = (part.flatten(0, 1) for part in (pool, world.pools.index))
    torch.testing.assert_close(keys[elsewhere], expected[slots])
    assert torch.equal(pool[: start.shape[0]].nan_to_num(7), start.nan_to_num(7))


def selected(scores: list[list[float]], config: IndexerConfig, lengths: list[int]) -> list[list[int]]:
    """Positions that the kernel lists, with the identity as page table of pages of one token."""
    values = torch.tensor(scores, device=DEVICE)
    width = max(lengths)
    table = torch.arange(width, dtype=torch.int32, device=DEVICE).repeat(len(lengths), 1)
    rows = torch.arange(len(lengths), device=DEVICE)
    chosen, counts = triton.select(values, table, rows, torch.tensor(lengths, device=DEVICE).int(), 1, config)
    return [row[:count] for row, count in zip(chosen.tolist(), counts.tolist())]


def test_of_equal_scores_the_earlier_block_wins() -> None:
    scores = [0.0, 2.0, -0.0, 1.0, 2.0, 0.0, 9.0]
    for count, wanted in ((1, [1]), (2, [1, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])):
        best, found = reference._best(torch.tensor([scores]), count, torch.tensor([6]))
        assert sorted(best[0].tolist()) == wanted and bool(found.all())
        assert selected([scores], geometry(count, 1), [6]) == [wanted]
    best, found = reference._best(torch.tensor([scores]), 7, torch.tensor([2]))
    assert set(best[found].tolist()) == {0, 1}
    assert selected([scores, scores], geometry(14, 2), [5, 4]) == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]


@pytest.mark.parametrize("split", [102, 100])
@pytest.mark.parametrize("kind", ["any", "few values", "close"])
def test_selection_is_exact(kind: str, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than a chunk has, of every order of magnitude, of few values, or apart in their last bits only; at once, or with
    the long text searched in splits."""
    monkeypatch.setattr(triton, "SELECT_CHUNK", 64)
    monkeypatch.setattr(triton, "SELECT_SPLIT", split)
    draw = torch.Generator().manual_seed(3)
    blocks, kept = 203, 50
    values = {
        "any": torch.randn(3, blocks, generator=draw).mul(8).exp(),
        "few values": torch.randint(0, 3, (3, blocks), generator=draw).float(),
        "close": (torch.randint(0, 40, (3, blocks), generator=draw) + 0x3F800000).to(torch.int32).view(torch.float32),
    }[kind]
    lengths = [2 * blocks + 1, 2 * kept + 2, 2 * 199]
    ours = selected(values.tolist(), geometry(2 * kept, 2), lengths)
    for row, length, listed in zip(values.tolist(), lengths, ours):
        whole = length // 2
        best = sorted(sorted(range(whole), key=lambda block: (-row[block], block))[:kept])
        assert listed == [2 * b + i for b in best for i in (0, 1)] + list(range(2 * whole, length))


@pytest.mark.parametrize("kind", ["any", "few values", "close"])
def test_pieces_select_exactly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scalar rule for every query of two texts, over lists of several chunks; unused scores are poison."""
    monkeypatch.setattr(pieces, "SELECT_CHUNK", 64)
    monkeypatch.setattr(pieces, "LIST_CHUNK", 32)
    draw = torch.Generator().manual_seed(4)
    config, piece = geometry(60, 3), PieceConfig(7, 16, 16, 4, 1, 16, 16)
    q_lens, seq_lens = (17, 5), (303, 64)
    plan = plan_pieces(q_lens, seq_lens, 1, config, piece, torch.device(DEVICE))
    (part,) = plan.parts
    positions = [seq - count + i for seq, count in zip(seq_lens, q_lens) for i in range(count)]
    shape = (sum(q_lens), part.blocks)
    scores = {
        "any": torch.randn(shape, generator=draw).mul(8).exp(),
        "few values": torch.randint(0, 3, shape, generator=draw).float(),
        "close": (torch.randint(0, 40, shape, generator=draw) + 0x3F800000).to(torch.int32).view(torch.float32),
    }[kind]
    whole = torch.tensor([(position + 1) // 3 for position in positions])
    scores[torch.arange(part.blocks) >= whole[:, None]] = float("nan")
    table = torch.stack([torch.randperm(101, generator=draw).int() for _ in range(3)]).to(DEVICE)
    on_device = scores.to(DEVICE), torch.tensor(positions, device=DEVICE)
    rows = torch.tensor([2, 0, 1], device=DEVICE)
    found = pieces.bounds(*on_device, config)
    slots, bits, counts = pieces.list_tokens(on_device[0], found, table, rows, 3, plan, part, config)
    tiles = plan.tiles[part.attend].tolist()
    assert sorted(first + i for first, count, _, _ in tiles for i in range(count)) == list(range(22))
    for (first, count, position, request), own, marks, listed in zip(
        tiles, slots.tolist(), bits.tolist(), counts.tolist()
    ):
        pages = table[rows[request]].tolist()
        for query in range(count):
            at, values = position + query, scores[first + query].tolist()
            assert at == positions[first + query] and request == (1 if first + query < 17 else 2)
            best = sorted(range((at + 1) // 3), key=lambda block: (-values[block], block))[:20]
            seen = sorted(3 * block + i for block in best for i in range(3)) + list(range((at + 1) // 3 * 3, at + 1))
            mine = [slot for slot, mark in zip(own[:listed], marks) if mark >> query & 1]
            assert mine == [pages[token // 3] * 3 + token % 3 for token in seen]
        assert all((slot >= 0) == (mark != 0) for slot, mark in zip(own[:listed], marks))


@given(
    lens=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 300)), min_size=1, max_size=5),
    ratio=st.integers(1, 5),
    queries=st.integers(1, 32),
    elements=st.integers(1, 9000),
)
@settings(max_examples=40, deadline=None)
def test_plans(lens: list[tuple[int, int]], ratio: int, queries: int, elements: int) -> None:
    """Every query in one tile of either kind, tiles within their part, scores and lists within the bound where there is a choice."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Bounded(IndexerConfig):
        score_elements = elements

    config = Bounded(num_heads=1, head_dim=8, budget=4 * ratio, ratio=ratio)
    q_lens, seq_lens = [count for count, _ in lens], [count + depth for count, depth in lens]
    piece = PieceConfig(queries, 64, 16, 4, 1, 16, 16)
    plan = plan_pieces(q_lens, seq_lens, 3, config, piece, torch.device("cpu"))
    tiles = plan.tiles.tolist()
    wanted = [
        (seq - count + i, 3 + number) for number, (count, seq) in enumerate(zip(q_lens, seq_lens)) for i in range(count)
    ]
    token = 0
    for part in plan.parts:
        assert part.begin == token
        token = part.end
        for kind, size in ((part.score, piece.score_m), (part.attend, queries)):
            own = [(f + i, p + i, r) for f, n, p, r in tiles[kind] for i in range(n)]
            assert all(0 < n <= size for _, n, _, _ in tiles[kind])
            assert sorted(own) == [(t, *wanted[t]) for t in range(part.begin, part.end)]
        assert part.blocks == max((wanted[t][0] + 1) // ratio for t in range(part.begin, part.end))
        count = part.attend.stop - part.attend.start
        listed = count * (part.blocks + 1) * ratio
        assert count == 1 or max((part.end - part.begin) * part.blocks, listed) <= elements
    assert token == sum(q_lens)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(5, 5, 80), (12, 1, 64), (48, 2, 16)])
def test_pieces_of_other_widths(heads: int, kv_heads: int, size: int) -> None:
    """Groups of 1, 12 and 24 query heads in float16: many tiles, one, fewer queries than fit; every call compared."""
    torch.manual_seed(size)
    config, page = geometry(24, 4), 16
    op = Qsa(choice("qsa", "check"), torch.empty(0, ROTATED, device=DEVICE), config)
    k, v = (torch.randn(9, kv_heads, page, size, device=DEVICE).half() for _ in range(2))
    pools = Pools(k, v, torch.randn(9, page, INDEX_SIZE, device=DEVICE).half())
    table = torch.tensor([[0] * 6, [8, 2, 5, 1, 7, 3], [4, 6, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    q_lens, seq_lens = (38, 9), (90, 31)
    plan = op.plan(q_lens, seq_lens, 0, k, heads)
    positions = torch.cat([torch.arange(seq - n, seq) for n, seq in zip(q_lens, seq_lens)]).to(DEVICE)
    q, index_q = (torch.randn(47, h, d, device=DEVICE).half() for h, d in ((heads, size), (INDEX_HEADS, INDEX_SIZE)))
    rows = torch.tensor([1, 2], device=DEVICE)
    out = op.attend_pieces(q, index_q, pools, table, rows, positions, plan, size**-0.5)
    assert bool(out.isfinite().all())


def test_check_mode_compares_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([14], 4, geometry(8, 4))
    op = world.op("check")
    live = [(world.texts[0], 3, 14)]
    world.store([world.texts[0]], [0], [3], op)
    world.attend_pieces(live, op)
    right = {name: getattr(pieces, name) for name in ("score", "bounds", "attend")}
    for name, wrong, message in (
        ("score", lambda *a: right["score"](*a) + 1, "the scores"),
        ("bounds", lambda *a: right["bounds"](*a).fill_(0x7F000000), "other tokens"),
        ("attend", lambda *a: (right["attend"](*a), a[-1].add_(1)), "attention"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(pieces, name, wrong)
            with pytest.raises(KernelCheckError, match=message):
                world.attend_pieces(live, op)


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([9, 20], 4, geometry(8, 4))
    op = world.op("check")
    index_q = world.fill(op)
    where = (world.page_table.to(DEVICE), world.rows, world.lengths)

    def attend() -> None:
        op.attend_decodes(world.last_queries(), index_q, world.pools, *where, 20, SCALE)

    attend()
    right = triton.select
    for name, wrong, message in (
        ("score", lambda *a: reference.score(*a[:4], *a[5:]) + 1, "the scores"),
        ("select", lambda *a: (right(*a)[0].clamp_min(5), right(*a)[1]), "other tokens"),
        ("attend", lambda q, *_: q.flatten(1) + 1, "attention"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(triton, name, wrong)
            with pytest.raises(KernelCheckError, match=message):
                attend()
    index = triton.index
    for wrong, message in (
        (lambda *a: index(*a) + 1, "the index queries"),
        (lambda raw, pool, *a: index(raw, pool.clone(), *a), "the index keys"),
    ):
        world.pools.index.fill_(7)
        with monkeypatch.context() as patch:
            patch.setattr(triton, "index", wrong)
            with pytest.raises(KernelCheckError, match=message):
                world.store(world.texts, [8, 19], [9, 20], op)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [600, 4097, 65_536])
def test_on_a_gpu_selection_is_exact(blocks: int) -> None:
    """The published budget over contexts of up to 262,144 tokens, a part of the scores equal."""
    config = geometry(2048, 4)
    scores = torch.randn(4, blocks, device=DEVICE).relu_()
    scores[1].mul_(4).floor_()
    lengths = torch.tensor([4 * blocks, 4 * blocks - 1, 4 * 512 + 3, 4 * 513], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(4 * blocks, device=DEVICE).int().repeat(4, 1)
    where = (table, torch.arange(4, device=DEVICE), lengths)
    chosen, counts = triton.select(scores, *where, 1, config)
    slots, valid = reference.select_best(scores, *where[:2], lengths.long(), 1, config)
    for lane in range(4):
        assert set(chosen[lane, : counts[lane]].tolist()) == set(slots[lane][valid[lane]].tolist())


@pytest.mark.gpu
def test_on_a_gpu_replays_follow_the_lengths() -> None:
    """One captured step in a page table with room for more: replayed as texts grow, from all seen to most left out."""
    world = World([64, 200, 17], 16, geometry(24, 4), torch.bfloat16)
    op = world.op("triton")
    table = world.page_table.to(DEVICE)
    raw, q = (torch.stack([getattr(text, name)[0] for text in world.texts]).to(DEVICE) for name in ("raw", "q"))
    raw = raw.flatten(1)
    positions = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    slots, lengths = positions.clone(), positions.int()
    norms = tuple(weight.to(DEVICE) for weight in world.norms)

    def step() -> torch.Tensor:
        where = (table, world.rows, positions, slots)
        index_q = op.index(raw, world.pools.index, norms, EPS, where, None)
        return op.attend_decodes(q, index_q, world.pools, table, world.rows, lengths, table.shape[1] * 16, SCALE)

    def place(token: int) -> None:
        at = [min(token, len(text.q) - 1) for text in world.texts]
        positions.copy_(torch.tensor(at))
        lengths.copy_(torch.tensor(at) + 1)
        slots.copy_(flat_slots(table, world.rows, positions[:, None], 16)[:, 0])
        raw.copy_(torch.stack([t.raw[i] for t, i in zip(world.texts, at)]).flatten(1))
        q.copy_(torch.stack([t.q[i] for t, i in zip(world.texts, at)]))

    place(0)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    world.pools.index.fill_(float("nan"))
    for token in range(200):
        place(token)
        graph.replay()
        if token in (3, 16, 27, 64, 199):
            captured = out.clone()
            assert bool(captured.isfinite().all()) and torch.equal(captured, step())
            checked = world.op("check")
            where = (table, world.rows, lengths, table.shape[1] * 16)
            index_q = op.index(raw, world.pools.index, norms, EPS, (table, world.rows, positions, slots), None)
            checked.attend_decodes(q, index_q, world.pools, *where, SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_pieces_equal_the_reference(dtype: torch.dtype) -> None:
    """The published geometry: pieces at the start of a text, across the budget, deep in one, and of one token, in several parts; keys
    made in the same step; every call compared, and without a word from the device where it is not."""
    torch.manual_seed(7)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Parts(IndexerConfig):
        score_elements = 1 << 19

    config = Parts(num_heads=4, head_dim=128, budget=2048, ratio=4)
    q_lens, seq_lens, page = (70, 333, 400, 1), (70, 2300, 9001, 5000), 16
    width, tokens = -(-max(seq_lens) // page), sum(q_lens)
    pages = 1 + len(q_lens) * width
    k, v = (torch.randn(pages, 2, page, 256, device=DEVICE).to(dtype) for _ in range(2))
    pools = Pools(k, v, torch.randn(pages, page, 128, device=DEVICE).to(dtype))
    table = (torch.randperm(pages - 1, device=DEVICE) + 1).int().view(len(q_lens), width)
    rows = torch.arange(len(q_lens), device=DEVICE)
    positions = torch.cat([torch.arange(seq - n, seq) for n, seq in zip(q_lens, seq_lens)]).to(DEVICE)
    of_token = torch.repeat_interleave(rows, torch.tensor(q_lens, device=DEVICE))
    slots = flat_slots(table, of_token, positions[:, None], page)[:, 0]
    before = torch.cat([torch.arange(n) for n in q_lens]).to(DEVICE)
    angles = torch.randn(max(seq_lens), 64, device=DEVICE)
    projected = torch.randn(tokens, 5 * 128, device=DEVICE).to(dtype)
    norms = (torch.rand(128, device=DEVICE) + 0.5, torch.rand(128, device=DEVICE) + 0.5)
    q = torch.randn(tokens, 24, 256, device=DEVICE).to(dtype)
    where = (table, of_token, positions, slots)
    first = (positions - 3).clamp_min(0)
    step = IndexStep(
        query_lines=rope.prepare(angles, positions, slots, page),
        key_lines=rope.prepare(angles, first, slots, page),
        out_slots=slots,
        block_slots=flat_slots(table, of_token, first[:, None] + torch.arange(4, device=DEVICE), page),
        ends=(positions + 1) % 4 == 0,
    )
    checked = Qsa(choice("qsa", "check"), angles, config)
    plan = checked.plan(q_lens, seq_lens, 0, k, 24)
    assert len(plan.parts) > 2
    index_q = checked.index(projected, pools.index, norms, 1e-6, where, step, before)
    wanted = checked.attend_pieces(q, index_q, pools, table, rows, positions, plan, 1 / 16)
    op = Qsa(choice("qsa", "triton"), angles, config)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = op.plan(q_lens, seq_lens, 0, k, 24)
        out = op.attend_pieces(q, index_q, pools, table, rows, positions, plan, 1 / 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, wanted)
    whole = Qsa(choice("qsa", "reference"), angles, config)
    theirs = whole.attend_pieces(q, index_q, pools, table, rows, positions, plan, 1 / 16)
    assert relative_rms(out, theirs) < RELATIVE_RMS[torch.bfloat16]
