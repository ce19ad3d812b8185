"""Rows of a stored table by id, decoded: from device memory, from host memory that the GPU reads, or already gathered."""

from __future__ import annotations

import torch

from freetoken.kernels.ple_gather import reference
from freetoken.kernels.ple_gather.formats import FORMATS, RowFormat

__all__ = ["FORMATS", "RowFormat", "gather_rows"]


def gather_rows(
    table: torch.Tensor,
    row_ids: torch.Tensor | None,
    fmt: RowFormat,
    width: int,
    scale: float,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows ``[N, width]`` of ``dtype``, semantics as :func:`reference.gather_rows`; ``out`` is filled and returned where given.

    ``table [rows, fmt.row_bytes(width)]`` uint8, contiguous, on the device of ``row_ids`` or in page-locked host memory;
    ``row_ids [N]`` int64, contiguous, or ``None`` for every row of ``table`` in turn. Where there is CUDA to run it one kernel of one
    program a row does the work: nothing is read on the host. Raises ``ValueError`` for shapes that do not fit.
    """
    count = table.shape[0] if row_ids is None else row_ids.shape[0]
    if table.dim() != 2 or table.dtype != torch.uint8 or table.shape[1] != fmt.row_bytes(width):
        raise ValueError(
            f"ple_gather: rows of {width} in {fmt.name} need {fmt.row_bytes(width)} bytes, not {list(table.shape)}"
        )
    if out is None:
        device = table.device if row_ids is None else row_ids.device
        out = torch.empty((count, width), dtype=dtype, device=device)
    elif out.shape != (count, width) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"ple_gather: out must be a contiguous {dtype} [{count}, {width}], not {list(out.shape)}")
    if count == 0:
        return out
    if out.is_cuda:
        from freetoken.kernels.ple_gather import triton

        return triton.gather_rows(table, row_ids, fmt, width, scale, out)
    return out.copy_(reference.gather_rows(table, row_ids, fmt, width, scale, dtype))
