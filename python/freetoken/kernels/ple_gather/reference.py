"""Rows of a stored table by id in plain torch: the specification of the kernel."""

from __future__ import annotations

import torch

from freetoken.kernels.ple_gather.formats import RowFormat

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn}


def decode_rows(rows: torch.Tensor, fmt: RowFormat, width: int, scale: float) -> torch.Tensor:
    """``[N, width]`` float32 of stored rows ``[N, row_bytes]`` uint8 (contiguous): the stored values times ``scale``."""
    plain = _PLAIN.get(fmt.name)
    if plain is not None:
        return rows.view(plain).float() * scale
    blocks = rows.view(-1, width // fmt.block, fmt.block_bytes)
    factor = blocks[..., :2].contiguous().view(torch.float16).float()
    packed = blocks[..., 2:]
    if fmt.codebook is None:
        values = packed.contiguous().view(torch.int8).float()
    else:
        codes = torch.cat([packed & 15, packed >> 4], dim=-1)
        values = torch.tensor(fmt.codebook, dtype=torch.float32, device=rows.device)[codes.long()]
    return (factor * values).view(-1, width) * scale


def gather_rows(
    table: torch.Tensor,
    row_ids: torch.Tensor | None,
    fmt: RowFormat,
    width: int,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows ``[N, width]`` of ``table``, decoded through float32 and rounded once to ``dtype``; the tensors share a device.

    An id outside the table gives a row of zeros: on a GPU nobody is there to raise, and no memory outside is read.
    """
    if row_ids is None:
        return decode_rows(table, fmt, width, scale).to(dtype)
    inside = (row_ids >= 0) & (row_ids < table.shape[0])
    stored = table[torch.where(inside, row_ids, 0)]
    return torch.where(inside[:, None], decode_rows(stored, fmt, width, scale), 0).to(dtype)
