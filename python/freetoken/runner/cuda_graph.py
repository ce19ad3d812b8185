"""Decode steps captured into graphs: buckets, padding, capture and replay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.staging import HostRing, Layout


class Captured(Protocol):
    """A recorded run: :meth:`replay` repeats it on the same buffers; ``output`` is where its result lies."""

    output: torch.Tensor

    def replay(self) -> None: ...


class CapturePrimitive(Protocol):
    """Records one run of ``function``; every capture of one primitive shares one memory pool."""

    def __call__(self, function: Callable[[], torch.Tensor]) -> Captured: ...


class CudaGraphCapture:
    """The real CUDA graph. Runs the function twice before capturing, so that kernels are compiled and tuned."""

    def __init__(self) -> None:
        self._pool: tuple[int, int] | None = None
        self._stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Captured:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = function()
        self._pool = graph.pool()
        return _CudaCaptured(graph, output)


class _CudaCaptured:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class RerunCapture:
    """A stand-in for machines without CUDA: replay runs the function again on the same static buffers.

    Bucket choice, padding, and values baked in where a buffer was meant show as wrong results here too.
    """

    def __call__(self, function: Callable[[], torch.Tensor]) -> Captured:
        return _Rerun(function)


class _Rerun:
    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function = function
        self.output = function().clone()

    def replay(self) -> None:
        self.output.copy_(self._function())


class DecodeGraphs:
    """One captured decode step per bucket.

    ``run(fb)`` computes logits ``[bucket, vocab]`` from a :class:`ForwardBatch` of static buffers; ``replan(fb)`` is called
    before each replay for backends that keep host metadata. A replay copies in exactly: rows, positions, KV slots and
    sequence lengths. Padding lanes use ``padding_row``, position 0, length 1 and slot 0, which lies in the padding page.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        *,
        run: Callable[[ForwardBatch], torch.Tensor],
        replan: Callable[[ForwardBatch], None],
        capture: CapturePrimitive,
        ring: HostRing,
        page_table: torch.Tensor,
        page_size: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self.buckets = tuple(sorted(buckets))
        self.replays = dict.fromkeys(self.buckets, 0)
        self.misses = 0
        self._ring = ring
        self._run = run
        self._replan = replan
        self._padding_row = page_table.shape[0] - 1
        self._batches: dict[int, ForwardBatch] = {}
        self._captured: dict[int, Captured] = {}
        self._layouts = {size: _decode_layout(size) for size in self.buckets}
        device = page_table.device
        self._static = torch.zeros(self._layouts[self.buckets[-1]].size, dtype=torch.uint8, device=device)
        self._empty = torch.zeros(0, dtype=torch.int64, device=device)
        limit = page_table.shape[1] * page_size
        for done, size in enumerate(reversed(self.buckets)):
            progress(done, len(self.buckets))
            self._batches[size] = fb = self._static_batch(size, page_table, limit)
            self._upload(size, *_padding(0, size, self._padding_row))
            replan(fb)
            self._captured[size] = capture(lambda fb=fb: run(fb))
        progress(len(self.buckets), len(self.buckets))

    def bucket(self, requests: int) -> int | None:
        """The smallest captured size that holds ``requests``, or ``None``."""
        index = bisect_left(self.buckets, requests)
        return self.buckets[index] if index < len(self.buckets) else None

    def replay(
        self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray, lengths: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[n, vocab]`` and rows ``[n]`` of ``n`` decodes; valid until the next replay. Call :meth:`bucket` first."""
        count = len(rows)
        size = self.bucket(count)
        assert size is not None
        pad = _padding(count, size, self._padding_row)
        joined = (np.concatenate((a, b)) for a, b in zip((rows, positions, slots, lengths), pad))
        self._upload(size, *joined)
        self._replan(self._batches[size])
        self._captured[size].replay()
        self.replays[size] += 1
        return self._captured[size].output[:count], self._batches[size].rows[:count]

    def rerun(self, size: int, within: AbstractContextManager[object]) -> None:
        """Run bucket ``size`` outside its graph, on padding lanes alone and inside ``within``: the kernels of a replay one by one.

        No request notices: what the static buffers hold is put back, since a draw of the last replay may still need it.
        """
        kept = self._static.clone()
        self._upload(size, *_padding(0, size, self._padding_row))
        self._replan(self._batches[size])
        with within:
            self._run(self._batches[size])
        self._static.copy_(kept)

    def _upload(self, size: int, *arrays: np.ndarray) -> None:
        self._ring.upload(self._layouts[size], arrays, target=self._static)

    def _static_batch(self, size: int, page_table: torch.Tensor, limit: int) -> ForwardBatch:
        rows, positions, slots, lengths = self._layouts[size].device_views(self._static)
        return ForwardBatch(
            num_decodes=size,
            num_prefills=0,
            input_ids=torch.zeros(size, dtype=torch.int64, device=page_table.device),
            positions=positions,
            out_slots=slots,
            rows=rows,
            seq_lens=lengths,
            q_starts=self._empty.to(torch.int32),
            starts=self._empty.to(torch.int32),
            sample_index=self._empty,
            page_table=page_table,
            decode_max_seq_len=limit,
            captured=True,
        )


def _decode_layout(size: int) -> Layout:
    return Layout.of([(size, np.int64), (size, np.int64), (size, np.int64), (size, np.int32)])


def _padding(count: int, size: int, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    lanes = size - count
    zeros = np.zeros(lanes, dtype=np.int64)
    return np.full(lanes, row, dtype=np.int64), zeros, zeros, np.ones(lanes, dtype=np.int32)
