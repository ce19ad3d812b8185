"""Integer arithmetic of grids and tiles (torch-free): made for every launch, where Triton's own functions take a hundred times as long."""

from __future__ import annotations


def cdiv(value: int, by: int) -> int:
    """``value / by``, rounded up."""
    return -(-value // by)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``; 1 below 1."""
    return 1 << max(value - 1, 0).bit_length()
