"""Decoding of stored GGUF tensors to plain torch tensors, or splitting into planes of codes and scales, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile, GGUFTensor
from freetoken.loader.names import DECODABLE_TYPES, PACKABLE_TYPES

CHUNK_ELEMENTS = 2**17
PLANE_CHUNK_ELEMENTS = 2**24


def decode_blocks(blocks: np.ndarray, type_id: int) -> np.ndarray:
    """Decode packed rows of one of :data:`DECODABLE_TYPES`.

    ``blocks`` is uint8 ``[rows, row_bytes]``; the result is float32 ``[rows, row_elements]``. Block layouts are those
    of the ``gguf`` package, whose decoders do the work.
    """
    # Scales of a damaged file may be infinite or NaN: so are its weights, without a warning for each block.
    with np.errstate(all="ignore"):
        return dequantize(blocks, GGMLQuantizationType(type_id))


def split_planes(blocks: torch.Tensor, type_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[rows, K/4]`` and scales float16 ``[rows, K/group]`` of packed rows, on their device.

    ``blocks`` is uint8 ``[rows, row_bytes]`` of one of :data:`PACKABLE_TYPES`. A block of PQ2_0 and of both Q2_0 is a float16 scale
    and codes of 2 bits, lowest first, that stand for -1, 0, 1 and 2; PTQ1_0 is turned into the same codes.
    """
    rows, group = blocks.shape[0], PACKABLE_TYPES[type_name]
    if type_name == "PTQ1_0":
        packed = blocks.view(rows, -1, 28)
        scales = blocks.view(torch.int16).view(rows, -1, 14)[:, :, 13].contiguous().view(torch.float16)
        return _trits_to_codes(packed[:, :, :26]).view(rows, -1), scales
    # Moved as 16-bit words, which takes a fraction of the time that single bytes do.
    words = blocks.view(torch.int16).view(rows, -1, 1 + group // 8)
    codes = words[:, :, 1:].reshape(rows, -1).view(torch.uint8)
    return codes, words[:, :, 0].contiguous().view(torch.float16)


def _trits_to_codes(stored: torch.Tensor) -> torch.Tensor:
    """uint8 ``[rows, blocks, 32]`` of 2-bit codes from ``[rows, blocks, 26]`` bytes of base-3 digits.

    Digit n of byte b is ``b * 3^n mod 256 * 3 div 256``: a fraction whose digits come out most significant first. Digit t of
    bytes 0 to 15 is element 16t + byte, of bytes 16 to 23 element 80 + 8t + byte - 16, of the last two 120 + 2t + byte - 24.
    """
    # A digit fits no more than 2 bits, so three steps of arithmetic on int16 keep within its range.
    wide = stored.to(torch.int16)
    digits = []
    for _ in range(5):
        wide = wide * 3
        digits.append((wide >> 8).to(torch.uint8))
        wide = wide & 255
    trits = torch.stack(digits, -2)
    first, second, last = trits[..., :16], trits[..., 16:24], trits[..., :4, 24:]
    elements = torch.cat([part.flatten(-2) for part in (first, second, last)], -1)
    quads = elements.unflatten(-1, (32, 4))
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack_planes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 ``[rows, K]`` of planes ``codes [rows, K/4]`` and ``scales [rows, K/group]``."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    values = (codes.unsqueeze(-1) >> shifts & 3).float().sub_(1)
    return values.view(*scales.shape, -1).mul_(scales.float().unsqueeze(-1)).flatten(1)


def _chunks(file: GGUFFile, tensor: GGUFTensor, order: np.ndarray | None, elements: int) -> Iterator[np.ndarray]:
    """Copies of some stored rows after the other, in the order ``order`` of rows, or as they are."""
    rows = file.raw(tensor).reshape(-1, tensor.row_bytes)
    step = max(1, elements // tensor.shape[-1])
    for start in range(0, rows.shape[0], step):
        yield np.array(rows[start : start + step]) if order is None else rows[order[start : start + step]]


def read_planes(
    file: GGUFFile,
    tensor: GGUFTensor,
    group: int,
    device: torch.device | str,
    *,
    rows: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Planes of matrix ``tensor`` on ``device``: codes uint8 ``[N, K/4]``, scales float16 ``[N, K/group]``.

    ``rows`` and ``columns`` list, for each row and column, its place in the file; columns move in whole groups. ``group`` may be
    the half of the stored one. Beside the result some :data:`PLANE_CHUNK_ELEMENTS` elements are held, packed on the host.
    """
    n, k = tensor.shape
    codes = torch.empty((n, k // 4), dtype=torch.uint8, device=device)
    scales = torch.empty((n, k // group), dtype=torch.float16, device=device)
    by_group = None if columns is None else torch.from_numpy(columns[::group] // group).to(device)
    repeats = PACKABLE_TYPES[tensor.type_name] // group
    done = 0
    for chunk in _chunks(file, tensor, rows, PLANE_CHUNK_ELEMENTS):
        some_codes, some_scales = split_planes(torch.from_numpy(chunk).to(device), tensor.type_name)
        if repeats > 1:
            some_scales = some_scales.repeat_interleave(repeats, 1)
        if by_group is not None:
            some_codes = some_codes.unflatten(1, (-1, group // 4))[:, by_group].flatten(1)
            some_scales = some_scales[:, by_group]
        place = slice(done, done + chunk.shape[0])
        codes[place], scales[place] = some_codes, some_scales
        done += chunk.shape[0]
    return codes, scales


def decode_tensor(
    file: GGUFFile,
    tensor: GGUFTensor,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    rows: np.ndarray | None = None,
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Tensor ``tensor`` of ``file`` as a new tensor of ``tensor.shape`` and ``dtype`` on ``device``.

    Decoded on the host through float32 in chunks of about :data:`CHUNK_ELEMENTS` elements, so beside the result only a few
    MiB are held. ``rows`` lists, for each row (all axes but the last), its place in the file; ``convert`` makes of the float32
    rows ``[some, width]``, on ``device``, what they mean. Raises :class:`StartupError` for a type that is not served.
    """
    name = tensor.type_name
    if name not in DECODABLE_TYPES and name not in PACKABLE_TYPES:
        raise StartupError(f"tensor {tensor.name!r} has type {name}, which is not served")
    width = tensor.shape[-1]
    result = torch.empty((tensor.nbytes // tensor.row_bytes, width), dtype=dtype, device=device)
    done = 0
    for chunk in _chunks(file, tensor, rows, CHUNK_ELEMENTS):
        if name in PACKABLE_TYPES:
            values = unpack_planes(*split_planes(torch.from_numpy(chunk), name))
        else:
            # One long row: the decoders work on 16 rows at a time, which is little for narrow ones.
            values = torch.from_numpy(decode_blocks(chunk.reshape(1, -1), tensor.type_id)).view(-1, width)
        result[done : done + len(chunk)] = values if convert is None else convert(values.to(device))
        done += len(chunk)
    return result.view(tensor.shape)
