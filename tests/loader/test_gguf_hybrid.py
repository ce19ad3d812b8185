"""``qwen35`` files: plain ones as transformers reads them, MTP blocks set aside, metadata and rotation keys that are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import Checkpoint, open_checkpoint
from freetoken.loader.names import MTP, is_zero_centred
from freetoken.loader.stream import stream_tensors
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from rewrite_gguf import rewrite_metadata

GEOMETRY: dict[str, Any] = {
    "arch": "qwen3_5",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_layers": 4,
    "head_dim": 64,
    "linear_key_heads": 2,
    "linear_value_heads": 6,
    "linear_key_dim": 32,
    "linear_value_dim": 128,
}


def tiny(path: Path, **options: Any) -> Path:
    return make_tiny_model(path, format="gguf", **{**GEOMETRY, **options})


@pytest.mark.parametrize("quant", ["f32", "bf16", "q8_0", "q4_k", "iq2_xs"])
@pytest.mark.parametrize("options", [{}, {"tied": True, "linear_value_heads": 2, "mtp": 1}])
def test_weights_are_those_of_transformers(quant: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tiny(tmp_path / "tiny.gguf", quant=quant, **options)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(path)
    ours = dict(stream_tensors(checkpoint, torch.float32))
    assert set(oracle) - set(ours) == ({"lm_head.weight"} if options.get("tied") else set())
    assert not checkpoint.model.zero_centred_norm and checkpoint.model.float32_norm
    for name, tensor in ours.items():
        if is_zero_centred(name):  # theirs are added to 1, ours used as the file has them
            assert torch.equal(tensor - 1, oracle[name]), name
        elif name.endswith("A_log"):
            torch.testing.assert_close(tensor, oracle[name], rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensor, oracle[name]), name


def test_blocks_of_multi_token_prediction_are_set_aside(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny(tmp_path / "tiny.gguf", mtp=1))
    names = {tensor.name for tensor in checkpoint.aside[MTP]}
    assert checkpoint.model.num_layers == 4 and len(names) == 15 and all(name.startswith("blk.4.") for name in names)
    assert "blk.4.nextn.eh_proj.weight" in names and not any("layers.4" in name for name in checkpoint.gguf_names)
    assert checkpoint.model.layer_types == (LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION,)


def test_geometry_comes_from_the_keys(tmp_path: Path) -> None:
    path = tiny(tmp_path / "tiny.gguf", layer_pattern="fllf", partial_rotary=0.5, conv_width=3, extra_vocab=7)
    model = open_checkpoint(path).model
    linear = model.linear_attention
    assert linear is not None and model.rotary_dim == 32 and model.vocab_size == 391
    assert model.layer_types == (FULL_ATTENTION, LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION)
    assert (linear.num_key_heads, linear.num_value_heads, linear.key_head_dim, linear.value_head_dim) == (2, 6, 32, 128)
    assert linear.conv_width == 3 and model.attn_output_gate and model.qk_norm


def test_norms_and_decays_stay_in_float32(tmp_path: Path) -> None:
    kept = {
        name.split(".", 3)[-1]
        for name, tensor in stream_tensors(open_checkpoint(tiny(tmp_path / "tiny.gguf")), torch.bfloat16)
        if tensor.dtype == torch.float32
    }
    assert {"linear_attn.A_log", "linear_attn.dt_bias", "input_layernorm.weight", "self_attn.q_norm.weight"} <= kept
    assert "linear_attn.norm.weight" not in kept and "mlp.up_proj.weight" not in kept


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("plain") / "tiny.gguf", num_layers=4, mtp=1)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"qwen35.ssm.inner_size": None}, "ssm.inner_size' is missing"),
    ({"qwen35.ssm.inner_size": 769}, "ssm.inner_size' 769 is not a multiple"),
    ({"qwen35.ssm.inner_size": 384}, "shape"),
    ({"qwen35.ssm.time_step_rank": 0}, "ssm.time_step_rank 0"),
    ({"qwen35.ssm.time_step_rank": 5, "qwen35.ssm.inner_size": 640}, "not a multiple of linear_num_key_heads"),
    ({"qwen35.ssm.group_count": 0}, "linear_num_key_heads"),
    ({"qwen35.ssm.state_size": 2**31}, "linear_key_head_dim"),
    ({"qwen35.ssm.conv_kernel": 9}, "linear_conv_kernel_dim"),
    ({"qwen35.nextn_predict_layers": None}, "'blk.4.* is not part|lacks tensor"),
    ({"qwen35.nextn_predict_layers": 5}, "nextn_predict_layers' is 5, but there are 5 blocks"),
    ({"qwen35.nextn_predict_layers": 2}, "layer_types holds no full_attention"),
    ({"qwen35.block_count": 0}, "nextn_predict_layers|num_hidden_layers"),
    ({"qwen35.full_attention_interval": 0}, "full_attention_interval"),
    ({"qwen35.full_attention_interval": 2}, "shape|not part|lacks"),
    ({"qwen35.attention.recurrent_layers": [True]}, "recurrent_layers' must hold"),
    ({"qwen35.attention.recurrent_layers": [1, 1, 1, 0, 0]}, "recurrent_layers' must hold"),
    ({"qwen35.attention.recurrent_layers": [True] * 5}, "full_attention"),
    ({"qwen35.rope.dimension_count": 7}, "partial_rotary_factor"),
    ({"qwen35.rope.dimension_count": 128}, "partial_rotary_factor"),
    ({"qwen35.attention.scale": 0.5}, "attention.scale' is 0.5"),
    ({"qwen35.attention.key_length": 0}, "attention.key_length"),
]


@pytest.mark.parametrize(("change", "word"), BAD)
def test_bad_metadata_names_the_key(change: dict[str, Any], word: str, plain: Path, tmp_path: Path) -> None:
    path = rewrite_metadata(plain, tmp_path / "bad.gguf", change)
    with pytest.raises(StartupError, match=word) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value) and "bad.gguf" in str(caught.value)


def test_a_scale_that_is_the_usual_one_is_taken(plain: Path, tmp_path: Path) -> None:
    open_checkpoint(rewrite_metadata(plain, tmp_path / "scale.gguf", {"qwen35.attention.scale": 0.125}))


def test_a_decay_above_zero_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "tiny.gguf")
    tensor = open_checkpoint(path).gguf.tensors["blk.1.ssm_a"]  # type: ignore[union-attr]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 4] = np.float32(0.5).tobytes()
    path.write_bytes(data)
    with pytest.raises(StartupError, match=r"'blk\.1\.ssm_a' holds a decay"):
        list(stream_tensors(open_checkpoint(path), torch.float32))


# --- the rotation contract ---------------------------------------------------------------------------------------------

H = "prism.hadamard."
WIDTHS = [256, 768]
ROTATED: dict[str, Any] = {"hadamard": 128, "gdn_v_grouped": True, "quant": "bf16"}


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("rotated") / "tiny.gguf", **ROTATED)


@pytest.fixture(scope="module")
def rotated_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tied") / "tiny.gguf", tied=True, **ROTATED)


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(path)


def test_a_whole_contract_is_taken(rotated: Path, rotated_tied: Path) -> None:
    for path, tied in ((rotated, False), (rotated_tied, True)):
        found = opened(path).hadamard
        assert found is not None and found.block == 128 and found.inverse and found.gdn_v_grouped
        assert found.tied == tied and ("output.weight" in found.rotated) != tied
        assert sorted(found.signs) == WIDTHS and {len(found.signs[width]) for width in WIDTHS} == set(WIDTHS)
        assert "blk.0.ssm_out.weight" in found.rotated and "blk.0.ssm_alpha.weight" not in found.rotated


SIGNS = [1] * 1024
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"version": 3}, "version' is 3"),
    ({"version": 0}, "version' is 0"),
    ({"version": "1"}, "version' must be an integer"),
    ({"version": None}, "version' is missing beside others"),
    ({"version": 2}, "tied_output' is false, which contradicts version 2"),
    ({"tied_output": True}, "tied_output' is true, which contradicts version 1"),
    ({"tied_output": 1}, "tied_output' must be a boolean"),
    ({"version": 2, "tied_output": True}, "tied_output' is true, but there is a tensor 'output.weight'"),
    ({"block_size": 0}, "block_size' must be a power of two, not 0"),
    ({"block_size": 96}, "block_size' must be a power of two, not 96"),
    ({"block_size": None}, "block_size' is missing"),
    ({"block_size": 512}, "sign_widths' holds 256, not a multiple of block_size 512"),
    ({"transform": "dct"}, "transform' is 'dct'"),
    ({"transform": None}, "transform' is missing"),
    ({"axis": "output"}, "axis' is 'output'"),
    ({"axis": 1}, "axis' must be a string"),
    ({"sign_mode": "random"}, "sign_mode' is 'random'"),
    ({"sign_mode": None}, "sign_mode' is missing"),
    ({"sign_mode": "identity"}, "sign_mode' is identity, but there are prism.hadamard.sign_widths"),
    ({"weight_names": None}, "weight_names' is missing"),
    ({"weight_names": [1, 2]}, "weight_names' must be a list of strings"),
    ({"weight_names": ["output.weight", "output.weight"]}, "weight_names' names 'output.weight' twice"),
    ({"weight_names": ["blk.9.ffn_up.weight"]}, "weight_names' names 'blk.9.ffn_up.weight', which is no tensor"),
    ({"weight_names": ["blk.0.ssm_alpha.weight"]}, "'blk.0.ssm_alpha.weight', whose input cannot be rotated"),
    ({"weight_names": ["token_embd.weight"]}, "'token_embd.weight', whose input cannot be rotated"),
    ({"weight_names": ["blk.0.attn_norm.weight"]}, "'blk.0.attn_norm.weight', whose input cannot be rotated"),
    ({"inverse_weight_names": ["output.weight"]}, "inverse_weight_names' names 'output.weight'; only"),
    ({"inverse_weight_names": ["token_embd.weight"] * 2}, "inverse_weight_names' names 'token_embd.weight' twice"),
    ({"inverse_weight_names": "token_embd.weight"}, "inverse_weight_names' must be a list"),
    ({"sign_widths": None}, "sign_widths' is missing"),
    ({"sign_values": None}, "sign_values' is missing"),
    ({"sign_widths": [256]}, "sign_values' holds 1024 values, but sign_widths add up to 256"),
    ({"sign_widths": [256], "sign_values": [1] * 256}, "sign_widths' holds no signs for the 768 columns of tensor"),
    ({"sign_widths": [768], "sign_values": [1] * 768}, "sign_widths' holds no signs for the 256 columns of tensor"),
    ({"sign_widths": [200, 824]}, "sign_widths' holds 200, not a multiple of block_size 128"),
    ({"sign_widths": [-128, 1152]}, "sign_widths' holds -128"),
    ({"sign_widths": [256, 768, 256], "sign_values": [*SIGNS, *[1] * 256]}, "sign_widths' holds a width twice"),
    ({"sign_widths": [256.0, 768.0]}, "sign_widths' must be a list of integers"),
    ({"sign_values": [*SIGNS[1:], 0]}, "sign_values' holds a value other than 1 and -1"),
    ({"sign_values": [*SIGNS[1:], 3]}, "sign_values' holds a value other than 1 and -1"),
    ({"gdn_v_grouped": "yes"}, "gdn_v_grouped' must be a boolean"),
    ({"rounds": 2}, "key 'prism.hadamard.rounds' is not known"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "word"), REFUSED)
def test_a_broken_contract_names_the_key(change: dict[str, Any], word: str, rotated: Path, tmp_path: Path) -> None:
    path = rewrite_metadata(rotated, tmp_path / "bad.gguf", {H + key: value for key, value in change.items()})
    with pytest.raises(StartupError, match=word) as caught:
        opened(path)
    assert "\n" not in str(caught.value) and "bad.gguf" in str(caught.value)


def test_a_missing_architecture_is_called_missing(rotated: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(rotated.read_bytes().replace(b"general.architecture", b"general.architecturX"))
    with pytest.raises(StartupError, match=r"metadata key 'general.architecture' is missing"):
        opened(path)


def test_a_broken_tied_contract_names_the_key(rotated_tied: Path, tmp_path: Path) -> None:
    for change, word in (
        ({"inverse_weight_names": None}, "tied_output' is true, but 'token_embd.weight' is not among"),
        ({"version": 1, "tied_output": None}, "inverse_weight_names' names 'token_embd.weight', but there is no"),
    ):
        path = rewrite_metadata(rotated_tied, tmp_path / "bad.gguf", {H + key: value for key, value in change.items()})
        with pytest.raises(StartupError, match=re.escape(word)):
            opened(path)


def test_an_empty_list_of_weights_is_refused(rotated: Path, tmp_path: Path) -> None:
    """The writer of the tests knows no empty arrays, so the count is changed in place; what is cut out keeps to the alignment."""
    path = rewrite_metadata(rotated, tmp_path / "bad.gguf", {H + "weight_names": ["x" * 24]})
    data = path.read_bytes()
    key = (H + "weight_names").encode()
    at = data.index(key) + len(key) + 8
    assert data[at : at + 8] == (1).to_bytes(8, "little")
    path.write_bytes(data[:at] + bytes(8) + data[at + 8 + 32 :])
    with pytest.raises(StartupError, match="weight_names' is empty"):
        opened(path)


def test_half_of_the_keys_is_refused_whichever_half(rotated: Path, tmp_path: Path) -> None:
    """Each key alone: the file is refused, never served as if it were not rotated."""
    keys = [key for key in opened(rotated).gguf.metadata if key.startswith(H)]  # type: ignore[union-attr]
    for kept in keys:
        path = rewrite_metadata(rotated, tmp_path / "bad.gguf", {key: None for key in keys if key != kept})
        with pytest.raises(StartupError, match=H):
            opened(path)


def test_a_block_must_divide_every_rotated_width(tmp_path: Path) -> None:
    path = tiny(tmp_path / "tiny.gguf", plain_signs=True, **ROTATED)
    bad = rewrite_metadata(path, tmp_path / "bad.gguf", {H + "block_size": 1024})
    with pytest.raises(StartupError, match=r"block_size' 1024 does not divide the 256 columns of tensor"):
        opened(bad)
