"""A table of n-gram embeddings left on disk: the host hashes and fetches a step's rows ahead of it, the device decodes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from freetoken.kernels.ple_gather import FORMATS, gather_rows
from freetoken.kernels.ple_hash.host import HostHash
from freetoken.loader.ple_table import TableSource
from freetoken.models.ple_config import PleConfig
from freetoken.runner.row_reader import RowReader
from freetoken.runner.staging import HostRing

BUFFERS = 2
"""Host buffers in turn: one is filled while the other is copied."""


@dataclass(frozen=True)
class StepIds:
    """The ids of one step on the host: ``ids [T]`` of requests of ``lengths`` tokens, one after another, and before each of them the n - 1
    ids of its row of ``context [B, n - 1]``."""

    ids: np.ndarray
    context: np.ndarray
    lengths: tuple[int, ...]


class MmapTable:
    """One layer's table. :meth:`stage` comes before the step that looks its rows up.

    Steps replayed from a graph find the rows at the start of one device buffer of ``max_captured`` tokens, others in a tensor of their
    own. All copies go through the current stream, behind the step before.
    """

    kind = "mmap"
    host_side = True
    device_bytes = 0

    def __init__(
        self,
        source: TableSource,
        config: PleConfig,
        ordinal: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_captured: int,
        vectored: bool = True,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self.format = FORMATS[source.format]
        self.width = source.width
        self.heads = config.heads
        constants = config.constants(ordinal)
        self.hash = HostHash.of(
            constants.multipliers,
            constants.vocab_sizes,
            constants.offsets,
            eos_token_id=config.boundary_id,
            heads_per_ngram=config.heads_per_ngram,
        )
        self.reader = RowReader(source, vectored=vectored)
        self._ring = HostRing(device, depth=BUFFERS)
        self._static = torch.zeros((max_captured, self.token_bytes), dtype=torch.uint8, device=device)
        self._staged: torch.Tensor | None = None
        if device.type == "cuda":
            from freetoken.kernels.ple_gather import triton

            triton.prepare(self.format, device)

    @property
    def rows(self) -> int:
        return self.source.rows

    @property
    def token_bytes(self) -> int:
        """Stored bytes of all rows of one token."""
        return self.heads * self.source.row_bytes

    def stage(self, step: StepIds, *, captured: bool) -> list[int]:
        """Fetch the rows of a step and start their copy to the device; the numbers of the requests some of whose rows could not be
        read. Those rows are zeros: the step can run, but nothing of it may be used for these requests."""
        rows = self.hash.row_ids(step.ids, step.context, step.lengths)
        tokens = len(step.ids)
        size = tokens * self.token_bytes
        index, host = self._ring.take(size)
        landing = host[:size].view(tokens, self.token_bytes)
        failed = self.reader.read(rows.reshape(-1), landing.numpy().reshape(tokens * self.heads, -1))
        if captured:
            target = self._static[:tokens]
        else:
            self._staged = target = torch.empty((tokens, self.token_bytes), dtype=torch.uint8, device=self.device)
        target.copy_(landing, non_blocking=True)
        self._ring.mark(index)
        if not failed.any():
            return []
        request = np.repeat(np.arange(len(step.lengths)), step.lengths)
        return np.unique(request[failed.reshape(tokens, self.heads).any(1)]).tolist()

    def staged(self, tokens: int, captured: bool) -> torch.Tensor:
        """``[T, H * row_bytes]`` uint8 of the step that runs now; every replay of a captured one reads the same memory."""
        if captured:
            return self._static[:tokens]
        staged, self._staged = self._staged, None
        if staged is None or staged.shape[0] != tokens:
            raise RuntimeError(f"rows of {tokens} tokens were not staged before the step")
        return staged

    def prefetch(self, row_ids: torch.Tensor) -> None:
        """Nothing to do: the rows are on their way since :meth:`stage`."""

    def lookup(self, row_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, H * width]`` of what :meth:`staged` gave, ``out`` itself where given."""
        tokens = row_ids.shape[0]
        target = None if out is None else out.view(-1, self.width)
        stored = row_ids.view(tokens * self.heads, self.source.row_bytes)
        rows = gather_rows(stored, None, self.format, self.width, self.source.scale, self.dtype, target)
        return rows.view(tokens, self.heads * self.width) if out is None else out
