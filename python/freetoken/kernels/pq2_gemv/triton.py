"""Launching the kernels of the products with two-bit weights."""

from __future__ import annotations

from typing import Any

import torch

from freetoken.kernels import launch
from freetoken.kernels.integers import cdiv
from freetoken.kernels.pq2_gemv.activation import Quantised
from freetoken.kernels.pq2_gemv.configs import MAX_TOKENS, PQ2Config, pick_config
from freetoken.kernels.pq2_gemv.fragments import fragment_kernel
from freetoken.kernels.pq2_gemv.single import single_kernel
from freetoken.kernels.pq2_gemv.weight import INTERLEAVE, PQ2Weight

POINTERS = {
    "single": (torch.int32, torch.int32, torch.int32, torch.int32, torch.float16),
    "fragments": (torch.int32, torch.int32, torch.int32, torch.float16),
}
"""What the kernels see of an activation (values, scales and sums; tiles and what is beside them) and of a weight's codes and scales."""


def _settings(
    config: PQ2Config,
    n: int,
    k: int,
    group_w: int,
    group_x: int,
    tokens: int,
    early: bool,
    late: bool = False,
    interleaved: bool = True,
) -> dict[str, Any]:
    """Compile-time arguments and launch options."""
    own = {"HALVES": -(-tokens // 8)} if config.kind == "fragments" else {}
    return own | {
        "K": k,
        "GROUP_W": group_w,
        "GROUP_X": group_x,
        "TILES": config.tiles,
        "ROW_WARPS": config.row_warps,
        "K_WARPS": config.k_warps,
        "AHEAD": config.ahead,
        "WHOLE": n >= config.rows,
        "INTERLEAVED": interleaved,
        "EARLY": early,
        "LATE": late,
        "launch_pdl": early,
        "num_warps": config.num_warps,
        "num_stages": 1,
    }


def _kernel(config: PQ2Config) -> Any:
    return single_kernel if config.kind == "single" else fragment_kernel


def _sizes(config: PQ2Config, m: int, n: int) -> tuple[int, ...]:
    return (n,) if config.kind == "single" else (m, n)


def compile_only(
    config: PQ2Config, n: int, k: int, m: int, group_w: int, group_x: int, out_dtype: torch.dtype, early: bool
) -> Any:
    """Compile what :func:`linear` would launch on the current CUDA device, into the compiler's cache; the compiled kernel."""
    settings = _settings(config, n, k, group_w, group_x, m, early, interleaved=n % INTERLEAVE == 0)
    sizes = _sizes(config, m, n)
    return _kernel(config).warmup(*POINTERS[config.kind], out_dtype, *sizes, ON_GPU=True, grid=(1,), **settings)


def linear(
    activation: Quantised,
    weight: PQ2Weight,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    *,
    config: PQ2Config | None = None,
    late: bool = False,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.pq2_gemv.reference.linear` for 0 to 32 tokens.

    ``out`` must be contiguous. With ``late`` the kernel launched next starts once nothing runs but this one. ``ValueError`` for
    settings that cannot run these sizes.
    """
    m, (n, k) = activation.tokens, (weight.out_features, weight.in_features)
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=weight.codes.device)
    if m == 0 or n == 0:
        return out
    if config is None:
        config = pick_config(n, k, m, launch.capability(weight.codes.device))
    if not 1 <= m <= MAX_TOKENS or (config.kind == "single" and m > 1) or not config.legal(k):
        raise ValueError(f"{config} cannot run {m} tokens of {n} by {k}")
    early = launch.early(weight.codes)
    if config.kind == "single":
        rows = activation.rows()
        source = (rows.values.view(torch.int32), rows.scales.view(torch.int32), rows.sums)
    else:
        tiles = activation.tiled()
        source = (tiles.words, tiles.beside)
    launched = _kernel(config)[(cdiv(n, config.rows),)](
        *source,
        weight.codes.view(torch.int32),
        weight.scales,
        out,
        *_sizes(config, m, n),
        ON_GPU=weight.codes.is_cuda,
        **_settings(config, n, k, weight.group, activation.group, m, early, late, weight.interleaved),
    )
    if config.kind == "fragments":
        launch.prefer_cache(launched)
    return out
