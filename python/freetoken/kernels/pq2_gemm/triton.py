"""Products of many tokens with two-bit weights: decoded tiles on tensor cores, and a decoder of whole rows."""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv
from freetoken.kernels.pq2_gemm.config import (
    SLICE_BYTES,
    SPLIT_CELLS,
    SPLIT_PROGRAMS,
    DenseConfig,
    GemmConfig,
    pick_config,
    pick_slice,
)
from freetoken.kernels.pq2_gemv.activation import QuantisedActivation
from freetoken.kernels.pq2_gemv.order import along_row, row_codes, row_scales
from freetoken.kernels.pq2_gemv.weight import PQ2Weight

FLOAT_BLOCK = 64
"""Elements of K a step of the product of floats."""
DECODE_ROWS, DECODE_WIDTH = 8, 512


class Scratch:
    """Memory for the parts of split products and for a slice of decoded weights; calls of one stream share it.

    ``arrivals`` counts programs that delivered their part and is zero between calls. Sizes depend on nothing, so what a captured
    graph refers to is never replaced.
    """

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(SPLIT_PROGRAMS * SPLIT_CELLS, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(SPLIT_PROGRAMS, dtype=torch.int32, device=device)
        self.decoded = torch.empty(SLICE_BYTES, dtype=torch.uint8, device=device)


_scratch: dict[torch.device, Scratch] = {}


def scratch_of(device: torch.device) -> Scratch:
    """The scratch memory of a device, made at the first call. A device without an index is the current one of its kind."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _scratch:
        _scratch[device] = Scratch(device)
    return _scratch[device]


@triton.jit
def _planes(codes, SIGNED: tl.constexpr, ON_GPU: tl.constexpr):
    """The four codes of each byte, or with ``SIGNED`` their values (-1, 0, 1, 2), one int8 tensor for each place in the byte."""
    if ON_GPU and not SIGNED:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 c1, c2, c3;
            shr.u32 c1, $4, 2;
            shr.u32 c2, $4, 4;
            shr.u32 c3, $4, 6;
            and.b32 $0, $4, 0x03030303;
            and.b32 $1, c1, 0x03030303;
            and.b32 $2, c2, 0x03030303;
            and.b32 $3, c3, 0x03030303;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    elif ON_GPU:
        # Four bytes a register. Adding 127 and flipping the top bit takes one off each byte without a borrow.
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 c1, c2, c3;
            shr.u32 c1, $4, 2;
            shr.u32 c2, $4, 4;
            shr.u32 c3, $4, 6;
            and.b32 $0, $4, 0x03030303;
            and.b32 $1, c1, 0x03030303;
            and.b32 $2, c2, 0x03030303;
            and.b32 $3, c3, 0x03030303;
            add.u32 $0, $0, 0x7f7f7f7f;
            add.u32 $1, $1, 0x7f7f7f7f;
            add.u32 $2, $2, 0x7f7f7f7f;
            add.u32 $3, $3, 0x7f7f7f7f;
            xor.b32 $0, $0, 0x80808080;
            xor.b32 $1, $1, 0x80808080;
            xor.b32 $2, $2, 0x80808080;
            xor.b32 $3, $3, 0x80808080;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.int32)
        LESS: tl.constexpr = 1 if SIGNED else 0
        v0 = ((wide & 3) - LESS).to(tl.int8)
        v1 = ((wide >> 2 & 3) - LESS).to(tl.int8)
        v2 = ((wide >> 4 & 3) - LESS).to(tl.int8)
        v3 = ((wide >> 6 & 3) - LESS).to(tl.int8)
    return v0, v1, v2, v3


@triton.jit
def _values(
    codes,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIGNED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """int8 ``[ROWS, WIDTH]`` from bytes ``[ROWS, WIDTH / 4]``, in natural order or in that of a quantised activation."""
    v0, v1, v2, v3 = _planes(codes, SIGNED, ON_GPU)
    # Joining puts the new dimension last: (0, 2) with (1, 3) is 0, 1, 2, 3.
    values = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    if TRANSPOSED:
        values = tl.permute(tl.reshape(values, (ROWS, WIDTH // 16, 4, 4)), (0, 1, 3, 2))
    return tl.reshape(values, (ROWS, WIDTH))


@triton.jit
def _tf32(x):
    """The part of float32 ``x`` that ten bits of mantissa hold."""
    return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _ones(
    x_scale,
    x_sum,
    w_scale,
    begin,
    end,
    GROUP_X: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """What codes count too much: the product of weights that are all one scale, ``[BLOCK_N, BLOCK_M]``, over groups of K from
    ``begin`` to ``end``. Float16 scales are exact in TF32, and what they meet is cut into two TF32 parts."""
    GROUPS: tl.constexpr = 16
    APART: tl.constexpr = 8 if INTERLEAVED else 1
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in tl.range(begin, end, GROUPS):
        group = first + tl.arange(0, GROUPS)
        inside = (group < end)[None, :]
        d_w = tl.load(w_scale[:, None] + (group * GROUP // GROUP_W * APART)[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        place = (group * GROUP // GROUP_X)[None, :]
        d_x = tl.load(x_scale[:, None] + place, mask=inside, other=0.0)
        u = tl.trans(d_x * tl.load(x_sum[:, None] + place, mask=inside, other=0).to(tl.float32))
        high = _tf32(u)
        total = tl.dot(d_w, high, total, input_precision="tf32")
        total = tl.dot(d_w, u - high, total, input_precision="tf32")
    return total


@triton.jit
def _ask_ahead(pointer):
    """Bring the lines at ``pointer`` into the L2 cache: weights, before the wait for the kernel that makes the activation."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _finish(
    total,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    row,
    token,
    m,
    n,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Store ``total [BLOCK_N, BLOCK_M]`` transposed; of a split product the last program to arrive adds all parts."""
    last = True
    if SPLIT_K > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = parts_ptr + tile * (SPLIT_K * BLOCK_N * BLOCK_M) + cell
        tl.store(parts + tl.program_id(2) * (BLOCK_N * BLOCK_M), total)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(parts + part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
    if last:
        out = out_ptr + token.to(tl.int64)[:, None] * n + row[None, :]
        inside = (token[:, None] < m) & (row[None, :] < n)
        tl.store(out, tl.trans(total.to(out_ptr.dtype.element_ty)), mask=inside)


@launched
@triton.jit(do_not_specialize=["m"])
def int8_kernel(
    values_ptr,
    x_scales_ptr,
    sums_ptr,
    codes_ptr,
    w_scales_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    m,
    n,
    K: tl.constexpr,
    GROUP_X: tl.constexpr,
    GROUP_W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    SIGNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [m, n]`` from eight-bit activations and codes; integers of a group are added exactly, groups in float32. Codes are made
    signed values, or (not ``SIGNED``) counted from zero and put right at the end: fewer instructions where tokens are few.

    Grid ``(ceil(m / BLOCK_M), ceil(n / BLOCK_N), SPLIT_K)``; ``GROUP`` is the smaller of both groups. Weights are the left operand:
    their rows fill the 64 that a warp group's product has. Rows and tokens past the end repeat the last one.
    """
    STEPS: tl.constexpr = (K // GROUP + SPLIT_K - 1) // SPLIT_K
    APART: tl.constexpr = 8 if INTERLEAVED else 1
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_in = tl.minimum(token, m - 1).to(tl.int64)
    row_in = tl.minimum(row, n - 1).to(tl.int64)
    x_tile = values_ptr + token_in[:, None] * K + tl.arange(0, GROUP)[None, :]
    w_row = codes_ptr + row_codes(row_in, K, INTERLEAVED)
    w_tile = w_row[:, None] + tl.arange(0, GROUP // 4)[None, :]
    x_scale = x_scales_ptr + token_in * (K // GROUP_X)
    w_scale = w_scales_ptr + row_scales(row_in, K, GROUP_W, INTERLEAVED)
    begin = tl.program_id(2) * STEPS
    end = tl.minimum(begin + STEPS, K // GROUP)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        _ask_ahead(w_row + along_row(begin, GROUP // 4, INTERLEAVED))
        tl.extra.cuda.gdc_wait()
    # Stages are stated here and not only at the launch: then the scales of the tokens are copied ahead, too.
    for step in tl.range(begin, end, num_stages=STAGES):
        codes = tl.load(w_tile + along_row(step, GROUP // 4, INTERLEAVED))
        x = tl.load(x_tile + step * GROUP)
        d_w = tl.load(w_scale + step * GROUP // GROUP_W * APART).to(tl.float32)
        d_x = tl.load(x_scale + step * GROUP // GROUP_X)
        part = tl.dot(_values(codes, BLOCK_N, GROUP, SIGNED, True, ON_GPU), tl.trans(x), out_dtype=tl.int32)
        total += part.to(tl.float32) * (d_w[:, None] * d_x[None, :])
    if not SIGNED:
        x_sum = sums_ptr + token_in * (K // GROUP_X)
        total -= _ones(x_scale, x_sum, w_scale, begin, end, GROUP_X, GROUP_W, GROUP, BLOCK_N, BLOCK_M, INTERLEAVED)
    _finish(total, out_ptr, parts_ptr, arrivals_ptr, row, token, m, n, BLOCK_N, BLOCK_M, SPLIT_K)


@launched
@triton.jit(do_not_specialize=["m"])
def float_kernel(
    x_ptr,
    codes_ptr,
    w_scales_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    m,
    n,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [m, n]`` from float activations ``[m, K]`` and weights rounded to their type; sums are float32. As :func:`int8_kernel`."""
    STORAGE: tl.constexpr = x_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K // BLOCK_K + SPLIT_K - 1) // SPLIT_K
    APART: tl.constexpr = 8 if INTERLEAVED else 1
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_in = tl.minimum(token, m - 1).to(tl.int64)
    row_in = tl.minimum(row, n - 1).to(tl.int64)
    x_tile = x_ptr + token_in[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    w_row = codes_ptr + row_codes(row_in, K, INTERLEAVED)
    w_tile = w_row[:, None] + tl.arange(0, BLOCK_K // 4)[None, :]
    w_scale = w_scales_ptr + row_scales(row_in, K, GROUP_W, INTERLEAVED)
    begin = tl.program_id(2) * STEPS
    end = tl.minimum(begin + STEPS, K // BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        _ask_ahead(w_row + along_row(begin, BLOCK_K // 4, INTERLEAVED))
        tl.extra.cuda.gdc_wait()
    for step in tl.range(begin, end, num_stages=STAGES):
        codes = tl.load(w_tile + along_row(step, BLOCK_K // 4, INTERLEAVED))
        x = tl.load(x_tile + step * BLOCK_K)
        d_w = tl.load(w_scale + step * BLOCK_K // GROUP_W * APART).to(tl.float32)
        w = _values(codes, BLOCK_N, BLOCK_K, True, False, ON_GPU).to(tl.float32) * d_w[:, None]
        total = tl.dot(w.to(STORAGE), tl.trans(x), total, input_precision="ieee")
    _finish(total, out_ptr, parts_ptr, arrivals_ptr, row, token, m, n, BLOCK_N, BLOCK_M, SPLIT_K)


@launched
@triton.jit(do_not_specialize=["begin"])
def decode_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    begin,
    rows,
    K: tl.constexpr,
    GROUP_W: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``out [rows, K]`` of weights decoded from row ``begin`` on. Grid ``(ceil(K / WIDTH), ceil(rows / ROWS))``."""
    GROUPS: tl.constexpr = WIDTH // GROUP_W
    APART: tl.constexpr = 8 if INTERLEAVED else 1
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(0) * WIDTH
    byte = first // 4 + tl.arange(0, WIDTH // 4)
    group = first // GROUP_W + tl.arange(0, GROUPS)
    column = first + tl.arange(0, WIDTH)
    here = row[:, None] < rows
    codes = tl.load(
        codes_ptr + row_codes(begin + row, K, INTERLEAVED)[:, None] + along_row(byte, 1, INTERLEAVED)[None, :],
        mask=here & (byte[None, :] < K // 4),
        other=0,
    )
    scales = tl.load(
        scales_ptr + row_scales(begin + row, K, GROUP_W, INTERLEAVED)[:, None] + (group * APART)[None, :],
        mask=here & (group[None, :] < K // GROUP_W),
        other=0.0,
    )
    values = tl.reshape(_values(codes, ROWS, WIDTH, True, False, ON_GPU), (ROWS, GROUPS, GROUP_W))
    wide = tl.reshape(values.to(tl.float32) * scales.to(tl.float32)[:, :, None], (ROWS, WIDTH))
    # What it overwrites may still be read by the product before it.
    if EARLY:
        tl.extra.cuda.gdc_wait()
    target = out_ptr + row[:, None] * K + column[None, :]
    tl.store(target, wide.to(out_ptr.dtype.element_ty), mask=here & (column[None, :] < K))


def int8_linear(
    activation: QuantisedActivation, weight: PQ2Weight, out: torch.Tensor, config: GemmConfig | None = None
) -> torch.Tensor:
    """``out [M, N]`` (contiguous), as :func:`freetoken.kernels.pq2_gemv.reference.linear`; M of 1 or more."""
    m, n, k = activation.tokens, weight.out_features, weight.in_features
    device = activation.values.device
    config = config or pick_config("int8", n, k, m, launch.capability(device))
    group = gcd(activation.group, weight.group)
    early = launch.early(activation.values)
    scratch = scratch_of(device)
    int8_kernel[(cdiv(m, config.block_m), cdiv(n, config.block_n), config.split_k)](
        activation.values,
        activation.scales,
        activation.sums,
        weight.codes,
        weight.scales,
        out,
        scratch.parts,
        scratch.arrivals,
        m,
        n,
        K=k,
        GROUP_X=activation.group,
        GROUP_W=weight.group,
        GROUP=group,
        # The sums of activations are those of their groups, and of no part of one.
        SIGNED=config.signed or group < activation.group,
        INTERLEAVED=weight.interleaved,
        **_settings(config, early, out.is_cuda),
    )
    return out


def float_linear(
    x: torch.Tensor, weight: PQ2Weight, out: torch.Tensor, config: GemmConfig | None = None
) -> torch.Tensor:
    """``out [M, N]`` (contiguous) of contiguous ``x [M, K]`` and the weights rounded to its type; M of 1 or more."""
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    config = config or pick_config("float", n, k, m, launch.capability(x.device))
    early = launch.early(x)
    scratch = scratch_of(x.device)
    float_kernel[(cdiv(m, config.block_m), cdiv(n, config.block_n), config.split_k)](
        x,
        weight.codes,
        weight.scales,
        out,
        scratch.parts,
        scratch.arrivals,
        m,
        n,
        K=k,
        GROUP_W=weight.group,
        BLOCK_K=FLOAT_BLOCK,
        INTERLEAVED=weight.interleaved,
        **_settings(config, early, out.is_cuda),
    )
    return out


def _settings(config: GemmConfig, early: bool, on_gpu: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "SPLIT_K": config.split_k,
        "STAGES": config.num_stages,
        "ON_GPU": on_gpu,
        "EARLY": early,
        "launch_pdl": early,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }


def decode_rows(weight: PQ2Weight, first: int, rows: int, out: torch.Tensor) -> None:
    """Rows ``first`` to ``first + rows`` of ``weight`` into contiguous ``out [rows, K]``, rounded to its type."""
    k = weight.in_features
    early = launch.early(out)
    decode_kernel[(cdiv(k, DECODE_WIDTH), cdiv(rows, DECODE_ROWS))](
        weight.codes,
        weight.scales,
        out,
        first,
        rows,
        K=k,
        GROUP_W=weight.group,
        ROWS=DECODE_ROWS,
        WIDTH=DECODE_WIDTH,
        INTERLEAVED=weight.interleaved,
        ON_GPU=out.is_cuda,
        EARLY=early,
        launch_pdl=early,
        num_warps=4,
    )


def dense_linear(
    x: torch.Tensor, weight: PQ2Weight, out: torch.Tensor, config: DenseConfig | None = None
) -> torch.Tensor:
    """``out [M, N]`` of ``x [M, K]`` in two bytes an element, by slices of weights that are decoded to its type and multiplied by
    torch; ``out`` has the type of ``x``. ``ValueError`` for a slice that the scratch memory does not hold."""
    n, k = weight.out_features, weight.in_features
    config = config or pick_slice(n, k, x.shape[0], launch.capability(x.device))
    if not config.fits_scratch(k):
        raise ValueError(f"slices of {config.rows} rows of {k} columns are larger than the scratch memory")
    decoded = scratch_of(x.device).decoded.view(x.dtype)
    for first in range(0, n, config.rows):
        count = min(config.rows, n - first)
        part = decoded[: count * k].view(count, k)
        decode_rows(weight, first, count, part)
        torch.mm(x, part.t(), out=out[:, first : first + count])
    return out
