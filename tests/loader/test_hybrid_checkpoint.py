"""Qwen3.5 checkpoints: names with and without a vision tower, what is left aside, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.names import MTP, VISION
from freetoken.loader.stream import stream_tensors

PREFIX = "model.language_model.layers."
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder as it is published, beside a vision tower."""
    return make_tiny_model(tmp_path / "tiny", arch="qwen3_5", num_layers=4, vision=True, linear_value_heads=6)


@pytest.mark.parametrize("vision", [False, True])
@pytest.mark.parametrize("options", [{}, {"tied": True, "shards": 3}, {"attention_bias": True, "quant": "bf16"}])
def test_weights_are_those_of_transformers(vision: bool, options: dict[str, object], tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", arch="qwen3_5", num_layers=4, vision=vision, extra_vocab=3, **options)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(path)
    ours = dict(stream_tensors(checkpoint, torch.float32))
    tied = {"lm_head.weight"} if options.get("tied") else set()
    assert set(oracle) - set(ours) == tied and set(ours) <= set(oracle)
    for name, tensor in ours.items():
        assert torch.equal(tensor, oracle[name]), name


def test_parts_that_are_not_served_are_known_by_name(published: Path) -> None:
    checkpoint = open_checkpoint(published)
    names = {part: [tensor.name for tensor in tensors] for part, tensors in checkpoint.aside.items()}
    assert set(names) == {VISION, MTP} and names[MTP] == ["mtp.fc.weight"]
    assert sorted(names[VISION]) == ["model.visual.blocks.0.norm1.weight", "model.visual.patch_embed.proj.bias"]
    assert not any("visual" in name or "mtp" in name for name in checkpoint.stored)
    read = sum(tensor.nbytes for tensor in checkpoint.stored.values())
    assert checkpoint.total_bytes == read < (published / "model.safetensors").stat().st_size


def test_decays_and_norms_stay_in_float32(published: Path) -> None:
    stored = load_file(published / "model.safetensors")
    types: dict[torch.dtype, set[str]] = {torch.float32: set(), torch.bfloat16: set()}
    for name, tensor in stream_tensors(open_checkpoint(published), torch.bfloat16):
        types[tensor.dtype].add(name.split(".", 3)[-1] if "layers" in name else name)
        if tensor.dtype == torch.float32:
            assert torch.equal(tensor, stored[name.replace("model.", "model.language_model.", 1)])
    assert types[torch.float32] == {
        "linear_attn.A_log",
        "linear_attn.dt_bias",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "model.norm.weight",
    }
    assert "linear_attn.norm.weight" in types[torch.bfloat16]


def test_an_override_reaches_the_nested_configuration(published: Path) -> None:
    assert open_checkpoint(published, "auto", {"max_position_embeddings": 77}).model.max_position_embeddings == 77
    nested = open_checkpoint(published, "auto", {"text_config": {"max_position_embeddings": 78}})
    assert nested.model.max_position_embeddings == 78
    with pytest.raises(StartupError, match="linear_num_key_heads 4"):
        open_checkpoint(published, "auto", {"linear_num_key_heads": 4})


def _drop(tensors: Tensors) -> None:
    del tensors[f"{PREFIX}1.linear_attn.dt_bias"]


def _surplus(tensors: Tensors) -> None:
    tensors[f"{PREFIX}3.linear_attn.dt_bias"] = torch.zeros(6)


def _flat_conv(tensors: Tensors) -> None:
    name = f"{PREFIX}0.linear_attn.conv1d.weight"
    tensors[name] = tensors[name].squeeze(1)


def _narrow_query(tensors: Tensors) -> None:
    name = f"{PREFIX}3.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:64].clone()


def _integers(tensors: Tensors) -> None:
    tensors[f"{PREFIX}0.linear_attn.A_log"] = torch.zeros(6, dtype=torch.int32)


def _both_names(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop, r"lacks tensor 'model\.layers\.1\.linear_attn\.dt_bias'"),
        (_surplus, r"tensor 'model\.language_model\.layers\.3\.linear_attn\.dt_bias' is not part"),
        (_flat_conv, r"conv1d\.weight' has shape \[160, 4\], but the config asks for \[160, 1, 4\]"),
        (_narrow_query, r"q_proj\.weight' has shape \[64, 64\], but the config asks for \[128, 64\]"),
        (_integers, r"A_log' has dtype I32"),
        (_both_names, r"tensors 'model\..*norm\.weight' and 'model\..*norm\.weight' are the same one"),
    ],
)
def test_bad_checkpoints_name_the_tensor(spoil: Callable[[Tensors], None], message: str, published: Path) -> None:
    path = published / "model.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(StartupError, match=message):
        open_checkpoint(published)


def test_dense_checkpoints_have_no_such_parts(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "dense", arch="qwen3")
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(StartupError, match=r"tensor 'mtp\.fc\.weight' is not part"):
        open_checkpoint(path)
