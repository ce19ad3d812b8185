"""Bucket choice, padding and static buffers, with the stand-in that re-runs the captured function."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from freetoken.runner.cuda_graph import DecodeGraphs, RerunCapture
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.staging import HostRing

ROWS, PAGES, PAGE = 9, 4, 4


class Fixture:
    """Graphs over a function whose result names every input of its lane."""

    def __init__(self, buckets: tuple[int, ...] = (1, 2, 4, 8), baked: bool = False) -> None:
        self.table = torch.arange(ROWS * PAGES, dtype=torch.int32).view(ROWS, PAGES)
        self.seen: list[int] = []
        self.progress: list[tuple[int, int]] = []
        self.replans = 0
        frozen: dict[int, torch.Tensor] = {}

        def run(fb: ForwardBatch) -> torch.Tensor:
            assert fb.captured and fb.decode_max_seq_len == PAGES * PAGE
            self.seen.append(fb.num_decodes)
            rows = frozen.setdefault(fb.num_decodes, fb.rows.clone()) if baked else fb.rows
            first = fb.page_table[rows, 0].to(torch.int64)
            return torch.stack([rows, fb.positions, fb.out_slots, fb.seq_lens.to(torch.int64), first], dim=1)

        def replan(_: ForwardBatch) -> None:
            self.replans += 1

        self.graphs = DecodeGraphs(
            buckets,
            run=run,
            replan=replan,
            capture=RerunCapture(),
            ring=HostRing(torch.device("cpu")),
            page_table=self.table,
            page_size=PAGE,
            progress=lambda done, total: self.progress.append((done, total)),
        )

    def replay(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(seed)
        rows = rng.permutation(ROWS - 1)[:count].astype(np.int64)
        positions = rng.integers(0, PAGES * PAGE, count)
        slots = rng.integers(PAGE, 100, count)
        out, out_rows = self.graphs.replay(rows, positions, slots, (positions + 1).astype(np.int32))
        expected = np.stack([rows, positions, slots, positions + 1, rows * PAGES], axis=1)
        assert out_rows.tolist() == rows.tolist()
        return out, torch.from_numpy(expected)


@pytest.mark.parametrize("count", range(1, 9))
def test_every_size_finds_its_bucket_and_fresh_inputs(count: int) -> None:
    fixture = Fixture()
    assert fixture.graphs.bucket(count) == min(b for b in fixture.graphs.buckets if b >= count)
    for seed in range(3):
        out, expected = fixture.replay(count, seed)
        assert torch.equal(out, expected)


def test_padding_lanes_use_the_padding_row_and_page() -> None:
    fixture = Fixture()
    fixture.replay(8, 0)
    fixture.replay(5, 1)
    lanes = fixture.graphs._captured[8].output[5:]
    assert lanes[:, 0].tolist() == [ROWS - 1] * 3
    assert lanes[:, 1].tolist() == [0] * 3
    assert lanes[:, 2].max() < PAGE
    assert lanes[:, 3].tolist() == [1] * 3


def test_a_baked_in_value_is_caught() -> None:
    fixture = Fixture(baked=True)
    out, expected = fixture.replay(4, 3)
    assert not torch.equal(out, expected)


def test_captures_from_large_to_small_and_reports() -> None:
    fixture = Fixture()
    assert fixture.seen == [8, 4, 2, 1]
    assert fixture.progress == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_too_many_requests_have_no_bucket_and_replays_are_counted() -> None:
    fixture = Fixture(buckets=(1, 4))
    assert fixture.graphs.bucket(5) is None
    fixture.replay(2, 0)
    fixture.replay(3, 0)
    assert fixture.graphs.replays == {1: 0, 4: 2}


def test_a_run_outside_the_graph_is_of_padding_and_leaves_the_last_replay_alone() -> None:
    fixture = Fixture()
    out, expected = fixture.replay(3, 5)
    rows = fixture.graphs._batches[4].rows
    held, runs, replans = rows.clone(), [], fixture.replans
    inner = fixture.graphs._run
    fixture.graphs._run = lambda fb: runs.append(inner(fb)) or runs[-1]
    for size in fixture.graphs.buckets:
        fixture.graphs.rerun(size, nullcontext())
    assert torch.equal(out, expected) and torch.equal(rows, held) and fixture.replans == replans + 4
    padding = torch.tensor([ROWS - 1, 0, 0, 1, (ROWS - 1) * PAGES])
    assert [len(run) for run in runs] == [1, 2, 4, 8] and all(torch.equal(run, padding.expand_as(run)) for run in runs)
    fixture.graphs._run = inner
    out, expected = fixture.replay(3, 6)
    assert torch.equal(out, expected)
