"""Which request each token of a step belongs to, and where in it: depends on shapes alone, so it is kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CAPACITY = 64


@dataclass(frozen=True)
class TokenIndex:
    """``request`` and ``local [T]`` int32: the request of each token and its offset among the request's tokens of this step; both
    ``None`` for a decode, where they are the token's own number and 0. ``max_len`` is the longest request's count."""

    request: torch.Tensor | None
    local: torch.Tensor | None
    max_len: int


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class TokenIndexMemo:
    """The last indices made, at most ``capacity`` of them, the one used longest ago out first.

    A decode needs no index. While a graph is captured the memo is neither read nor filled: a graph keeps the addresses it saw,
    and an entry may be dropped at any time.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[tuple[bool, tuple[int, ...], torch.device], TokenIndex] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, lengths: Sequence[int], device: torch.device | str, *, is_decode: bool = False) -> TokenIndex:
        """For requests of ``lengths`` tokens (all 1 in a decode), one after another.

        Raises ``ValueError`` for a negative length, or a decode of anything but single tokens.
        """
        device = torch.device(device)
        if any(length < 0 for length in lengths) or (is_decode and any(length != 1 for length in lengths)):
            raise ValueError(f"ple_hash: lengths {list(lengths)[:8]} of a {'decode' if is_decode else 'prefill'}")
        if capturing():
            return TokenIndex(None, None, 1) if is_decode else _fill(lengths, device)
        key = (is_decode, (len(lengths),) if is_decode else tuple(lengths), device)
        found = self._entries.get(key)
        if found is None:
            found = TokenIndex(None, None, 1) if is_decode else _upload(lengths, device)
            self._entries[key] = found
            if len(self._entries) > self.capacity:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return found


def _upload(lengths: Sequence[int], device: torch.device) -> TokenIndex:
    """Made on the host, one copy from pinned memory."""
    counts = np.asarray(lengths, dtype=np.int64)
    request = np.repeat(np.arange(len(counts)), counts)
    local = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    packed = torch.from_numpy(np.stack([request, local]).astype(np.int32))
    if device.type == "cuda":
        packed = packed.pin_memory()
    both = packed.to(device, non_blocking=True)
    return TokenIndex(both[0], both[1], max(lengths, default=0))


def _fill(lengths: Sequence[int], device: torch.device) -> TokenIndex:
    """Made on the device alone, so that a graph that records it makes it anew."""
    options = {"dtype": torch.int32, "device": device}
    empty = [torch.empty(0, **options)]
    request = torch.cat([*empty, *(torch.full((length,), i, **options) for i, length in enumerate(lengths))])
    local = torch.cat([*empty, *(torch.arange(length, **options) for length in lengths)])
    return TokenIndex(request, local, max(lengths, default=0))
