"""Rows of a stored table: decoding against Python's numbers and other packages, kernel against reference."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from poison import DEVICE, poisoned_outputs

from freetoken.kernels.ple_gather import FORMATS, gather_rows, reference

triton = pytest.importorskip("freetoken.kernels.ple_gather.triton", exc_type=ImportError)

NAMES = list(FORMATS)
BLOCKS = ("q8_0", "q4_0", "iq4_nl")


def stored(name: str, rows: int, width: int) -> torch.Tensor:
    """Random rows of a format, their values finite."""
    if name == "f8_e4m3":
        codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8)
        codes[(codes & 127) == 127] = 0
        return codes
    if name in BLOCKS:
        packed = torch.randint(0, 256, (rows, width // 32, FORMATS[name].block_bytes), dtype=torch.uint8)
        packed[..., :2] = torch.randn(rows, width // 32, 1).half().view(torch.uint8).view(rows, width // 32, 2)
        return packed.view(rows, -1)
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]
    return torch.randn(rows, width).to(kind).view(torch.uint8)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def test_every_code_of_e4m3() -> None:
    table = torch.arange(256, dtype=torch.uint8).view(8, 32)
    expected = torch.tensor([e4m3(code) for code in range(256)]).view(8, 32)
    fmt = FORMATS["f8_e4m3"]
    out = torch.full((8, 32), 7.0, device=DEVICE)
    triton.gather_rows(table.to(DEVICE), None, fmt, 32, 0.5, out)
    for decoded in (reference.decode_rows(table, fmt, 32, 0.5), out.cpu()):
        torch.testing.assert_close(decoded, expected * 0.5, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_against_the_gguf_package_and_scalar_python(name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    table, fmt = stored(name, 5, 96), FORMATS[name]
    expected = torch.from_numpy(quants.dequantize(table.numpy(), GGMLQuantizationType[name.upper()])).view(5, 96)
    decoded = reference.decode_rows(table, fmt, 96, 1.0)
    assert torch.equal(decoded, expected)
    block = bytes(table[3, fmt.block_bytes : 2 * fmt.block_bytes].tolist())
    (factor,) = struct.unpack("<e", block[:2])
    if name == "q8_0":
        codes = list(struct.unpack("<32b", block[2:]))
    else:
        values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
        if name == "q4_0":
            values = tuple(code - 8 for code in range(16))
        codes = [values[byte & 15] for byte in block[2:]] + [values[byte >> 4] for byte in block[2:]]
    assert decoded[3, 32:64].tolist() == pytest.approx([factor * code for code in codes], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [32, 96, 160])
def test_kernel_equals_reference(name: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    table = stored(name, 11, width).to(DEVICE)
    ids = torch.tensor([10, 0, 3, 3, 11, -1, 7, 2**40, -(2**40)], device=DEVICE)
    for given in (ids, None):
        expected = reference.gather_rows(table, given, FORMATS[name], width, 0.75, dtype)
        with poisoned_outputs(monkeypatch):
            out = torch.empty(len(expected), width, dtype=dtype, device=DEVICE)
            assert triton.gather_rows(table, given, FORMATS[name], width, 0.75, out) is out
        assert torch.equal(out, expected)
    assert not out.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_ids_outside_the_table_give_zeros(name: str) -> None:
    table = stored(name, 4, 64).to(DEVICE)
    ids = torch.tensor([4, 1, -1], device=DEVICE)
    rows = gather_rows(table, ids, FORMATS[name], 64, 1.0, torch.float32)
    assert not rows[[0, 2]].any() and torch.equal(
        rows[1:2], gather_rows(table[1:2], None, FORMATS[name], 64, 1.0, torch.float32)
    )


def test_shapes_that_do_not_fit() -> None:
    fmt, table = FORMATS["f8_e4m3"], torch.zeros(3, 32, dtype=torch.uint8)
    ids = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="need 33 bytes"):
        gather_rows(table, ids, fmt, 33, 1.0, torch.float32)
    with pytest.raises(ValueError, match="whole blocks of 32"):
        gather_rows(table, ids, FORMATS["iq4_nl"], 33, 1.0, torch.float32)
    for out in (torch.zeros(3, 32), torch.zeros(2, 32, dtype=torch.float16), torch.zeros(32, 2).t()):
        with pytest.raises(ValueError, match="out must be"):
            gather_rows(table, ids, fmt, 32, 1.0, torch.float32, out)
    held = torch.ones(2, 32)
    assert gather_rows(table, ids, fmt, 32, 1.0, torch.float32, held) is held and not held.any()
    assert gather_rows(table, ids[:0], fmt, 32, 1.0, torch.float32).shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_host_memory_read_by_the_gpu(name: str) -> None:
    table = stored(name, 1000, 160)
    ids = torch.randint(0, 1000, (4000,), device="cuda")
    rows = gather_rows(table.pin_memory(), ids, FORMATS[name], 160, 0.25, torch.bfloat16)
    assert torch.equal(rows, gather_rows(table.cuda(), ids, FORMATS[name], 160, 0.25, torch.bfloat16))
    expected = reference.gather_rows(table, ids.cpu(), FORMATS[name], 160, 0.25, torch.bfloat16)
    assert torch.equal(rows.cpu(), expected)


def test_a_row_far_into_a_table_is_addressed_in_64_bits() -> None:
    """2^31 bytes are passed by a sparse file: only the pages that are read exist."""
    fmt, width = FORMATS["f8_e4m3"], 160
    far = 2**31 // width + 7
    table = torch.from_numpy(np.zeros((far + 1, width), dtype=np.uint8))
    table[far] = stored("f8_e4m3", 1, width)[0]
    if DEVICE == "cuda":
        table = table.cuda()
    ids = torch.tensor([far, 0], device=DEVICE)
    out = torch.full((2, width), 3.0, device=DEVICE)
    triton.gather_rows(table, ids, fmt, width, 1.0, out)
    assert torch.equal(out[:1].cpu(), reference.decode_rows(table[far:].cpu(), fmt, width, 1.0)) and not out[1].any()
