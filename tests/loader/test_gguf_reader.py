"""The GGUF reader: against the gguf package on files its writer made, on damaged files, and under random mutation."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_bytes import array, container, pair, row, string
from make_tiny_model import make_tiny_model

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.gguf import PRIVATE_IDS, TENSOR_TYPES, GGUFFile
from freetoken.loader.stream import stream_tensors
from freetoken.loader.tokenizer import load_tokenizer


def opened(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return GGUFFile.open(path)


def test_agrees_with_the_reference_reader(tiny_gguf: Path) -> None:
    ours, theirs = GGUFFile.open(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, value in fields.items():
        held = ours.metadata[key]
        assert (held.tolist() if isinstance(held, np.ndarray) else held) == value, key
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        held = ours.tensors[tensor.name]
        assert held.shape == tuple(int(size) for size in tensor.shape)[::-1]
        assert (held.type_id, held.type_name) == (tensor.tensor_type.value, tensor.tensor_type.name)
        assert (held.offset, held.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()
    assert not ours.raw("token_embd.weight").flags.writeable


def test_reads_every_value_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    scalars = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 1e300, "bool": True, "string": "héllo 😀",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    arrays = {"ints": [1, -2, 3], "floats": [0.25, -1.5], "strings": ["", "a", "日本"], "bools": [True, False, True]}
    for key, values in arrays.items():
        writer.add_array(f"test.{key}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile.open(tmp_path / "values.gguf").metadata
    for kind, value in scalars.items():
        assert metadata[f"test.{kind}"] == value and type(metadata[f"test.{kind}"]) is type(value), kind
    for key, values in arrays.items():
        held = metadata[f"test.{key}"]
        assert (held.tolist() if isinstance(held, np.ndarray) else held) == values


def test_nested_and_empty_arrays_version_2_and_alignment(tmp_path: Path) -> None:
    nested = array(9, 2, array(5, 2, struct.pack("<2i", 7, 8)) + array(8, 0, b""))
    pairs = [pair("nested", 9, nested), pair("general.alignment", 4, struct.pack("<I", 128))]
    rows = [row("a", [3], 0, 128), row("b", [32, 2], 8, 0)]
    data = bytes(range(68)) + bytes(60) + np.arange(3, dtype="<f4").tobytes()
    file = opened(tmp_path, container(pairs, rows, data, version=2, align=128))
    assert file.version == 2
    assert file.metadata["nested"][0].tolist() == [7, 8] and file.metadata["nested"][1] == []
    assert file.raw("a").view("<f4").tolist() == [0.0, 1.0, 2.0]
    assert file.tensors["b"].shape == (2, 32) and file.tensors["b"].row_bytes == 34
    assert file.raw("b").tobytes() == bytes(range(68))


def test_type_table_matches_the_package() -> None:
    packed = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for type_id, kind in TENSOR_TYPES.items():
        if type_id in PRIVATE_IDS:
            assert type_id not in packed
            continue
        assert packed[type_id] == (kind.name, kind.block_elements, kind.block_bytes)


ONE = pair("k", 4, struct.pack("<I", 1))
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF"),
    "magic": (b"GGML" + bytes(40), "not a GGUF"),
    "version": (container([], [], version=1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (container([], [], counts=(2**63, 0)), "tensors"),
    "key count": (container([], [], counts=(0, 2**60)), "metadata keys"),
    "count above content": (container([ONE], [], counts=(0, 2)), "key"),
    "key name": (container([string("x" * 1025) + bytes(20)], []), "name of metadata key 0"),
    "empty key": (container([pair("", 4, bytes(4))], []), "name of metadata key 0"),
    "key utf-8": (container([pair(b"\xff\xfe", 4, bytes(4))], []), "UTF-8"),
    "twice": (container([ONE, ONE], []), "'k' appears twice"),
    "value type": (container([pair("k", 13, bytes(8))], []), "'k'"),
    "boolean": (container([pair("k", 7, b"\x02")], []), "boolean"),
    "string length": (container([pair("k", 8, struct.pack("<Q", 2**62) + bytes(8))], []), "truncated"),
    "string utf-8": (container([pair("k", 8, string(b"\xc3\x28"))], []), "UTF-8"),
    "array count": (container([pair("k", 9, array(4, 2**61, bytes(64)))], []), "'k'"),
    "string array count": (container([pair("k", 9, array(8, 2**40, bytes(64)))], []), "'k'"),
    "string array element": (container([pair("k", 9, array(8, 1, struct.pack("<Q", 999)))], []), "element 0"),
    "string array utf-8": (container([pair("k", 9, array(8, 1, string(b"\xff")))], []), "element 0"),
    "array type": (container([pair("k", 9, array(77, 1, bytes(8)))], []), "element type 77"),
    "array boolean": (container([pair("k", 9, array(7, 2, b"\x00\x05"))], []), "boolean"),
    "array depth": (container([pair("k", 9, array(9, 1, b"") * 60 + bytes(64))], []), "nested"),
    "alignment": (container([pair("general.alignment", 4, struct.pack("<I", 48))], []), "general.alignment"),
    "alignment type": (container([pair("general.alignment", 8, string("32"))], []), "general.alignment"),
    "alignment array": (container([pair("general.alignment", 9, array(4, 1, bytes(4)))], []), "general.alignment"),
    "tensor twice": (container([], [row("t", [1], 0, 0), row("t", [1], 0, 32)], bytes(64)), "'t' appears twice"),
    "dimensions": (container([], [row("t", [1] * 5, 0, 0)], bytes(64)), "5 dimensions"),
    "no dimensions": (container([], [row("t", [], 0, 0)], bytes(64)), "0 dimensions"),
    "empty tensor": (container([], [row("t", [4, 0], 0, 0)], bytes(64)), "empty"),
    "type id": (container([], [row("t", [4], 43, 0)], bytes(64)), "'t' has the unknown type id 43"),
    "private id, block": (container([], [row("t", [4], 142, 0)], bytes(64)), "'t' has type id 142, but not the size"),
    "private id, larger": (container([], [row("t", [128], 142, 0)], bytes(96)), "'t' has type id 142, but not the size"),
    "private id, smaller": (
        container([], [row("t", [256], 143, 0), row("u", [8], 0, 32)], bytes(64)), "'t' has type id 143, but not the size"
    ),
    "two bits, neither": (container([], [row("t", [1024], 42, 0)], bytes(280)), "'t' has type id 42.* neither"),
    "two bits, each its own": (
        container([], [row("t", [4096], 42, 0), row("u", [4096], 42, 1152)], bytes(1152 + 1088)),
        "type id 42.* neither groups of 64 nor of 128",
    ),
    "two bits, ambiguous": (container([], [row("t", [128], 42, 0), row("u", [8], 0, 64)], bytes(96)), "'t' .* cannot be told"),
    "two bits, odd rows": (container([], [row("t", [96], 42, 0)], bytes(32)), "'t' has type id 42.* neither"),
    "block multiple": (container([], [row("t", [48], 8, 0)], bytes(64)), "multiple of the Q8_0 block"),
    "beyond the end": (container([], [row("t", [64], 0, 0)], bytes(64)), "truncated"),
    "overflow": (container([], [row("t", [2**63, 2**63], 0, 0)], bytes(64)), "truncated"),
    "offset": (container([], [row("t", [1], 0, 2**63)], bytes(64)), "'t'"),
    "offset alignment": (container([], [row("t", [1], 0, 4)], bytes(64)), "alignment"),
    "overlap": (container([], [row("t", [16], 0, 0), row("u", [1], 0, 32)], bytes(64)), "overlap"),
    "table cut": (container([ONE], [row("t", [4], 0, 0)[:-4]], counts=(1, 1))[:-32], "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_is_one_sentence(case: str, tmp_path: Path) -> None:
    data, word = DAMAGED[case]
    with pytest.raises(StartupError, match=word) as caught:
        opened(tmp_path, data)
    assert "\n" not in str(caught.value) and "file.gguf" in str(caught.value)


@pytest.mark.parametrize("name", ["\x01\x02" * 300, "\u2028" * 300, "x" * 900])
def test_a_long_name_is_cut_in_errors(name: str, tmp_path: Path) -> None:
    """What a flipped length makes of the bytes behind it."""
    for data in (
        container([pair(name, 13, bytes(8))], []),
        container([pair(name, 9, array(77, 1, bytes(8)))], []),
        container([], [row(name, [4], 43, 0)], bytes(64)),
    ):
        with pytest.raises(StartupError, match=r"\.\.\.") as caught:
            opened(tmp_path, data)
        said = str(caught.value).removeprefix(str(tmp_path))
        assert len(said) < 160 and said.isascii() and said.isprintable()


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(StartupError, match="cannot be read"):
            GGUFFile.open(path)


def test_every_truncation_of_a_real_file_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    data = tiny_gguf.read_bytes()
    tensors = GGUFFile.open(tiny_gguf).tensors.values()
    start, end = min(t.offset for t in tensors), max(t.offset + t.nbytes for t in tensors)
    cuts = [*range(0, start, 97), *range(start, end, 5003), end - 1]
    path = tmp_path / "cut.gguf"
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(StartupError):
            GGUFFile.open(path)


def _mutations(rng: random.Random, head: int) -> list[Callable[[bytearray], None]]:
    def flip(data: bytearray) -> None:
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(head)] ^= 1 << rng.randrange(8)

    def wild_count(data: bytearray) -> None:
        start = rng.randrange(head - 8)
        data[start : start + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1)))

    def small_number(data: bytearray) -> None:
        start = rng.randrange(head - 4)
        data[start : start + 4] = struct.pack("<I", rng.randrange(48))

    def cut_out(data: bytearray) -> None:
        start = rng.randrange(head)
        del data[start : start + rng.randrange(1, 64)]

    def repeat(data: bytearray) -> None:
        start = rng.randrange(head)
        data[start:start] = data[start : start + rng.randrange(1, 64)]

    def truncate(data: bytearray) -> None:
        del data[rng.randrange(len(data)) :]

    return [flip, flip, wild_count, small_number, cut_out, repeat, truncate]


SEEDS: dict[str, dict[str, Any]] = {
    "plain": {
        "quant": "q4_0", "num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32,
    },
    "rotated hybrid": {
        "arch": "qwen3_5", "quant": "pq2_0", "hidden_size": 128, "intermediate_size": 128, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 1, "head_dim": 32, "layer_pattern": "lf", "linear_value_dim": 32, "linear_value_heads": 4,
        "hadamard": 64, "gdn_v_grouped": True, "mtp": 1,
    },
    "two bits": {
        "arch": "qwen3", "quant": "q2_0_g128", "num_layers": 1, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128,
        "hadamard": 128, "tied": True,
    },
    "n-grams": {
        "arch": "qwen4_exp", "quant": "q8_0", "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "num_layers": 2,
        "layer_pattern": "lf", "linear_value_dim": 32, "linear_value_heads": 2, "num_experts": 2, "expert_size": 32,
        "shared_size": 32, "streams": 2, "hyper_rank": 32, "ple_layers": "1", "ple_width": 128, "ngram_base": 20,
        "index_heads": 1, "mtp": 1,
    },
}  # fmt: skip


def mutate_and_open(name: str, turns: int, traced: int, seed: int, tmp_path: Path) -> tuple[int, int, int]:
    """Files read, files refused, and the most memory that was held over the first ``traced`` of them.

    Whatever the bytes, the answer is a checkpoint, whose weights and tokenizer can be read, or a StartupError.
    """
    source = make_tiny_model(tmp_path / "seed.gguf", format="gguf", tokenizer_vocab=270, **SEEDS[name])
    data, rng, path = source.read_bytes(), random.Random(seed), tmp_path / "mutated.gguf"
    head = min(tensor.offset for tensor in GGUFFile.open(source).tensors.values())
    mutations = _mutations(rng, head)
    read = refused = peak = 0
    tracemalloc.start()
    for turn in range(turns):
        if turn == traced:  # tracing costs most of the time
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        changed = bytearray(data)
        rng.choice(mutations)(changed)
        path.unlink(missing_ok=True)
        path.write_bytes(changed)
        try:
            file = GGUFFile.open(path)
            for key, tensor in file.tensors.items():
                assert len(file.raw(key)) == tensor.nbytes
            checkpoint = open_checkpoint(path)
            load_tokenizer(checkpoint)
            if turn % 10 == 0:
                assert sum(1 for _ in stream_tensors(checkpoint, torch.float32))
            read += 1
        except StartupError as error:
            assert "\n" not in str(error)
            refused += 1
    return read, refused, peak


@pytest.mark.parametrize("name", SEEDS)
def test_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    read, refused, peak = mutate_and_open(name, 600, 150, 20240607, tmp_path)
    assert read > 30 and refused > 200
    assert 0 < peak < 16 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_ten_thousand_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Over the kinds of file."""
    read, refused, peak = mutate_and_open(name, 3400, 3399, 4, tmp_path)
    assert read > 200 and refused > 1000
    assert 0 < peak < 16 * 2**20
