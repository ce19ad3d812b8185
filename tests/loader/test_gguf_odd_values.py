"""Whole files whose metadata and tensor tables hold odd values: read, or refused in one sentence."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import array, container, pair, row, string
from make_tiny_model import make_tiny_model

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.tokenizer import load_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SEEDS: dict[str, dict[str, Any]] = {
    "rotated hybrid": {
        "arch": "qwen3_5", "quant": "pq2_0", "hidden_size": 128, "intermediate_size": 128, "num_kv_heads": 1, "head_dim": 32,
        "layer_pattern": "lf", "linear_value_dim": 32, "hadamard": 64, "gdn_v_grouped": True, "mtp": 1,
    },
    "yarn": {"arch": "qwen3", "quant": "q2_0", "num_layers": 1, "hidden_size": 128, "head_dim": 32, "rope_scaling": YARN},
    "factors": {"quant": "q8_0", "num_layers": 1, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
}  # fmt: skip
ODD: list[Any] = [
    0, 1, 2, 3, 5, 7, 31, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -1, -(2**63), True, False, "", "x", "qwen35",
    "llama", 0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300, [], ["a"], ["a", "a"], np.array([], np.int64),
    np.array([1, 2]), np.array([2**64 - 1], np.uint64), np.array([-(2**63)]), np.array([1.5, float("nan")]),
    np.array([True, False]),
]  # fmt: skip
TYPES = (0, 1, 2, 8, 10, 12, 16, 24, 28, 30, 39, 40, 41, 42, 142, 143, 99)


def encoded(key: str, value: Any) -> bytes:
    """One pair, its type that of the value."""
    if isinstance(value, bool):
        return pair(key, 7, bytes([value]))
    if isinstance(value, int):
        kind, layout = (4, "<I") if 0 <= value < 2**32 else (10, "<Q") if value >= 0 else (11, "<q")
        return pair(key, kind, struct.pack(layout, value))
    if isinstance(value, float):
        return pair(key, 12, struct.pack("<d", value))
    if isinstance(value, str):
        return pair(key, 8, string(value))
    if isinstance(value, np.ndarray):
        kind, stored = {"f": (6, "<f4"), "i": (11, "<i8"), "u": (10, "<u8"), "b": (7, "u1")}[value.dtype.kind]
        return pair(key, 9, array(kind, value.size, value.astype(stored).tobytes()))
    return pair(key, 9, array(8, len(value), b"".join(string(entry) for entry in value)))


Entry = list[Any]
"""Name, dimensions, type id and offset of a tensor."""


def spoil(rng: random.Random, metadata: dict[str, Any], entries: list[Entry]) -> None:
    """Take out or change a key, or change a field of a tensor's entry."""
    if rng.random() < 0.75:
        key = rng.choice([key for key in metadata if rng.random() < 0.5 or "tokenizer" not in key] or list(metadata))
        if rng.random() < 0.15:
            del metadata[key]
        else:
            metadata[key] = rng.choice(ODD)
        return
    entry = rng.choice(entries)
    changes: dict[int, list[Any]] = {
        0: [rng.choice(entries)[0], "blk.0.x.weight", "blk.999999.ffn_up.weight", "token_embd.weight"],
        1: [[0], [1], [2**63, 2], [128], [128, 2**40], [64, 2], [*entry[1], 1], entry[1][::-1]],
        2: list(TYPES),
        3: [0, 1, 32, 2**63, 2**64 - 32, rng.choice(entries)[3]],
    }
    field = rng.randrange(4)
    entry[field] = rng.choice(changes[field])


@pytest.mark.parametrize("name", SEEDS)
def test_odd_values_are_read_or_refused(name: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "seed.gguf", format="gguf", tokenizer_vocab=270, **SEEDS[name])
    file, rng, path = GGUFFile.open(source), random.Random(name), tmp_path / "odd.gguf"
    first = min(tensor.offset for tensor in file.tensors.values())
    data = source.read_bytes()[first:]
    read = refused = 0
    for _ in range(300):
        metadata = dict(file.metadata)
        entries = [[t.name, list(t.shape[::-1]), t.type_id, t.offset - first] for t in file.tensors.values()]
        for _ in range(rng.choice((1, 1, 2))):
            spoil(rng, metadata, entries)
        pairs = [encoded(key, value) for key, value in metadata.items()]
        path.unlink(missing_ok=True)
        path.write_bytes(container(pairs, [row(*entry) for entry in entries], data))
        try:
            load_tokenizer(open_checkpoint(path))
            read += 1
        except StartupError as error:
            assert "\n" not in str(error)
            refused += 1
    assert read > 20 and refused > 100
