"""Rows fetched from mapped files: both ways of reading, ids outside, files that shrink under the reader."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from freetoken.errors import StartupError
from freetoken.loader.ple_table import Shard, TableSource
from freetoken.runner import row_reader
from freetoken.runner.row_reader import RowReader

BOTH = pytest.mark.parametrize("vectored", [True, False])
ROW = 100


def write(folder: Path, counts: list[int], lead: int = 8) -> tuple[TableSource, np.ndarray]:
    """Shards of ``counts`` rows, two to a file, behind ``lead`` bytes; and all their rows."""
    folder.mkdir(exist_ok=True)
    data = np.random.default_rng(sum(counts)).integers(1, 256, (sum(counts), ROW), dtype=np.uint8)
    shards, first = [], 0
    for number, count in enumerate(counts):
        path = folder / f"file{number // 2}.bin"
        with path.open("ab") as file:
            file.write(b"\0" * lead)
            shards.append(Shard(path, file.tell(), count))
            file.write(data[first : first + count].tobytes())
        first += count
    return TableSource("f8_e4m3", len(data), ROW, ROW, 1.0, tuple(shards)), data


@BOTH
@pytest.mark.parametrize("count", [0, 1, 31, 33, 700, 5000])
def test_rows_come_from_every_shard(tmp_path: Path, count: int, vectored: bool) -> None:
    source, data = write(tmp_path, [50, 50, 50, 13, 50])
    reader = RowReader(source, vectored=vectored)
    ids = np.random.default_rng(count).integers(0, len(data), count)
    out = np.full((count, ROW), 77, dtype=np.uint8)
    failed = reader.read(ids, out)
    assert failed.shape == (count,) and not failed.any()
    assert np.array_equal(out, data[ids])
    reader.close()


@BOTH
def test_ids_outside_the_table(tmp_path: Path, vectored: bool) -> None:
    source, data = write(tmp_path, [9, 9])
    reader = RowReader(source, vectored=vectored)
    out = np.zeros((2, ROW), dtype=np.uint8)
    for bad in (18, -1, 2**40):
        with pytest.raises(ValueError, match=f"row {bad} lies outside the n-gram table of 18 rows"):
            reader.read(np.array([3, bad]), out)
    assert not out.any()
    with pytest.raises(ValueError, match="need a contiguous place"):
        reader.read(np.array([3]), out)
    assert not reader.read(np.array([17, 0]), out).any() and np.array_equal(out, data[[17, 0]])


@BOTH
def test_a_file_that_shrinks_fails_its_rows_alone(tmp_path: Path, vectored: bool) -> None:
    """Touching the lost pages would end the process."""
    source, data = write(tmp_path, [200, 200, 200])
    reader = RowReader(source, vectored=vectored)
    page = os.sysconf("SC_PAGE_SIZE")
    os.truncate(source.shards[0].path, 2 * page)
    ids = np.random.default_rng(5).integers(0, 600, 3000)
    out = np.full((3000, ROW), 9, dtype=np.uint8)
    failed = reader.read(ids, out)
    ends = np.where(ids < 200, 8 + (ids + 1) * ROW, 16 + (ids + 1) * ROW)
    lost = (ids < 400) & (ends > 2 * page)
    assert np.array_equal(failed, lost) and lost.any() and not lost.all()
    assert np.array_equal(out[~failed], data[ids[~failed]]) and not out[failed].any()


def test_files_are_checked_when_they_are_opened(tmp_path: Path) -> None:
    source, _ = write(tmp_path / "short", [20, 20])
    with source.shards[0].path.open("r+b") as file:
        file.truncate(20 * ROW)
    with pytest.raises(StartupError, match=r"file0\.bin ends inside the n-gram table"):
        RowReader(source)
    source, _ = write(tmp_path / "gone", [20, 20, 20])
    source.shards[2].path.unlink()
    with pytest.raises(StartupError, match=r"file1\.bin: cannot be mapped: No such file"):
        RowReader(source)
    source.shards[2].path.touch()
    with pytest.raises(StartupError, match=r"file1\.bin: cannot be mapped: cannot mmap an empty file"):
        RowReader(source)


def test_a_system_without_the_call_reads_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Denied:
        def __call__(self, *_: object) -> int:
            return -1

    class Library:
        process_vm_readv = Denied()

    monkeypatch.setattr(row_reader.ctypes, "CDLL", lambda *_, **__: Library())
    source, data = write(tmp_path, [20])
    reader = RowReader(source)
    assert not reader.vectored
    out = np.zeros((1, ROW), dtype=np.uint8)
    assert not reader.read(np.array([4]), out).any() and np.array_equal(out[0], data[4])
