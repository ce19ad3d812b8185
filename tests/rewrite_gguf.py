"""Copies of a GGUF file with other metadata or tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_gguf import known_type

from freetoken.loader.gguf import AMBIGUOUS_ID, AMBIGUOUS_TYPES, TENSOR_TYPES, GGUFFile

TYPES = [*TENSOR_TYPES.items(), *((AMBIGUOUS_ID, packing) for packing in AMBIGUOUS_TYPES)]


def rewrite_metadata(
    source: Path, target: Path, change: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]] | None = None
) -> Path:
    """A copy of ``source`` whose metadata have the values of ``change`` (``None`` removes a key), and whose tensors named in ``tensors``
    are stored rows (uint8) of another type, by its name in the loader."""
    file = GGUFFile.open(source)
    metadata = file.metadata | change
    writer = gguf.GGUFWriter(target, metadata["general.architecture"])
    for key, value in metadata.items():
        if value is None or key == "general.architecture":
            continue
        if isinstance(value, (str, bool)):
            (writer.add_string if isinstance(value, str) else writer.add_bool)(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    for name, tensor in file.tensors.items():
        rows, kind = file.raw(name).reshape(*tensor.shape[:-1], -1), tensor.type_id
        packing = tensor.packing
        if tensors and name in tensors:
            rows, wanted = tensors[name]
            kind, packing = next((k, p) for k, p in TYPES if p.name == wanted)
        with known_type(kind, packing.block_elements, packing.block_bytes):
            writer.add_tensor(name, rows.view("<f4") if kind == 0 else rows, raw_dtype=kind)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
