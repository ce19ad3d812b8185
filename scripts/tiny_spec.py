"""What a tiny random checkpoint is: geometry, tokenizer, configuration and weights, whatever the file format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny_qwen4_exp import qwen4_exp_config
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from freetoken.loader.gguf_tokenizer import byte_level_parts
from freetoken.loader.names import FP8_BLOCK, expected_tensors, is_zero_centred
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from freetoken.models.parse import parse_hf_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen4_exp": "Qwen4ExpForCausalLM",
}
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
LAYER_LETTERS = {"l": LINEAR_ATTENTION, "f": FULL_ATTENTION}
MIXTURES, SHARED = ("qwen3_moe", "qwen3_5_moe", "qwen4_exp"), ("qwen3_5_moe", "qwen4_exp")
# What published FP8 checkpoints leave in their own type, by the ends of the names.
NOT_IN_FP8 = ["lm_head", "mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b"]
FLOAT_QUANTS = ("f32", "f16", "bf16")
BLOCK_QUANTS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
IQ_QUANTS = (
    "iq1_s",
    "iq1_m",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
    "iq4_nl",
    "iq4_xs",
    "tq1_0",
    "tq2_0",
    "mxfp4",
)
PACKED_QUANTS = ("pq2_0", "ptq1_0", "q2_0", "q2_0_g128")
TABLE_QUANTS = (*FLOAT_QUANTS, "q8_0", "q4_0", "iq4_nl")
QUANTS = FLOAT_QUANTS + BLOCK_QUANTS + IQ_QUANTS + PACKED_QUANTS
WEIGHT_STD = 0.08
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the warm sun for the rest of the day.",
    "A server answers requests; a client sends them. When the queue is full, the client waits and tries again later.",
    "def add(left, right):\n    return left + right\n\nfor index in range(10):\n    print(index, add(index, 1))\n",
    "In 1969 people walked on the Moon; it is 384,400 km away. Pi is about 3.14159 and e about 2.71828.",
    "Où est la bibliothèque ? Das Mädchen läuft über die Straße. El niño comió una manzana. Привет, мир!",
    "the cat sat on the mat while the rain fell on the roof and the wind sang in the trees around the house",
    "人工知能は言葉を学ぶ。今日は天気がいいですね。안녕하세요 세계. مرحبا بالعالم. नमस्ते दुनिया।",
)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """What to make. ``rope_scaling`` is the Hugging Face dictionary; ``extra_vocab`` adds embedding rows that the
    tokenizer does not know; ``pre`` is the tokenizer family (default: ``smollm`` for llama, ``qwen35`` for qwen3_5, ``qwen2`` for the others).

    For the architectures with experts: the sizes of the experts; ``stacked`` writes the experts of a layer as one tensor. For qwen3_moe
    ``sparse_step`` and ``dense_layers`` (numbers and commas) say which layers have none. ``fp8`` stores linear layers in FP8 with
    block scales, in any architecture.

    For qwen3_5, qwen3_5_moe and qwen4_exp: ``layer_pattern`` has a letter for each layer, ``l`` for linear and ``f`` for full attention (default: every fourth
    full), and ``vision`` writes the checkpoint as it is published, beside a vision tower and a layer of multi-token prediction.

    For qwen4_exp: ``streams`` and ``hyper_rank`` of the hyper-connections, ``ple_layers`` (numbers from 1 and commas) with n-gram
    embeddings of ``ple_width``, their tables in ``table_shards``, and the indexer of attention.

    For GGUF files: ``hadamard`` is the block that matrices are rotated in (0: not at all), ``plain_signs`` leaves the signs out,
    ``gdn_v_grouped`` rotates the output projection of linear attention in the order of grouped value heads, and ``mtp`` blocks of
    multi-token prediction follow the model. ``fused_experts`` has the gates and ups of experts in one tensor, ``table_quant`` is the
    type of an n-gram table (default: that of the matrices).
    """

    arch: str = "llama"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    tokenizer_vocab: int = 384
    extra_vocab: int = 0
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_key_dim: int = 16
    linear_value_dim: int = 16
    conv_width: int = 4
    layer_pattern: str | None = None
    partial_rotary: float = 0.25
    vision: bool = False
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 24
    shared_size: int = 40
    norm_topk: bool = False
    sparse_step: int = 1
    dense_layers: str = ""
    stacked: bool = False
    fp8: bool = False
    streams: int = 4
    hyper_rank: int = 12
    ple_layers: str = "2"
    ple_width: int = 64
    ngram_size: int = 3
    ngram_heads: int = 2
    ngram_base: int = 300
    table_shards: int = 4
    index_heads: int = 8
    index_dim: int = 12
    index_budget: int = 16
    index_ratio: int = 4
    output_gate: str | None = "sigmoid"
    hadamard: int = 0
    plain_signs: bool = False
    gdn_v_grouped: bool = False
    mtp: int = 0
    fused_experts: bool = False
    table_quant: str | None = None
    add_bos: bool = False
    pre: str | None = None
    seed: int = 0

    def family(self) -> str:
        return self.pre or {"llama": "smollm", "qwen3_5": "qwen35"}.get(self.arch, "qwen2")


def train_tokenizer(spec: TinyModel) -> Tokenizer:
    """A byte-level BPE of at most ``spec.tokenizer_vocab`` ids, the special tokens first."""
    tokenizer = Tokenizer(BPE(ignore_merges=spec.family() == "llama-bpe"))
    normalizer, tokenizer.pre_tokenizer = byte_level_parts(spec.family())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=spec.tokenizer_vocab,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    if spec.add_bos:
        bos = SPECIAL_TOKENS[1]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 $B:1",
            special_tokens=[(bos, SPECIAL_TOKENS.index(bos))],
        )
    return tokenizer


def hf_config(spec: TinyModel, vocab_size: int, dtype: str = "float32") -> dict[str, Any]:
    """``config.json`` of the model."""
    config = {
        "architectures": [ARCHITECTURES[spec.arch]],
        "model_type": spec.arch,
        "vocab_size": vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    if spec.arch in MIXTURES:
        config |= _moe_config(spec)
    if spec.fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": NOT_IN_FP8,
        }
    return _hybrid_config(spec, config) if spec.arch in HYBRIDS else config


def _moe_config(spec: TinyModel) -> dict[str, Any]:
    common = {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": spec.expert_size,
    }
    if spec.arch in SHARED:
        return {**common, "shared_expert_intermediate_size": spec.shared_size}
    dense = [int(layer) for layer in spec.dense_layers.split(",") if layer]
    return {
        **common,
        "norm_topk_prob": spec.norm_topk,
        "decoder_sparse_step": spec.sparse_step,
        "mlp_only_layers": dense,
    }


def _hybrid_config(spec: TinyModel, config: dict[str, Any]) -> dict[str, Any]:
    """The same with what linear attention adds, inside ``text_config`` where there is a vision tower."""
    config |= {
        "model_type": f"{spec.arch}_text",
        "linear_num_key_heads": spec.linear_key_heads,
        "linear_num_value_heads": spec.linear_value_heads,
        "linear_key_head_dim": spec.linear_key_dim,
        "linear_value_head_dim": spec.linear_value_dim,
        "linear_conv_kernel_dim": spec.conv_width,
        "full_attention_interval": 4,
        "attn_output_gate": True,
    }
    if spec.layer_pattern is not None:
        config["layer_types"] = [LAYER_LETTERS[letter] for letter in spec.layer_pattern]
    rope = {"rope_theta": config.pop("rope_theta"), "partial_rotary_factor": spec.partial_rotary}
    rope |= config.pop("rope_scaling") or {"rope_type": "default"}
    if spec.arch == "qwen4_exp":
        config |= qwen4_exp_config(spec)
    config["rope_parameters"] = rope | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    if not spec.vision:
        return config
    outer = {
        "architectures": [ARCHITECTURES[spec.arch].replace("CausalLM", "ConditionalGeneration")],
        "model_type": spec.arch,
        "tie_word_embeddings": spec.tied,
        "vision_config": {"model_type": f"{spec.arch}_vision", "depth": 1, "hidden_size": 16, "num_heads": 2},
    }
    del config["architectures"]
    if "quantization_config" in config:
        outer["quantization_config"] = config.pop("quantization_config")
    return {**outer, "text_config": config}


def random_weights(config: dict[str, Any], seed: int, stacked: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Float32 weights under canonical names, whatever type they are stored in: matrices and biases of standard deviation 0.08, norms around 1 (0 where 1 is
    added to them), convolutions of 0.5, routers of 0.5 so that no two experts tie, and decays of linear attention that remember from a token to some hundreds."""
    generator = np.random.default_rng(seed)
    model = dataclasses.replace(parse_hf_config(config, None, "tiny"), fp8=None)
    for name, shape in expected_tensors(model, stacked=stacked).items():
        noise = generator.standard_normal(shape).astype(np.float32)
        if model.zero_centred_norm and is_zero_centred(name):
            yield name, 0.2 * noise
        elif name.endswith("norm.weight"):
            yield name, 1.0 + 0.1 * noise
        elif name.endswith(("A_log", "dt_bias")):
            yield name, noise - 2.0
        else:
            yield name, (0.5 if name.endswith(("conv1d.weight", "mlp.gate.weight")) else WEIGHT_STD) * noise
