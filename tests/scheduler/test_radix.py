"""The prefix tree against a dictionary from every stored page's prefix to its page, use and locks."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freetoken.scheduler.invariants import check_tree
from freetoken.scheduler.radix import Node, RadixCache, as_key

TOKENS = st.lists(st.integers(0, 1), max_size=14)


class RadixModel(RuleBasedStateMachine):
    """``stored`` maps a prefix of whole pages to ``[page, last use, locks]``."""

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.dropped: list[int] = []
        self.tree = RadixCache(page_size, self.dropped.append)
        self.stored: dict[tuple[int, ...], list[int]] = {}
        self.checkpoints: dict[tuple[int, ...], int] = {}
        self.locks: list[tuple[Node, tuple[int, ...]]] = []
        self.next_page = 1
        self.now = 0

    def prefixes(self, ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[:end]) for end in range(self.size, len(ids) + 1, self.size)]

    def find(self, ids: list[int]) -> list[tuple[int, ...]]:
        found = []
        for prefix in self.prefixes(ids):
            if prefix not in self.stored:
                break
            found.append(prefix)
        return found

    def touch(self, prefixes: list[tuple[int, ...]]) -> None:
        self.now += 1
        for prefix in prefixes:
            self.stored[prefix][1] = self.now

    @rule(ids=TOKENS)
    def insert(self, ids: list[int]) -> None:
        prefixes = self.prefixes(ids)
        pages = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(prefixes)
        expected = [page for page, prefix in zip(pages, prefixes) if prefix in self.stored]
        node, duplicates = self.tree.insert(ids[: len(prefixes) * self.size], pages)
        assert duplicates == expected
        for page, prefix in zip(pages, prefixes):
            self.stored.setdefault(prefix, [page, 0, 0])
        self.touch(prefixes)
        assert self.tree.path_pages(node) == [self.stored[p][0] for p in prefixes]

    @rule(ids=TOKENS, lock=st.booleans())
    def match(self, ids: list[int], lock: bool) -> None:
        found = self.find(ids)
        assert self.tree.match_length(ids) == len(found)
        usable = max((i for i, prefix in enumerate(found, 1) if prefix in self.checkpoints), default=0)
        assert self.tree.measure(ids) == (len(found), usable)
        pages, node = self.tree.match(ids)
        assert pages == [self.stored[p][0] for p in found] == self.tree.path_pages(node)
        self.touch(found)
        if lock:
            self.tree.lock(node)
            for prefix in found:
                self.stored[prefix][2] += 1
            self.locks.append((node, found[-1] if found else ()))

    @rule(ids=TOKENS)
    def reinsert_what_is_known(self, ids: list[int]) -> None:
        found = self.find(ids)
        node, duplicates = self.tree.insert(list(found[-1]) if found else [], [self.stored[p][0] for p in found])
        assert duplicates == [] and len(self.tree.path_pages(node)) == len(found)
        self.touch(found)

    @rule(ids=TOKENS)
    def set_checkpoint(self, ids: list[int]) -> None:
        found = self.find(ids)
        if found and found[-1] not in self.checkpoints:
            _, node = self.tree.match(ids)
            self.touch(found)
            node.checkpoint = self.checkpoints[found[-1]] = self.next_page
            self.next_page += 1

    @rule(ids=TOKENS, depth=st.integers(0, 5))
    def replace(self, ids: list[int], depth: int) -> None:
        found = self.find(ids)
        depth = min(depth, len(found))
        _, node = self.tree.match(list(found[depth - 1]) if depth else [])
        self.touch(found[:depth])
        pages = list(range(self.next_page, self.next_page + len(self.prefixes(ids))))
        self.next_page += len(pages)
        below = found[depth:]
        out = self.tree.replace(node, ids, pages)
        if any(self.stored[prefix][2] for prefix in below):
            assert out is None
            return
        assert out == [self.stored[prefix][0] for prefix in below]
        for page, prefix in zip(pages[depth:], below):
            self.stored[prefix][0] = page

    @rule(which=st.integers(0, 20))
    def unlock(self, which: int) -> None:
        if self.locks:
            node, deepest = self.locks.pop(which % len(self.locks))
            self.tree.unlock(node)
            for prefix in self.prefixes(list(deepest)):
                self.stored[prefix][2] -= 1

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        expected = []
        for _ in range(count):
            inner = {prefix[: -self.size] for prefix in self.stored}
            leaves = [p for p, (_, _, locks) in self.stored.items() if locks == 0 and p not in inner]
            if not leaves:
                break
            expected.append(self.stored.pop(min(leaves, key=lambda p: self.stored[p][1]))[0])
        assert self.tree.evict(count) == expected

    @rule()
    def clear(self) -> None:
        if self.locks and any(deepest for _, deepest in self.locks):
            with pytest.raises(ValueError):
                self.tree.clear()
        else:
            assert sorted(self.tree.clear()) == sorted(page for page, _, _ in self.stored.values())
            self.stored.clear()

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "tree"):
            return
        gone = [prefix for prefix in self.checkpoints if prefix not in self.stored]
        assert sorted(self.dropped) == sorted(self.checkpoints.pop(prefix) for prefix in gone)
        self.dropped.clear()
        check_tree(self.tree)
        assert self.tree.total_pages == len(self.stored)
        assert self.tree.evictable_pages == sum(locks == 0 for _, _, locks in self.stored.values())


TestRadixModel = RadixModel.TestCase
TestRadixModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_lock_survives_a_split_above_it() -> None:
    tree = RadixCache(2)
    node, _ = tree.insert([1, 1, 2, 2, 3, 3], [1, 2, 3])
    tree.lock(node)
    tree.insert([1, 1, 9, 9], [1, 4])
    assert tree.path_pages(node) == [1, 2, 3]
    assert tree.evict(9) == [4]
    tree.unlock(node)
    assert tree.evict(9) == [3, 2, 1]


def test_a_partial_page_never_matches() -> None:
    tree = RadixCache(4)
    tree.insert([1, 2, 3, 4], [7])
    assert tree.match([1, 2, 3])[0] == []
    assert tree.match([1, 2, 3, 4, 5])[0] == [7]
    assert tree.match([1, 2, 3, 5])[0] == []


def test_misuse_is_an_error() -> None:
    tree = RadixCache(4)
    with pytest.raises(ValueError, match="do not fill"):
        tree.insert([1, 2, 3], [1])
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(tree.root)
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(0)


def test_checkpoints_stay_with_their_position_until_it_goes() -> None:
    dropped: list[int] = []
    tree = RadixCache(1, dropped.append)
    deep, _ = tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
    deep.checkpoint = 4
    _, upper = tree.match([1, 2])
    assert upper.checkpoint is None and deep.checkpoint == 4
    upper.checkpoint = 2
    tree.evict(1)
    assert dropped == [4] and deep.checkpoint is None
    tree.clear()
    assert dropped == [4, 2]


def test_long_prompts_are_compared_in_bulk() -> None:
    rng = random.Random(0)
    ids = as_key([rng.randrange(150_000) for _ in range(100_000)])
    tree = RadixCache(16)
    tree.insert(ids, range(6250))
    other = as_key(ids[:])
    other[77_777] += 1
    start = time.perf_counter()
    assert tree.match_length(ids) == 6250
    assert tree.match_length(other) == 77_777 // 16
    assert time.perf_counter() - start < 0.05
