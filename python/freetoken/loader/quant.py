"""Decoding of stored GGUF tensors to plain torch tensors, a few rows at a time."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile, GGUFTensor
from freetoken.loader.names import DECODABLE_TYPES

CHUNK_ELEMENTS = 2**17


def decode_blocks(blocks: np.ndarray, type_id: int) -> np.ndarray:
    """Decode packed rows.

    ``blocks`` is uint8 ``[rows, row_bytes]``; the result is float32 ``[rows, row_elements]``. Block layouts are those
    of the ``gguf`` package, whose decoders do the work.
    """
    return dequantize(blocks, GGMLQuantizationType(type_id))


def decode_tensor(file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    """Tensor ``tensor`` of ``file`` as a new CPU tensor of ``tensor.shape`` and ``dtype``.

    Decoded through float32 in chunks of about :data:`CHUNK_ELEMENTS` elements, so beside the result only a few MiB are
    held. Raises :class:`StartupError` for a type that is not served.
    """
    if tensor.type_name not in DECODABLE_TYPES:
        raise StartupError(f"tensor {tensor.name!r} has type {tensor.type_name}, which is not served")
    rows = file.raw(tensor.name).reshape(-1, tensor.row_bytes)
    width = tensor.shape[-1]
    result = torch.empty((rows.shape[0], width), dtype=dtype)
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows.shape[0], step):
        # One long row: the decoders work on 16 rows at a time, which is little for narrow ones.
        chunk = np.array(rows[start : start + step]).reshape(1, -1)
        result[start : start + step] = torch.from_numpy(decode_blocks(chunk, tensor.type_id)).view(-1, width)
    return result.view(tensor.shape)
