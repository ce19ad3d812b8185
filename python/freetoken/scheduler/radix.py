"""Prefix cache: a radix tree over whole KV pages (torch-free).

An edge carries one or more pages: ``page_size`` token ids and one page number each. Two sequences share a page only when
they agree on every token up to its end, so a page number found on the path of a prompt holds exactly the KV it needs.
The tree owns the pages stored in it. A lock on a node protects the whole path up to the root; unlocked leaves are given
back least recently used first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence


def as_key(ids: Sequence[int]) -> array[int]:
    """Token ids in the packed form the tree compares; an ``array('i')`` is returned as it is."""
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    return array("i", ids)


def common_pages(a: array[int], b: array[int], size: int, most: int, *, offset: int = 0, known: int = 0) -> int:
    """Whole pages of ``size`` on which ``a`` and ``b`` from ``offset`` agree, up to ``most``; ``known`` are known to."""
    low, high = known, most
    step = most
    while low < high:
        if a[low * size : step * size] == b[offset + low * size : offset + step * size]:
            low = step
        else:
            high = step - 1
        step = (low + high + 1) // 2
    return low


class Node:
    """A run of pages below ``parent``.

    ``key`` holds the token ids of ``pages``. ``locks`` counts the locks on this node and everything below it.
    ``checkpoint`` names the state that is valid exactly at this node's end (recurrent layers need one to resume): the
    tree only looks whether there is one. A split leaves it with the lower half, which keeps the end; when the end goes (evicted, trimmed
    or cleared) the value is handed to the tree's ``on_drop``.
    """

    __slots__ = ("checkpoint", "children", "key", "last_access", "locks", "pages", "parent", "queued")

    def __init__(self, key: array[int], pages: list[int], parent: Node | None, last_access: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_access = last_access
        self.queued = False
        self.checkpoint: int | None = None


class RadixCache:
    """The tree. All lengths are whole pages; a partial last page of ``ids`` is ignored by lookups.

    ``on_drop`` receives every non-``None`` :attr:`Node.checkpoint` whose position leaves the tree.
    """

    def __init__(self, page_size: int, on_drop: Callable[[int], None] | None = None) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.root = Node(array("i"), [], None, 0)
        self.version = 0
        """Grows whenever the set of stored prefixes changes."""
        self._on_drop = on_drop
        self._clock = 0
        self._pushes = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._total = 0
        self._evictable = 0

    @property
    def total_pages(self) -> int:
        return self._total

    @property
    def evictable_pages(self) -> int:
        """Pages that :meth:`evict` could give back now."""
        return self._evictable

    def match(self, ids: Sequence[int]) -> tuple[list[int], Node]:
        """The stored pages of the longest known prefix of ``ids``, and the node at its end (the root for none).

        Marks the path as used. The pages are safe only while the node is locked; lock it before anything is evicted.
        """
        key = as_key(ids)
        node = self.root
        pages: list[int] = []
        now = self._tick()
        while True:
            child, common = self._descend(node, key, len(pages))
            if child is None:
                return pages, node
            if common < len(child.pages):
                child = self._split(child, common)
            child.last_access = now
            pages.extend(child.pages)
            node = child

    def match_length(self, ids: Sequence[int]) -> int:
        """Pages :meth:`match` would find, without any effect on the tree."""
        return self.measure(ids)[0]

    def measure(self, ids: Sequence[int]) -> tuple[int, int]:
        """Pages :meth:`match` would find, and those of them up to the last checkpoint. No effect on the tree."""
        key = as_key(ids)
        node, done, restorable = self.root, 0, 0
        while True:
            child, common = self._descend(node, key, done)
            if child is None:
                return done, restorable
            done += common
            if common < len(child.pages):
                return done, restorable
            if child.checkpoint is not None:
                restorable = done
            node = child

    def insert(self, ids: Sequence[int], pages: Sequence[int]) -> tuple[Node, list[int]]:
        """Store ``pages`` for ``ids`` (exactly ``len(pages)`` whole pages).

        Returns the node at the end and those of ``pages`` the tree did not take, because it already holds other pages for
        the same tokens: the caller still owns them. Every page not returned is the tree's from now on.
        """
        key = as_key(ids)
        if len(key) != len(pages) * self.page_size:
            raise ValueError(f"{len(key)} ids do not fill {len(pages)} pages of {self.page_size}")
        node, done = self.root, 0
        duplicates: list[int] = []
        now = self._tick()
        while done < len(pages):
            child, common = self._descend(node, key, done)
            if child is None:
                return self._add_leaf(node, key[done * self.page_size :], list(pages[done:]), now), duplicates
            given, stored = pages[done : done + common], child.pages[:common]
            if list(given) != stored:
                duplicates.extend(mine for mine, theirs in zip(given, stored) if mine != theirs)
            if common < len(child.pages):
                child = self._split(child, common)
            child.last_access = now
            node, done = child, done + common
        return node, duplicates

    def replace(self, node: Node, ids: Sequence[int], pages: Sequence[int]) -> list[int] | None:
        """Put ``pages`` in place of those stored below ``node`` for the same tokens, if nobody has them locked.

        ``ids`` and ``pages`` run from the root; ``node`` is the end of a stored prefix of them. Returns the pages put out,
        which are the caller's, or ``None`` and no change. Checkpoints stay: they belong to the tokens.
        """
        key = as_key(ids)
        done = self.depth(node)
        out: list[int] = []
        child, common = self._descend(node, key, done)
        if child is not None and child.locks:
            return None
        while child is not None:
            if common < len(child.pages):
                child = self._split(child, common)
            out.extend(child.pages)
            child.pages = list(pages[done : done + common])
            node, done = child, done + common
            child, common = self._descend(node, key, done)
        return out

    def lock(self, node: Node) -> None:
        """Protect the path from the root to ``node`` until :meth:`unlock`. Locks nest."""
        current: Node | None = node
        while current is not None:
            if current.locks == 0:
                self._evictable -= len(current.pages)
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        if node.locks < 1:
            raise ValueError("unlock of a node that is not locked")
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.locks == 0:
                self._evictable += len(current.pages)
            current = current.parent
        self._queue(node)

    def evict(self, count: int) -> list[int]:
        """Give back up to ``count`` pages, least recently used leaves first and a leaf from its end."""
        freed: list[int] = []
        while len(freed) < count and self._heap:
            when, _, node = heapq.heappop(self._heap)
            node.queued = False
            if when != node.last_access or not self._is_evictable(node):
                self._queue(node)
                continue
            take = min(count - len(freed), len(node.pages))
            freed.extend(reversed(node.pages[-take:]))
            self._drop_checkpoint(node)
            if take == len(node.pages):
                self._remove(node)
            else:
                del node.pages[-take:]
                del node.key[-take * self.page_size :]
                self._queue(node)
            self._total -= take
            self._evictable -= take
        if freed:
            self.version += 1
        return freed

    def clear(self) -> list[int]:
        """Give back every page; ``ValueError`` while anything is locked."""
        if self._evictable != self._total:
            raise ValueError("the prefix cache is in use")
        return self.evict(self._total)

    def depth(self, node: Node) -> int:
        """Pages from the root to the end of ``node``."""
        pages = 0
        current: Node | None = node
        while current is not None:
            pages += len(current.pages)
            current = current.parent
        return pages

    def path_pages(self, node: Node) -> list[int]:
        """All pages from the root to the end of ``node``."""
        parts: list[list[int]] = []
        current: Node | None = node
        while current is not None:
            parts.append(current.pages)
            current = current.parent
        return [page for part in reversed(parts) for page in part]

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _edge(self, key: array[int], page: int) -> bytes:
        """Name of the child that continues with page ``page`` of ``key``."""
        return key[page * self.page_size : (page + 1) * self.page_size].tobytes()

    def _descend(self, node: Node, key: array[int], done: int) -> tuple[Node | None, int]:
        """The child of ``node`` along ``key`` after ``done`` pages, and how many of its pages agree (at least one)."""
        left = len(key) // self.page_size - done
        child = node.children.get(self._edge(key, done)) if left > 0 else None
        if child is None:
            return None, 0
        most = min(left, len(child.pages))
        return child, common_pages(child.key, key, self.page_size, most, offset=done * self.page_size, known=1)

    def _split(self, node: Node, pages: int) -> Node:
        """Cut ``node`` after ``pages`` pages. The upper part is new and returned: who holds ``node`` keeps its end."""
        assert node.parent is not None and 0 < pages < len(node.pages)
        cut = pages * self.page_size
        upper = Node(node.key[:cut], node.pages[:pages], node.parent, node.last_access)
        upper.locks = node.locks
        node.parent.children[self._edge(node.key, 0)] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[pages:]
        node.parent = upper
        upper.children[self._edge(node.key, 0)] = node
        return upper

    def _add_leaf(self, parent: Node, key: array[int], pages: list[int], now: int) -> Node:
        leaf = Node(key, pages, parent, now)
        parent.children[self._edge(key, 0)] = leaf
        self._total += len(pages)
        self._evictable += len(pages)
        self.version += 1
        self._queue(leaf)
        return leaf

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[self._edge(node.key, 0)]
        node.parent = None
        self._queue(parent)

    def _drop_checkpoint(self, node: Node) -> None:
        if node.checkpoint is not None:
            value, node.checkpoint = node.checkpoint, None
            if self._on_drop is not None:
                self._on_drop(value)

    def _is_evictable(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _queue(self, node: Node) -> None:
        """Enter an evictable leaf in the heap. Entries gone stale are sorted out when they come up."""
        if self._is_evictable(node) and not node.queued:
            node.queued = True
            self._pushes += 1
            heapq.heappush(self._heap, (node.last_access, self._pushes, node))
