"""Rows of a table fetched from mapped files by the host, many at a time, with read errors that can be handled.

Touching a page of a mapping that cannot be read kills the process. So the copy is left to the kernel: ``process_vm_readv`` on
ourselves gathers up to :data:`VECTOR` rows in one call, faults pages in as an access would, and reports the row it stopped at. Where a
sandbox forbids that call, rows are read one by one. (torch-free)
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from freetoken.errors import StartupError
from freetoken.loader.ple_table import TableSource

VECTOR = 1024
"""Most pieces one call takes (``IOV_MAX`` of Linux)."""
THREADS = 16
ROWS_A_THREAD = 32


def _vector_call() -> Callable[[np.ndarray, np.ndarray], int] | None:
    """``call(local [1, 2], remote [N, 2])`` of addresses and lengths, uint64: bytes copied, or minus the error number. ``None`` where
    the system has no such call or does not allow it."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    size = ctypes.c_ulong
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, size, ctypes.c_void_p, size, size]
    function.restype = ctypes.c_ssize_t
    process = os.getpid()

    def call(local: np.ndarray, remote: np.ndarray) -> int:
        copied = int(function(process, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0))
        return copied if copied >= 0 else -ctypes.get_errno()

    probe, result = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    pieces = [np.array([[array.ctypes.data, 8]], dtype=np.uint64) for array in (result, probe)]
    return call if call(*pieces) == 8 and np.array_equal(result, probe) else None


class RowReader:
    """Fetches rows of one table. Not for two calls at a time.

    ``vectored`` asks for the one-call gather where the system has it. Files are opened and measured at once: :class:`StartupError`
    for one that is missing or too short.
    """

    def __init__(self, source: TableSource, *, vectored: bool = True) -> None:
        self.source = source
        self._call = _vector_call() if vectored else None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ple-rows")
        self._maps: list[mmap.mmap] = []
        self._bases: list[int] = []
        self._files: list[int] = []
        opened: dict[object, int] = {}
        try:
            for shard in source.shards:
                if shard.path not in opened:
                    opened[shard.path] = self._open(os.fspath(shard.path))
                index = opened[shard.path]
                if shard.offset + shard.rows * source.row_bytes > len(self._maps[index]):
                    raise StartupError(f"{shard.path} ends inside the n-gram table; it is truncated")
        except OSError as error:
            self.close()
            raise StartupError(f"{error.filename}: cannot be mapped: {error.strerror or error}") from None
        except StartupError:
            self.close()
            raise
        which = [opened[shard.path] for shard in source.shards]
        self._ends = np.cumsum([shard.rows for shard in source.shards])
        self._firsts = self._ends - [shard.rows for shard in source.shards]
        self._descriptors = np.array([self._files[index] for index in which])
        self._offsets = np.array([shard.offset for shard in source.shards])
        self._addresses = self._offsets + np.array([self._bases[index] for index in which])

    @property
    def vectored(self) -> bool:
        """Whether many rows are fetched by one call."""
        return self._call is not None

    def _open(self, path: str) -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files.append(descriptor)
        try:
            mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error), path) from None
        # Neighbours of a row mean nothing to the next token.
        mapped.madvise(mmap.MADV_RANDOM)
        self._maps.append(mapped)
        self._bases.append(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
        return len(self._maps) - 1

    def close(self) -> None:
        """Unmap and close the files; the reader is of no use afterwards."""
        self._pool.shutdown()
        for mapped in self._maps:
            mapped.close()
        for descriptor in self._files:
            os.close(descriptor)
        self._maps, self._files = [], []

    def read(self, row_ids: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Fill ``out [N, row_bytes]`` uint8 (contiguous) with rows ``row_ids [N]``; ``[N]`` bool says which could not be read, and
        are zeros. ``ValueError`` for an id outside the table, before anything is read."""
        count = len(row_ids)
        if out.shape != (count, self.source.row_bytes) or not out.flags.c_contiguous:
            raise ValueError(f"{count} rows of {self.source.row_bytes} bytes need a contiguous place, not {out.shape}")
        outside = (row_ids < 0) | (row_ids >= self.source.rows)
        if outside.any():
            raise ValueError(
                f"row {int(row_ids[outside.argmax()])} lies outside the n-gram table of {self.source.rows} rows"
            )
        failed = np.zeros(count, dtype=bool)
        shard = np.searchsorted(self._ends, row_ids, side="right")
        within = (row_ids - self._firsts[shard]) * self.source.row_bytes
        pieces = min(THREADS, -(-count // ROWS_A_THREAD))
        bounds = [count * piece // max(pieces, 1) for piece in range(pieces + 1)]
        work = [(slice(a, b), shard, within, out, failed) for a, b in itertools.pairwise(bounds)]
        if len(work) == 1:
            self._read_part(*work[0])
        else:
            list(self._pool.map(lambda part: self._read_part(*part), work))
        return failed

    def _read_part(
        self, part: slice, shard: np.ndarray, within: np.ndarray, out: np.ndarray, failed: np.ndarray
    ) -> None:
        read = self._read_each if self._call is None else self._read_many
        read(shard[part], within[part], out[part], failed[part])

    def _read_many(self, shard: np.ndarray, within: np.ndarray, out: np.ndarray, failed: np.ndarray) -> None:
        assert self._call is not None
        size, count = self.source.row_bytes, len(shard)
        remote = np.full((count, 2), size, dtype=np.uint64)
        remote[:, 0] = self._addresses[shard] + within
        local = np.empty((1, 2), dtype=np.uint64)
        done = 0
        while done < count:
            batch = min(VECTOR, count - done)
            local[0] = out[done:].ctypes.data, batch * size
            copied = self._call(local, remote[done : done + batch])
            done += max(copied, 0) // size
            if copied < batch * size:
                # The kernel stopped at the first row it could not read.
                out[done] = 0
                failed[done] = True
                done += 1

    def _read_each(self, shard: np.ndarray, within: np.ndarray, out: np.ndarray, failed: np.ndarray) -> None:
        positions = (self._offsets[shard] + within).tolist()
        for row, (descriptor, position) in enumerate(zip(self._descriptors[shard].tolist(), positions)):
            try:
                whole = os.preadv(descriptor, [out[row].data], position) == self.source.row_bytes
            except OSError:
                whole = False
            if not whole:
                out[row] = 0
                failed[row] = True
