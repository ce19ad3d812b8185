"""GGUF models in several parts: read as the whole file is, found by any part or their folder, and refused where they disagree."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_bytes import container, pair, row, string
from make_tiny_model import make_tiny_model

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.gguf_split import open_gguf
from freetoken.loader.stream import stream_tensors
from freetoken.loader.tokenizer import load_tokenizer

OPTIONS: dict[str, Any] = {"format": "gguf", "quant": "q8_0", "num_layers": 2, "extra_vocab": 5}
PARTS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("whole") / "tiny.gguf", **OPTIONS)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    first = make_tiny_model(tmp_path_factory.mktemp("parts") / "tiny.gguf", shards=PARTS, **OPTIONS)
    found = sorted(first.parent.iterdir())
    assert found[0] == first and [path.name for path in found] == [f"tiny-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)]
    return found


def test_the_parts_are_the_whole_file(whole: Path, parts: list[Path]) -> None:
    wanted, found = GGUFFile.open(whole), open_gguf(parts[2])
    assert found.path == parts[0]
    assert {key for key in found.metadata if not key.startswith("split.")} == set(wanted.metadata)
    assert list(found.tensors) == list(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        other = found.tensors[name]
        assert (other.shape, other.type_name) == (tensor.shape, tensor.type_name)
        assert np.array_equal(found.raw(name), wanted.raw(name)) and np.array_equal(
            found.raw(other), wanted.raw(tensor)
        )
    assert {found.path_of(name) for name in found.tensors} == set(parts)


@pytest.mark.parametrize("which", [0, 2, 3, "folder"])
def test_any_part_or_the_folder_opens_the_model(which: int | str, whole: Path, parts: list[Path]) -> None:
    path = parts[0].parent if which == "folder" else parts[int(which)]
    wanted, found = open_checkpoint(whole), open_checkpoint(path)
    assert (found.path, found.name, found.model) == (parts[0], "tiny", wanted.model)
    assert found.total_bytes == wanted.total_bytes
    ours, theirs = load_tokenizer(found), load_tokenizer(wanted)
    assert ours.encode("The quick brown fox") == theirs.encode("The quick brown fox")
    assert load_tokenizer(wanted, str(parts[1])).size == theirs.size
    seen: list[tuple[int, int]] = []
    tensors = stream_tensors(found, torch.float32, lambda done, total: seen.append((done, total)))
    for (name, tensor), (other, value) in zip(tensors, stream_tensors(wanted, torch.float32), strict=True):
        assert name == other and torch.equal(tensor, value)
    assert seen == sorted(seen) and seen[-1] == (wanted.total_bytes, wanted.total_bytes)


def test_a_first_part_without_tensors_and_the_table_in_another(tmp_path: Path) -> None:
    """As ``--no-tensor-first-split`` makes them; the reader of n-gram rows is given the part that they lie in."""
    options = {
        "arch": "qwen4_exp", "num_layers": 2, "layer_pattern": "lf", "num_experts": 2, "expert_size": 32, "shared_size": 32, "hyper_rank": 32,
        "ple_layers": "1", "ple_width": 128, "tokenizer_vocab": 270, "format": "gguf", "quant": "f32",
    }  # fmt: skip
    first = make_tiny_model(tmp_path / "tiny.gguf", shards=200, **options)
    assert not GGUFFile.open(first).tensors
    tables = open_checkpoint(first).tables
    assert tables is not None
    (shard,) = tables[0].shards
    assert shard.path.name == "tiny-00200-of-00200.gguf"
    alone = GGUFFile.open(shard.path)
    assert [tensor.offset for tensor in alone.tensors.values()] == [shard.offset]


def test_a_folder_of_two_sets_names_none(parts: list[Path], tmp_path: Path) -> None:
    for path in parts:
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "aa-mmproj-F16.gguf").write_bytes(b"a vision tower, never opened")
    assert open_checkpoint(tmp_path).path == tmp_path / parts[0].name
    (tmp_path / "other-00001-of-00002.gguf").symlink_to(parts[0])
    with pytest.raises(StartupError, match=r"2 models in \.gguf files; name one of them"):
        open_checkpoint(tmp_path)


def test_a_folder_of_nothing_but_a_vision_tower_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "mmproj.gguf").write_bytes(container([pair("general.architecture", 8, string("clip"))], [], b""))
    with pytest.raises(StartupError, match=r"mmproj\.gguf.*'clip'"):
        open_checkpoint(tmp_path)


def part(number: int | None, count: int | None, total: int | None, *names: str, text: bool = False) -> bytes:
    """A part with one float32 tensor of 8 for each of ``names``."""
    keys = {"split.no": number, "split.count": count, "split.tensors.count": total}
    pairs = [pair(key, 4, struct.pack("<I", value)) for key, value in keys.items() if value is not None]
    if text:
        pairs.append(pair("split.no", 8, string("1")))
    rows = [row(name, [8], 0, 32 * index) for index, name in enumerate(names)]
    return container(pairs, rows, bytes(32 * len(names)))


GOOD = [part(0, 3, 4, "a"), part(1, 3, 4, "b", "c"), part(2, 3, 4, "d")]
# Number of the part that is replaced, what by, the number of the part that is opened, and of the one that is named.
BAD: dict[str, tuple[int, bytes | None, int, int, str]] = {
    "missing": (1, None, 0, 1, "part 2 of 3 of this model is missing"),
    "first missing": (0, None, 1, 0, "part 1 of 3 of this model is missing"),
    "swapped": (1, GOOD[2], 0, 1, "'split.no' is 2, but by its name it must be 1"),
    "swapped first": (0, GOOD[1], 0, 0, "'split.no' is 1, but by its name it must be 0"),
    "number absent": (2, part(None, 3, 4, "d"), 0, 2, "'split.no' of a part must be an integer"),
    "number of another type": (2, part(None, 3, 4, "d", text=True), 0, 2, "'split.no' of a part must be an integer"),
    "count": (2, part(2, 4, 4, "d"), 0, 2, "'split.count' is 4, but the first part says 3"),
    "count against the name": (2, part(2, 4, 4, "d"), 2, 2, "'split.count' is 4, but by its name it is one of 3 parts"),
    "count absent": (1, part(1, None, 4, "b", "c"), 0, 1, "'split.count' of a part must be an integer"),
    "total": (1, part(1, 3, 5, "b", "c"), 2, 1, "'split.tensors.count' is 5, but the first part says 4"),
    "total absent": (0, part(0, 3, None, "a"), 0, 0, "'split.tensors.count' of a part must be an integer"),
    "twice": (2, part(2, 3, 4, "b"), 0, 2, "tensor 'b' is in model-00002-of-00003.gguf as well"),
    "fewer": (1, part(1, 3, 4, "b"), 0, 0, "'split.tensors.count' is 4, but the 3 parts hold 3 tensors"),
    "more": (1, part(1, 3, 4, "b", "c", "e"), 1, 0, "'split.tensors.count' is 4, but the 3 parts hold 5 tensors"),
    "data cut": (1, GOOD[1][:-1], 0, 1, "tensor 'c' ends at byte .* truncated"),
    "table cut": (2, GOOD[2][:-60], 0, 2, "truncated"),
    "empty": (2, b"", 0, 2, "not a GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_parts_that_do_not_fit_are_one_sentence(case: str, tmp_path: Path) -> None:
    replaced, data, opened, named, message = BAD[case]
    paths = [tmp_path / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path, good in zip(paths, GOOD):
        path.write_bytes(good)
    assert list(open_gguf(paths[opened]).tensors) == ["a", "b", "c", "d"]
    if data is None:
        paths[replaced].unlink()
    else:
        paths[replaced].write_bytes(data)
    with pytest.raises(StartupError, match=message) as caught:
        open_gguf(paths[opened])
    assert str(caught.value).startswith(f"{paths[named]}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.gguf", "one of 3 parts, which are found by names that end in '-00001-of-00003.gguf'"),
        ("model-00007-of-00003.gguf", "its name says part 7 of 3"),
    ],
)
def test_a_part_by_another_name(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(GOOD[0])
    with pytest.raises(StartupError, match=message):
        open_gguf(tmp_path / name)


@pytest.mark.parametrize("count", [0, 1])
def test_one_part_is_a_file(count: int, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(part(0, count, 7, "a"))
    assert list(open_gguf(tmp_path / "model.gguf").tensors) == ["a"]
