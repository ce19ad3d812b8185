"""Products with a stack of expert weights: matrix-vector kernels for single routes, tensor-core tiles for grouped ones.

Weights are float, or FP8 with block scales. FP8 values are turned into the type of the activations inside a tile, which is exact, and
scales are applied in float32. Where a GPU has no FP8 type (``NATIVE`` off) the bytes are read as integers and their bits put
in place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.block_fp8 import BLOCK, Fp8Weight, Weight
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv, next_power_of_two
from freetoken.kernels.moe_gemm.config import RouteConfig, TileConfig
from freetoken.kernels.moe_gemm.reference import Shared

SCALE_BLOCK = tl.constexpr(BLOCK)
FIRST_FP8_CAPABILITY = (8, 9)
COMBINE_BLOCK = 1024


@triton.jit
def _values(tile, FP8: tl.constexpr, NATIVE: tl.constexpr, TARGET: tl.constexpr):
    """A tile of weights in ``TARGET``. FP8 read as integers comes out 2^-8 times too small: its exponent has another bias."""
    if FP8 and not NATIVE:
        bits = tile.to(tl.uint16)
        values = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(TARGET)
    else:
        values = tile.to(TARGET)
    return values


@triton.jit
def _weights(tile, start, row, offset, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """The ``[BLOCK_N, BLOCK_K]`` weights from column ``start`` on; zero outside N rows and K columns."""
    if EVEN:
        return tl.load(tile + start)
    inside = (row[:, None] < N) & (offset[None, :] < K - start)
    return tl.load(tile + start, mask=inside, other=0.0)


@triton.jit
def _scaled(
    x, scale, start, row, offset, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, FACTOR
):
    """Inputs ``x [BLOCK_K]`` times the scales of their columns: ``[1, BLOCK_K]`` where all rows share them, else one line a row."""
    block = (start + offset) // SCALE_BLOCK
    COLUMNS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
    if ONE:
        group = tl.min(row, 0) // ROWS
        scales = tl.load(scale + group * COLUMNS + block, mask=offset < K - start, other=0.0)
        result = (x * scales * FACTOR)[None, :]
    else:
        inside = (row[:, None] < N) & (offset[None, :] < K - start)
        place = scale + (row // ROWS)[:, None] * COLUMNS + block[None, :]
        result = x[None, :] * tl.load(place, mask=inside, other=0.0) * FACTOR
    return result


@triton.jit
def _activate(gate, up, STORAGE: tl.constexpr):
    """``silu(gate) * up`` of float32 sums, with the roundings of the unfused ops."""
    wide = gate.to(STORAGE).to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(STORAGE).to(tl.float32)
    return (active * up.to(STORAGE).to(tl.float32)).to(STORAGE)


@launched
@triton.jit
def route_gate_up_kernel(
    x_ptr,
    ids_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    NATIVE: tl.constexpr,
    ROUTED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [routes, N]``: gate and up of one route's expert and their activation. Grid ``(routes, ceil(N / BLOCK_N))``.

    ``ROWS`` is 0 for float weights. Without ``ROUTED`` there is one expert.
    """
    FP8: tl.constexpr = ROWS > 0
    ONE: tl.constexpr = FP8 and ROWS % BLOCK_N == 0
    FACTOR: tl.constexpr = 1.0 if NATIVE else 256.0
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    STORAGE: tl.constexpr = out_ptr.dtype.element_ty
    route = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset = tl.arange(0, BLOCK_K)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids_ptr + route).to(tl.int64) if ROUTED else route * 0
    if expert < 0:
        return
    tile = weight_ptr + expert * (2 * N * K) + row.to(tl.int64)[:, None] * K + offset[None, :]
    if FP8:
        COLUMNS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
        scale = scale_ptr + expert * (2 * N // ROWS * COLUMNS)
    x_row = x_ptr + route // TOP_K * K
    gate_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        gate = _weights(tile, start, row, offset, N, K, EVEN)
        up = _weights(tile + N * K, start, row, offset, N, K, EVEN)
        x = tl.load(x_row + start + offset, mask=offset < K - start, other=0.0).to(tl.float32)
        if FP8:
            gate_x = _scaled(x, scale, start, row, offset, N, K, ROWS, ONE, FACTOR)
            up_x = _scaled(x, scale + N // ROWS * COLUMNS, start, row, offset, N, K, ROWS, ONE, FACTOR)
        else:
            gate_x = x[None, :]
            up_x = gate_x
        gate_sum += _values(gate, FP8, NATIVE, tl.float32) * gate_x
        up_sum += _values(up, FP8, NATIVE, tl.float32) * up_x
    value = _activate(tl.sum(gate_sum, 1), tl.sum(up_sum, 1), STORAGE)
    tl.store(out_ptr + route * N + row, value, mask=row < N)


@launched
@triton.jit
def route_down_kernel(
    hidden_ptr,
    ids_ptr,
    route_weights_ptr,
    weight_ptr,
    scale_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    gate_stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    NATIVE: tl.constexpr,
    ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [T, N]``: the routes' down products, weighted and summed, and the shared expert. Grid ``(T, ceil(N / BLOCK_N))``.

    Without ``ROUTED`` a plain product with one weight (``TOP_K`` 1).
    """
    FP8: tl.constexpr = ROWS > 0
    ONE: tl.constexpr = FP8 and ROWS % BLOCK_N == 0
    FACTOR: tl.constexpr = 1.0 if NATIVE else 256.0
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    COLUMNS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset = tl.arange(0, BLOCK_K)
    tile = weight_ptr + row.to(tl.int64)[:, None] * K + offset[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for step in tl.range(0, TOP_K * STEPS, loop_unroll_factor=UNROLL):
        route = token * TOP_K + step // STEPS
        start = step % STEPS * BLOCK_K
        if ROUTED:
            chosen = tl.load(ids_ptr + route)
            known = (chosen >= 0).to(tl.int32)
            expert = (chosen * known).to(tl.int64)
            share = tl.load(route_weights_ptr + route)
        else:
            known = 1
            expert = route * 0
            share = 1.0
        here = (offset < K - start) & ((offset * 0 + known) > 0)
        x = tl.load(hidden_ptr + route * K + start + offset, mask=here, other=0.0).to(tl.float32) * share
        x = tl.where(here, x, 0.0)
        values = _weights(tile + expert * (N * K), start, row, offset, N, K, EVEN)
        if FP8:
            scale = scale_ptr + expert * (N // ROWS * COLUMNS)
            total += _values(values, FP8, NATIVE, tl.float32) * _scaled(
                x, scale, start, row, offset, N, K, ROWS, ONE, FACTOR
            )
        else:
            total += values.to(tl.float32) * x[None, :]
    inside = row < N
    result = tl.sum(total, 1)
    if SHARED:
        logit = tl.load(gate_ptr + token * gate_stride).to(tl.float32)
        output = tl.load(shared_ptr + token * N + row, mask=inside, other=0.0).to(tl.float32)
        result += output / (1.0 + tl.exp(-logit))
    tl.store(out_ptr + token * N + row, result.to(out_ptr.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=["routes"])
def tile_kernel(
    x_ptr,
    order_ptr,
    experts_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    routes,
    DIVISOR: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    SILU: tl.constexpr,
    GROUPED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [routes, N]``: row r is the product of row ``r // DIVISOR`` of x with its expert's weight, with ``SILU`` gate and up and
    their activation. Grid ``(blocks, ceil(N / BLOCK_N))``. Without ``GROUPED`` there is one expert and rows are in order.

    Weights are the left operand: their 64 or more rows fill a warp group's product, and the routes are its columns.
    """
    FP8: tl.constexpr = ROWS > 0
    HALVES: tl.constexpr = 2 if SILU else 1
    COLUMNS: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    STORAGE: tl.constexpr = x_ptr.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset = tl.arange(0, BLOCK_K)
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if GROUPED:
        expert = tl.load(experts_ptr + block).to(tl.int64)
        if expert < 0:
            return
        route = tl.load(order_ptr + place).to(tl.int64)
    else:
        expert = block * 0
        route = tl.where(place < routes, place, -1)
    live = route >= 0
    source = tl.where(live, route, 0) // DIVISOR
    x_tile = x_ptr + source[:, None] * K + offset[None, :]
    tile = weight_ptr + expert * (HALVES * N * K) + row.to(tl.int64)[:, None] * K + offset[None, :]
    if FP8:
        scale = scale_ptr + expert * (HALVES * N // ROWS * COLUMNS) + row // ROWS * COLUMNS
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    other = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        inside = live[:, None]
        if not EVEN_K:
            inside = inside & (offset[None, :] < K - start)
        x = tl.trans(tl.load(x_tile + start, mask=inside, other=0.0))
        gate = _values(_weights(tile, start, row, offset, N, K, EVEN_N and EVEN_K), FP8, NATIVE, STORAGE)
        if FP8:
            scales = tl.load(scale + start // SCALE_BLOCK, mask=row < N, other=0.0)
            total += tl.dot(gate, x, input_precision="ieee") * scales[:, None]
        else:
            total = tl.dot(gate, x, total, input_precision="ieee")
        if SILU:
            up = _values(_weights(tile + N * K, start, row, offset, N, K, EVEN_N and EVEN_K), FP8, NATIVE, STORAGE)
            if FP8:
                scales = tl.load(scale + N // ROWS * COLUMNS + start // SCALE_BLOCK, mask=row < N, other=0.0)
                other += tl.dot(up, x, input_precision="ieee") * scales[:, None]
            else:
                other = tl.dot(up, x, other, input_precision="ieee")
    if FP8 and not NATIVE:
        total *= 256.0
        other *= 256.0
    value = _activate(total, other, STORAGE) if SILU else total.to(STORAGE)
    out = out_ptr + tl.where(live, route, 0)[None, :] * N + row[:, None]
    tl.store(out, value, mask=(row[:, None] < N) & live[None, :])


@launched
@triton.jit
def combine_kernel(
    parts_ptr,
    ids_ptr,
    route_weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    gate_stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [T, N]``: the weighted sum over each token's ``parts [T * TOP_K, N]``, and the shared expert. Grid
    ``(T, ceil(N / BLOCK_N))``."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N,), tl.float32)
    for index in tl.range(TOP_K):
        route = token * TOP_K + index
        known = tl.load(ids_ptr + route) >= 0
        here = inside & ((row * 0 + known.to(tl.int32)) > 0)
        part = tl.load(parts_ptr + route * N + row, mask=here, other=0.0).to(tl.float32)
        total += tl.where(here, part * tl.load(route_weights_ptr + route), 0.0)
    if SHARED:
        logit = tl.load(gate_ptr + token * gate_stride).to(tl.float32)
        output = tl.load(shared_ptr + token * N + row, mask=inside, other=0.0).to(tl.float32)
        total += output / (1.0 + tl.exp(-logit))
    tl.store(out_ptr + token * N + row, total.to(out_ptr.dtype.element_ty), mask=inside)


def has_fp8(device: torch.device) -> bool:
    """Whether kernels on ``device`` can name the FP8 type."""
    found = launch.capability(device)
    return found is not None and found >= FIRST_FP8_CAPABILITY


def _operands(weight: Weight, native: bool | None) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Weight, scales, and the settings that say what they are."""
    if not isinstance(weight, Fp8Weight):
        return weight, weight, {"ROWS": 0, "NATIVE": True}
    native = has_fp8(weight.device) if native is None else native
    data = weight.data if native else weight.data.view(torch.uint8)
    return data, weight.scale, {"ROWS": weight.rows, "NATIVE": native}


def gate_up_routes(
    x: torch.Tensor, ids: torch.Tensor | None, weight: Weight, config: RouteConfig, *, native: bool | None = None
) -> torch.Tensor:
    """``[T * K, F]`` activations of every route; ``x [T, H]`` contiguous, ``weight [E, 2F, H]``. Rows of negative ids are not written.

    Without ``ids``, ``weight [2F, H]`` serves all rows.
    """
    n, k = weight.shape[-2] // 2, weight.shape[-1]
    top_k = 1 if ids is None else ids.shape[1]
    routes = x.shape[0] * top_k
    out = torch.empty((routes, n), dtype=x.dtype, device=x.device)
    data, scale, kind = _operands(weight, native)
    early = launch.early(x)
    route_gate_up_kernel[(routes, cdiv(n, config.block_n))](
        x,
        x if ids is None else ids,
        data,
        scale,
        out,
        TOP_K=top_k,
        N=n,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        UNROLL=config.unroll,
        ROUTED=ids is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=config.num_warps,
        **kind,
    )
    return out


def down_routes(
    hidden: torch.Tensor,
    routes: tuple[torch.Tensor, torch.Tensor] | None,
    weight: Weight,
    shared: Shared | None,
    config: RouteConfig,
    *,
    native: bool | None = None,
) -> torch.Tensor:
    """``[T, N]``: ``routes`` are ids and weights ``[T, K]``, ``hidden [T * K, F]``, ``weight [E, N, F]``. Without ``routes``,
    ``hidden [T, F] @ weight [N, F]^T``."""
    n, k = weight.shape[-2:]
    top_k = 1 if routes is None else routes[0].shape[1]
    tokens = hidden.shape[0] // top_k
    out = torch.empty((tokens, n), dtype=hidden.dtype, device=hidden.device)
    data, scale, kind = _operands(weight, native)
    ids, shares = (hidden, hidden) if routes is None else routes
    output, gate = (hidden, hidden[:, 0]) if shared is None else shared
    early = launch.early(hidden)
    route_down_kernel[(tokens, cdiv(n, config.block_n))](
        hidden,
        ids,
        shares,
        data,
        scale,
        output,
        gate,
        out,
        gate.stride(0),
        TOP_K=top_k,
        N=n,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        UNROLL=config.unroll,
        ROUTED=routes is not None,
        SHARED=shared is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=config.num_warps,
        **kind,
    )
    return out


def tiles(
    x: torch.Tensor,
    groups: tuple[torch.Tensor, torch.Tensor] | None,
    weight: Weight,
    config: TileConfig,
    *,
    routes: int,
    silu: bool,
    native: bool | None = None,
) -> torch.Tensor:
    """``[routes, N]`` by tiles: ``groups`` are order and experts for ``config.block_m``, ``weight [E, N, K]`` (with ``silu`` twice the
    rows). Row r takes row ``r // (routes / rows of x)`` of x. Without ``groups`` one weight ``[N, K]`` serves all rows."""
    n, k = weight.shape[-2] // (2 if silu else 1), weight.shape[-1]
    out = torch.empty((routes, n), dtype=x.dtype, device=x.device)
    data, scale, kind = _operands(weight, native)
    order, experts = (x, x) if groups is None else groups
    blocks = cdiv(routes, config.block_m) if groups is None else experts.numel()
    early = launch.early(x)
    tile_kernel[(blocks, cdiv(n, config.block_n))](
        x,
        order,
        experts,
        data,
        scale,
        out,
        routes,
        DIVISOR=routes // x.shape[0],
        N=n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SILU=silu,
        GROUPED=groups is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **kind,
    )
    return out


def combine(parts: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: Shared | None) -> torch.Tensor:
    """``[T, N]``: the sum of ``parts [T * K, N]`` by ``weights [T, K]``, leaving out negative ids, and the shared expert."""
    tokens, top_k = ids.shape
    n = parts.shape[1]
    out = torch.empty((tokens, n), dtype=parts.dtype, device=parts.device)
    output, gate = (parts, parts[:, 0]) if shared is None else shared
    early = launch.early(parts)
    combine_kernel[(tokens, cdiv(n, COMBINE_BLOCK))](
        parts,
        ids,
        weights,
        output,
        gate,
        out,
        gate.stride(0),
        TOP_K=top_k,
        N=n,
        BLOCK_N=min(COMBINE_BLOCK, next_power_of_two(n)),
        SHARED=shared is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=4,
    )
    return out
