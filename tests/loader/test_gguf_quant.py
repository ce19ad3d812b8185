"""Every served GGUF type against a decoder of scalar Python, on random blocks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from iq_scalar import IQ_SCALAR

from freetoken.errors import StartupError
from freetoken.loader.gguf import TENSOR_TYPES, GGUFFile
from freetoken.loader.names import DECODABLE_TYPES
from freetoken.loader.quant import CHUNK_ELEMENTS, decode_blocks, decode_tensor

TYPE_IDS = {kind.name: type_id for type_id, kind in TENSOR_TYPES.items()}


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def low_high(block: bytes, at: int, index: int) -> int:
    """4-bit code of element ``index`` of 32: low nibbles are the first half."""
    return block[at + index % 16] >> (4 * (index // 16)) & 15


def f32(block: bytes) -> list[float]:
    return list(struct.unpack("<f", block))


def f16(block: bytes) -> list[float]:
    return [half(block, 0)]


def bf16(block: bytes) -> list[float]:
    return list(struct.unpack("<f", b"\0\0" + block))


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * code for code in struct.unpack_from("<32b", block, 2)]


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (low_high(block, 2, i) - 8) for i in range(32)]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * low_high(block, 4, i) + half(block, 2) for i in range(32)]


def fifth_bit(block: bytes, at: int, index: int) -> int:
    return struct.unpack_from("<I", block, at)[0] >> index & 1


def q5_0(block: bytes) -> list[float]:
    return [half(block, 0) * ((low_high(block, 6, i) | fifth_bit(block, 2, i) << 4) - 16) for i in range(32)]


def q5_1(block: bytes) -> list[float]:
    return [half(block, 0) * (low_high(block, 8, i) | fifth_bit(block, 4, i) << 4) + half(block, 2) for i in range(32)]


def two_bits(block: bytes, at: int, i: int) -> int:
    return block[at + 32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3


def q2_k(block: bytes) -> list[float]:
    scale, least = half(block, 80), half(block, 82)
    return [scale * (block[i // 16] & 15) * two_bits(block, 16, i) - least * (block[i // 16] >> 4) for i in range(256)]


def q3_k(block: bytes) -> list[float]:
    values = []
    for i in range(256):
        s = i // 16
        low = block[96 + s % 8] >> 4 * (s // 8) & 15
        high = block[96 + 8 + s % 4] >> 2 * (s // 4) & 3
        code = two_bits(block, 32, i) - (0 if block[i % 32] >> (i // 32) & 1 else 4)
        values.append(half(block, 108) * ((low | high << 4) - 32) * code)
    return values


def scale_and_least(block: bytes, s: int) -> tuple[int, int]:
    packed = block[4:16]
    if s < 4:
        return packed[s] & 63, packed[s + 4] & 63
    return packed[s + 4] & 15 | packed[s - 4] >> 6 << 4, packed[s + 4] >> 4 | packed[s] >> 6 << 4


def k_nibble(block: bytes, at: int, i: int) -> int:
    return block[at + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15


def q4_k(block: bytes) -> list[float]:
    values = []
    for i in range(256):
        scale, least = scale_and_least(block, i // 32)
        values.append(half(block, 0) * scale * k_nibble(block, 16, i) - half(block, 2) * least)
    return values


def q5_k(block: bytes) -> list[float]:
    values = []
    for i in range(256):
        scale, least = scale_and_least(block, i // 32)
        code = k_nibble(block, 48, i) | (block[16 + i % 32] >> (i // 32) & 1) << 4
        values.append(half(block, 0) * scale * code - half(block, 2) * least)
    return values


def q6_k(block: bytes) -> list[float]:
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        low = block[64 * part + within % 64] >> 4 * (within // 64) & 15
        high = block[128 + 32 * part + i % 32] >> 2 * (within // 32) & 3
        scale = struct.unpack_from("<b", block, 192 + i // 16)[0]
        values.append(half(block, 208) * scale * ((low | high << 4) - 32))
    return values


SCALAR: dict[str, tuple[Callable[[bytes], list[float]], tuple[int, ...]]] = {
    "F32": (f32, ()),
    "F16": (f16, (0,)),
    "BF16": (bf16, ()),
    "Q8_0": (q8_0, (0,)),
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q5_0": (q5_0, (0,)),
    "Q5_1": (q5_1, (0, 2)),
    "Q2_K": (q2_k, (80, 82)),
    "Q3_K": (q3_k, (108,)),
    "Q4_K": (q4_k, (0, 2)),
    "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
    **IQ_SCALAR,
}


def random_rows(name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Random packed rows whose half-precision scales, at the offsets of ``SCALAR``, are finite."""
    kind = TENSOR_TYPES[TYPE_IDS[name]]
    generator = np.random.default_rng(seed)
    if name == "F32":
        return generator.standard_normal((rows, blocks)).astype("<f4").view(np.uint8)
    if name == "BF16":
        return (generator.standard_normal((rows, blocks)).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    packed = generator.integers(0, 256, (rows, blocks, kind.block_bytes), dtype=np.uint8)
    for at in SCALAR[name][1]:
        scales = generator.standard_normal((rows, blocks, 1)).astype("<f2")
        packed[:, :, at : at + 2] = scales.view(np.uint8)
    if (
        name == "IQ1_M"
    ):  # the scale is spread over the high nibbles of four words, the last with its sign and high exponent
        packed[:, :, 55] = packed[:, :, 55] & 0x8F | 0x30
    if name == "MXFP4":  # an exponent
        packed[:, :, 0] = generator.integers(100, 150, (rows, blocks))
    return packed.reshape(rows, -1)


def decode_by_hand(name: str, packed: np.ndarray) -> np.ndarray:
    size = TENSOR_TYPES[TYPE_IDS[name]].block_bytes
    rows = []
    for line in packed:
        data = line.tobytes()
        rows.append([v for at in range(0, len(data), size) for v in SCALAR[name][0](data[at : at + size])])
    return np.array(rows, dtype=np.float64).astype(np.float32)


def test_every_served_type_is_checked() -> None:
    assert set(SCALAR) == DECODABLE_TYPES


@pytest.mark.parametrize("name", SCALAR)
def test_decoding_matches_scalar_python(name: str) -> None:
    packed = random_rows(name, rows=19, blocks=3, seed=TYPE_IDS[name])
    ours, expected = decode_blocks(packed, TYPE_IDS[name]), decode_by_hand(name, packed)
    assert ours.dtype == np.float32 and ours.shape == expected.shape
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("name", SCALAR)
def test_a_flipped_byte_shows(name: str) -> None:
    packed = random_rows(name, rows=1, blocks=1, seed=TYPE_IDS[name])
    before = decode_blocks(packed, TYPE_IDS[name])
    for at in range(packed.shape[1]):
        changed = packed.copy()
        changed[0, at] ^= 0x15
        assert not np.array_equal(decode_blocks(changed, TYPE_IDS[name]), before), at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["F32", "F16", "Q4_1", "Q6_K"])
def test_tensor_is_decoded_in_chunks(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = random_rows(name, rows=14, blocks=2, seed=5)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    kind = gguf.GGMLQuantizationType[name]
    writer.add_tensor("t", packed.reshape(2, 7, -1), raw_dtype=kind) if kind > 1 else writer.add_tensor(
        "t", packed.view("<f4" if name == "F32" else "<f2").reshape(2, 7, -1)
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "one.gguf")
    expected = torch.from_numpy(decode_by_hand(name, packed)).to(dtype).view(file.tensors["t"].shape)
    assert CHUNK_ELEMENTS >= 2**16
    for chunk in (1, 1000, CHUNK_ELEMENTS):
        monkeypatch.setattr("freetoken.loader.quant.CHUNK_ELEMENTS", chunk)
        held = decode_tensor(file, file.tensors["t"], dtype)
        assert held.dtype == dtype and torch.equal(held, expected)


def test_unserved_type_names_the_tensor(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("t", np.zeros((2, 18), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "one.gguf")
    with pytest.raises(StartupError, match="'t' has type Q1_0"):
        decode_tensor(file, file.tensors["t"], torch.float32)
