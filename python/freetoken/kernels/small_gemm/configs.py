"""Launch settings of the small products, by shape."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from freetoken.kernels.integers import next_power_of_two

MAX_TOKENS = 16
"""Rows of x up to which these kernels run with a weight of many rows; more go to torch's matmul."""
NARROW = 128
"""Rows up to which a weight is narrow: its products are all latency, and torch's matmul takes a second kernel for parts of K, and
shared memory that the L1 cache of its neighbours in a decode step would need."""
NARROW_TOKENS = 32
"""Rows of x up to which these kernels run with a narrow weight."""


@dataclass(frozen=True)
class GemmConfig:
    """Settings of one launch.

    ``kind`` of the kernel: ``tiles`` (for one row the matrix-vector kernel), or ``fragments`` (``block_n`` 16, ``block_k`` 32 times
    ``num_warps``). ``block_n`` output columns a program (with the activation, that many gate rows and as many up rows), ``block_k`` elements of K a step, ``num_warps`` warps a program. ``num_stages`` is
    the depth of the asynchronous copies (``tiles`` only). ``unroll`` steps of K are issued together
    (not with ``tiles``). ``split_k`` programs share the rows and add their parts in a fixed order. ``ahead`` steps of weights are asked for
    before the wait for the kernel that makes x (one row only).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    unroll: int = 1
    split_k: int = 1
    ahead: int = 1
    kind: Literal["tiles", "fragments"] = "tiles"


Capability = tuple[int, int]
HOPPER: Capability = (9, 0)

_QWEN3_8B_ON_H200: dict[tuple[int, int, int], GemmConfig] = {
    (24576, 4096, 1): GemmConfig(2, 1024, 4),
    (4096, 12288, 1): GemmConfig(2, 1024, 4, unroll=2),
    (6144, 4096, 1): GemmConfig(8, 1024, 4),
    (4096, 4096, 1): GemmConfig(4, 1024, 4),
    (151936, 4096, 1): GemmConfig(2, 4096, 8),
    (24576, 4096, 16): GemmConfig(64, 128, 4, num_stages=3),
    (4096, 12288, 16): GemmConfig(64, 256, 4, num_stages=3, split_k=2),
    (6144, 4096, 16): GemmConfig(64, 256, 4, num_stages=3),
    (4096, 4096, 16): GemmConfig(64, 256, 4, num_stages=3, split_k=2),
    (151936, 4096, 16): GemmConfig(64, 128, 4, num_stages=4),
}
_QWEN4_EXP_ON_H200: dict[tuple[int, int, int], GemmConfig] = {
    (336, 10240, 1): GemmConfig(1, 2048, 8, ahead=5),
    (528, 2560, 1): GemmConfig(1, 256, 1, ahead=10),
    (640, 2560, 1): GemmConfig(2, 512, 2, ahead=5),
    (96, 2560, 1): GemmConfig(1, 512, 1, ahead=5),
    (336, 10240, 16): GemmConfig(16, 128, 4, unroll=8, split_k=10, kind="fragments"),
    (528, 2560, 16): GemmConfig(16, 64, 2, unroll=8, split_k=5, kind="fragments"),
    (640, 2560, 16): GemmConfig(16, 64, 2, unroll=8, split_k=5, kind="fragments"),
}
CONFIGS: dict[Capability, dict[tuple[int, int, int], GemmConfig]] = {HOPPER: _QWEN3_8B_ON_H200 | _QWEN4_EXP_ON_H200}
"""Measured settings by compute capability, then by ``(N, K, class)``, where N counts weight rows and the class comes from
:func:`m_class`. Those of Qwen3-8B were each chosen by the time of the whole decode step it is part of, those of ``qwen4_exp`` by
that of the product alone, replayed with weights that are not in the cache."""


def measured(capability: Capability) -> int:
    """Number of settings that were measured on cards of a compute capability."""
    return len(CONFIGS.get(capability, {}))


def max_tokens(n: int) -> int:
    """Rows of x up to which these kernels run with a weight of ``n`` rows."""
    return NARROW_TOKENS if n <= NARROW else MAX_TOKENS


def m_class(m: int) -> int:
    """1 for one row of x (matrix-vector kernel), 16 for 2 to 16 and 32 for 17 to 32 (tensor-core kernel)."""
    return 1 if m == 1 else 16 if m <= 16 else 32


def pick_config(
    n: int, k: int, m: int, capability: Capability | None = None, *, silu: bool = False, wide: bool = False
) -> GemmConfig:
    """The measured settings of this shape on a GPU of ``capability``, or a default that suits the shape.

    ``wide`` is for float32, which fragments cannot have; nor can they have ``silu``.

    The default of the tensor-core kernel stays within the 99 KiB of shared memory that the smallest served GPUs give a
    program, and cuts K until about a hundred programs run; that of narrow weights, without ``silu``, needs a twentieth of it.
    """
    found = CONFIGS.get(capability, {}).get((n, k, m_class(m))) if capability is not None else None
    if found is not None and not ((wide or silu) and found.kind == "fragments"):
        return found
    if m == 1:
        block_k = min(1024, next_power_of_two(k))
        if n <= NARROW:
            return GemmConfig(1, block_k, num_warps=max(1, min(4, block_k // 256)))
        block_n = 2 if n >= 16384 or k >= 8192 else 4 if n >= 1024 else 2
        return GemmConfig(block_n, block_k, num_warps=max(1, min(4, block_n * block_k // 512)))
    if n <= NARROW and k % 32 == 0 and not silu:
        return _narrow(n, k)
    block_k = max(16, min(64, next_power_of_two(k)))
    split = 1
    while split < 8 and n // 64 * split < 96 and k // (split * 2) >= 512:
        split *= 2
    return GemmConfig(64, block_k, num_warps=4, num_stages=4, split_k=split)


def _narrow(n: int, k: int) -> GemmConfig:
    """Rounds of 256 columns whose loads are all on their way at once, in parts of K of equal length where about as many can be."""
    rounds = -(-k // 256)
    most = max(1, min(rounds, 160 // -(-n // 16)))
    even = next(split for split in range(most, 0, -1) if rounds % split == 0)
    return GemmConfig(16, 128, 4, unroll=2, split_k=even if even * 2 > most else most, kind="fragments")


def candidates(n: int, k: int, m: int, capability: Capability | None = None) -> list[GemmConfig]:
    """Settings worth timing for this shape, the default first; ``n`` counts weight rows (gate and up together).

    Some may ask for more shared memory or registers than a given GPU has; a tuning loop skips those that fail to launch.
    """
    found = [pick_config(n, k, m, capability)]
    if m == 1:
        grid = itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 2), (1, 2))
        for block_n, block_k, warps, unroll, split in grid:
            per_thread = block_n * block_k // (32 * warps)
            steps = -(-k // (block_k * split))
            if block_k <= k and 16 <= per_thread * unroll <= 64 and unroll <= steps and _split_helps(n, block_n, split):
                found.append(GemmConfig(block_n, block_k, warps, unroll=unroll, split_k=split))
    else:
        grid = itertools.product((16, 32, 64), (64, 128, 256, 512), (4, 8), (3, 4, 6), (1, 2, 4))
        for block_n, block_k, warps, stages, split in grid:
            staged = (block_n + m_class(m)) * block_k * 2 * stages
            if block_k <= k // split and staged <= 200 * 1024 and _split_helps(n, block_n, split):
                found.append(GemmConfig(block_n, block_k, warps, num_stages=stages, split_k=split))
    if m > 1 and found[0].kind == "fragments":
        for warps, unroll, split in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 5, 8, 10, 20, 40)):
            if warps * unroll * split * 32 <= k:
                found.append(GemmConfig(16, 32 * warps, warps, unroll=unroll, split_k=split, kind="fragments"))
    return list(dict.fromkeys(found))


def _split_helps(n: int, block_n: int, split: int) -> bool:
    return split == 1 or n // block_n <= 1024
