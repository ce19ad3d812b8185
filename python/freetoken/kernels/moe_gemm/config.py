"""Which kernels a layer of experts runs through, and their launch settings: all from numbers known on the host."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.kernels.integers import next_power_of_two

SLICE_TOKENS = 8192
"""Tokens that go through the grouped kernels at once: bounds the memory for the outputs of single routes (``runner/memory.py``
counts on it)."""
SHARED_BYTES = 99 * 1024
"""What the smallest served GPUs give a program."""


@dataclass(frozen=True)
class RouteConfig:
    """A matrix-vector launch for single routes: ``block_n`` weight rows a program (as many gate rows and up rows),
    ``block_k`` columns a step, ``unroll`` steps issued together."""

    block_n: int
    block_k: int
    num_warps: int
    unroll: int = 1


@dataclass(frozen=True)
class TileConfig:
    """A tensor-core launch: ``block_m`` routes by ``block_n`` weight rows, ``block_k`` columns a step in ``num_stages`` asynchronous
    copies."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class FragmentConfig:
    """A launch of :mod:`freetoken.kernels.moe_gemm.fragments`: 16 weight rows a program, ``unroll`` chunks of columns of each of its
    warps on their way at a time."""

    num_warps: int
    unroll: int


def route_by_route(tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether each route should read its expert's weights by itself.

    One token's experts are all different, so grouping saves nothing; with one route to four experts few are read twice.
    """
    return tokens == 1 or 4 * tokens * top_k <= num_experts


def pick_gate_up_route(k: int, element_bytes: int) -> RouteConfig:
    """Settings for gate and up over inputs of ``k`` elements: 16 elements of each a thread and step."""
    block_k = min(next_power_of_two(k), 1024 if element_bytes == 1 else 512)
    block_n = 2 if element_bytes == 1 else 4
    return RouteConfig(block_n, block_k, num_warps=max(1, min(4, block_n * block_k // 512)), unroll=2)


def pick_down_route(k: int, element_bytes: int) -> RouteConfig:
    """Settings for down, whose programs go through all routes of a token: a whole row of ``k`` elements a step where it fits."""
    block_k = min(next_power_of_two(k), 1024)
    return RouteConfig(4, block_k, num_warps=max(1, min(4, 4 * block_k * element_bytes // 512)), unroll=2)


def pick_dense_route(n: int, k: int) -> RouteConfig:
    """Settings for one row and an FP8 weight ``[n, k]``: fewer weight rows a program where there are few."""
    block_k = min(next_power_of_two(k), 1024)
    block_n = 4 if n >= 4096 else 2
    return RouteConfig(block_n, block_k, num_warps=max(1, min(4, block_n * block_k // 512)), unroll=2)


def pick_fragments(n: int, k: int, routes: int = 1, *, gated: bool = False) -> FragmentConfig:
    """Settings for few rows, or a row to each of several routes, and weights ``[n, k]`` (``gated``: as many rows of gate and of up).

    The fewer programs there are, the more warps share the columns of one. Measured on an H200 with the weights of qwen4_exp.
    """
    programs, chunks = n // 16 * routes, max(1, k // 64)
    warps = min(16 if programs < 256 else 8 if programs < 512 else 4, next_power_of_two(chunks))
    return FragmentConfig(warps, even_share(-(-chunks // warps), 1 if gated and warps >= 8 else 2))


def pick_down_fragments(k: int, top_k: int) -> FragmentConfig:
    """Settings for down, whose programs go through all routes of a token."""
    pieces = max(1, k // 64 * top_k)
    warps = min(8, next_power_of_two(pieces))
    return FragmentConfig(warps, even_share(-(-pieces // warps), 7))


def even_share(steps: int, most: int) -> int:
    """Of ``steps`` the part, at most ``most``, that makes the fewest rounds and leaves the least over."""
    return -(-steps // -(-steps // most))


def block_m(routes: int, num_experts: int) -> int:
    """Routes a tile by their density: the smallest tile that holds an expert's average share with a third to spare."""
    density = routes / num_experts
    return next((size for size in (16, 32, 64) if density * 4 <= size * 3), 128)


PROGRAMS = 128
"""Programs that a product with one weight should have at least: about as many as a large GPU has multiprocessors."""


def pick_tile(m: int, k: int, element_bytes: int, *, gated: bool, alone: int | None = None) -> TileConfig:
    """Settings for tiles of ``m`` routes. Element size is that of the activations, the larger of both operands.

    Gate and up rows count twice (``gated``). Within the smallest shared memory of a served GPU. A weight that stands ``alone`` with so many
    outputs is cut finer while that leaves multiprocessors idle.
    """
    block_n = 64 if gated or m < 64 else 128
    block_k = min(128 if m <= 32 else 64, max(16, next_power_of_two(k)))
    if element_bytes == 4:
        block_n, block_k = 32, min(block_k, 32)
    while alone is not None and m <= 32 and block_n > 16 and alone < PROGRAMS * block_n:
        block_n //= 2
    step = (m + block_n * (2 if gated else 1)) * block_k * element_bytes
    stages = max(1, min(4, SHARED_BYTES // step))
    warps = 8 if m * block_n >= (64 * 128 if element_bytes < 4 else 64 * 32) else 4
    return TileConfig(m, block_n, block_k, num_warps=warps, num_stages=stages)


def candidates_tile(m: int, k: int, element_bytes: int, *, gated: bool) -> list[TileConfig]:
    """Settings worth timing, the default first; some may ask for more shared memory than a given GPU has."""
    found = [pick_tile(m, k, element_bytes, gated=gated)]
    for block_n in (32, 64, 128):
        for block_k in (32, 64, 128):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    if block_k <= next_power_of_two(k):
                        found.append(TileConfig(m, block_n, block_k, warps, stages))
    return list(dict.fromkeys(found))


def candidates_route(default: RouteConfig, k: int) -> list[RouteConfig]:
    """Settings worth timing, the default first."""
    found = [default]
    for block_n in (1, 2, 4, 8, 16):
        for block_k in (128, 256, 512, 1024, 2048):
            for warps in (1, 2, 4, 8):
                for unroll in (1, 2, 4):
                    if block_k <= next_power_of_two(k) and 4 <= block_n * block_k // (32 * warps) <= 64:
                        found.append(RouteConfig(block_n, block_k, warps, unroll))
    return list(dict.fromkeys(found))
