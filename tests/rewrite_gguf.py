"""Copies of a GGUF file with other metadata or tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_gguf import known_type

from freetoken.loader.gguf import AMBIGUOUS_ID, AMBIGUOUS_TYPES, TENSOR_TYPES, GGUFFile

TYPES = [*TENSOR_TYPES.items(), *((AMBIGUOUS_ID, packing) for packing in AMBIGUOUS_TYPES)]


KINDS = {
    "uint32": gguf.GGUFValueType.UINT32,
    "int32": gguf.GGUFValueType.INT32,
    "uint64": gguf.GGUFValueType.UINT64,
    "int64": gguf.GGUFValueType.INT64,
    "float32": gguf.GGUFValueType.FLOAT32,
    "bool": gguf.GGUFValueType.BOOL,
}


def rewrite_metadata(
    source: Path,
    target: Path,
    change: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, str] | None] | None = None,
) -> Path:
    """A copy of ``source`` whose metadata have the values of ``change`` (``None`` removes a key), and whose tensors named in ``tensors``
    are stored rows (uint8) of another type, by its name in the loader; ``None`` removes a tensor, an unknown name adds one."""
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
        elif isinstance(value, np.ndarray):
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, sub_type=KINDS[value.dtype.name])
        else:
            writer.add_array(key, value)
    change_of = tensors or {}
    for name in dict.fromkeys((*file.tensors, *change_of)):
        other = change_of.get(name)
        if other is not None:
            rows, wanted = other
            kind, packing = next((k, p) for k, p in TYPES if p.name == wanted)
        elif name in change_of:
            continue
        else:
            tensor = file.tensors[name]
            rows, kind, packing = file.raw(name).reshape(*tensor.shape[:-1], -1), tensor.type_id, tensor.packing
        with known_type(kind, packing.block_elements, packing.block_bytes):
            writer.add_tensor(name, rows.view("<f4") if kind == 0 else rows, raw_dtype=kind)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
