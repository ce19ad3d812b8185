"""Tables of n-gram embeddings in memory: the GPU's own, or page-locked host memory that the GPU reads by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from freetoken.errors import StartupError
from freetoken.kernels.ple_gather import FORMATS, RowFormat, gather_rows
from freetoken.loader.ple_table import Shard, TableSource
from freetoken.runner import host_memory

READ_BYTES = 2**26
RANDOM_ROWS = 2**16
_FACTORS = {"iq4_nl": 1 / 64, "q4_0": 1 / 4, "q8_0": 1 / 64}
"""Factors with which random codes have about unit variance."""

Progress = Callable[[int], None]


class ResidentTable:
    """Rows in the memory of the device that looks them up. ``stored [rows, row_bytes]`` uint8."""

    kind = "gpu"
    host_side = False

    def __init__(self, stored: torch.Tensor, fmt: RowFormat, width: int, scale: float, dtype: torch.dtype) -> None:
        self.stored = stored
        self.format = fmt
        self.width = width
        self.scale = scale
        self.dtype = dtype

    @property
    def rows(self) -> int:
        return self.stored.shape[0]

    @property
    def device_bytes(self) -> int:
        """Bytes it takes of the device."""
        return self.stored.nbytes

    def staged(self, tokens: int, captured: bool) -> torch.Tensor:
        raise NotImplementedError("rows of this table are asked for by ids")

    def prefetch(self, row_ids: torch.Tensor) -> None:
        """Nothing to gain: the rows are where they are needed."""

    def lookup(self, row_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, H * width]`` of ``row_ids [T, H]``, ``out`` itself where given; ids outside the table give zeros."""
        tokens, heads = row_ids.shape
        target = None if out is None else out.view(-1, self.width)
        rows = gather_rows(self.stored, row_ids.view(-1), self.format, self.width, self.scale, self.dtype, target)
        return rows.view(tokens, heads * self.width) if out is None else out


class PinnedTable(ResidentTable):
    """Rows in page-locked host memory. On CUDA the GPU fetches them on a side stream from :meth:`prefetch` on, beside the layers in
    between, and :meth:`lookup` waits there for them; elsewhere it is plain memory.

    Prefetch and lookup belong to one another by the identity of the ids. A prefetch that no lookup asked for is waited for before
    the next, so that what it writes to is not given away under it.
    """

    kind = "pinned"

    def __init__(
        self, stored: torch.Tensor, fmt: RowFormat, width: int, scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(stored, fmt, width, scale, dtype)
        self.cuda = device.type == "cuda"
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.cuda:
            from freetoken.kernels.ple_gather import triton

            triton.prepare(fmt, device)
            self._side = torch.cuda.Stream(device)
            finalizer = weakref.finalize(self, host_memory.release, self._side, [stored.data_ptr()])
            finalizer.atexit = False

    @property
    def device_bytes(self) -> int:
        return 0 if self.cuda else self.stored.nbytes

    def prefetch(self, row_ids: torch.Tensor) -> None:
        """Start fetching the rows of ``row_ids [T, H]``."""
        self._join()
        tokens, heads = row_ids.shape
        rows = torch.empty((tokens, heads * self.width), dtype=self.dtype, device=row_ids.device)
        self._pending = (row_ids, rows)
        if not self.cuda:
            super().lookup(row_ids, rows)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            super().lookup(row_ids, rows)

    def lookup(self, row_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        pending = self._pending
        self._join()
        if pending is None or pending[0] is not row_ids:
            return super().lookup(row_ids, out)
        return pending[1] if out is None else out.copy_(pending[1])

    def _join(self) -> None:
        if self._pending is not None and self.cuda:
            torch.cuda.current_stream().wait_stream(self._side)
        self._pending = None


def load_table(
    source: TableSource, kind: str, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> ResidentTable:
    """Read a table into memory, ``kind`` being ``gpu`` or ``pinned``; ``progress`` gets the number of bytes after each piece.

    :class:`StartupError` for a file that cannot be read to its end.
    """
    table = _empty(source.format, kind, source.rows, source.width, source.scale, dtype, device)
    first = 0
    for shard in source.shards:
        _read_shard(shard, table.stored[first : first + shard.rows], progress)
        first += shard.rows
    return table


def random_table(
    fmt: str, kind: str, rows: int, width: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> ResidentTable:
    """A table of random rows of about unit variance, the same block of them again and again."""
    scale = 0.5 if fmt == "f8_e4m3" else 1.0
    table = _empty(fmt, kind, rows, width, scale, dtype, device)
    generator = torch.Generator().manual_seed(seed)
    block = _random_rows(fmt, min(rows, RANDOM_ROWS), width, generator).to(table.stored.device)
    for first in range(0, rows, block.shape[0]):
        part = table.stored[first : first + block.shape[0]]
        part.copy_(block[: part.shape[0]])
    return table


def _empty(
    fmt: str, kind: str, rows: int, width: int, scale: float, dtype: torch.dtype, device: torch.device
) -> ResidentTable:
    layout = FORMATS[fmt]
    shape = (rows, layout.row_bytes(width))
    if kind == "gpu":
        try:
            stored = torch.empty(shape, dtype=torch.uint8, device=device)
        except (torch.cuda.OutOfMemoryError, RuntimeError):
            raise StartupError(
                f"out of memory for an n-gram table of {shape[0] * shape[1]} bytes; use --ple-table mmap"
            ) from None
        if device.type == "cuda":
            from freetoken.kernels.ple_gather import triton

            triton.prepare(layout, device)
        return ResidentTable(stored, layout, width, scale, dtype)
    stored = host_memory.allocate(
        shape,
        torch.uint8,
        pinned=device.type == "cuda",
        what="an n-gram table",
        advice="use --ple-table mmap",
        flags=host_memory.MAPPED,
    )
    return PinnedTable(stored, layout, width, scale, dtype, device)


def _read_shard(shard: Shard, target: torch.Tensor, progress: Progress | None) -> None:
    """Fill ``target [rows, row_bytes]``; host memory is read into directly, a device through one buffer."""
    flat = target.view(-1)
    on_host = target.device.type == "cpu"
    buffer = None if on_host else torch.empty(min(READ_BYTES, flat.numel()), dtype=torch.uint8)
    try:
        with shard.path.open("rb", buffering=0) as file:
            file.seek(shard.offset)
            for first in range(0, flat.numel(), READ_BYTES):
                part = flat[first : first + READ_BYTES]
                landing = part if buffer is None else buffer[: part.numel()]
                view = memoryview(landing.numpy())
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise StartupError(f"{shard.path} ends inside the n-gram table; it is truncated")
                    view = view[count:]
                if buffer is not None:
                    part.copy_(landing)
                if progress is not None:
                    progress(part.numel())
    except OSError as error:
        raise StartupError(f"{shard.path}: cannot be read: {error.strerror or error}") from None


def _random_rows(fmt: str, rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """``[rows, row_bytes]`` uint8 of finite values."""
    if fmt in _FACTORS:
        layout = FORMATS[fmt]
        shape = (rows, width // layout.block, layout.block_bytes)
        packed = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        packed[..., :2] = torch.full((*shape[:2], 1), _FACTORS[fmt], dtype=torch.float16).view(torch.uint8)
        return packed.view(rows, -1)
    values = torch.randn((rows, width), generator=generator)
    if fmt == "f8_e4m3":
        return (values * 2).to(torch.float8_e4m3fn).view(torch.uint8)
    return values.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[fmt]).view(torch.uint8)
