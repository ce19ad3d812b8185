"""Checkpoints with experts and with FP8 weights: what is read, how it is held, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.names import expected_tensors, tensor_bytes, weight_bytes
from freetoken.loader.stream import stream_tensors
from freetoken.models.config import Fp8Config, ModelConfig, MoeConfig
from freetoken.models.parse import parse_hf_config

Tensors = dict[str, torch.Tensor]
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
HYBRID = {**MOE, "architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 4}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def parse(base: dict[str, Any], **change: Any) -> ModelConfig:
    values = {**base, **change}
    return parse_hf_config({key: value for key, value in values.items() if value is not None}, None, "tiny")


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, ()),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, (0, 1, 3, 4, 5)),
        ({"mlp_only_layers": [1, 0]}, (0, 1)),
    ],
)
def test_dense_layers(change: dict[str, Any], dense: tuple[int, ...]) -> None:
    model = parse(MOE, **change)
    assert model.moe is not None and model.moe.dense_layers == dense
    assert model.num_sparse_layers == 6 - len(dense)
    assert model.intermediate_size == (48 if dense else 0)
    shapes = expected_tensors(model)
    for layer in range(6):
        assert (f"model.layers.{layer}.mlp.gate_proj.weight" in shapes) == (layer in dense)
        assert (f"model.layers.{layer}.mlp.experts.7.down_proj.weight" in shapes) == (layer not in dense)


def test_defaults_of_each_architecture() -> None:
    assert parse(MOE).moe == MoeConfig(num_experts=8, top_k=2, intermediate_size=16, norm_topk_prob=False)
    shared = MoeConfig(num_experts=8, top_k=2, intermediate_size=16, norm_topk_prob=True, shared_intermediate_size=512)
    assert parse(HYBRID, intermediate_size=None).moe == shared
    assert parse(MOE, num_experts=None, num_local_experts=8, norm_topk_prob=True).moe is not None
    assert parse({**MOE, "architectures": None, "model_type": "qwen3_moe"}).architecture == "Qwen3MoeForCausalLM"
    assert parse(MOE).head_dim == 8 and parse(MOE, head_dim=64).head_dim == 64


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (MOE, {"num_experts": None}, "num_experts is missing"),
        (MOE, {"num_experts": 0}, "num_experts must be an integer from 1"),
        (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        (MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok must be"),
        (MOE, {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (MOE, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step must be"),
        (MOE, {"mlp_only_layers": [6]}, "mlp_only_layers must list layers from 0 to 5"),
        (MOE, {"mlp_only_layers": "0"}, "mlp_only_layers must list"),
        (MOE, {"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
        (HYBRID, {"norm_topk_prob": False}, "norm_topk_prob is false"),
        (HYBRID, {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size must be"),
        (MOE, {"quantization_config": {**FP8, "weight_block_size": [64, 64]}}, r"weight_block_size \[64, 64\]"),
        (MOE, {"quantization_config": {**FP8, "activation_scheme": "static"}}, "activation_scheme 'static'"),
        (MOE, {"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt 'e5m2'"),
        (MOE, {"quantization_config": {**FP8, "scale_fmt": "ue8m0"}}, "scale_fmt 'ue8m0'"),
        (MOE, {"quantization_config": {**FP8, "modules_to_not_convert": "lm_head"}}, "not a list of module names"),
        (MOE, {"quantization_config": {**FP8, "ignored_layers": [""]}}, "ignored_layers that is not a list"),
    ],
)
def test_bad_configurations_name_the_key(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        parse(base, **change)
    assert "\n" not in str(caught.value)


def test_which_modules_are_fp8() -> None:
    fp8 = parse(
        MOE,
        quantization_config={**FP8, "modules_to_not_convert": ["lm_head", "model.language_model.layers.1", "k_proj"]},
    ).fp8
    assert fp8 == Fp8Config(skipped=("lm_head", "model.layers.1", "k_proj"))
    assert fp8.converts("model.layers.11.mlp.up_proj") and not fp8.converts("model.layers.1.mlp.up_proj")
    assert not fp8.holds(["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"])
    assert fp8.holds(["model.layers.0.self_attn.o_proj"]) and not fp8.holds(["model.layers.0.mlp.gate"])


def test_bytes_of_the_large_geometry() -> None:
    """The experts of the 512-expert geometry: 120.8 billion elements, one byte each, and their scales."""
    big = parse(
        HYBRID,
        hidden_size=2560,
        num_hidden_layers=48,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=640,
        quantization_config=FP8,
    )
    shapes = expected_tensors(big, stacked=True)
    experts = {name: shape for name, shape in shapes.items() if ".mlp.experts." in name}
    values = sum(tensor_bytes(n, s, shapes, 2) for n, s in experts.items() if not n.endswith("_scale_inv"))
    assert values == 3 * 2560 * 640 * 512 * 48
    scales = sum(tensor_bytes(n, s, shapes, 2) for n, s in experts.items() if n.endswith("_scale_inv"))
    assert scales * 128 * 128 == 4 * values
    assert weight_bytes(big, 2) > values + scales


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"stacked": True, "shards": 2}, {"vision": True}])
@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_5_moe"])
def test_weights_are_those_of_transformers(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    if arch == "qwen3_moe":
        options = {key: value for key, value in options.items() if key != "vision"}
    path = make_tiny_model(tmp_path / "tiny", arch=arch, num_layers=4, **options)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    for name, tensor in stream_tensors(open_checkpoint(path), torch.float32):
        prefix, _, rest = name.partition(".experts.")
        expert, _, part = rest.partition(".")
        if not expert.isdigit():
            assert torch.equal(tensor, oracle[name]), name
        elif part == "down_proj.weight":
            assert torch.equal(tensor, oracle[f"{prefix}.experts.down_proj"][int(expert)])
        else:
            half = oracle[f"{prefix}.experts.gate_up_proj"][int(expert)].chunk(2)[part == "up_proj.weight"]
            assert torch.equal(tensor, half)


@pytest.fixture
def fp8_folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", arch="qwen3_moe", fp8=True, hidden_size=136, num_layers=1)


def respoil(folder: Path, spoil: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_fp8_is_streamed_as_it_is_stored(fp8_folder: Path) -> None:
    stored = load_file(fp8_folder / "model.safetensors")
    for name, tensor in stream_tensors(open_checkpoint(fp8_folder), torch.bfloat16):
        if name.endswith("_scale_inv"):
            assert tensor.dtype == torch.float32
        elif stored[name].dtype == torch.float8_e4m3fn:
            assert tensor.dtype == torch.float8_e4m3fn and torch.equal(tensor.float(), stored[name].float())
            assert f"{name}_scale_inv" in stored
        else:
            assert tensor.dtype == torch.bfloat16
    held = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(held) == 4 + 3 * 8


def test_fp8_that_is_not_held_so_is_dequantised(fp8_folder: Path) -> None:
    """A router in FP8, two blocks wide, the last of 8 columns."""
    name = "model.layers.0.mlp.gate.weight"

    def spoil(tensors: Tensors) -> None:
        tensors[name] = torch.randn(8, 136).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.tensor([[0.5, 4.0]], dtype=torch.bfloat16)

    respoil(fp8_folder, spoil)
    checkpoint = open_checkpoint(fp8_folder)
    streamed = dict(stream_tensors(checkpoint, torch.float32))
    stored = load_file(fp8_folder / "model.safetensors")[name].float()
    assert torch.equal(streamed[name], torch.cat([stored[:, :128] * 0.5, stored[:, 128:] * 4], 1))
    assert f"{name}_scale_inv" not in streamed


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
SCALE = f"{EXPERT}_scale_inv"


def _no_scale(tensors: Tensors) -> None:
    del tensors[SCALE]


def _wrong_scale(tensors: Tensors) -> None:
    tensors[SCALE] = torch.ones(1, 1)


def _integer_scale(tensors: Tensors) -> None:
    tensors[SCALE] = torch.ones(1, 2, dtype=torch.int32)


def _not_fp8(tensors: Tensors) -> None:
    tensors[EXPERT] = tensors[EXPERT].to(torch.bfloat16)


def _router_without_scale(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.gate.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def _router_with_wrong_scale(tensors: Tensors) -> None:
    _router_without_scale(tensors)
    tensors["model.layers.0.mlp.gate.weight_scale_inv"] = torch.ones(2, 2)


def _norm_in_fp8(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    tensors["model.norm.weight_scale_inv"] = torch.ones(1)


def _surplus_scale(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.gate.weight_scale_inv"] = torch.ones(1, 2)


def _missing_expert(tensors: Tensors) -> None:
    del tensors[EXPERT], tensors[SCALE]


def _surplus_expert(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = tensors[EXPERT].clone()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_scale, r"experts\.3\.up_proj\.weight' is F8_E4M3, but the checkpoint has no '.*weight_scale_inv'"),
        (_wrong_scale, r"up_proj\.weight_scale_inv' has shape \[1, 1\], but the config asks for \[1, 2\]"),
        (_integer_scale, r"up_proj\.weight_scale_inv' has dtype I32"),
        (_not_fp8, r"up_proj\.weight' has dtype BF16, but quantization_config asks for F8_E4M3"),
        (_router_without_scale, r"mlp\.gate\.weight' is F8_E4M3, but the checkpoint has no"),
        (_router_with_wrong_scale, r"gate\.weight_scale_inv' has shape \[2, 2\], but the config asks for \[1, 2\]"),
        (_norm_in_fp8, r"norm\.weight' is F8_E4M3, which is served for matrices only"),
        (_surplus_scale, r"gate\.weight_scale_inv' is not part of a Qwen3MoeForCausalLM"),
        (_missing_expert, r"lacks tensor 'model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight'"),
        (_surplus_expert, r"experts\.8\.up_proj\.weight' is not part of"),
    ],
)
def test_bad_checkpoints_name_the_tensor(spoil: Callable[[Tensors], None], message: str, fp8_folder: Path) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        open_checkpoint(respoil(fp8_folder, spoil))
    assert "\n" not in str(caught.value)


def test_a_plain_checkpoint_has_no_fp8(tmp_path: Path) -> None:
    """FP8 tensors with scales are dequantised even where quantization_config is missing; without one they are refused."""
    path = make_tiny_model(tmp_path / "tiny", arch="qwen3_moe", num_layers=1)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    respoil(path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(StartupError, match="is F8_E4M3, but the checkpoint has no"):
        open_checkpoint(path)
    respoil(path, lambda tensors: tensors.update({f"{name}_scale_inv": torch.full((1, 1), 2.0)}))
    streamed = dict(stream_tensors(open_checkpoint(path), torch.float32))
    assert torch.equal(streamed[name], load_file(path / "model.safetensors")[name].float() * 2)


@pytest.mark.parametrize("count", [7, 9])
def test_another_number_of_stacked_experts(count: int, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", arch="qwen3_5_moe", num_layers=4, stacked=True)
    with pytest.raises(
        StartupError, match=rf"experts\.down_proj' has shape \[8, 64, 24\].*\[{count}, 64, 24\]|mlp\.gate"
    ):
        open_checkpoint(path, "auto", {"num_experts": count})
