"""What stays packed: random weights of a configuration, the 27B geometry byte by byte, and files of full size in small."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from full_gguf import FULL_SIZE, VOCABULARY, write_full_size
from make_tiny_model import TinyModel, make_tiny_model
from tiny_spec import hf_config

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import Checkpoint, open_checkpoint
from freetoken.loader.gguf_names import gguf_tensors
from freetoken.loader.names import expected_tensors, merged_projections, tensor_bytes, weight_bytes
from freetoken.loader.stream import stream_tensors
from freetoken.loader.tokenizer import load_tokenizer
from freetoken.runner.memory import check_model_fits, gib

CONFIG = Path(__file__).resolve().parents[2] / "benchmarks" / "configs" / "qwen3.5-27b-pq2"
SPEC = TinyModel(arch="qwen3", hidden_size=256, intermediate_size=384, head_dim=32)


def random_of(folder: Path, asked: Any, **changes: Any) -> Checkpoint:
    config = hf_config(SPEC, 300) | {"quantization_config": asked} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder, "dummy")


def test_the_27b_geometry_has_the_published_sizes() -> None:
    """402 packed matrices of 26,869,760,000 elements, 96 of the gates and the rest, 851 tensors in all."""
    model = open_checkpoint(CONFIG, "dummy").model
    shapes = expected_tensors(model)
    packed = model.packed
    assert packed is not None and len(packed.groups) == 402 == len(packed.rotated) and len(shapes) == 851
    assert sorted(packed.signs) == [5120, 6144, 17408] and packed.block == 1024
    elements = sum(shapes[name][0] * shapes[name][1] for name in packed.groups)
    assert elements == 26_869_760_000
    gates = [name for name in shapes if name.endswith(("in_proj_a.weight", "in_proj_b.weight"))]
    assert sum(shapes[name][0] * shapes[name][1] for name in gates) == 23_592_960
    rest = 23_592_960 + 2_645_504
    assert weight_bytes(model, 2) == elements * 34 // 128 + 2 * rest
    assert weight_bytes(model, 2) < 7.25e9
    head = ("model.embed_tokens.weight", shapes["model.embed_tokens.weight"])
    assert tensor_bytes(*head, shapes, 2, packed) == 248320 * 5120 * 34 // 128


def test_room_is_asked_for_packed_weights() -> None:
    """8 GB are enough for what would take 54 in bfloat16."""
    model = open_checkpoint(CONFIG, "dummy").model
    numbers: dict[str, Any] = {"dtype": "bfloat16", "rows": 8, "page_table_entries": 100}
    check_model_fits(model, **numbers, free_bytes=8 * 10**9, total_bytes=10**10)
    with pytest.raises(StartupError, match=gib(weight_bytes(model, 2))):
        check_model_fits(model, **numbers, free_bytes=7 * 10**9, total_bytes=10**10)
    with pytest.raises(StartupError, match="weights need 50"):
        check_model_fits(dataclasses.replace(model, packed=None), **numbers, free_bytes=8 * 10**9, total_bytes=10**10)


def test_every_matrix_is_in_one_merged_projection() -> None:
    model = open_checkpoint(CONFIG, "dummy").model
    names = [name for merged in merged_projections(model) for name in merged]
    matrices = {name for name, shape in expected_tensors(model).items() if len(shape) == 2}
    gates = {name for name in matrices if "in_proj_a" in name or "in_proj_b" in name}
    assert len(names) == len(set(names)) and set(names) == matrices - gates


def test_defaults_of_random_packed_weights(tmp_path: Path) -> None:
    packed = random_of(tmp_path, {"quant_method": "pq2", "hadamard_block": 128}).model.packed
    assert packed is not None and set(packed.groups.values()) == {128} and packed.rotated == set(packed.groups)
    assert set(packed.signs) == {256, 384, 128} and all(set(s) == {1, 255} for s in packed.signs.values())
    plain = random_of(tmp_path, {"quant_method": "pq2", "hadamard_block": 0, "group_size": 64}).model.packed
    assert plain is not None and not plain.rotated and set(plain.groups.values()) == {64}
    identity = random_of(tmp_path, {"quant_method": "pq2", "hadamard_block": 64, "sign_mode": "identity"}).model.packed
    assert identity is not None and identity.rotated and not identity.signs
    tied = random_of(tmp_path, {"quant_method": "pq2", "hadamard_block": 64}, tie_word_embeddings=True).model.packed
    assert tied is not None and "lm_head.weight" not in tied.groups


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"quant_method": "awq"}, "quantization_config says 'awq'"),
        ({"quant_method": "pq2"}, "128 columns: they must be a multiple of 1024"),
        ({"quant_method": "pq2", "bits": 2}, "unknown key 'bits'"),
        ({"quant_method": "pq2", "group_size": 32}, "group_size must be 64 or 128"),
        ({"quant_method": "pq2", "group_size": "128"}, "group_size must be 64 or 128"),
        ({"quant_method": "pq2", "hadamard_block": 96}, "hadamard_block must be 0 or a power of two"),
        ({"quant_method": "pq2", "hadamard_block": -1}, "hadamard_block must be 0 or a power of two"),
        ({"quant_method": "pq2", "hadamard_block": True}, "hadamard_block must be 0 or a power of two"),
        ({"quant_method": "pq2", "hadamard_block": 64, "sign_mode": 1}, "sign_mode must be one of"),
        ({"quant_method": ["pq2"]}, "quantization_config says"),
    ],
)
def test_bad_wishes_name_the_key(asked: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=word):
        random_of(tmp_path, asked)


def test_packed_weights_are_not_read_from_a_folder(tmp_path: Path) -> None:
    random_of(tmp_path, {"quant_method": "pq2", "hadamard_block": 64})
    with pytest.raises(StartupError, match=r"2-bit weights are read from \.gguf files"):
        open_checkpoint(tmp_path)
    path = make_tiny_model(tmp_path / "tiny.gguf", format="gguf", arch="qwen3", quant="f16", hidden_size=128)
    with pytest.raises(StartupError, match="cannot be laid over a GGUF"):
        open_checkpoint(path, "auto", {"quantization_config": {"quant_method": "pq2"}})


def test_random_weights_of_a_packed_file(tmp_path: Path) -> None:
    """``dummy`` on a file: the same geometry, packed the same, nothing read."""
    path = make_tiny_model(
        tmp_path / "tiny.gguf", format="gguf", arch="qwen3", quant="q2_0", hidden_size=128, head_dim=32, hadamard=128
    )
    real, random = open_checkpoint(path), open_checkpoint(path, "dummy")
    assert random.model == real.model and real.model.packed is not None
    assert random.gguf_names == {} and random.total_bytes == 0


def test_the_full_size_file_in_small(tmp_path: Path) -> None:
    """Tensors, keys and vocabulary as in the large one, and the names of the published model."""
    names = gguf_tensors(open_checkpoint(CONFIG, "dummy").model)
    assert len(names) == 851 and VOCABULARY == 248320
    assert {"blk.62.ssm_out.weight", "blk.63.attn_q.weight", "blk.63.post_attention_norm.weight"} <= set(names)
    spec = dataclasses.replace(
        FULL_SIZE, num_layers=4, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64,
        linear_key_heads=1, linear_value_heads=2, hadamard=256,
    )  # fmt: skip
    checkpoint = open_checkpoint(write_full_size(tmp_path / "full.gguf", spec, 700))
    packed = checkpoint.model.packed
    assert packed is not None and packed.rotated == set(packed.groups) and len(packed.groups) == 2 + 3 * 3 + 4 + 12
    tokenizer = load_tokenizer(checkpoint)
    text = "def f(x):\n    return 'Grüße!!!!'  # 日本語 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) < len(text.encode())
    streamed = dict(stream_tensors(checkpoint, torch.bfloat16))
    codes = streamed["model.layers.0.mlp.down_proj.codes"]
    assert codes.shape == (256, 128) and len(codes.unique()) == 81
    assert sum(tensor.nbytes for name, tensor in streamed.items() if name.endswith((".codes", ".scales"))) == sum(
        packed.nbytes(name, shape[0] * shape[1])
        for name, shape in expected_tensors(checkpoint.model).items()
        if name in packed.groups
    )
