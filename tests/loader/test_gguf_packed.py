"""2-bit types: planes and values against scalar Python, layouts told apart, rows and columns moved whole."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import PACKED_TYPES, finish, known_type, pack_rows

from freetoken.errors import StartupError
from freetoken.kernels.pq2_gemv import PQ2Weight
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.names import PACKABLE_TYPES
from freetoken.loader.quant import decode_tensor, read_planes, split_planes, unpack_planes

NAMES = {"q2_0": "Q2_0", "q2_0_g128": "Q2_0_G128", "pq2_0": "PQ2_0", "ptq1_0": "PTQ1_0"}


def by_hand(block: bytes, name: str) -> list[float]:
    """Values of one block, element by element, in order."""
    if name == "PTQ1_0":
        found: dict[int, int] = {}
        for at, byte in enumerate(block[:26]):
            first, step, digits = (at, 16, 5) if at < 16 else (80 + at - 16, 8, 5) if at < 24 else (120 + at - 24, 2, 4)
            for n in range(digits):
                assert first + step * n not in found
                found[first + step * n] = byte * 3**n % 256 * 3 // 256
        return [(found[element] - 1) * struct.unpack_from("<e", block, 26)[0] for element in range(128)]
    scale = struct.unpack_from("<e", block, 0)[0]
    return [((block[2 + i // 4] >> 2 * (i % 4) & 3) - 1) * scale for i in range(PACKABLE_TYPES[name])]


def random_rows(quant: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random bytes with finite scales, uint8 ``[rows, row_bytes]``; of PTQ1_0 every byte is one that its encoder writes."""
    _, elements, size = PACKED_TYPES[quant]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * width // elements, size), dtype=np.uint8)
    scales = generator.standard_normal((len(blocks), 1)).astype("<f2").view(np.uint8)
    at = slice(26, 28) if quant == "ptq1_0" else slice(0, 2)
    blocks[:, at] = scales
    return blocks.reshape(rows, -1)


def file_of(path: Path, quant: str, tensors: dict[str, np.ndarray]) -> GGUFFile:
    kind, elements, size = PACKED_TYPES[quant]
    writer = gguf.GGUFWriter(path, "llama")
    with known_type(kind, elements, size):
        for name, rows in tensors.items():
            writer.add_tensor(name, rows, raw_dtype=kind)  # type: ignore[arg-type]
    finish(writer)
    return GGUFFile.open(path)


def test_the_published_vector() -> None:
    block = bytes.fromhex("003CE4") + bytes(31)
    assert by_hand(block, "PQ2_0")[:4] == [-1.0, 0.0, 1.0, 2.0]
    codes, scales = split_planes(torch.frombuffer(bytearray(block), dtype=torch.uint8)[None], "PQ2_0")
    assert unpack_planes(codes, scales)[0, :5].tolist() == [-1.0, 0.0, 1.0, 2.0, -1.0] and scales.tolist() == [[1.0]]


@pytest.mark.parametrize("quant", PACKED_TYPES)
def test_planes_and_values_match_scalar_python(quant: str, tmp_path: Path) -> None:
    packed = random_rows(quant, 7, 384, seed=3)
    size, name = PACKED_TYPES[quant][2], NAMES[quant]
    wanted = torch.tensor(
        [[v for at in range(0, row.size, size) for v in by_hand(row[at : at + size].tobytes(), name)] for row in packed]
    )
    file = file_of(tmp_path / "t.gguf", quant, {"t": packed})
    tensor = file.tensors["t"]
    assert tensor.type_name == name
    assert torch.equal(decode_tensor(file, tensor, torch.float32), wanted)
    assert torch.equal(decode_tensor(file, tensor, torch.bfloat16), wanted.bfloat16())
    group = PACKABLE_TYPES[name]
    codes, scales = read_planes(file, tensor, group, "cpu")
    assert (codes.shape, scales.shape) == ((7, 96), (7, 384 // group))
    assert torch.equal(PQ2Weight(codes, scales, group).dequantise(), wanted)
    assert torch.equal(unpack_planes(codes, scales), wanted)
    half_codes, half_scales = read_planes(file, tensor, 64, "cpu")
    assert torch.equal(PQ2Weight(half_codes, half_scales, 64).dequantise(), wanted)


@pytest.mark.parametrize("quant", PACKED_TYPES)
def test_a_flipped_byte_shows(quant: str) -> None:
    packed, name = torch.from_numpy(random_rows(quant, 1, 128, seed=5)), NAMES[quant]
    before = unpack_planes(*split_planes(packed, name))
    for at in range(packed.shape[1]):
        changed = packed.clone()
        changed[0, at] ^= 0x15
        assert not torch.equal(unpack_planes(*split_planes(changed, name)), before), at


def test_all_bytes_of_trits_come_back() -> None:
    """Every number of five digits survives, digit by digit, whatever the byte that stands for it."""
    for number in range(243):
        digits = [number // 3 ** (4 - n) % 3 for n in range(5)]
        byte = (256 * number + 242) // 243
        assert [byte * 3**n % 256 * 3 // 256 for n in range(5)] == digits


def test_ternary_bytes_and_codes_hold_the_same(tmp_path: Path) -> None:
    """What one type packs, so does the other, where no value is twice the scale."""
    values = np.random.default_rng(1).choice([-1, 0, 1], (5, 256), p=[0.4, 0.2, 0.4]).astype(np.float32)
    planes = []
    for quant in ("pq2_0", "ptq1_0"):
        file = file_of(tmp_path / f"{quant}.gguf", quant, {"t": pack_rows(values, quant)})
        planes.append(read_planes(file, file.tensors["t"], 128, "cpu"))
    (codes, scales), (others, other_scales) = planes
    assert not ((codes[..., None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3) == 3).any()
    assert torch.equal(codes, others) and torch.equal(scales, other_scales)


@pytest.mark.parametrize("quant", PACKED_TYPES)
@pytest.mark.parametrize("elements", [1, 999, 2**20])
def test_rows_and_columns_are_moved(quant: str, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.loader.quant.PLANE_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr("freetoken.loader.quant.CHUNK_ELEMENTS", elements)
    file = file_of(tmp_path / "t.gguf", quant, {"t": random_rows(quant, 6, 512)})
    tensor, whole = file.tensors["t"], decode_tensor(file, file.tensors["t"], torch.float32)
    rows, heads = np.array([3, 0, 5, 1, 4, 2]), np.array([2, 0, 3, 1])
    columns = (heads[:, None] * 128 + np.arange(128)).reshape(-1)
    wanted = whole[rows][:, columns]
    codes, scales = read_planes(file, tensor, 64, "cpu", rows=rows, columns=columns)
    assert torch.equal(unpack_planes(codes, scales), wanted)
    assert torch.equal(decode_tensor(file, tensor, torch.float32, rows=rows, convert=lambda v: v[:, columns]), wanted)


@pytest.mark.parametrize("quant", ["q2_0", "q2_0_g128"])
def test_the_layout_is_told_by_the_distances(quant: str, tmp_path: Path) -> None:
    """All tensors count: one alone may be so small that both layouts take the same room."""
    tensors = {
        "small": random_rows(quant, 1, 128),
        "large": random_rows(quant, 40, 512),
        "last": random_rows(quant, 1, 128),
    }
    file = file_of(tmp_path / "t.gguf", quant, tensors)
    assert {tensor.type_name for tensor in file.tensors.values()} == {NAMES[quant]}
    assert [file.raw(name).tobytes() for name in tensors] == [rows.tobytes() for rows in tensors.values()]
    with pytest.raises(StartupError, match=r"'small' has type id 42.*cannot be told"):
        file_of(tmp_path / "u.gguf", quant, {"small": tensors["small"]})


def test_a_padded_and_an_unpadded_end_are_both_an_end(tmp_path: Path) -> None:
    file_of(tmp_path / "t.gguf", "pq2_0", {"t": random_rows("pq2_0", 3, 128)})
    data = (tmp_path / "t.gguf").read_bytes()
    end = GGUFFile.open(tmp_path / "t.gguf").tensors["t"].offset + 102
    for cut in (data[:end], data[:end] + bytes(-end % 32)):
        (tmp_path / "u.gguf").write_bytes(cut)
        assert GGUFFile.open(tmp_path / "u.gguf").tensors["t"].nbytes == 102
    for cut in (data[: end - 1], data[:end] + b"\0", data[:end] + bytes(64)):
        (tmp_path / "u.gguf").write_bytes(cut)
        with pytest.raises(StartupError, match="'t' has type id 142, but not the size"):
            GGUFFile.open(tmp_path / "u.gguf")
