"""Copies of a GGUF file with other metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from freetoken.loader.gguf import GGUFFile


def rewrite_metadata(source: Path, target: Path, change: dict[str, Any]) -> Path:
    """A copy of ``source`` whose metadata have the values of ``change`` (``None`` removes a key)."""
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
        rows = file.raw(name).reshape(*tensor.shape[:-1], -1)
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        writer.add_tensor(name, rows.view("<f4") if kind == 0 else rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
