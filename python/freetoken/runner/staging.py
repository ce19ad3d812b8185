"""One host-to-device copy a step: numpy arrays packed into pinned buffers, seen on the device as typed views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

ALIGNMENT = 16
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


@dataclass(frozen=True)
class Layout:
    """Where each array lies in a packed buffer: ``(offset, count, dtype)`` in bytes and elements, and the total size."""

    parts: tuple[tuple[int, int, np.dtype], ...]
    size: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, type]]) -> Layout:
        """``shapes`` are ``(count, numpy type)`` of one-dimensional arrays; each starts on a 16-byte border."""
        parts, offset = [], 0
        for count, kind in shapes:
            dtype = np.dtype(kind)
            parts.append((offset, count, dtype))
            offset += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(tuple(parts), max(offset, ALIGNMENT))

    def host_views(self, buffer: np.ndarray) -> list[np.ndarray]:
        return [buffer[o : o + n * d.itemsize].view(d) for o, n, d in self.parts]

    def device_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[o : o + n * d.itemsize].view(_DTYPES[d]) for o, n, d in self.parts]


class HostRing:
    """Pinned byte buffers used in turn. A buffer is handed out again only after its last copy has run;
    the depth covers the uploads of two steps, so that planning one step does not wait for the one that runs.

    On the CPU the buffers are plain memory and the device copy is a copy all the same, so that a step never shares
    memory with the one being planned.
    """

    def __init__(self, device: torch.device, depth: int = 16) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * depth
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def take(self, size: int) -> tuple[int, torch.Tensor]:
        """``(index, buffer)`` of at least ``size`` bytes, free to be written."""
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        if self._buffers[index].numel() < size:
            capacity = 1 << max(12, (size - 1).bit_length())
            self._buffers[index] = torch.empty(capacity, dtype=torch.uint8, pin_memory=self.cuda)
        return index, self._buffers[index]

    def mark(self, index: int) -> torch.cuda.Event | None:
        """Record that all copies from or to buffer ``index`` have been enqueued; returns the event to wait for."""
        if not self.cuda:
            return None
        event = self._events[index] or torch.cuda.Event()
        event.record()
        self._events[index] = event
        return event

    def upload(
        self, layout: Layout, arrays: Sequence[np.ndarray], target: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Pack ``arrays`` and copy them in one go, to ``target`` (a static byte buffer) or to a fresh one.

        Returns the typed device views in the order of ``arrays``.
        """
        index, host = self.take(layout.size)
        for view, array in zip(layout.host_views(host[: layout.size].numpy()), arrays):
            view[:] = array
        if target is None:
            target = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        target[: layout.size].copy_(host[: layout.size], non_blocking=True)
        self.mark(index)
        return layout.device_views(target)

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """:meth:`upload` of one-dimensional int64, int32 or float32 arrays to a fresh buffer, laid out by their lengths."""
        return self.upload(Layout.of([(len(array), array.dtype.type) for array in arrays]), arrays)
