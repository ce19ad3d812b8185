"""The ways to hold an n-gram table: they agree with each other, and say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken.errors import StartupError
from freetoken.hardware import probe
from freetoken.kernels.ple_gather import FORMATS
from freetoken.kernels.ple_hash import TokenIndexMemo, ple_row_ids
from freetoken.loader.ple_table import Shard, TableSource, find_tables
from freetoken.loader.safetensors import index_folder
from freetoken.runner.memory import GIB, plan_tables
from freetoken.runner.ple_mmap import MmapTable, StepIds
from freetoken.runner.ple_table import PinnedTable, ResidentTable, load_table, random_table
from ple_checkpoint import table_tensors, write_folder
from ple_geometry import SMALL

DEVICE = torch.device("cuda" if probe().usable_gpu else "cpu")
DTYPE = torch.float32
WIDE = replace(SMALL, embed_dim=128)
"""Rows of 32 elements, so that they can be packed."""


def checkpoint(folder: Path, fmt: str) -> TableSource:
    """A table of random rows on disk, in shards over several files (packed: one tensor of one file)."""
    made = random_table(fmt, "gpu", 4064, 32, dtype=DTYPE, device=torch.device("cpu"), seed=1)
    if FORMATS[fmt].block > 1:
        path = folder / "packed.bin"
        path.write_bytes(b"12345678" + made.stored.numpy().tobytes())
        return TableSource(fmt, 4064, 32, made.stored.shape[1], 1.0, (Shard(path, 8, 4064),))
    kind = {"bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn, "f32": torch.float32}[fmt]
    tensors = table_tensors(WIDE, made.stored.view(kind), 16, scale=0.125 if fmt == "f8_e4m3" else None)
    return find_tables(index_folder(write_folder(folder, tensors, 3)), WIDE)[0]


def mapped(source: TableSource, **options: Any) -> MmapTable:
    return MmapTable(source, WIDE, 0, **{"dtype": DTYPE, "device": DEVICE, "max_captured": 8, **options})


def row_ids(tokens: list[list[int]], contexts: list[list[int]]) -> torch.Tensor:
    constants = WIDE.constants(0)
    parts = (constants.multipliers, constants.vocab_sizes, constants.offsets)
    where = TokenIndexMemo().get([len(part) for part in tokens], DEVICE)
    ids = torch.tensor([t for part in tokens for t in part], device=DEVICE)
    return ple_row_ids(
        ids,
        torch.tensor(contexts, device=DEVICE),
        where.request,
        where.local,
        *(torch.tensor(part, device=DEVICE) for part in parts),
        eos_token_id=7,
        heads_per_ngram=2,
    )


def step_ids(tokens: list[list[int]], contexts: list[list[int]]) -> StepIds:
    flat = np.array([t for part in tokens for t in part], dtype=np.int64)
    return StepIds(flat, np.array(contexts), tuple(len(part) for part in tokens))


TOKENS, CONTEXTS = [[3, 4, 7, 5, 6, 8], [2, 7, 11], [9]], [[7, 7], [21, 22], [31, 7]]


@pytest.mark.parametrize("fmt", ["f8_e4m3", "bf16", "f32", "iq4_nl", "q4_0", "q8_0"])
def test_the_three_agree(tmp_path: Path, fmt: str) -> None:
    """And with the rows as another reading of the file decodes them."""
    source = checkpoint(tmp_path, fmt)
    seen: list[int] = []
    resident = load_table(source, "gpu", dtype=DTYPE, device=DEVICE, progress=seen.append)
    pinned = load_table(source, "pinned", dtype=DTYPE, device=DEVICE)
    disk = mapped(source)
    assert sum(seen) == source.nbytes == 4064 * FORMATS[fmt].row_bytes(32)
    assert isinstance(resident, ResidentTable) and isinstance(pinned, PinnedTable)
    assert resident.rows == pinned.rows == disk.rows == 4064
    assert (resident.kind, pinned.kind, disk.kind) == ("gpu", "pinned", "mmap")
    ids = row_ids(TOKENS, CONTEXTS)
    expected = resident.lookup(ids)
    assert expected.shape == (10, 128) and expected.abs().sum() > 0
    raw = np.concatenate(
        [np.fromfile(s.path, np.uint8, s.rows * source.row_bytes, offset=s.offset) for s in source.shards]
    ).reshape(4064, -1)
    from freetoken.kernels.ple_gather.reference import decode_rows

    again = decode_rows(torch.from_numpy(raw)[ids.view(-1).cpu()].contiguous(), FORMATS[fmt], 32, source.scale)
    assert torch.equal(again.view(10, 128), expected.cpu())
    pinned.prefetch(ids)
    assert torch.equal(pinned.lookup(ids), expected)
    for captured in (False, False, True):
        tokens, contexts = (TOKENS, CONTEXTS) if not captured else (TOKENS[1:], CONTEXTS[1:])
        assert disk.stage(step_ids(tokens, contexts), captured=captured) == []
        count = sum(map(len, tokens))
        assert torch.equal(disk.lookup(disk.staged(count, captured)), expected[-count:])
    disk.reader.close()


@pytest.mark.parametrize("kind", ["gpu", "pinned"])
def test_out_is_filled_and_returned(tmp_path: Path, kind: str) -> None:
    source = checkpoint(tmp_path, "bf16")
    table = load_table(source, kind, dtype=DTYPE, device=DEVICE)
    ids = row_ids(TOKENS, CONTEXTS)
    expected = table.lookup(ids)
    for prefetched in (False, True):
        if prefetched:
            table.prefetch(ids)
        out = torch.full((10, 128), -3.0, device=DEVICE)
        assert table.lookup(ids, out) is out and torch.equal(out, expected)
    disk = mapped(source)
    disk.stage(step_ids(TOKENS, CONTEXTS), captured=False)
    out.fill_(-3.0)
    assert disk.lookup(disk.staged(10, False), out) is out and torch.equal(out, expected)
    assert not table.lookup(torch.full((2, 4), 4064, device=DEVICE)).any(), "ids outside give zeros"


def test_a_prefetch_is_joined_by_identity() -> None:
    """Equal ids are not the same ids; a prefetch that nobody took does no harm to the next."""
    table = random_table("f32", "pinned", 50, 32, dtype=DTYPE, device=DEVICE, seed=2)
    first = torch.tensor([[1, 2], [3, 4]], device=DEVICE)
    other = torch.tensor([[5, 6]], device=DEVICE)
    table.prefetch(first)
    assert torch.equal(table.lookup(other), table.lookup(other.clone()))
    table.prefetch(first)
    table.prefetch(other)
    taken = table.lookup(other)
    assert torch.equal(taken, table.lookup(other)) and taken.shape == (1, 64)
    assert table.lookup(first).shape == (2, 64)


def test_replays_read_one_place_and_steps_their_own(tmp_path: Path) -> None:
    """What is staged for a replay lies where the capture looked; a step without its rows is a fault of ours."""
    disk = mapped(checkpoint(tmp_path, "f8_e4m3"))
    captured = disk.staged(4, True)
    assert not disk.lookup(captured).any()
    tokens, contexts = [[5], [6], [7]], [[1, 2], [3, 4], [5, 6]]
    disk.stage(step_ids(tokens, contexts), captured=True)
    assert disk.staged(4, True).data_ptr() == captured.data_ptr()
    resident = load_table(disk.source, "gpu", dtype=DTYPE, device=DEVICE)
    rows = disk.lookup(captured)
    assert torch.equal(rows[:3], resident.lookup(row_ids(tokens, contexts))) and rows.isfinite().all()
    for tokens_there in (3, 4):
        with pytest.raises(RuntimeError, match=f"rows of {tokens_there} tokens were not staged"):
            disk.staged(tokens_there, False)
    with pytest.raises(NotImplementedError):
        resident.staged(1, False)


@pytest.mark.parametrize("vectored", [True, False])
def test_a_read_that_fails_names_its_requests_alone(tmp_path: Path, vectored: bool) -> None:
    source = checkpoint(tmp_path, "bf16")
    disk = mapped(source, vectored=vectored)
    resident = load_table(source, "gpu", dtype=DTYPE, device=DEVICE)
    good = row_ids(TOKENS, CONTEXTS)
    lost = source.shards[5]
    with lost.path.open("r+b") as file:
        file.truncate(4096)
    failed = disk.stage(step_ids(TOKENS, CONTEXTS), captured=False)
    per_file = {shard.path for shard in source.shards}
    assert len(per_file) == 3 and failed and failed == sorted(set(failed))
    rows = disk.lookup(disk.staged(10, False))
    for number, part in enumerate((slice(0, 6), slice(6, 9), slice(9, 10))):
        same = torch.equal(rows[part], resident.lookup(good[part]))
        assert same == (number not in failed)


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "iq4_nl")
    path = source.shards[0].path
    with path.open("r+b") as file:
        file.truncate(1000)
    for kind in ("gpu", "pinned"):
        with pytest.raises(StartupError, match=r"packed\.bin ends inside the n-gram table"):
            load_table(source, kind, dtype=DTYPE, device=DEVICE)
    with pytest.raises(StartupError, match=r"packed\.bin ends inside the n-gram table"):
        mapped(source)
    path.unlink()
    with pytest.raises(StartupError, match=r"packed\.bin: cannot be read: No such file"):
        load_table(source, "gpu", dtype=DTYPE, device=DEVICE)


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_random_rows_are_finite_and_repeat(fmt: str) -> None:
    table = random_table(fmt, "pinned", 70_000, 32, dtype=DTYPE, device=DEVICE, seed=3)
    ids = torch.tensor([[0, 69_999], [65_536, 4463]], device=DEVICE)
    rows = table.lookup(ids).view(4, 32)
    assert rows.isfinite().all() and 0.3 < rows.std().item() < 3
    assert torch.equal(rows[0], rows[2]) and torch.equal(rows[1], rows[3])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["f8_e4m3", "iq4_nl", "q8_0"])
def test_a_page_locked_table_in_a_graph(fmt: str) -> None:
    """The side stream forks and joins inside the capture; replays see fresh ids."""
    table = random_table(fmt, "pinned", 5000, 160, dtype=torch.bfloat16, device=DEVICE, seed=4)
    there = random_table(fmt, "gpu", 5000, 160, dtype=torch.bfloat16, device=DEVICE, seed=4)
    ids = torch.randint(0, 5000, (8, 16), device=DEVICE)

    def step() -> torch.Tensor:
        table.prefetch(ids)
        return table.lookup(ids)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = step()
    for _ in range(3):
        ids.copy_(torch.randint(0, 5000, (8, 16), device=DEVICE))
        graph.replay()
        assert torch.equal(rows, there.lookup(ids))
    for _ in range(50):
        fresh = torch.randint(0, 5000, (300, 16), device=DEVICE)
        table.prefetch(fresh)
        torch.empty(300, 2560, dtype=torch.bfloat16, device=DEVICE).fill_(9)
        assert torch.equal(table.lookup(fresh), there.lookup(fresh))


# --- which one -------------------------------------------------------------------------------------------------------


def plan(asked: str = "auto", gib: float = 48, *, left: float = 120, host: float = 200, **more: Any) -> Any:
    options = {"on_disk": True, "device": "cuda", "total_bytes": 141 * GIB, "fraction": 1.0, **more}
    return plan_tables(asked, int(gib * GIB), free_bytes=int(left * GIB), host_bytes=int(host * GIB), **options)


@pytest.mark.parametrize(
    ("options", "kind", "why"),
    [
        ({}, "gpu", r"48\.00 GiB of tables are at most 50% of the 120\.00 GiB left on the GPU"),
        ({"left": 90}, "pinned", r"above 50% of the 90\.00 GiB left on the GPU; the host has room"),
        ({"left": 90, "host": 50}, "mmap", r"fit neither the 90\.00 GiB left on the GPU nor the 50\.00 GiB"),
        ({"left": 90, "fraction": 0.5}, "pinned", r"of the 19\.50 GiB"),
        ({"device": "cpu", "total_bytes": 64 * GIB, "left": 60, "host": 60}, "mmap", "fit neither"),
        ({"device": "cpu", "total_bytes": 64 * GIB, "left": 60, "host": 60, "gib": 9}, "gpu", "at most 50%"),
        ({"asked": "gpu", "left": 50}, "gpu", "--ple-table gpu"),
        ({"asked": "pinned", "left": 0}, "pinned", "--ple-table pinned"),
        ({"asked": "mmap", "left": 0, "host": 1}, "mmap", "--ple-table mmap"),
        ({"on_disk": False}, "gpu", "at most 50%"),
    ],
)
def test_where_a_table_goes(options: dict[str, Any], kind: str, why: str) -> None:
    import re

    found = plan(**options)
    assert found.kind == kind and re.search(why, found.reason)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"asked": "gpu", "left": 40},
            r"--ple-table gpu: .*48\.00 GiB, but 40\.00 GiB left on the GPU; use pinned or mmap",
        ),
        ({"asked": "pinned", "host": 50}, r"--ple-table pinned: .*may be page-locked on the host; use mmap"),
        ({"asked": "mmap", "on_disk": False}, "random weights have no file to map"),
        ({"left": 60, "host": 50, "on_disk": False}, "random n-gram tables need"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(StartupError, match=match):
        plan(**options)
