"""Weights of two bits: a plane of codes and a plane of scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WEIGHT_GROUPS = (64, 128)
BLOCK = 128
"""K is a multiple of this, whatever the group."""
INTERLEAVE = 8
"""Rows that lie interleaved in the order that kernels read fastest."""
BLOCK_BYTES = BLOCK // 4


@dataclass(frozen=True)
class PQ2Weight:
    """``[N, K]`` weights of the values ``(code - 1) * scale`` with codes 0 to 3: minus one, zero, one and two scales.

    ``codes`` is uint8 ``[N, K/4]`` in the order of the file: element j of a row is in byte ``j // 4``, in bits ``2 * (j % 4)``
    and the next. ``scales`` is float16 ``[N, K/group]``, one for ``group`` (64 or 128) neighbours along K. Both planes are
    contiguous, so joining projections is joining rows; on a GPU codes begin at a multiple of 16 bytes. ``ValueError`` for planes that
    do not fit each other.

    ``interleaved`` says that in memory every eight rows lie block by block of 128 along K: codes as ``[N/8, K/128, 8, 32]`` and scales
    as ``[N/8, K/group, 8]``, whatever the shapes of the planes. The eight rows that a warp reads together are then without gaps. N is
    a multiple of eight; rows ``8i`` to ``8j`` of both planes are still those of the weight.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int = 128
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.group not in WEIGHT_GROUPS:
            raise ValueError(f"a weight group of {self.group}; it is one of {WEIGHT_GROUPS}")
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.float16:
            raise ValueError(f"codes are uint8 and scales float16, not {self.codes.dtype} and {self.scales.dtype}")
        if self.codes.dim() != 2 or self.in_features % BLOCK != 0:
            raise ValueError(f"codes of shape {tuple(self.codes.shape)}: not [N, K/4] with K a multiple of {BLOCK}")
        if self.scales.shape != (self.out_features, self.in_features // self.group):
            raise ValueError(
                f"scales of shape {tuple(self.scales.shape)} for codes of shape {tuple(self.codes.shape)} in groups of "
                f"{self.group}"
            )
        if not (self.codes.is_contiguous() and self.scales.is_contiguous()):
            raise ValueError("the planes of a weight are contiguous")
        if self.codes.device != self.scales.device:
            raise ValueError(f"codes on {self.codes.device}, scales on {self.scales.device}")

        if self.codes.is_cuda and self.codes.data_ptr() % 16 != 0:
            raise ValueError("the codes of a weight on a GPU begin at a multiple of 16 bytes")
        if self.interleaved and self.out_features % INTERLEAVE:
            raise ValueError(f"{self.out_features} rows cannot be interleaved by {INTERLEAVE}")

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.codes.shape[1] * 4

    @property
    def nbytes(self) -> int:
        """Bytes of both planes."""
        return self.codes.nbytes + self.scales.nbytes

    def interleave(self) -> PQ2Weight:
        """The same interleaved, in the same memory where it was not; itself where its rows are no multiple of eight."""
        if self.interleaved or self.out_features % INTERLEAVE:
            return self
        for plane, run in ((self.codes, BLOCK_BYTES), (self.scales, 1)):
            rows = plane.view(-1, INTERLEAVE, plane.shape[1] // run, run)
            plane.view(-1).copy_(rows.transpose(1, 2).reshape(-1))
        return PQ2Weight(self.codes, self.scales, self.group, interleaved=True)

    def row_order(self) -> PQ2Weight:
        """The same with one row after the other: itself, or a copy."""
        if not self.interleaved:
            return self
        planes = [
            plane.view(-1, plane.shape[1] // run, INTERLEAVE, run).transpose(1, 2).reshape(plane.shape)
            for plane, run in ((self.codes, BLOCK_BYTES), (self.scales, 1))
        ]
        return PQ2Weight(planes[0], planes[1], self.group)

    def unpack(self) -> torch.Tensor:
        """Codes one a byte: uint8 ``[N, K]``."""
        return unpack(self.row_order().codes)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values ``[N, K]``: exact in float32, rounded once to any other ``dtype``."""
        rows = self.row_order()
        signed = unpack(rows.codes).float().sub_(1).view(self.out_features, -1, self.group)
        signed *= rows.scales.float()[:, :, None]
        return signed.view(self.out_features, self.in_features).to(dtype)

    def rows(self, index: torch.Tensor) -> PQ2Weight:
        """The rows ``index`` (int64 ``[R]``) as a weight of its own, ``[R, K]``."""
        rows = self.row_order()
        return PQ2Weight(rows.codes[index], rows.scales[index], self.group)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Packed codes ``[N, B]``, four a byte, as uint8 ``[N, 4B]``, one a byte."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    return (codes[:, :, None] >> shifts & 3).reshape(codes.shape[0], codes.shape[1] * 4)
