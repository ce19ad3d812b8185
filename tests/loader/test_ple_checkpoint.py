"""Finding the tables of per-layer embeddings in checkpoints: numeric order of shards, scales, constants, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.ple_table import TableSource, belongs_to_table, find_gguf_table, find_tables
from freetoken.loader.safetensors import index_folder
from ple_checkpoint import table_tensors, write_folder
from ple_geometry import SMALL

ROWS, WIDTH, SHARDS = 4064, 16, 127
PREFIX = "model.layers.1.ple.ple_embedding."


def random_table(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH).to(dtype)


def read_back(source: TableSource) -> np.ndarray:
    """All rows as stored bytes, shard after shard."""
    parts = [
        np.fromfile(s.path, dtype=np.uint8, count=s.rows * source.row_bytes, offset=s.offset) for s in source.shards
    ]
    return np.concatenate(parts).reshape(source.rows, source.row_bytes)


def find(folder: Path, tensors: dict[str, torch.Tensor], config: Any = SMALL) -> TableSource:
    return find_tables(index_folder(write_folder(folder, tensors, 3)), config)[0]


@pytest.mark.parametrize(
    ("dtype", "scale", "name"),
    [
        (torch.bfloat16, None, "bf16"),
        (torch.float32, None, "f32"),
        (torch.float16, 0.5, "f16"),
        (torch.float8_e4m3fn, 0.125, "f8_e4m3"),
    ],
)
def test_shards_are_taken_in_the_order_of_their_numbers(
    tmp_path: Path, dtype: torch.dtype, scale: float | None, name: str
) -> None:
    """Names as text put shard 10 before shard 2."""
    table = random_table(dtype)
    source = find(tmp_path, table_tensors(SMALL, table, SHARDS, scale=scale))
    assert (source.format, source.rows, source.width, len(source.shards)) == (name, ROWS, WIDTH, SHARDS)
    assert source.scale == (1.0 if scale is None else scale) and source.nbytes == table.numel() * table.element_size()
    assert np.array_equal(read_back(source), table.view(torch.uint8).numpy())


def test_one_table_a_layer(tmp_path: Path) -> None:
    config = replace(SMALL, layers=(0, 2))
    tables = [torch.randn(config.table_rows(ordinal), WIDTH) for ordinal in range(2)]
    tensors: dict[str, torch.Tensor] = {}
    for ordinal, table in enumerate(tables):
        tensors |= table_tensors(config, table, 4, ordinal=ordinal)
    sources = find_tables(index_folder(write_folder(tmp_path, tensors, 2)), config)
    assert [source.rows for source in sources] == [config.table_rows(0), config.table_rows(1)]
    for source, table in zip(sources, tables, strict=True):
        assert np.array_equal(read_back(source), table.view(torch.uint8).numpy())


def test_a_table_that_is_whole(tmp_path: Path) -> None:
    tensors = table_tensors(SMALL, random_table(), 1)
    tensors[f"{PREFIX}ngram_embedding.weight"] = tensors.pop(f"{PREFIX}ngram_embedding.shard_0.weight")
    assert len(find(tmp_path, tensors).shards) == 1


def test_bfloat16_scales_are_read(tmp_path: Path) -> None:
    tensors = table_tensors(SMALL, random_table(torch.float8_e4m3fn), 2, scale=1.0)
    tensors[f"{PREFIX}ngram_embedding.weight_scale"] = torch.tensor([0.375], dtype=torch.bfloat16)
    assert find(tmp_path, tensors).scale == 0.375


def shard(number: int) -> str:
    return f"{PREFIX}ngram_embedding.shard_{number}.weight"


def _drop(*names: str) -> Any:
    return lambda tensors: [tensors.pop(name) for name in names]


def _set(name: str, value: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_drop(shard(5)), r"lacks tensor .*shard_5\.weight, though it has shard 7"),
        (_drop(shard(7)), r"has 3556 rows in 7 shards, but the config asks for 4064"),
        (_drop(*map(shard, range(8))), r"lacks tensor .*shard_0"),
        (_set(shard(2), torch.zeros(508, 15, dtype=torch.float8_e4m3fn)), r"shard_2.*\[508, 15\], but rows of 16"),
        (_set(shard(2), torch.zeros(507, 16, dtype=torch.float8_e4m3fn)), r"shard_2.*\[507, 16\], the first shard"),
        (_set(shard(2), torch.zeros(508, 16, dtype=torch.bfloat16)), r"shard_2.*is BF16 .*the first shard F8_E4M3"),
        (_set(shard(0), torch.zeros(508, 16, dtype=torch.int64)), r"dtype I64, which a table cannot have"),
        (_set(shard(8), torch.zeros(508, 16, dtype=torch.float8_e4m3fn)), r"has 4572 rows in 9 shards"),
        (_set(f"{PREFIX}ngram_embedding.shard_03.weight", torch.zeros(508, 16)), r"are the same shard"),
        (_set(f"{PREFIX}ngram_embedding.weight", torch.zeros(4064, 16)), r"both whole and in shards"),
        (_set(f"{PREFIX}something.weight", torch.zeros(1)), r"something.weight' is not part of a table"),
        (_drop(f"{PREFIX}ngram_embedding.weight_scale"), r"lacks .*weight_scale, without which its fp8 table"),
        (_set(f"{PREFIX}ngram_embedding.weight_scale", torch.ones(2)), r"must be one float, not F32 \[2\]"),
        (_set(f"{PREFIX}ngram_embedding.weight_scale", torch.tensor(float("nan"))), r"holds nan, which is no scale"),
        (_set(f"{PREFIX}ngram_embedding.weight_scale", torch.tensor(0.0)), r"holds 0.0, which is no scale"),
        (_drop(f"{PREFIX}layer_multipliers"), r"lacks tensor .*layer_multipliers"),
        (_set(f"{PREFIX}ngram_heads_offsets", torch.zeros(4)), r"ngram_heads_offsets' must be a few int64"),
        (_set(f"{PREFIX}ngram_heads_offsets", torch.tensor([0, 1, 2, 3])), r"stored offsets\[1\] is 1, .* give 1009"),
        (_set(f"{PREFIX}layer_multipliers", torch.tensor([1, 2])), r"2 multipliers are stored, but .* 3"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, change: Any, match: str) -> None:
    tensors = table_tensors(SMALL, random_table(torch.float8_e4m3fn), 8, scale=0.5)
    find(tmp_path / "good", tensors)
    change(tensors)
    with pytest.raises(StartupError, match=match):
        find(tmp_path / "bad", tensors)


def test_names_that_belong_to_a_table() -> None:
    assert belongs_to_table(shard(3)) and belongs_to_table(f"{PREFIX}layer_multipliers")
    assert not belongs_to_table("model.layers.1.ple.key_proj.weight")


# --- GGUF ------------------------------------------------------------------------------------------------------------

WIDE = replace(SMALL, embed_dim=128)


def write_gguf(path: Path, data: np.ndarray, kind: str, name: str = "per_layer_token_embd.weight") -> GGUFFile:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "qwen4exp")
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(path)


@pytest.mark.parametrize(("kind", "size"), [("IQ4_NL", 18), ("Q4_0", 18), ("Q8_0", 34)])
def test_a_gguf_holds_one_packed_table(kind: str, size: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).integers(0, 256, (ROWS, size), dtype=np.uint8)
    source = find_gguf_table(write_gguf(tmp_path / "x.gguf", rows, kind), WIDE)
    assert (source.format, source.width, source.row_bytes, source.scale) == (kind.lower(), 32, size, 1.0)
    assert np.array_equal(read_back(source), rows)


def test_ggufs_that_are_refused(tmp_path: Path) -> None:
    rows = np.zeros((ROWS, 22), dtype=np.uint8)
    with pytest.raises(
        StartupError, match="type Q5_0, which a table cannot have; F32, F16, BF16, IQ4_NL, Q4_0, Q8_0 it"
    ):
        find_gguf_table(write_gguf(tmp_path / "a.gguf", rows, "Q5_0"), WIDE)
    file = write_gguf(tmp_path / "b.gguf", rows[1:, :18], "IQ4_NL")
    with pytest.raises(StartupError, match=r"shape \[4063, 32\], but the config asks for \[4064, 32\]"):
        find_gguf_table(file, WIDE)
    with pytest.raises(StartupError, match="2 layers have n-gram tables"):
        find_gguf_table(file, replace(WIDE, layers=(0, 1)))
    with pytest.raises(StartupError, match="lacks tensor"):
        find_gguf_table(write_gguf(tmp_path / "c.gguf", rows[:, :18], "IQ4_NL", "other.weight"), WIDE)
