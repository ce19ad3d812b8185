"""Free lists against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.scheduler.allocator import AllocatorError, IdAllocator, page_allocator, row_allocator


@settings(max_examples=80, deadline=None)
@given(
    first=st.integers(0, 3),
    size=st.integers(0, 12),
    operations=st.lists(st.tuples(st.booleans(), st.integers(0, 14)), max_size=40),
)
def test_against_a_set(first: int, size: int, operations: list[tuple[bool, int]]) -> None:
    allocator = IdAllocator(first, first + size)
    held: list[int] = []
    for allocate, number in operations:
        if allocate and number <= size - len(held):
            ids = allocator.allocate(number)
            assert len(ids) == number and set(ids).isdisjoint(held)
            held.extend(ids)
        elif allocate:
            with pytest.raises(AllocatorError):
                allocator.allocate(number)
        else:
            allocator.free(held[:number])
            del held[:number]
        assert len(set(held)) == len(held) and set(held) <= set(range(first, first + size))
        assert sorted(allocator.free_ids() + held) == list(range(first, first + size))
        assert (allocator.free_count, allocator.used_count) == (size - len(held), len(held))


def test_fresh_ids_rise_and_the_last_freed_comes_first() -> None:
    pages = page_allocator(6)
    assert pages.allocate(5) == [1, 2, 3, 4, 5]
    pages.free([4, 2])
    assert pages.allocate(1) == [2]
    assert row_allocator(2).allocate(2) == [0, 1]


@pytest.mark.parametrize("wrong", [0, 6, -1, 3])
def test_freeing_what_is_not_handed_out(wrong: int) -> None:
    pages = page_allocator(6)
    pages.allocate(2)
    with pytest.raises(AllocatorError):
        pages.free([wrong])


def test_a_double_free_is_noticed() -> None:
    pages = page_allocator(6)
    pages.free(pages.allocate(1))
    with pytest.raises(AllocatorError, match="twice"):
        pages.free([1])
