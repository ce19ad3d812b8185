"""What a ``qwen4_exp`` configuration and its files may say, and what is refused: each fault with an error of its own."""

from __future__ import annotations

import json
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
from freetoken.loader.names import expected_tensors, tensor_bytes
from freetoken.loader.stream import stream_tensors
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION, HyperConfig, IndexerConfig
from freetoken.models.parse import parse_hf_config

PUBLISHED = Path(__file__).parents[2] / "benchmarks/configs/qwen3.8-flash-next-fp8/config.json"
Spoil = Callable[[dict[str, torch.Tensor]], Any]


def published(**changes: Any) -> dict[str, Any]:
    config = json.loads(PUBLISHED.read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_the_published_geometry() -> None:
    model = parse_hf_config(published(), None, "big")
    assert model.layer_types == 12 * (*3 * (LINEAR_ATTENTION,), FULL_ATTENTION)
    assert model.hyper == HyperConfig(streams=4, rank=320)
    assert model.indexer == IndexerConfig(num_heads=4, head_dim=128, budget=2048, ratio=4)
    assert (model.indexer.blocks, model.indexer.visible) == (512, 2051)
    assert model.linear_attention is not None and model.linear_attention.sigmoid_gate
    assert model.linear_attention.channels == 10_240 and model.rotary_dim == 64
    assert model.moe is not None and (model.moe.num_experts, model.moe.top_k, model.moe.norm_topk_prob) == (
        512,
        10,
        True,
    )
    assert model.ple is not None and (model.ple.layers, model.ple.boundary_id) == ((1,), 248_044)
    assert model.ple.table_rows(0) == 320_001_536
    assert model.kv_bytes_per_token(2) == 24_576 + 12 * 128 * 2
    shapes = expected_tensors(model, stacked=True)
    experts = sum(
        torch.Size(shape).numel() for name, shape in shapes.items() if ".experts." in name and "scale" not in name
    )
    assert experts == 3 * 2560 * 640 * 512 * 48
    beside = sum(tensor_bytes(n, s, shapes, 2) for n, s in shapes.items() if ".experts." not in n)
    assert 4 * 2**30 < beside < 10 * 2**30


def test_other_spellings_mean_the_same() -> None:
    model = parse_hf_config(published(), None, "big")
    kinds = [{LINEAR_ATTENTION: LINEAR_ATTENTION}.get(kind, "indexed_attention") for kind in model.layer_types]
    for changes in (
        {"layer_types": kinds, "full_attention_interval": ...},
        {"layer_types": list(model.layer_types)},
        {"architectures": ...},
        {"norm_topk_prob": None, "num_experts_per_tok": None, "hc_count": ..., "hc_lowrank": ...},
    ):
        assert parse_hf_config(published(**changes), None, "big") == model
    without = {key: published()[key] for key in ("quantization_config", "dtype")}
    nested = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", **without}
    nested["text_config"] = published(architectures=..., quantization_config=..., dtype=...)
    found = parse_hf_config(nested, None, "big")
    assert found.architecture == "Qwen4ExpForConditionalGeneration" and found.indexer == model.indexer
    unset = parse_hf_config(published(output_gate_type=None), None, "big").linear_attention
    assert unset is not None and not unset.sigmoid_gate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_n_heads": ...}, "indexer_n_heads is missing"),
        ({"indexer_budget": ...}, "indexer_budget is missing"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2, but only 1 is served"),
        ({"indexer_budget": 2050}, "indexer_budget 2050 is not a multiple of indexer_compress_ratio 4"),
        ({"indexer_compress_ratio": 0}, "indexer_compress_ratio must be an integer from 1"),
        ({"indexer_head_dim": 32}, "indexer_head_dim 32 is less than the 64 dimensions that are rotated"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh' is not served"),
        ({"hc_count": 1}, "hc_count must be at least 2"),
        ({"hc_lowrank": -1}, "hc_lowrank must be an integer from 1"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok 513 is more than num_experts 512"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types holds 'sliding_attention'"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids: layer 4 is full_attention; only linear_attention can be"),
        ({"ple_layer_ids": [49]}, "ple_layer_ids: 49 is not one of the 48 layers"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"ple_embed_dim": 2561}, "ple_embed_dim 2561 does not divide over 16 n-gram heads"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        parse_hf_config(published(**changes), None, "big")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen4_exp") / "tiny"
    return make_tiny_model(path, arch="qwen4_exp", layer_pattern="llf", num_layers=3, vision=True)


def test_weights_are_those_of_transformers(tiny: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(tiny)
    seen = set()
    for name, tensor in stream_tensors(checkpoint, torch.float32):
        if ".experts." not in name:
            assert torch.equal(tensor, oracle[name]), name
            seen.add(name)
    assert set(checkpoint.aside) == {"vision tower", "multi-token prediction"}
    missing = {name for name in oracle if ".experts." not in name and "ple_embedding" not in name} - seen
    assert not missing


LAYER = "model.language_model.layers.2.self_attn."


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda t: t.pop(f"{LAYER}indexer.k_layernorm.weight"),
            "lacks tensor 'model.layers.2.self_attn.indexer.k_layernorm",
        ),
        (
            lambda t: t.pop("model.language_model.hyper_connection_mixer.hc_norm.weight"),
            "lacks tensor .*mixer.hc_norm.weight",
        ),
        (lambda t: t.update({f"{LAYER}indexer.index_qk_proj.weight": torch.ones(4, 64)}), r"has shape \[4, 64\]"),
        (lambda t: t.update({"model.language_model.norm.weight": torch.ones(64)}), "norm.weight' is not part of"),
        (lambda t: t.pop("model.language_model.layers.1.ple.conv1d.weight"), "lacks tensor .*ple.conv1d.weight"),
        (
            lambda t: t.pop("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight"),
            "lacks tensor .*shard_2.weight, though it has shard 3",
        ),
    ],
    ids=["indexer", "mixer", "shape", "foreign", "n-grams", "shard"],
)
def test_faulty_files_are_refused(spoil: Spoil, message: str, tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(StartupError, match=message):
        open_checkpoint(tmp_path)
