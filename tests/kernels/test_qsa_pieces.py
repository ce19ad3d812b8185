"""Pieces of prompts behind an indexer: how they are cut, what each query chooses, and attention over it, against scalar Python."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import DEVICE, choice, poisoned_outputs
from qsa_world import EPS, GEOMETRIES, INDEX_HEADS, INDEX_SIZE, ROTATED, Small, World, check, geometry

from freetoken.kernels.checking import RELATIVE_RMS, KernelCheckError, relative_rms
from freetoken.kernels.qsa import IndexStep, PieceConfig, Pools, Qsa, flat_slots
from freetoken.kernels.qsa.plan import plan_pieces
from freetoken.kernels.rope_kv import reference as rope
from freetoken.models.config import IndexerConfig

triton = pytest.importorskip("freetoken.kernels.qsa.triton", exc_type=ImportError)
pieces = pytest.importorskip("freetoken.kernels.qsa.pieces", exc_type=ImportError)

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
