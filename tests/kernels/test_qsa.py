"""Decodes behind an indexer: keys, selection and attention against scalar Python, over pages in any order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from poison import DEVICE, poisoned_outputs
from qsa_world import EPS, GEOMETRIES, SCALE, Small, World, check, geometry

from freetoken.kernels.checking import RELATIVE_RMS, KernelCheckError, relative_rms
from freetoken.kernels.qsa import Qsa, flat_slots, reference
from freetoken.models.config import IndexerConfig

triton = pytest.importorskip("freetoken.kernels.qsa.triton", exc_type=ImportError)

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
