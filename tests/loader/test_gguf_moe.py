"""GGUF files of models with experts (``qwen3moe``, ``qwen35moe``, ``qwen4exp``): what they mean, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import TinyModel, make_tiny_model
from transformers import AutoModelForCausalLM

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import Checkpoint, open_checkpoint
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.gguf_names import gguf_tensors
from freetoken.loader.names import MTP, is_zero_centred
from freetoken.loader.stream import stream_tensors
from freetoken.models.parse import parse_hf_config
from freetoken.models.ple_config import PleConfig
from gguf_oracle_moe import write_published
from rewrite_gguf import rewrite_metadata

REPOSITORY = Path(__file__).parents[2]
ROWS_OF_32: dict[str, Any] = {
    "expert_size": 32,
    "shared_size": 64,
    "hyper_rank": 32,
    "ple_width": 128,
    "linear_value_heads": 6,
    "layer_pattern": "lfl",
    "num_layers": 3,
    "ple_layers": "3",
}
CASES: dict[str, dict[str, Any]] = {
    "qwen4_exp f32": {"arch": "qwen4_exp"},
    "qwen4_exp q8_0, table iq4_nl, fused": {
        "arch": "qwen4_exp",
        "quant": "q8_0",
        "table_quant": "iq4_nl",
        "fused_experts": True,
        "mtp": 1,
    },
    "qwen4_exp bf16, table q4_0, tied": {
        "arch": "qwen4_exp",
        "quant": "bf16",
        "table_quant": "q4_0",
        "tied": True,
        "stacked": True,
    },
    "qwen4_exp f16, no n-grams": {"arch": "qwen4_exp", "quant": "f16", "ple_layers": ""},
    "qwen35moe q8_0": {"arch": "qwen3_5_moe", "quant": "q8_0", "mtp": 1},
    "qwen3moe q8_0": {"arch": "qwen3_moe", "quant": "q8_0", "norm_topk": True},
}


def specified(options: dict[str, Any]) -> TinyModel:
    return TinyModel(**{key: value for key, value in {**ROWS_OF_32, **options}.items() if key != "quant"})


def tiny(path: Path, options: dict[str, Any]) -> Path:
    return make_tiny_model(path, format="gguf", **{**ROWS_OF_32, **options})


def weights_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Everything that is streamed, parts of an indexer's projection put together."""
    found = dict(stream_tensors(checkpoint, torch.float32))
    for name in [name for name in found if name.endswith("index_q_proj.weight")]:
        stem = name.removesuffix("q_proj.weight")
        found[f"{stem}qk_proj.weight"] = torch.cat((found.pop(name), found.pop(f"{stem}k_proj.weight")))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_file_means_what_its_checkpoint_says(name: str, tmp_path: Path) -> None:
    """Every weight and the whole geometry, against a folder made of the file by other code."""
    options = CASES[name]
    path = tiny(tmp_path / "tiny.gguf", options)
    ours = open_checkpoint(path)
    theirs = open_checkpoint(write_published(path, specified(options), tmp_path / "folder"))
    found, expected = weights_of(ours), weights_of(theirs)
    assert set(found) == set(expected)
    for key, value in expected.items():
        if ours.model.layer_types and is_zero_centred(key):  # stored less 1 there, whole in a file
            torch.testing.assert_close(found[key] - 1, value, rtol=0, atol=3e-7)
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=key)
    assert sum(ours.gguf.tensors[source].nbytes for source in ours.gguf_names.values()) == ours.total_bytes
    assert set(ours.aside) == ({MTP} if options.get("mtp") else set())
    same_geometry(ours, theirs)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_5_moe"])
def test_transformers_reads_the_same(arch: str, tmp_path: Path) -> None:
    """Where it knows the architecture: every weight, experts out of its stacks."""
    path = tiny(tmp_path / "tiny.gguf", {"arch": arch, "quant": "q8_0", "layer_pattern": None, "num_layers": 4})
    # It has no key for the size of an expert in one of them.
    known = {"gguf_file": path.name, "moe_intermediate_size": ROWS_OF_32["expert_size"], "dtype": torch.float32}
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, **known).state_dict()
    for name, tensor in weights_of(open_checkpoint(path)).items():
        layer, experts, rest = name.partition(".experts.")
        if experts:
            number, part = rest.split(".")[:2]
            stack = oracle[f"{layer}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(number)]
            expected = stack if part == "down_proj" else stack.chunk(2)[part == "up_proj"]
        else:
            expected = oracle[name]
        shift = 1.0 if arch == "qwen3_5_moe" and is_zero_centred(name) else 0.0
        torch.testing.assert_close(tensor - shift, expected, rtol=1e-6, atol=1e-6, msg=name)


def same_geometry(ours: Checkpoint, theirs: Checkpoint) -> None:
    changes: dict[str, Any] = {"name": "", "zero_centred_norm": False, "dtype": "", "eos_token_ids": ()}
    models = []
    for checkpoint in (ours, theirs):
        ple = checkpoint.model.ple
        if ple is not None:
            # A file says where a prime range begins and how many rows there are, not what they were made from.
            assert checkpoint.tables is not None and checkpoint.tables[0].rows == ple.table_rows(0)
            constants = ple.constants(0)
            ple = dataclasses.replace(ple, vocab_base=constants.vocab_sizes[0], divisible_by=1)
            assert constants == ple.constants(0)
        models.append(dataclasses.replace(checkpoint.model, ple=ple, intermediate_size=0, **changes))
    assert models[0] == models[1]
    if ours.tables is not None and theirs.tables is not None:
        assert (ours.tables[0].rows, ours.tables[0].width) == (theirs.tables[0].rows, theirs.tables[0].width)


def test_the_published_files_have_these_tensors() -> None:
    """As many a block as the files of the full model: 25 with linear attention, 26 with full, and 6 more with n-grams."""
    config = json.loads((REPOSITORY / "benchmarks/configs/qwen3.8-flash-next-fp8/config.json").read_text())
    del config["quantization_config"]
    found = gguf_tensors(parse_hf_config(config, None, "big"))
    counts = Counter(int(name.split(".")[1]) for name in found if name.startswith("blk."))
    assert counts == {layer: 31 if layer == 1 else 26 if layer % 4 == 3 else 25 for layer in range(48)}
    rest = {name.removesuffix(".weight") for name in found if not name.startswith("blk.")}
    assert rest == {"token_embd", "output", "output_hc_norm", "output_hc_down", "output_hc_up"}
    assert found["blk.47.ffn_down_exps.weight"][1] == (512, 2560, 640)
    assert found["blk.0.ssm_conv1d.weight"][1] == (10240, 4)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny(tmp_path / "tiny.gguf", {"arch": "qwen4_exp", "fused_experts": True}))
    seen: list[tuple[int, int]] = []
    for _ in stream_tensors(checkpoint, torch.float32, lambda done, total: seen.append((done, total))):
        pass
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)


@pytest.mark.gpu
def test_a_gpu_gets_the_same(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    there = dict(stream_tensors(checkpoint, torch.bfloat16, device="cuda"))
    for name, value in stream_tensors(checkpoint, torch.bfloat16):
        assert torch.equal(there[name].cpu(), value), name


def test_a_gate_of_one_row_may_keep_its_axis(good: Path, tmp_path: Path) -> None:
    name = "blk.0.ffn_gate_inp_shexp.weight"
    flat = GGUFFile.open(good).raw(name)
    path = rewrite_metadata(good, tmp_path / "two.gguf", {}, {name: (flat.reshape(1, -1), "F32")})
    assert GGUFFile.open(path).tensors[name].shape == (1, 64)
    before, after = weights_of(open_checkpoint(good)), weights_of(open_checkpoint(path))
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_the_boundary_is_not_an_end_of_text(good: Path, tmp_path: Path) -> None:
    path = rewrite_metadata(good, tmp_path / "other.gguf", {"qwen4exp.ple.eos_token_id": 9})
    model = open_checkpoint(path).model
    assert model.ple is not None and model.ple.boundary_id == 9 and model.eos_token_ids == (2, 0)


def test_a_ratio_may_be_one_number(good: Path, tmp_path: Path) -> None:
    path = rewrite_metadata(good, tmp_path / "one.gguf", {"qwen4exp.attention.compress_ratios": 4})
    assert open_checkpoint(path).model.indexer == open_checkpoint(good).model.indexer


def test_a_table_may_have_rows_that_nobody_looks_up(good: Path, tmp_path: Path) -> None:
    rows = np.zeros((1251, 128), dtype=np.uint8)
    checkpoint = open_checkpoint(rewrite_metadata(good, tmp_path / "long.gguf", {}, {TABLE: (rows, "F32")}))
    assert checkpoint.tables is not None and checkpoint.tables[0].rows == 1251
    assert checkpoint.model.ple is not None and checkpoint.model.ple.constants(0) == CONSTANTS


def test_another_seed_is_named_by_an_override(good: Path, tmp_path: Path) -> None:
    config = open_checkpoint(good).model.ple
    assert config is not None
    multipliers = numbers(dataclasses.replace(config, seed=7).constants(0).multipliers)
    path = rewrite_metadata(good, tmp_path / "seed.gguf", {"qwen4exp.ple.layer_multipliers": multipliers})
    with pytest.raises(StartupError, match=r"qwen4exp\.ple: stored multipliers\[0\] is"):
        open_checkpoint(path)
    found = open_checkpoint(path, overrides={"seed": 7}).model.ple
    assert found is not None and found.seed == 7


def test_dummy_weights_of_a_file(good: Path) -> None:
    checkpoint = open_checkpoint(good, "dummy")
    assert checkpoint.model == open_checkpoint(good).model
    assert (checkpoint.gguf_names, checkpoint.tables) == ({}, None)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen4exp") / "good.gguf"
    return tiny(path, {"arch": "qwen4_exp", "layer_pattern": "llf", "ple_layers": "2"})


def refused(source: Path, target: Path, change: dict[str, Any], tensors: Any, message: str) -> None:
    path = rewrite_metadata(source, target / "bad.gguf", change, tensors)
    with pytest.raises(StartupError, match=re.escape(message)) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value) and "bad.gguf" in str(caught.value)


REQUIRED = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "hyper_connection.count",
    "hyper_connection.low_rank",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "attention.compress_ratios",
    "ple.ngram_size",
    "ple.heads_per_ngram",
    "ple.conv_kernel",
    "ple.eos_token_id",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
    "embedding_length_per_layer_input",
    "ssm.conv_kernel",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str, good: Path, tmp_path: Path) -> None:
    refused(good, tmp_path, {f"qwen4exp.{key}": None}, None, f"metadata key 'qwen4exp.{key}' is missing")


CONSTANTS = PleConfig(
    layers=(1,), streams=4, hidden_size=64, vocab_size=384, boundary_id=2, embed_dim=128, heads_per_ngram=2, vocab_base=300
).constants(0)  # fmt: skip


def numbers(values: tuple[int, ...], *, add: int = 0) -> np.ndarray:
    return np.array([*values[:-1], values[-1] + add], dtype=np.uint64)


SEED_OF = "bad.gguf: qwen4exp.ple: stored "
BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"ple.layers": [2]}, "qwen4exp.ple.layers' names block 2, which has full_attention; only one with linear_attention"),
    ({"ple.layers": [3]}, "qwen4exp.ple.layers' names block 3, which has no attention"),
    ({"ple.layers": [0, 1]}, "qwen4exp.ple.layers' names 2 blocks, but a file holds one n-gram table"),
    ({"ple.layers": "1"}, "qwen4exp.ple.layers' must be a list of integers"),
    ({"ple.layers": [-1]}, "qwen4exp.ple.layers' must be a list of integers of at least 0"),
    ({"ple.layers": None}, "tensor 'blk.1.ple_key.weight' is not part of a Qwen4ExpForCausalLM"),
    ({"ple.layers": [0]}, "tensor 'blk.1.ple_key.weight' is not part of a Qwen4ExpForCausalLM"),
    ({"ple.ngram_size": 1}, "qwen4exp.ple.ngram_size' must be at least 2"),
    ({"ple.ngram_size": 4}, "qwen4exp.ple.layer_multipliers' has 3 entries, but ngram_size and heads ask for 4"),
    ({"ple.heads_per_ngram": 0}, "qwen4exp.ple.heads_per_ngram' must be at least 1"),
    ({"ple.heads_per_ngram": 1}, "qwen4exp.ple.head_vocab_sizes' has 4 entries, but ngram_size and heads ask for 2"),
    ({"ple.conv_kernel": 1}, "ple_conv_kernel_size must be at least 2, not 1"),
    ({"ple.conv_kernel": 3}, "tensor 'blk.1.ple_conv1d.weight' has shape [256, 4], but the config asks for [256, 3]"),
    ({"ple.eos_token_id": 384}, "qwen4exp.ple.eos_token_id' is 384, outside the vocabulary of 384"),
    ({"ple.layer_multipliers": numbers(CONSTANTS.multipliers, add=2)}, SEED_OF + "multipliers[2]"),
    ({"ple.layer_multipliers": numbers(CONSTANTS.multipliers[:2])}, "layer_multipliers' has 2 entries"),
    ({"ple.layer_multipliers": [1.0, 2.0, 3.0]}, "qwen4exp.ple.layer_multipliers' must be a list of integers"),
    ({"ple.head_vocab_sizes": numbers(CONSTANTS.vocab_sizes, add=-2)}, SEED_OF + "vocab_sizes[3]"),
    ({"ple.head_offsets": numbers(CONSTANTS.offsets, add=-1)}, SEED_OF + "offsets[3]"),
    ({"ple.head_offsets": numbers(CONSTANTS.offsets, add=10**6)}, "has 1248 rows, but n-grams have"),
    ({"embedding_length_per_layer_input": 16}, "tensor 'blk.1.ple_key.weight' has shape [256, 128]"),
    ({"attention.compress_ratios": [4, 0, 4]}, "compress_ratios' is 4 for block 0, which has linear_attention"),
    ({"attention.compress_ratios": [0, 0, 0, 4]}, "compress_ratios' is 0 for block 2, which has full_attention"),
    ({"attention.compress_ratios": [0, 0]}, "compress_ratios' has 2 entries, but there are 3 layers"),
    ({"attention.compress_ratios": 3}, "indexer_budget 16 is not a multiple of indexer_compress_ratio 3"),
    ({"attention.indexer.head_count": 9}, "tensor 'blk.2.indexer.q_proj.weight' has shape [96, 64]"),
    ({"attention.recurrent_layers": [False, True, False]}, "compress_ratios' is 0 for block 0, which has full_attention"),
    ({"hyper_connection.count": 1}, "hc_count must be at least 2, not 1"),
    ({"hyper_connection.low_rank": 16}, "tensor 'blk.0.hc_attn_down.weight' has shape [32, 256]"),
    ({"expert_count": 4}, "tensor 'blk.0.ffn_gate_inp.weight' has shape [8, 64], but the config asks for [4, 64]"),
    ({"expert_used_count": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
    ({"expert_feed_forward_length": 16}, "tensor 'blk.0.ffn_gate_exps.weight' has shape [8, 32, 64]"),
    ({"expert_weights_norm": 1}, "qwen4exp.expert_weights_norm' must be a boolean"),
    ({"expert_weights_scale": 2.5}, "qwen4exp.expert_weights_scale' is not 1, which is not served"),
    ({"expert_gating_func": 2}, "qwen4exp.expert_gating_func' is 2, but only 1 is served"),
    ({"full_attention_interval": 0, "attention.recurrent_layers": None}, "full_attention_interval' must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_KEYS)
def test_bad_keys_are_named(change: dict[str, Any], message: str, good: Path, tmp_path: Path) -> None:
    refused(good, tmp_path, {f"qwen4exp.{key}": value for key, value in change.items()}, None, message)


TABLE = "per_layer_token_embd.weight"
F32 = np.zeros((1248, 128), dtype=np.uint8)
BAD_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({TABLE: None}, f"tensor '{TABLE}' is missing, though 'qwen4exp.ple.layers' says that there are n-grams"),
    # 1248 is also what n-grams look up: a table without rows that fill it.
    ({TABLE: (F32[:-8], "F32")}, f"tensor '{TABLE}' has 1240 rows, but n-grams have 1248; some of it is missing"),
    ({TABLE: (F32[:, :64], "F32")}, f"tensor '{TABLE}' has shape [1248, 16], but the config asks for [1248, 32]"),
    ({TABLE: (F32[:, :22], "Q5_0")}, f"tensor '{TABLE}' has type Q5_0, which a table cannot have; F32, F16"),
    *(
        ({name: None}, f"lacks tensor '{name}'")
        for name in (
            "blk.0.ffn_down_exps.weight",
            "blk.0.ffn_up_exps.weight",
            "blk.1.ple_norm_conv.weight",
            "blk.2.indexer.k_proj.weight",
            "blk.2.hc_ffn_inject.weight",
            "output_hc_up.weight",
        )
    ),
    ({"output_norm.weight": (F32[0], "F32")}, "tensor 'output_norm.weight' is not part of a Qwen4ExpForCausalLM"),
    ({"blk.0.attn_norm.weight": (F32[0], "F32")}, "tensor 'blk.0.attn_norm.weight' is not part of"),
    ({"blk.0.ple_ngram.weight": (F32, "F32")}, "tensor 'blk.0.ple_ngram.weight' is not part of"),
    ({"blk.3.ffn_gate_exps.weight": (F32, "F32")}, "tensor 'blk.3.ffn_gate_exps.weight' is not part of"),
    (
        {"blk.0.ffn_gate_up_exps.weight": (np.zeros((8, 64, 256), dtype=np.uint8), "F32")},
        "tensor 'blk.0.ffn_gate_exps.weight' is not part of",
    ),
    ({"blk.0.ffn_gate_exps.weight": (np.zeros((8, 32, 36), dtype=np.uint8), "NVFP4")}, "has type NVFP4, which is not"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS)
def test_bad_tensors_are_named(tensors: dict[str, Any], message: str, good: Path, tmp_path: Path) -> None:
    refused(good, tmp_path, {}, tensors, message)


def test_weights_that_are_not_normalised(good: Path, tmp_path: Path) -> None:
    """Where there is no key they are; only one of the architectures has no other form."""
    for value in (True, None):
        path = rewrite_metadata(good, tmp_path / "norm.gguf", {"qwen4exp.expert_weights_norm": value})
        moe = open_checkpoint(path).model.moe
        assert moe is not None and moe.norm_topk_prob
    moe = open_checkpoint(good).model.moe
    assert moe is not None and not moe.norm_topk_prob
    other = tiny(tmp_path / "other.gguf", {"arch": "qwen3_5_moe"})
    change = {"qwen35moe.expert_weights_norm": False}
    refused(other, tmp_path, change, None, "norm_topk_prob is false, which a Qwen3_5MoeForCausalLM does not have")


def test_rotated_weights_are_refused(good: Path, tmp_path: Path) -> None:
    keys = {
        "version": 1,
        "block_size": 32,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "identity",
        "weight_names": ["output.weight"],
    }
    change = {f"prism.hadamard.{key}": value for key, value in keys.items()}
    refused(good, tmp_path, change, None, "rotated weights of architecture 'qwen4exp' are not served")


def test_experts_packed_in_2_bits_are_decoded(tmp_path: Path) -> None:
    options = {"arch": "qwen4_exp", "quant": "q2_0", "hidden_size": 64, "expert_size": 64, "hyper_rank": 64}
    wide = {"linear_value_dim": 32, "ple_width": 128, "table_quant": "q8_0"}
    path = tiny(tmp_path / "tiny.gguf", {**options, **wide})
    ours = open_checkpoint(path)
    assert ours.model.packed is None
    theirs = weights_of(open_checkpoint(write_published(path, specified({**options, **wide}), tmp_path / "folder")))
    for name, value in weights_of(ours).items():
        if ".experts." in name or ".hc_" in name:
            shift = 1.0 if is_zero_centred(name) else 0.0
            torch.testing.assert_close(value - shift, theirs[name], rtol=1e-6, atol=1e-6)
