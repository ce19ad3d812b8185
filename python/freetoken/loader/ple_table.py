"""Where the tables of per-layer embeddings lie in a checkpoint, and the hash constants beside them (torch-free).

In safetensors the table of a layer is ``ple.ple_embedding.ngram_embedding.shard_<i>.weight``, equal shards to be put one after
another by their numbers, with one scale for an fp8 table; in a GGUF it is one tensor. Nothing is read here but constants and
scales. Every fault is a :class:`StartupError` that names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.safetensors import StoredTensor
from freetoken.models.ple_config import HashConstants, PleConfig

EMBEDDING = ".ple.ple_embedding."
GGUF_TABLE = "per_layer_token_embd.weight"
_SHARD = re.compile(r"ngram_embedding\.shard_(\d{1,9})\.weight")
_WHOLE, _SCALE = "ngram_embedding.weight", "ngram_embedding.weight_scale"
_SCALES = (_SCALE, "ngram_embedding.weight_scale_inv")
# What files call the types of a table: the name of its row format.
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f8_e4m3"}
_GGUF_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "IQ4_NL": "iq4_nl", "Q4_0": "q4_0", "Q8_0": "q8_0"}
_SCALE_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
}
_BUFFERS = {
    "layer_multipliers": "multipliers",
    "ngram_heads_vocab_sizes": "vocab_sizes",
    "ngram_heads_offsets": "offsets",
}


@dataclass(frozen=True)
class Shard:
    """``rows`` rows from byte ``offset`` of a file on."""

    path: Path
    offset: int
    rows: int


@dataclass(frozen=True)
class TableSource:
    """One table: ``rows`` rows of ``width`` elements in the row format ``format`` (``row_bytes`` each), the shards in order of
    rows; stored values are to be multiplied by ``scale``."""

    format: str
    rows: int
    width: int
    row_bytes: int
    scale: float
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def belongs_to_table(name: str) -> bool:
    """Whether tensor ``name`` is part of a table or its hash: none of a model's ordinary weights."""
    return EMBEDDING in name


def find_tables(stored: Mapping[str, StoredTensor], config: PleConfig) -> list[TableSource]:
    """The table of each layer of ``config``, from a checkpoint's tensors by their canonical names.

    Constants that the checkpoint stores are held against the configuration's.
    """
    return [_find_table(stored, config, ordinal) for ordinal in range(len(config.layers))]


def _find_table(stored: Mapping[str, StoredTensor], config: PleConfig, ordinal: int) -> TableSource:
    prefix = f"model.layers.{config.layers[ordinal]}{EMBEDDING}"
    mine = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    _check_constants(mine, config, ordinal, prefix)
    shards = _shards(mine, prefix)
    rows, width = config.table_rows(ordinal), config.row_width
    first = shards[0]
    for tensor in shards:
        if tensor.dtype not in _FORMATS:
            raise StartupError(
                f"{tensor.path}: tensor {tensor.name!r} has dtype {tensor.dtype}, which a table cannot have"
            )
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise StartupError(
                f"{tensor.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, but rows of {width} are needed"
            )
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise StartupError(
                f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, the first shard {first.dtype} {list(first.shape)}"
            )
    found = sum(tensor.shape[0] for tensor in shards)
    if found != rows:
        raise StartupError(
            f"{prefix}ngram_embedding has {found} rows in {len(shards)} shards, but the config asks for {rows}"
        )
    return TableSource(
        format=_FORMATS[first.dtype],
        rows=rows,
        width=width,
        row_bytes=first.nbytes // first.shape[0],
        scale=_scale(mine, first, prefix),
        shards=tuple(Shard(tensor.path, tensor.offset, tensor.shape[0]) for tensor in shards),
    )


def _shards(mine: Mapping[str, StoredTensor], prefix: str) -> list[StoredTensor]:
    """The pieces of a table in the order of their numbers, which the names alone are not in."""
    numbered: dict[int, StoredTensor] = {}
    for name, tensor in mine.items():
        match = _SHARD.fullmatch(name)
        if match is not None:
            number = int(match[1])
            if number in numbered:
                raise StartupError(
                    f"{tensor.path}: tensors {numbered[number].name!r} and {tensor.name!r} are the same shard"
                )
            numbered[number] = tensor
        elif name != _WHOLE and name not in _SCALES and name not in _BUFFERS:
            raise StartupError(f"{tensor.path}: tensor {tensor.name!r} is not part of a table of n-grams")
    if _WHOLE in mine:
        if numbered:
            raise StartupError(f"{mine[_WHOLE].path}: {prefix}{_WHOLE} is there both whole and in shards")
        return [mine[_WHOLE]]
    if not numbered:
        raise StartupError(f"the checkpoint lacks tensor {prefix}ngram_embedding.shard_0.weight")
    for number in range(max(numbered) + 1):
        if number not in numbered:
            raise StartupError(
                f"the checkpoint lacks tensor {prefix}ngram_embedding.shard_{number}.weight, though it has shard {max(numbered)}"
            )
    return [numbered[number] for number in range(len(numbered))]


def _scale(mine: Mapping[str, StoredTensor], first: StoredTensor, prefix: str) -> float:
    tensor = next((mine[name] for name in _SCALES if name in mine), None)
    if tensor is None:
        if first.dtype.startswith("F8"):
            raise StartupError(f"the checkpoint lacks {prefix}{_SCALE}, without which its fp8 table cannot be read")
        return 1.0
    dtype = _SCALE_TYPES.get(tensor.dtype)
    if dtype is None or tensor.nbytes != dtype.itemsize:
        raise StartupError(
            f"{tensor.path}: tensor {tensor.name!r} must be one float, not {tensor.dtype} {list(tensor.shape)}"
        )
    raw = _read(tensor, dtype)
    if tensor.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    value = float(raw[0])
    if not 0 < value < float("inf"):
        raise StartupError(f"{tensor.path}: tensor {tensor.name!r} holds {value}, which is no scale")
    return value


def _check_constants(mine: Mapping[str, StoredTensor], config: PleConfig, ordinal: int, prefix: str) -> None:
    values: dict[str, tuple[int, ...]] = {}
    for name, part in _BUFFERS.items():
        tensor = mine.get(name)
        if tensor is None:
            raise StartupError(f"the checkpoint lacks tensor {prefix}{name}")
        if tensor.dtype != "I64" or len(tensor.shape) != 1 or tensor.nbytes > 2**20:
            raise StartupError(
                f"{tensor.path}: tensor {tensor.name!r} must be a few int64 numbers, not {tensor.dtype} {list(tensor.shape)}"
            )
        values[part] = tuple(int(value) for value in _read(tensor, np.dtype("<i8")))
    config.check_constants(ordinal, HashConstants(**values), prefix.rstrip("."))


def _read(tensor: StoredTensor, dtype: np.dtype[Any]) -> np.ndarray:
    try:
        return np.fromfile(tensor.path, dtype=dtype, count=tensor.nbytes // dtype.itemsize, offset=tensor.offset)
    except OSError as error:
        raise StartupError(f"{tensor.path}: cannot be read: {error.strerror or error}") from None


def find_gguf_table(file: GGUFFile, config: PleConfig) -> TableSource:
    """The one table of a GGUF: a tensor of all rows, in a type that rows are looked up in."""
    if len(config.layers) != 1:
        raise StartupError(f"{file.path}: {len(config.layers)} layers have n-gram tables, but a GGUF file holds one")
    tensor = file.tensors.get(GGUF_TABLE)
    if tensor is None:
        raise StartupError(f"{file.path} lacks tensor {GGUF_TABLE!r}")
    if tensor.type_name not in _GGUF_FORMATS:
        raise StartupError(
            f"{file.path_of(tensor)}: tensor {GGUF_TABLE!r} has type {tensor.type_name}, which a table cannot have; {', '.join(_GGUF_FORMATS)} it can"
        )
    shape = (config.table_rows(0), config.row_width)
    if tensor.shape != shape:
        raise StartupError(
            f"{file.path_of(tensor)}: tensor {GGUF_TABLE!r} has shape {list(tensor.shape)}, but the config asks for {list(shape)}"
        )
    shard = Shard(file.path_of(tensor), tensor.offset, shape[0])
    return TableSource(_GGUF_FORMATS[tensor.type_name], *shape, tensor.row_bytes, 1.0, (shard,))
