"""Tiny checkpoints load in transformers with the very weights that our loader gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model
from tiny_spec import PACKED_QUANTS, QUANTS
from transformers import AutoModelForCausalLM

from freetoken.errors import StartupError
from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.stream import stream_tensors
from rewrite_gguf import rewrite_metadata


def agree(path: Path, **loading: Any) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(
        path.parent if path.is_file() else path, dtype=torch.float32, **loading
    ).state_dict()
    checkpoint = open_checkpoint(path)
    ours = dict(stream_tensors(checkpoint, torch.float32))
    assert set(oracle) - set(ours) == ({"lm_head.weight"} if checkpoint.model.tie_word_embeddings else set())
    for name, tensor in ours.items():
        assert torch.equal(tensor, oracle[name]), name


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"tied": True, "shards": 3}, {"attention_bias": True, "quant": "bf16"}])
def test_folder(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    agree(make_tiny_model(tmp_path / "tiny", arch=arch, head_dim=24, extra_vocab=3, **options))


@pytest.mark.parametrize("quant", [quant for quant in QUANTS if quant not in PACKED_QUANTS])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_gguf(arch: str, quant: str, tmp_path: Path) -> None:
    # transformers assumes hidden_size / num_heads for llama and 128 for qwen3 GGUFs.
    path = make_tiny_model(
        tmp_path / "tiny.gguf", format="gguf", arch=arch, quant=quant, num_layers=1, hidden_size=256,
        intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=128 if arch == "qwen3" else 64,
        tied=quant in ("f16", "q4_0", "q6_k"),
    )  # fmt: skip
    agree(path, gguf_file=path.name)


def test_rows_of_k_quants_and_of_other_blocks_must_fit(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="multiple of 256"):
        make_tiny_model(tmp_path / "tiny.gguf", format="gguf", quant="q4_k")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"split.count": 3}, "one of 3 split files"),
    ({"llama.embedding_length": None}, "llama.embedding_length' is missing"),
    ({"llama.embedding_length": "64"}, "llama.embedding_length' must be an integer"),
    ({"llama.embedding_length": 32}, "shape"),
    ({"llama.attention.head_count": 0}, "num_attention_heads"),
    ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv' differs"),
    ({"llama.attention.value_length": 8}, "value_length' must equal"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count' must equal"),
    ({"llama.rope.freq_base": "big"}, "rope.freq_base' must be a number"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
    ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
    ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor' is missing"),
    ({"llama.expert_count": 8}, "expert_count' is 8, which is not served"),
    ({"llama.block_count": 2**31}, "num_hidden_layers"),
    ({"llama.block_count": 2}, "lacks tensor 'model.layers.1"),
    ({"general.architecture": "qwen4exp"}, "architecture 'qwen4exp' is not served; llama, qwen3, qwen35 are"),
]


@pytest.mark.parametrize(("change", "word"), BAD)
def test_bad_metadata_names_the_key(change: dict[str, Any], word: str, tiny_gguf: Path, tmp_path: Path) -> None:
    path = rewrite_metadata(tiny_gguf, tmp_path / "bad.gguf", change)
    with pytest.raises(StartupError, match=word) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value) and "bad.gguf" in str(caught.value)


def test_scaling_keys_of_a_gguf(tiny_gguf: Path, tmp_path: Path) -> None:
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    scaling = open_checkpoint(rewrite_metadata(tiny_gguf, tmp_path / "y.gguf", yarn)).model.rope_scaling
    assert scaling is not None and scaling.pop("attention_factor") == pytest.approx(1.1386294361)
    assert scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "truncate": True,
    }
    older = {"llama.rope.scale_linear": 2.0}
    linear = open_checkpoint(rewrite_metadata(tiny_gguf, tmp_path / "l.gguf", older)).model.rope_scaling
    assert linear == {"rope_type": "linear", "factor": 2.0}
    plain = open_checkpoint(rewrite_metadata(tiny_gguf, tmp_path / "n.gguf", {"llama.rope.scaling.type": "none"}))
    assert plain.model.rope_scaling is None


def test_one_value_a_layer_counts_when_all_are_equal(tiny_gguf: Path, tmp_path: Path) -> None:
    change = {"llama.attention.head_count_kv": [2], "llama.feed_forward_length": [128]}
    model = open_checkpoint(rewrite_metadata(tiny_gguf, tmp_path / "a.gguf", change)).model
    assert (model.num_kv_heads, model.intermediate_size) == (2, 128)
