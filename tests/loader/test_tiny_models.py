"""Tiny checkpoints load in transformers with the very weights that our loader gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import main, make_tiny_model
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
    with pytest.raises(ValueError, match="multiple of 256"):
        make_tiny_model(tmp_path / "tiny.gguf", format="gguf", quant="q4_k")


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_every_fourth_layer_is_full_where_nobody_says_how_many_there_are(arch: str, tmp_path: Path) -> None:
    assert main([str(tmp_path / "tiny"), "--arch", arch]) == 0
    kinds = open_checkpoint(tmp_path / "tiny").model.layer_types
    assert len(kinds) == 4 and len(set(kinds[:3])) == 1 and kinds[3] != kinds[0]


REFUSED: list[tuple[str, str]] = [
    *((f"--format gguf --quant {quant}", "multiple of 128, but --hidden-size is 64") for quant in ("pq2_0", "ptq1_0", "q2_0_g128")),
    ("--format gguf --quant pq2_0 --hidden-size 128 --intermediate-size 192", "--intermediate-size is 192"),
    ("--format gguf --quant pq2_0 --hidden-size 128", "--num-heads times --head-dim is 64"),
    ("--format gguf --quant q2_0 --arch qwen3_5 --linear-value-dim 8", "--linear-value-dim is 32"),
    ("--format gguf --hadamard 128", "--hadamard 128 does not divide --hidden-size, which is 64"),
    ("--format gguf --hadamard 24", "--hadamard must be a power of two"),
    ("--format gguf --fp8", "--format gguf is without --fp8"),
    ("--format gguf --arch qwen3_moe --sparse-step 2", "without --sparse-step and --dense-layers"),
    ("--format gguf --arch qwen4_exp --hadamard 16", "--hadamard is not for --arch qwen4_exp"),
    ("--format gguf --arch qwen4_exp --output-gate silu", "has no --output-gate but sigmoid"),
    ("--format gguf --arch qwen4_exp --ple-layers 1,2", "one n-gram table, but --ple-layers is '1,2'"),
    ("--format gguf --arch qwen4_exp --quant q8_0", "multiple of 32, but --expert-size is 24"),
    ("--arch qwen4_exp --table-quant q5_0", "--table-quant must be one of"),
    ("--quant q4_0", "needs --format gguf"),
    ("--pre nonsense", "--pre must be one of"),
    ("--num-layers 0", "--num-layers must be at least 1, not 0"),
    ("--hidden-size -4", "--hidden-size must be at least 1, not -4"),
    ("--num-heads 3", "--num-heads 3 is not a multiple of --num-kv-heads 2"),
    ("--shards 0", "--shards must be at least 1"),
    ("--arch qwen3_5 --layer-pattern lxf", "--layer-pattern is made of l and f"),
    ("--arch qwen3_5 --layer-pattern lll", "no full_attention"),
    ("--arch qwen4_exp --ple-layers two", "--ple-layers must be numbers"),
    ("--rope-scaling 3", "--rope-scaling must be a JSON object"),
    ("--arch qwen3_moe --top-k 9", "--top-k 9 is more than --num-experts 8"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_made_is_one_sentence(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "tiny"), *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "tiny").exists()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"split.count": 3}, "one of 3 parts, which are found by names that end in '-00001-of-00003.gguf'"),
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
    ({"llama.block_count": 2}, "lacks tensor 'blk.1.attn_q.weight' and 8 more"),
    (
        {"general.architecture": "qwen2moe"},
        "architecture 'qwen2moe' is not served; llama, qwen3, qwen3moe, qwen35, qwen35moe, qwen4exp are",
    ),
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
