"""Rotation fused with what comes before it (norms, activations) and after it (quantisation), as two kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.hadamard.config import RotateConfig, pick_config, tile_of
from freetoken.kernels.hadamard.reference import Activation, Normed, require_shape
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv
from freetoken.kernels.pq2_gemv import tiles_for
from freetoken.kernels.pq2_gemv.activation import SMALLEST as SMALLEST_ABSMAX
from freetoken.kernels.pq2_gemv.activation import empty_activation
from freetoken.kernels.pq2_gemv.quantiser import buffers, put_beside, tile_word
from freetoken.kernels.pq2_gemv.weight import PQ2Weight

SMALLEST = tl.constexpr(SMALLEST_ABSMAX)
SHIFT = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a float32 of magnitude below 2^22 leaves the nearest integer, ties to even, in the lowest bits."""
FOUR_SHIFTS = tl.constexpr(4 * 0x4B400000 - (1 << 32))
"""Four times the bits of ``SHIFT``, as an int32 wraps them."""


@triton.jit
def _step(x, TILE: tl.constexpr, HALF: tl.constexpr):
    """Sums and differences of elements ``HALF`` apart."""
    pairs = tl.permute(tl.reshape(x, (TILE // (2 * HALF), 2, HALF)), (0, 2, 1))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (TILE,))


@triton.jit
def _transform(x, TILE: tl.constexpr, STEPS: tl.constexpr, FACTOR: tl.constexpr):
    """The ladder of :mod:`reference` on every ``1 << STEPS`` of ``x [TILE]`` (float32), in the same order of sums."""
    for step in tl.static_range(STEPS):
        x = _step(x, TILE, 1 << step)
    if STEPS > 0:
        x = x * FACTOR
    return x


@triton.jit
def _rounded(x, inverse):
    """Bits whose lowest eight are ``x * inverse`` rounded to an integer."""
    return (tl.minimum(tl.maximum(x * inverse, -127.0), 127.0) + SHIFT).to(tl.int32, bitcast=True)


@triton.jit
def _emit(
    z, token, first, width, values_ptr, scales_ptr, sums_ptr, halves,
    TILE: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Store ``z [TILE]`` (float32) from column ``first`` of a row on: as it is with ``GROUP`` 0, else quantised as
    :mod:`freetoken.kernels.pq2_gemv.activation` states, four values to a word of ``values_ptr``, in rows or ``TILED``."""
    if GROUP == 0:
        column = first + tl.arange(0, TILE)
        tl.store(values_ptr + token * width + column, z.to(values_ptr.dtype.element_ty), mask=column < width)
    else:
        WORDS: tl.constexpr = TILE // 4
        GROUPS: tl.constexpr = TILE // GROUP
        # Word 4t + i of a row holds elements 16t + 4b + i, b = 0..3.
        runs = tl.permute(tl.reshape(z, (TILE // 16, 2, 2, 4)), (0, 3, 1, 2))
        even, odd = tl.split(runs)
        z0, z2 = tl.split(even)
        z1, z3 = tl.split(odd)
        largest = tl.maximum(tl.maximum(tl.abs(z0), tl.abs(z1)), tl.maximum(tl.abs(z2), tl.abs(z3)))
        largest = tl.max(tl.reshape(largest, (GROUPS, GROUP // 4)), axis=1)
        present = largest >= SMALLEST
        divisor = tl.where(present, largest, 1.0)
        inverse = tl.where(present, tl.div_rn(tl.full((GROUPS,), 127.0, tl.float32), divisor), 0.0)
        inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (GROUPS, GROUP // 4)), (TILE // 16, 4))
        z0, z1, z2, z3 = _rounded(z0, inverse), _rounded(z1, inverse), _rounded(z2, inverse), _rounded(z3, inverse)
        word = (z0 & 255) | ((z1 & 255) << 8) | ((z2 & 255) << 16) | (z3 << 24)
        place = tl.arange(0, WORDS)
        target = tl.multiple_of(values_ptr + token * (width // 4) + first // 4 + place, 1)
        if TILED:
            target = tl.multiple_of(values_ptr + tile_word(token, first // 4 + place, halves), 1)
        tl.store(target, tl.reshape(word, (WORDS,)), mask=place < (width - first) // 4)
        total = tl.sum(tl.reshape(z0 + z1 + z2 + z3 - FOUR_SHIFTS, (GROUPS, GROUP // 4)), axis=1)
        group = tl.arange(0, GROUPS)
        here = group < (width - first) // GROUP
        scale = tl.where(present, largest * (1 / 127), 0.0)
        groups = width // GROUP
        put_beside(scales_ptr, sums_ptr, token, first // GROUP + group, scale, total, here, halves, groups, TILED)


@triton.jit
def _source(
    x, other, weight, eps, KIND: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr
):  # fmt: skip
    """What is rotated, in float32, from up to three operands ``[TILE]`` (``weight [HEAD]``)."""
    if KIND == "silu_mul":
        return x / (1.0 + tl.exp(-x)) * other
    if KIND == "sigmoid_mul":
        return x / (1.0 + tl.exp(-other))
    if KIND == "gated_norm":
        heads = tl.reshape(x, (TILE // HEAD, HEAD))
        scale = tl.rsqrt(tl.sum(heads * heads, axis=1) / HEAD + eps)
        normal = tl.reshape(heads * scale[:, None] * weight[None, :], (TILE,))
        return normal * other / (1.0 + tl.exp(-other))
    return x


@launched
@triton.jit(do_not_specialize=["halves"])
def rotate_kernel(
    x_ptr,
    other_ptr,
    weight_ptr,
    signs_ptr,
    values_ptr,
    scales_ptr,
    sums_ptr,
    eps,
    x_stride,
    other_stride,
    halves,
    width: tl.constexpr,
    KIND: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    INVERSE: tl.constexpr,
    TILED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(ceil(width / TILE), T)``. Rows of ``x`` and ``other`` lie a stride apart; outputs are contiguous.

    With the kind ``table`` the input is row ``x [T]`` (ids) of a table with codes ``other`` and scales ``weight``, one for
    ``HEAD`` neighbours.
    """
    first = tl.program_id(0) * TILE
    column = first + tl.arange(0, TILE)
    token = tl.program_id(1).to(tl.int64)
    inside = column < width
    signs = tl.full((TILE,), 1.0, tl.float32)
    weight = signs
    if HAS_SIGNS:
        signs = tl.load(signs_ptr + column, mask=inside, other=0).to(tl.float32)
    if KIND == "gated_norm":
        weight = tl.load(weight_ptr + tl.arange(0, HEAD)).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if KIND == "table":
        row = tl.load(x_ptr + token).to(tl.int64)
        code = tl.load(other_ptr + row * (width // 4) + column // 4, mask=inside, other=0).to(tl.int32)
        x = ((code >> column % 4 * 2 & 3) - 1).to(tl.float32)
        x *= tl.load(weight_ptr + row * (width // HEAD) + column // HEAD, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    other = x
    if KIND != "plain" and KIND != "table":
        other = tl.load(other_ptr + token * other_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = _source(x, other, weight, eps, KIND, TILE, HEAD)
    if HAS_SIGNS and not INVERSE:
        x = x * signs
    z = _transform(x, TILE, STEPS, FACTOR)
    if HAS_SIGNS and INVERSE:
        z = z * signs
    _emit(z, token, first, width, values_ptr, scales_ptr, sums_ptr, halves, TILE, GROUP, TILED)


@triton.jit
def _summed(x_ptr, residual_ptr, place, inside, HAS_RESIDUAL: tl.constexpr):
    """``x`` and, with ``HAS_RESIDUAL``, the residual added and rounded to the storage type; float32 ``[TILE]``."""
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _weights(weight_ptr, signs_ptr, column, width, HAS_SIGNS: tl.constexpr):
    """Norm weights and signs at ``column [TILE]`` as float32; without signs the weights twice."""
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if HAS_SIGNS:
        return weight, tl.load(signs_ptr + column, mask=column < width, other=0).to(tl.float32)
    return weight, weight


@triton.jit
def _normed_tiles(
    x_ptr, residual_ptr, weight_ptr, signs_ptr, values_ptr, scales_ptr, sums_ptr, sum_ptr, plain_ptr, eps, halves,
    width: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, FACTOR: tl.constexpr,
    GROUP: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SIGNS: tl.constexpr, PLAIN: tl.constexpr, TILED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``TILES`` tiles of one row: residual add, norm, rotation, quantisation."""
    ALL: tl.constexpr = (width + TILE - 1) // TILE
    lane = tl.arange(0, TILE)
    token = tl.program_id(1).to(tl.int64)
    row = token * width
    first = tl.program_id(0) * TILES
    # A program of one tile asks for its weights while the kernel before still runs; they are seldom in the cache.
    weight, signs = _weights(weight_ptr, signs_ptr, first * TILE + lane, width, HAS_SIGNS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros((TILE,), tl.float32)
    for tile in tl.range(ALL, loop_unroll_factor=ALL if ALL <= 8 else 4):
        column = tile * TILE + lane
        x = _summed(x_ptr, residual_ptr, row + column, column < width, HAS_RESIDUAL)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    for tile in tl.range(first, tl.minimum(first + TILES, ALL)):
        column = tile * TILE + lane
        inside = column < width
        if TILES > 1:
            weight, signs = _weights(weight_ptr, signs_ptr, column, width, HAS_SIGNS)
        x = _summed(x_ptr, residual_ptr, row + column, inside, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(sum_ptr + row + column, x.to(sum_ptr.dtype.element_ty), mask=inside)
        normal = (x * scale).to(weight_ptr.dtype.element_ty).to(tl.float32) * weight
        if PLAIN:
            tl.store(plain_ptr + row + column, normal.to(plain_ptr.dtype.element_ty), mask=inside)
        z = _transform(normal * signs if HAS_SIGNS else normal, TILE, STEPS, FACTOR)
        _emit(z, token, tile * TILE, width, values_ptr, scales_ptr, sums_ptr, halves, TILE, GROUP, TILED)


@triton.jit
def _beside(
    x_ptr, residual_ptr, weight_ptr, beside_ptr, out_ptr, eps, index,
    width: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Output ``index`` of the product of one normed row with ``beside [N, width]``. All weights are asked for before the wait, by loads
    that the assembler does not move behind it, and the row is read once."""
    ALL: tl.constexpr = (width + TILE - 1) // TILE
    lane = tl.arange(0, TILE)
    token = tl.program_id(1).to(tl.int64)
    asked = ()
    for tile in tl.static_range(ALL):
        column = tile * TILE + lane
        inside = column < width
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0, volatile=True)
        asked += ((weight, tl.load(beside_ptr + index * width + column, mask=inside, other=0.0, volatile=True)),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros((TILE,), tl.float32)
    row = ()
    for tile in tl.static_range(ALL):
        column = tile * TILE + lane
        x = _summed(x_ptr, residual_ptr, token * width + column, column < width, HAS_RESIDUAL)
        squares += x * x
        row += (x,)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    products = tl.zeros((TILE,), tl.float32)
    for tile in tl.static_range(ALL):
        weight, other = asked[tile]
        normal = (row[tile] * scale).to(weight_ptr.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)
        products += normal.to(x_ptr.dtype.element_ty).to(tl.float32) * other.to(tl.float32)
    tl.store(out_ptr + token * N + index, tl.sum(products, axis=0).to(out_ptr.dtype.element_ty))


@launched
@triton.jit(do_not_specialize=["halves"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    signs_ptr,
    values_ptr,
    scales_ptr,
    sums_ptr,
    sum_ptr,
    plain_ptr,
    beside_ptr,
    beside_out_ptr,
    eps,
    halves,
    width: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    PLAIN: tl.constexpr,
    TILED: tl.constexpr,
    BESIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(ceil(width / (TILE * TILES)) + BESIDE, T)``: a program rotates ``TILES`` tiles of one row and reads the whole row for its
    sum of squares; ``BESIDE`` more each make one output of a product with the normed row. All rows are contiguous; the new residual
    is another buffer than the old one, which others still read."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if BESIDE > 0:
        ROTATING: tl.constexpr = (width + TILE * TILES - 1) // (TILE * TILES)
        if tl.program_id(0) >= ROTATING:
            _beside(
                x_ptr, residual_ptr, weight_ptr, beside_ptr, beside_out_ptr, eps, tl.program_id(0) - ROTATING,
                width, BESIDE, TILE, HAS_RESIDUAL, EARLY,
            )  # fmt: skip
        else:
            _normed_tiles(
                x_ptr, residual_ptr, weight_ptr, signs_ptr, values_ptr, scales_ptr, sums_ptr, sum_ptr, plain_ptr, eps,
                halves, width, TILES, TILE, STEPS, FACTOR, GROUP, HAS_RESIDUAL, HAS_SIGNS, PLAIN, TILED, EARLY,
            )  # fmt: skip
    else:
        _normed_tiles(
            x_ptr, residual_ptr, weight_ptr, signs_ptr, values_ptr, scales_ptr, sums_ptr, sum_ptr, plain_ptr, eps,
            halves, width, TILES, TILE, STEPS, FACTOR, GROUP, HAS_RESIDUAL, HAS_SIGNS, PLAIN, TILED, EARLY,
        )  # fmt: skip


def _output(tokens: int, width: int, group: int, like: torch.Tensor, dtype: torch.dtype) -> Activation:
    """An uninitialised activation, floats with group 0."""
    if group == 0:
        return torch.empty((tokens, width), dtype=dtype, device=like.device)
    return empty_activation(tokens, width, group, like.device, tiles=tiles_for(tokens, like.device))


def _buffers(output: Activation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """As :func:`freetoken.kernels.pq2_gemv.quantiser.buffers`, values as words; floats three times."""
    if isinstance(output, torch.Tensor):
        return output, output, output, 0
    values, scales, sums, halves = buffers(output)
    return values.view(torch.int32), scales, sums, halves


def _shape_settings(width: int, block: int, *parts: int) -> dict[str, int | float]:
    tile = tile_of(width, block, *(part for part in parts if part))
    return {"TILE": tile, "STEPS": block.bit_length() - 1, "FACTOR": block**-0.5}


def rotate(
    x: torch.Tensor,
    signs: torch.Tensor | None,
    block: int,
    group: int,
    *,
    kind: str = "plain",
    other: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    inverse: bool = False,
    out_dtype: torch.dtype | None = None,
    config: RotateConfig | None = None,
) -> Activation:
    """All producers of :mod:`reference` but ``norm``, and ``unrotate`` with ``inverse``: see there.

    ``x [T, width]`` and ``other [T, width]`` may have any row stride. ``kind`` is ``plain``, ``silu_mul`` (``silu(x) * other``),
    ``sigmoid_mul`` (``x * sigmoid(other)``) or ``gated_norm`` (with ``weight [head]``, a power of two; ``other`` is the gate).
    """
    tokens, width = x.shape
    require_shape(width, signs, block)
    output = _output(tokens, width, group, x, out_dtype or x.dtype)
    if tokens > 0:
        head = 1 if weight is None else weight.shape[0]
        settings = _shape_settings(width, block, group, head)
        tile = int(settings["TILE"])
        config = config or pick_config(tokens, width, tile)
        early = launch.early(x)
        values, scales, sums, halves = _buffers(output)
        rotate_kernel[(cdiv(width, tile), tokens)](
            x,
            x if other is None else other,
            x if weight is None else weight,
            x if signs is None else signs,
            values,
            scales,
            sums,
            eps,
            x.stride(0),
            0 if other is None else other.stride(0),
            halves,
            width=width,
            KIND=kind,
            HEAD=head,
            GROUP=group,
            HAS_SIGNS=signs is not None,
            INVERSE=inverse,
            TILED=halves > 0,
            EARLY=early,
            launch_pdl=early,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
            **settings,
        )
    return output


def embed(
    ids: torch.Tensor, table: PQ2Weight, signs: torch.Tensor | None, block: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """As :func:`freetoken.kernels.hadamard.reference.embed`; ``ids`` contiguous. ``ValueError`` for an interleaved table."""
    if table.interleaved:
        raise ValueError("the rows of a table that ids choose from are not interleaved")
    tokens, width = ids.shape[0], table.in_features
    require_shape(width, signs, block)
    out = torch.empty((tokens, width), dtype=out_dtype, device=table.codes.device)
    if tokens > 0:
        settings = _shape_settings(width, block)
        tile = int(settings["TILE"])
        early = launch.early(ids)
        rotate_kernel[(cdiv(width, tile), tokens)](
            ids,
            table.codes,
            table.scales,
            ids if signs is None else signs,
            out,
            out,
            out,
            0.0,
            1,
            0,
            0,
            width=width,
            KIND="table",
            HEAD=table.group,
            GROUP=0,
            HAS_SIGNS=signs is not None,
            INVERSE=True,
            TILED=False,
            EARLY=early,
            launch_pdl=early,
            num_warps=pick_config(tokens, width, tile).num_warps,
            enable_fp_fusion=False,
            **settings,
        )
    return out


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    signs: torch.Tensor | None,
    block: int,
    group: int,
    residual: torch.Tensor | None = None,
    *,
    plain: bool = False,
    beside: torch.Tensor | None = None,
    config: RotateConfig | None = None,
) -> Normed:
    """As :func:`freetoken.kernels.hadamard.reference.norm`; ``x``, ``residual`` and ``beside`` contiguous."""
    tokens, width = x.shape
    require_shape(width, signs, block)
    output = _output(tokens, width, group, x, x.dtype)
    total = x if residual is None else torch.empty_like(x)
    normal = torch.empty_like(x) if plain else None
    rows = 0 if beside is None else beside.shape[0]
    product = None if beside is None else torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if tokens > 0:
        settings = _shape_settings(width, block, group)
        tile = int(settings["TILE"])
        tiles = cdiv(width, tile)
        config = config or pick_config(tokens, width, tile)
        per_program = min(config.tiles or tiles, tiles)
        early = launch.early(x)
        values, scales, sums, halves = _buffers(output)
        norm_kernel[(cdiv(tiles, per_program) + rows, tokens)](
            x,
            x if residual is None else residual,
            weight,
            x if signs is None else signs,
            values,
            scales,
            sums,
            total,
            x if normal is None else normal,
            x if beside is None else beside,
            x if product is None else product,
            eps,
            halves,
            width=width,
            TILES=per_program,
            GROUP=group,
            HAS_RESIDUAL=residual is not None,
            HAS_SIGNS=signs is not None,
            PLAIN=plain,
            TILED=halves > 0,
            BESIDE=rows,
            EARLY=early,
            launch_pdl=early,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
            **settings,
        )
    return Normed(output, total, normal, product)
