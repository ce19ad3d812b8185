"""Rows of a stored table by id: one program a row, from device memory or from host memory the GPU can address.

Bytes of ``f8_e4m3`` are decoded by integer arithmetic, as GPUs before sm_89 have no such type.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import next_power_of_two
from freetoken.kernels.ple_gather.formats import RowFormat

PLAIN, F8, CODES, BYTES = 0, 1, 2, 3
_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@triton.jit
def decode_f8(stored):
    """float32 of an e4m3 (finite) byte: exponent bias 7, subnormals in steps of 2^-9, the all-ones code NaN."""
    code = stored.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@launched
@triton.jit(do_not_specialize=["rows"])
def gather_rows_kernel(
    ids_ptr,
    table_ptr,
    codebook_ptr,
    out_ptr,
    rows,
    scale,
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    Q_BYTES: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Grid ``(N,)``. ``table_ptr`` is typed for plain formats and of bytes for the others; with ``DIRECT`` program i takes row i."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if DIRECT:
        row = program
    else:
        row = tl.load(ids_ptr + program)
    # A range that is empty for a row outside the table: no load is made for it.
    known = ((row >= 0) & (row < rows)).to(tl.int32) * WIDTH
    inside = column < known
    if FORMAT == 0:
        value = tl.load(table_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    elif FORMAT == 1:
        value = decode_f8(tl.load(table_ptr + row * ROW_BYTES + column, mask=inside, other=0))
    else:
        start = table_ptr + row * ROW_BYTES + (column // Q_BLOCK) * Q_BYTES
        within = column % Q_BLOCK
        low = tl.load(start, mask=inside, other=0).to(tl.uint16)
        high = tl.load(start + 1, mask=inside, other=0).to(tl.uint16)
        factor = (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)
        if FORMAT == 2:
            packed = tl.load(start + 2 + within % (Q_BLOCK // 2), mask=inside, other=0).to(tl.int32)
            code = tl.where(within < Q_BLOCK // 2, packed & 15, packed >> 4)
            value = factor * tl.load(codebook_ptr + code)
        else:
            signed = tl.load(start + 2 + within, mask=inside, other=0).to(tl.int8, bitcast=True)
            value = factor * signed.to(tl.float32)
    value = tl.where(inside, value * scale, 0.0)
    tl.store(out_ptr + program * WIDTH + column, value.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


@functools.cache
def _codebook(fmt: RowFormat, device: torch.device) -> torch.Tensor:
    """What the codes of ``fmt`` stand for, float32, kept for every captured graph that reads it."""
    return torch.tensor(fmt.codebook, dtype=torch.float32, device=device)


def prepare(fmt: RowFormat, device: torch.device) -> None:
    """Make what the kernel reads beside the table, so that no capture has to."""
    if fmt.codebook is not None:
        _codebook(fmt, device)


def gather_rows(
    table: torch.Tensor, row_ids: torch.Tensor | None, fmt: RowFormat, width: int, scale: float, out: torch.Tensor
) -> torch.Tensor:
    """As :func:`freetoken.kernels.ple_gather.gather_rows`, into ``out``; ``table`` may lie in page-locked host memory."""
    plain = _TYPES.get(fmt.name)
    coded = BYTES if fmt.codebook is None else CODES
    kind = PLAIN if plain is not None else F8 if fmt.name == "f8_e4m3" else coded
    gather_rows_kernel[(out.shape[0],)](
        out if row_ids is None else row_ids,
        table if plain is None else table.view(plain),
        _codebook(fmt, out.device) if kind == CODES else out,
        out,
        table.shape[0],
        scale,
        WIDTH=width,
        ROW_BYTES=table.shape[1],
        BLOCK=next_power_of_two(width),
        FORMAT=kind,
        Q_BLOCK=fmt.block,
        Q_BYTES=fmt.block_bytes,
        DIRECT=row_ids is None,
        num_warps=1,
    )
    return out
