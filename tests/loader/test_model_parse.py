"""Configuration parsing: both spellings of config.json, generation defaults, geometry checks, GGUF metadata."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model
from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.models.parse import SERVED_ARCHITECTURES, parse_hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "torch_dtype": "float16",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_llama() -> None:
    model = parse_hf_config(LLAMA, None, "name")
    assert (model.name, model.architecture, model.head_dim, model.q_size, model.kv_size) == (
        "name",
        "LlamaForCausalLM",
        8,
        64,
        16,
    )
    assert (model.dtype, model.rope_theta, model.rope_scaling, model.rms_norm_eps) == ("float16", 500000.0, None, 1e-5)
    assert (model.eos_token_ids, model.bos_token_id, model.tie_word_embeddings) == ((7,), 1, False)
    assert not (model.qk_norm or model.attention_bias or model.mlp_bias or model.sampling_defaults)


def test_qwen3_and_generation_config() -> None:
    hf = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "mlp_bias": True}
    generation = {
        "eos_token_id": [9, 7],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "do_sample": True,
        "min_p": None,
    }
    model = parse_hf_config(hf, generation, "q")
    assert model.qk_norm and model.tie_word_embeddings and not model.mlp_bias
    assert model.head_dim == Qwen3Config().head_dim == 128
    assert model.eos_token_ids == (7, 9)
    assert model.sampling_defaults == {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}


def test_newer_spelling_means_the_same() -> None:
    newer = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "torch_dtype")}
    newer |= {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}, "dtype": "float16"}
    assert parse_hf_config(newer, None, "n") == parse_hf_config(LLAMA | {"rope_scaling": LLAMA3}, None, "n")
    plain = newer | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert parse_hf_config(plain, None, "n") == parse_hf_config(LLAMA, None, "n")


def test_model_type_stands_in_for_architectures() -> None:
    hf = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert parse_hf_config(hf | {"model_type": "qwen3"}, None, "n").architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_what_transformers_saves_is_understood(config_class: Any, tmp_path: Path) -> None:
    config = config_class(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 512}, max_position_embeddings=2048, tie_word_embeddings=True, dtype="bfloat16",
        architectures=[config_class.__name__.replace("Config", "ForCausalLM")], eos_token_id=[1, 2],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = open_checkpoint(tmp_path, "dummy").model
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (3, 4, 2, 16)
    assert (model.rope_theta, model.dtype, model.eos_token_ids) == (1e6, "bfloat16", (1, 2))
    assert model.rope_scaling is not None
    assert model.rope_scaling["rope_type"] == "yarn" and model.rope_scaling["original_max_position_embeddings"] == 512
    assert model.tie_word_embeddings and model.max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_type": "dynamic", "factor": 3.0},
            {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 4096},
        ),
        (LLAMA3, LLAMA3),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16, "truncate": False},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
                "attention_factor": 1.5,
                "beta_fast": 16.0,
                "truncate": False,
            },
        ),
        (
            {"rope_type": "factors", "factors": [1, 1.5, 2.0, 8]},
            {"rope_type": "factors", "factors": [1.0, 1.5, 2.0, 8.0]},
        ),
        ({"rope_type": "default"}, None),
    ],
)
def test_rope_scaling(scaling: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert parse_hf_config(LLAMA | {"rope_scaling": scaling}, None, "n").rope_scaling == expected


BAD: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["BertModel"]}, "BertModel"),
    ({"architectures": ["BertModel"]}, ", ".join(SERVED_ARCHITECTURES)),
    ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
    ({"architectures": 5}, "architectures"),
    ({"architectures": []}, "architectures"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": 2**40}, "hidden_size"),
    ({"hidden_size": 68}, "hidden_size 68 is not a multiple"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"vocab_size": 3.5}, "vocab_size"),
    ({"intermediate_size": [96]}, "intermediate_size"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"rope_theta": -1}, "rope_theta"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"attention_bias": "yes"}, "attention_bias"),
    ({"torch_dtype": "int8"}, "int8"),
    ({"torch_dtype": ["float32"]}, "torch_dtype"),
    ({"eos_token_id": 1000}, "eos_token_id"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ({"quantization_config": "awq"}, "awq"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_scaling": []}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
    ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}, "original_max_position_embeddings"),
    ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "list of 4 numbers"),
    ({"rope_scaling": {"rope_type": "factors", "factors": [1.0, 1.0, 1.0, 0.0]}}, "factors"),
]


@pytest.mark.parametrize(("change", "word"), BAD)
def test_bad_config_names_the_key(change: dict[str, Any], word: str) -> None:
    with pytest.raises(StartupError, match=word.replace("</s>", "eos_token_id")) as caught:
        parse_hf_config(LLAMA | change, None, "n")
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


@pytest.mark.parametrize("change", [{"temperature": "hot"}, {"eos_token_id": [1.5]}])
def test_bad_generation_config_names_the_file(change: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"generation_config\.json"):
        parse_hf_config(LLAMA, change, "n")


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_and_folder_of_one_model_agree(arch: str, tied: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "arch": arch,
        "tied": tied,
        "extra_vocab": 3,
        "head_dim": 24,
        "rope_theta": 123456.0,
        "attention_bias": arch == "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    }
    folder = open_checkpoint(make_tiny_model(tmp_path / "tiny", **options))
    single = open_checkpoint(make_tiny_model(tmp_path / "tiny.gguf", format="gguf", **options))
    assert (folder.kind, single.kind, folder.name, single.name) == ("safetensors", "gguf", "tiny", "tiny")
    values, others = vars(folder.model), vars(single.model)
    differing = {key for key in values if values[key] != others[key]}
    assert differing <= {"eos_token_ids"}
    assert set(folder.model.eos_token_ids) == set(single.model.eos_token_ids) == {0, 2}


def test_llama3_scaling_of_a_gguf_becomes_divisors(tmp_path: Path) -> None:
    """The divisors give the inverse frequencies that transformers computes from the same scaling."""
    scaling = LLAMA3 | {"original_max_position_embeddings": 64}
    path = make_tiny_model(tmp_path / "t.gguf", format="gguf", rope_scaling=scaling, head_dim=32, rope_theta=5e5)
    model = open_checkpoint(path).model
    assert model.rope_scaling is not None and model.rope_scaling["rope_type"] == "factors"
    config = LlamaConfig(head_dim=32, rope_parameters={"rope_theta": 5e5, **scaling})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** (-np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(plain / model.rope_scaling["factors"], expected.numpy(), rtol=2e-6)
    assert max(model.rope_scaling["factors"]) == 8.0 and min(model.rope_scaling["factors"]) == 1.0


# --- hybrid models ---------------------------------------------------------------------------------------------------

HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    "eos_token_id": 7,
    "dtype": "bfloat16",
}
LINEAR3_FULL1 = ("linear_attention",) * 3 + ("full_attention",)


def test_hybrid() -> None:
    model = parse_hf_config(HYBRID, None, "m")
    assert model.layer_types == LINEAR3_FULL1 * 2
    assert (model.num_linear_layers, model.num_attention_layers) == (6, 2)
    assert (model.rotary_dim, model.rope_theta, model.rope_scaling) == (8, 1e7, None)
    assert model.attn_output_gate and model.zero_centred_norm and model.qk_norm
    linear = model.linear_attention
    assert linear is not None
    assert (linear.key_size, linear.value_size, linear.channels, linear.conv_width) == (32, 144, 208, 4)
    assert linear.projected == 208 + 144 + 12
    assert model.kv_bytes_per_token(2) == 2 * 2 * 64 * 2


def test_hybrid_beside_a_vision_tower() -> None:
    """The language model is described in ``text_config``; class, type and tying stand beside it."""
    text = {key: value for key, value in HYBRID.items() if key != "architectures"} | {"model_type": "qwen3_5_text"}
    published = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text | {"tie_word_embeddings": False},
        "vision_config": {"hidden_size": 5, "num_heads": 3},
    }
    model = parse_hf_config(published, None, "m")
    alone = parse_hf_config(HYBRID | {"tie_word_embeddings": True}, None, "m")
    assert model.architecture == "Qwen3_5ForConditionalGeneration"
    assert model == dataclasses.replace(alone, architecture=model.architecture)
    del published["architectures"]
    assert parse_hf_config(published, None, "m") == model
    with pytest.raises(StartupError, match="text_config must be an object"):
        parse_hf_config(published | {"text_config": 3}, None, "m")


def test_hybrid_defaults_are_those_of_transformers() -> None:
    defaults = Qwen3_5TextConfig()
    model = parse_hf_config({"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 32, **NEEDED}, None, "m")
    linear = model.linear_attention
    assert linear is not None
    assert list(model.layer_types) == defaults.layer_types
    assert (linear.num_key_heads, linear.num_value_heads) == (
        defaults.linear_num_key_heads,
        defaults.linear_num_value_heads,
    )
    assert (linear.key_head_dim, linear.value_head_dim) == (
        defaults.linear_key_head_dim,
        defaults.linear_value_head_dim,
    )
    assert (linear.conv_width, model.head_dim) == (defaults.linear_conv_kernel_dim, defaults.head_dim)
    assert model.rotary_dim == int(defaults.head_dim * defaults.rope_parameters["partial_rotary_factor"])
    assert model.max_position_embeddings == defaults.max_position_embeddings


NEEDED = {"vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads must be an integer from 1"),
        ({"linear_key_head_dim": 512}, "linear_key_head_dim must be an integer from 1 to 256"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim must be from 2 to 4, not 5"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be from 2 to 4, not 1"),
        ({"layer_types": [*LINEAR3_FULL1, "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"layer_types": [*LINEAR3_FULL1]}, "layer_types has 4 entries, but num_hidden_layers is 8"),
        ({"layer_types": "linear_attention"}, "layer_types must be a list"),
        ({"layer_types": ["linear_attention"] * 8}, "layer_types holds no full_attention"),
        ({"num_hidden_layers": 3}, "layer_types holds no full_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval must be an integer"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor 0.1 of a head of 32"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5 of a head of 32"),
        ({"rope_parameters": {"rope_type": "mystery"}}, "rope_type 'mystery'"),
    ],
)
def test_bad_hybrid_configs_name_the_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=re.escape(words)):
        parse_hf_config(HYBRID | change, None, "m")


def test_linear_layers_are_for_hybrid_models_alone() -> None:
    with pytest.raises(StartupError, match="layer_types holds 'linear_attention', but only full_attention"):
        parse_hf_config(LLAMA | {"layer_types": ["linear_attention", "full_attention"]}, None, "m")
