"""Reading of safetensors headers and sharded indexes (torch-free).

A file is a u64 header length (little endian), a JSON header mapping names to ``dtype``, ``shape`` and ``data_offsets``
(from the end of the header), and the data. A sharded folder has ``model.safetensors.index.json`` whose ``weight_map``
names each tensor's file. Every fault is a :class:`StartupError`.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from freetoken.errors import StartupError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FP8_DTYPE = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: ``offset`` in bytes from the start of ``path``."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; :class:`StartupError` when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StartupError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path}: must hold a JSON object")
    return value


def index_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the safetensors in ``folder``, by name, in file and offset order."""
    index = folder / INDEX_NAME
    if index.exists():
        return _sharded(folder, read_json(index))
    if (folder / SINGLE_NAME).exists():
        return read_header(folder / SINGLE_NAME)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}")
    if len(files) > 1:
        raise StartupError(f"{folder} has {len(files)} safetensors files but no {INDEX_NAME}")
    return read_header(files[0])


def _sharded(folder: Path, index: dict[str, Any]) -> dict[str, StoredTensor]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StartupError(f"{folder / INDEX_NAME}: weight_map must map tensor names to file names")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise StartupError(f"{folder / INDEX_NAME}: {file!r} is not a plain file name")
        if not (folder / file).exists():
            raise StartupError(f"{folder} lacks {file}, which {INDEX_NAME} names")
        held = read_header(folder / file)
        for name, owner in weight_map.items():
            if owner == file and name not in held:
                raise StartupError(f"{folder / file} lacks tensor {name!r}, which {INDEX_NAME} places there")
        tensors.update((name, tensor) for name, tensor in held.items() if weight_map.get(name) == file)
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in offset order, all checked to lie inside it and not to overlap."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            lead = file.read(8)
            length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                _fail(path, "not a safetensors file, its header length is impossible")
            if 8 + length > size:
                _fail(path, f"is truncated: the header alone needs {8 + length} bytes, the file has {size}")
            text = file.read(length)
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        _fail(path, "its header is not valid JSON")
    if not isinstance(header, dict):
        _fail(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    rows = [_row(path, name, entry, 8 + length) for name, entry in header.items()]
    rows.sort(key=lambda row: (row.offset, row.nbytes))
    for row in rows:
        if row.offset + row.nbytes > size:
            _fail(
                path, f"is truncated: tensor {row.name!r} ends at byte {row.offset + row.nbytes}, the file has {size}"
            )
    for before, after in pairwise(rows):
        if before.offset + before.nbytes > after.offset:
            _fail(path, f"tensors {before.name!r} and {after.name!r} overlap")
    return {row.name: row for row in rows}


def _row(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        _fail(path, f"tensor {name!r} lacks a valid shape or data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _fail(path, f"tensor {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        _fail(path, f"tensor {name!r} has {offsets[1] - offsets[0]} bytes, but its shape and dtype need {nbytes}")
    return StoredTensor(name, path, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(entry) is int and 0 <= entry < 2**63 for entry in value)
    )


def _fail(path: Path, problem: str) -> NoReturn:
    raise StartupError(f"{path}: {problem}")
