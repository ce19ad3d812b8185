"""Free lists of small integer ids: KV pages, request rows (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable


class AllocatorError(RuntimeError):
    """More ids were asked for than are free, or an id was freed that is not handed out."""


class IdAllocator:
    """Hands out ids of ``[first, stop)``, each to one owner at a time.

    The order is deterministic: fresh ids in rising order, and the id freed last is reused first.
    """

    def __init__(self, first: int, stop: int) -> None:
        if stop < first:
            raise ValueError(f"empty range [{first}, {stop})")
        self._first = first
        self._stop = stop
        self._free = list(range(stop - 1, first - 1, -1))
        self._taken = bytearray(stop - first)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def total(self) -> int:
        return self._stop - self._first

    @property
    def used_count(self) -> int:
        return self.total - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` ids, or :class:`AllocatorError` and no change when fewer are free."""
        if count > len(self._free):
            raise AllocatorError(f"{count} ids asked for, {len(self._free)} free")
        if count == 0:
            return []
        ids = self._free[-count:]
        ids.reverse()
        del self._free[-count:]
        for item in ids:
            self._taken[item - self._first] = 1
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Take ids back; :class:`AllocatorError` for one that is not handed out (a double free)."""
        for item in ids:
            if not self._first <= item < self._stop:
                raise AllocatorError(f"id {item} is outside [{self._first}, {self._stop})")
            if not self._taken[item - self._first]:
                raise AllocatorError(f"id {item} is freed twice")
            self._taken[item - self._first] = 0
            self._free.append(item)

    def free_ids(self) -> list[int]:
        """A copy of the free list, next to be handed out last."""
        return list(self._free)


def page_allocator(num_pages: int) -> IdAllocator:
    """Pages ``1 .. num_pages - 1``: page 0 is where padded lanes write, and is never handed out."""
    return IdAllocator(1, num_pages)


def row_allocator(max_rows: int) -> IdAllocator:
    """Rows ``0 .. max_rows - 1`` of the runner's tables."""
    return IdAllocator(0, max_rows)
