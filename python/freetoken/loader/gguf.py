"""A reader of GGUF files (versions 2 and 3, little endian): metadata, tensor table, raw tensor bytes (torch-free).

Layout of a file: the magic ``GGUF``, version (u32), number of tensors (u64), number of key-value pairs (u64), the pairs,
the tensor table, padding to the alignment, the data section. A string is a u64 length and UTF-8 bytes. A pair is a
key, a value type (u32) and the value. A table row is a name, the number of dimensions (u32), the dimensions (u64 each,
contiguous axis first), the type id (u32) and the offset (u64) from the start of the data section.

The file is untrusted. Every count is held against the bytes that are left before anything is allocated by it, so memory
and time stay proportional to the size of the file, and every fault is a :class:`StartupError` that names the key or
tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from freetoken.errors import StartupError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024
MAX_ARRAY_DEPTH = 4
_SMALLEST_PAIR_BYTES = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorType:
    """How elements are packed: ``block_bytes`` bytes hold ``block_elements`` consecutive elements of a row."""

    name: str
    block_elements: int
    block_bytes: int


# Ids and sizes as published with the format.
TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    142: TensorType("PQ2_0", 128, 34),
    143: TensorType("PTQ1_0", 128, 28),
}
# Two layouts go by this one id; which of them a file holds is told by the distances between its tensors.
AMBIGUOUS_ID = 42
AMBIGUOUS_TYPES = (TensorType("Q2_0", 64, 18), TensorType("Q2_0_G128", 128, 34))
# Ids that other writers use for types of their own: taken for ours only where the sizes fit exactly.
PRIVATE_IDS = (142, 143)

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_SCALAR_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table. ``shape`` is in torch order (contiguous axis last); ``offset`` counts from the start
    of the file, which is number ``part`` of the model's."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    packing: TensorType
    offset: int
    part: int = 0

    @property
    def type_name(self) -> str:
        return self.packing.name

    @property
    def nbytes(self) -> int:
        """Stored size without padding."""
        return stored_bytes(self.shape, self.packing)

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row (the last axis)."""
        return stored_bytes(self.shape[-1:], self.packing)

    def entries(self) -> Iterator[GGUFTensor]:
        """Each entry of the first axis as a tensor of its own, by the same name."""
        shape = self.shape[1:]
        size = stored_bytes(shape, self.packing)
        for index in range(self.shape[0]):
            yield replace(self, shape=shape, offset=self.offset + index * size)


def stored_bytes(shape: tuple[int, ...], packing: TensorType) -> int:
    """Bytes of a tensor of ``shape`` whose rows are whole blocks of ``packing``."""
    return math.prod(shape) // packing.block_elements * packing.block_bytes


class _Cursor:
    """Bounds-checked reads that move forward through ``data``; ``what`` names the thing being read in errors."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise StartupError(f"{self.path}: {what}")

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left:
            self.fail(f"{what} needs {size} bytes, but the file ends after {self.left}; it is truncated or damaged")
        start = self.position
        self.position = start + size
        return self.data[start : self.position]

    def scalar(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("<Q", what)
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def name(self, what: str) -> str:
        length = self.scalar("<Q", what)
        if not 0 < length <= MAX_NAME_BYTES:
            self.fail(f"{what} has {length} bytes; 1 to {MAX_NAME_BYTES} are allowed, so the file is damaged")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")


class GGUFFile:
    """An open GGUF file, or all parts of one that is split (:mod:`freetoken.loader.gguf_split`).

    ``path``, ``version`` and ``metadata`` are of the first part. ``metadata`` maps keys to ``int``, ``float``, ``bool``, ``str``, lists of strings (or of arrays), and numpy arrays for
    arrays of numbers (views of the mapped file). ``tensors`` maps names to rows of the tensor table, in file order.
    """

    def __init__(
        self, path: Path, version: int, metadata: dict[str, Any], tensors: dict[str, GGUFTensor], data: np.memmap
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self._parts = [(path, data)]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map and check the file at ``path``; :class:`StartupError` says what is wrong with it."""
        path = Path(path)
        data = _map(path)
        cursor = _Cursor(path, data.data)
        version, tensor_count, pair_count = _read_header(cursor)
        metadata = _read_metadata(cursor, pair_count)
        tensors = _read_tensors(cursor, tensor_count, _alignment(cursor, metadata))
        return cls(path, version, metadata, tensors, data)

    def with_parts(self, parts: list[GGUFFile], tensors: dict[str, GGUFTensor]) -> GGUFFile:
        """The same metadata, with ``tensors`` that lie in the files ``parts``."""
        whole = GGUFFile(self.path, self.version, self.metadata, tensors, self._parts[0][1])
        whole._parts = [place for part in parts for place in part._parts]
        return whole

    def path_of(self, tensor: str | GGUFTensor) -> Path:
        """The file that a tensor lies in."""
        if isinstance(tensor, str):
            tensor = self.tensors[tensor]
        return self._parts[tensor.part][0]

    def raw(self, tensor: str | GGUFTensor) -> np.ndarray:
        """The stored bytes of a tensor, by its name or its place, as a read-only uint8 view of the mapped file."""
        if isinstance(tensor, str):
            tensor = self.tensors[tensor]
        return self._parts[tensor.part][1][tensor.offset : tensor.offset + tensor.nbytes]


def _map(path: Path) -> np.memmap:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < len(MAGIC) + 20:
                raise StartupError(f"{path}: not a GGUF file, it has only {size} bytes")
            return np.memmap(file, dtype=np.uint8, mode="r")
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    if cursor.take(4, "the magic number") != MAGIC:
        cursor.fail("not a GGUF file, it does not begin with 'GGUF'")
    version = cursor.scalar("<I", "the version")
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            cursor.fail("a big-endian GGUF file; only little-endian ones are served")
        cursor.fail(f"GGUF version {version} is not served; 2 and 3 are")
    tensor_count = cursor.scalar("<Q", "the tensor count")
    pair_count = cursor.scalar("<Q", "the metadata count")
    for count, least, what in (
        (pair_count, _SMALLEST_PAIR_BYTES, "metadata keys"),
        (tensor_count, _SMALLEST_TENSOR_BYTES, "tensors"),
    ):
        if count > cursor.left // least:
            cursor.fail(f"the header announces {count} {what}, more than the file can hold; it is truncated or damaged")
    return version, tensor_count, pair_count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.name(f"the name of metadata key {index}")
        if key in metadata:
            cursor.fail(f"metadata key {shown_name(key)} appears twice")
        kind = cursor.scalar("<I", f"the type of metadata key {shown_name(key)}")
        metadata[key] = _read_value(cursor, kind, key, 0)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    what = f"the value of metadata key {shown_name(key)}"
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, key, depth)
    layout = _SCALAR_FORMATS.get(kind)
    if layout is None:
        cursor.fail(f"metadata key {shown_name(key)} has the unknown value type {kind}")
    value = cursor.scalar(layout, what)
    if kind == _BOOL:
        if value > 1:
            cursor.fail(f"{what} is a boolean holding {value}")
        return bool(value)
    return value


def _read_array(cursor: _Cursor, key: str, depth: int) -> Any:
    what = f"the array of metadata key {shown_name(key)}"
    if depth >= MAX_ARRAY_DEPTH:
        cursor.fail(f"{what} is nested deeper than {MAX_ARRAY_DEPTH} levels")
    kind = cursor.scalar("<I", what)
    count = cursor.scalar("<Q", what)
    dtype = _SCALARS.get(kind)
    if dtype is not None:
        values = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype=dtype)
        if kind != _BOOL:
            return values
        if values.size and values.max() > 1:
            cursor.fail(f"{what} holds a boolean other than 0 and 1")
        return values.view(np.bool_)
    if kind not in (_STRING, _ARRAY):
        cursor.fail(f"{what} has the unknown element type {kind}")
    least = 8 if kind == _STRING else 12
    if count > cursor.left // least:
        cursor.fail(f"{what} announces {count} elements, more than the file can hold; it is truncated or damaged")
    if kind == _ARRAY:
        return [_read_array(cursor, key, depth + 1) for _ in range(count)]
    return _read_strings(cursor, count, what)


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    # Vocabularies hold hundreds of thousands of strings, so this loop works on local names.
    data, position, end = cursor.data, cursor.position, len(cursor.data)
    unpack = _U64.unpack_from
    strings: list[str] = []
    for index in range(count):
        if position + 8 > end:
            cursor.fail(f"element {index} of {what} lies beyond the end of the file; it is truncated or damaged")
        start = position + 8
        position = start + unpack(data, position)[0]
        if position > end:
            cursor.fail(f"element {index} of {what} ends beyond the end of the file; it is truncated or damaged")
        try:
            strings.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError:
            cursor.fail(f"element {index} of {what} is not valid UTF-8")
    cursor.position = position
    return strings


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 2**20 or value & (value - 1):
        cursor.fail(f"metadata key 'general.alignment' must be a power of two up to 1048576, not {_brief(value)}")
    return value


def _brief(value: Any, most: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def shown_name(name: str) -> str:
    """A key or a tensor's name in quotes, cut to 60 characters: of a damaged file it may be anything."""
    return _brief(name, 60)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table as it is stored: ``offset`` counts from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    rows: dict[str, _Row] = {}
    for index in range(count):
        row = _read_tensor_row(cursor, index)
        if row.name in rows:
            cursor.fail(f"tensor {shown_name(row.name)} appears twice")
        if row.offset % alignment:
            cursor.fail(
                f"tensor {shown_name(row.name)} lies at offset {row.offset}, not a multiple of the alignment {alignment}"
            )
        rows[row.name] = row
    data_start = -(-cursor.position // alignment) * alignment
    file_size = len(cursor.data)
    spaces = _Spaces(list(rows.values()), file_size - data_start, alignment)
    types = {**TENSOR_TYPES, AMBIGUOUS_ID: _ambiguous_type(cursor, list(rows.values()), spaces)}
    placed: dict[str, GGUFTensor] = {}
    for row in rows.values():
        packing = types[row.type_id]
        if row.type_id in PRIVATE_IDS and not spaces.fit(row, packing):
            cursor.fail(
                f"tensor {shown_name(row.name)} has type id {row.type_id}, but not the size of a {packing.name}: the file is damaged, or the id means another type there"
            )
        tensor = GGUFTensor(row.name, row.shape, row.type_id, packing, data_start + row.offset)
        if row.shape[-1] % packing.block_elements:
            cursor.fail(
                f"tensor {shown_name(row.name)} has rows of {row.shape[-1]} elements, not a multiple of the {packing.name} block of {packing.block_elements}"
            )
        if tensor.offset + tensor.nbytes > file_size:
            cursor.fail(
                f"tensor {shown_name(row.name)} ends at byte {tensor.offset + tensor.nbytes}, but the file has {file_size}; it is truncated or damaged"
            )
        placed[row.name] = tensor
    in_order = sorted(placed.values(), key=lambda row: row.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.nbytes > after.offset:
            cursor.fail(f"tensors {shown_name(before.name)} and {shown_name(after.name)} overlap")
    return placed


def _read_tensor_row(cursor: _Cursor, index: int) -> _Row:
    name = cursor.name(f"the name of tensor {index}")
    what = f"the table entry of tensor {shown_name(name)}"
    dimensions = cursor.scalar("<I", what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail(f"tensor {shown_name(name)} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    shape = tuple(cursor.scalar("<Q", what) for _ in range(dimensions))[::-1]
    type_id = cursor.scalar("<I", what)
    offset = cursor.scalar("<Q", what)
    if type_id not in TENSOR_TYPES and type_id != AMBIGUOUS_ID:
        cursor.fail(f"tensor {shown_name(name)} has the unknown type id {type_id}")
    if math.prod(shape) == 0:
        cursor.fail(f"tensor {shown_name(name)} has an empty dimension in its shape {list(shape)}")
    return _Row(name, shape, type_id, offset)


class _Spaces:
    """The bytes from each tensor to the next one, or to the end of the file."""

    def __init__(self, rows: list[_Row], data_bytes: int, alignment: int) -> None:
        self._alignment = alignment
        self._end = data_bytes
        offsets = sorted({row.offset for row in rows})
        self._next = dict(pairwise([*offsets, data_bytes]))

    def fit(self, row: _Row, packing: TensorType) -> bool:
        """Whether ``row`` is of whole blocks of ``packing`` and has exactly the room that these need."""
        if row.shape[-1] % packing.block_elements:
            return False
        size = stored_bytes(row.shape, packing)
        space = self._next[row.offset] - row.offset
        padded = -(-size // self._alignment) * self._alignment
        return space == padded or (space == size and row.offset + size == self._end)


def _ambiguous_type(cursor: _Cursor, rows: list[_Row], spaces: _Spaces) -> TensorType:
    """The one layout of :data:`AMBIGUOUS_TYPES` that fits all tensors with :data:`AMBIGUOUS_ID`."""
    asked = [row for row in rows if row.type_id == AMBIGUOUS_ID]
    if not asked:
        return AMBIGUOUS_TYPES[0]
    unfit = {kind: next((row for row in asked if not spaces.fit(row, kind)), None) for kind in AMBIGUOUS_TYPES}
    fitting = [kind for kind, row in unfit.items() if row is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        cursor.fail(
            f"tensor {shown_name(asked[0].name)} has type id {AMBIGUOUS_ID}, and the offsets fit groups of 64 as well as of 128, so which they are cannot be told"
        )
    row = unfit[AMBIGUOUS_TYPES[0]]
    assert row is not None
    cursor.fail(
        f"tensor {shown_name(row.name)} has type id {AMBIGUOUS_ID}, but the offsets fit neither groups of 64 nor of 128 throughout the file"
    )
