"""Write a tiny random Llama, Qwen3 or Qwen3.5 (also with experts) checkpoint with a tokenizer: a folder of safetensors, or a GGUF file.

    python scripts/make_tiny_model.py OUT --arch qwen3 --format safetensors --shards 2
    python scripts/make_tiny_model.py OUT.gguf --arch llama --format gguf --quant q4_0

The weights are noise, scaled so that the largest logits stand well apart. The tokenizer is a byte-level BPE trained on a
few lines of text, with a ChatML template.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from freetoken.loader.gguf_tokenizer import byte_level_parts
from freetoken.loader.names import (
    FP8_BLOCK,
    canonical_name,
    expected_tensors,
    is_zero_centred,
    scale_name,
    scale_shape,
)
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from freetoken.models.parse import parse_hf_config

try:
    import gguf
except ImportError:  # only GGUF files need it
    gguf = None

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
HYBRIDS, MIXTURES, IN_GGUF = ("qwen3_5", "qwen3_5_moe"), ("qwen3_moe", "qwen3_5_moe"), ("llama", "qwen3")
# What published FP8 checkpoints leave in their own type, by the ends of the names.
NOT_IN_FP8 = ["lm_head", "mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b"]
FLOAT_QUANTS = ("f32", "f16", "bf16")
BLOCK_QUANTS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
QUANTS = FLOAT_QUANTS + BLOCK_QUANTS
WEIGHT_STD = 0.08
FP8_LARGEST = 448.0
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
    tokenizer does not know; ``pre`` is the tokenizer family (default: ``smollm`` for llama, ``qwen2`` for the others).

    For qwen3_moe and qwen3_5_moe: the sizes of the experts; ``stacked`` writes the experts of a layer as one tensor. For qwen3_moe
    ``sparse_step`` and ``dense_layers`` (numbers and commas) say which layers have none. ``fp8`` stores linear layers in FP8 with
    block scales, in any architecture.

    For qwen3_5 and qwen3_5_moe: ``layer_pattern`` has a letter for each layer, ``l`` for linear and ``f`` for full attention (default: every fourth
    full), and ``vision`` writes the checkpoint as it is published, beside a vision tower and a layer of multi-token prediction.
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
    add_bos: bool = False
    pre: str | None = None
    seed: int = 0

    def family(self) -> str:
        return self.pre or ("smollm" if self.arch == "llama" else "qwen2")


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
    if spec.arch == "qwen3_5_moe":
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
    kinds = {"l": LINEAR_ATTENTION, "f": FULL_ATTENTION}
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
        config["layer_types"] = [kinds[letter] for letter in spec.layer_pattern]
    rope = {"rope_theta": config.pop("rope_theta"), "partial_rotary_factor": spec.partial_rotary}
    rope |= config.pop("rope_scaling") or {"rope_type": "default"}
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


def quantise_fp8(weights: dict[str, torch.Tensor], config: dict[str, Any], stacked: bool) -> dict[str, torch.Tensor]:
    """The same with the linear layers that ``config`` says are FP8 in that type, each followed by its block scales."""
    expected = expected_tensors(parse_hf_config(config, None, "tiny"), stacked=stacked)
    result: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if scale_name(name) not in expected:
            result[name] = value
            continue
        rows, columns = value.shape[-2:]
        scale = torch.empty(scale_shape(tuple(value.shape)))
        data = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
        for row in range(0, rows, FP8_BLOCK):
            for column in range(0, columns, FP8_BLOCK):
                block = (..., slice(row, row + FP8_BLOCK), slice(column, column + FP8_BLOCK))
                largest = value[block].float().abs().amax((-2, -1), keepdim=True)
                scale[(..., row // FP8_BLOCK, column // FP8_BLOCK)] = largest[..., 0, 0] / FP8_LARGEST
                data[block] = (value[block].float() / largest * FP8_LARGEST).to(torch.float8_e4m3fn)
        result[name], result[scale_name(name)] = data, scale
    return result


def published_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same as in a checkpoint with a vision tower, with some tensors of it and of multi-token prediction."""
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    renamed["model.visual.blocks.0.norm1.weight"] = torch.ones(16)
    renamed["model.visual.patch_embed.proj.bias"] = torch.ones(16)
    renamed["mtp.fc.weight"] = torch.ones(8, 16)
    return renamed


def write_safetensors(folder: Path, spec: TinyModel, quant: str = "f32", shards: int = 1) -> Path:
    """Write a folder that transformers and freetoken both load; returns ``folder``."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[quant]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(spec)
    config = hf_config(spec, tokenizer.get_vocab_size() + spec.extra_vocab, str(dtype).removeprefix("torch."))
    weights = {
        name: torch.from_numpy(value).to(dtype) for name, value in random_weights(config, spec.seed, spec.stacked)
    }
    weights = quantise_fp8(weights, config, spec.stacked) if spec.fp8 else weights
    weights = published_names(weights) if spec.vision else weights
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = names[shard::shards]
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    if shards > 1:
        total = sum(value.numel() * value.element_size() for value in weights.values())
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": spec.max_position_embeddings,
        },
    )
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def write_gguf(path: Path, spec: TinyModel, quant: str = "f32") -> Path:
    """Write one GGUF file; returns ``path``. With float or ``q4_0`` … ``q8_0`` types it holds the weights that
    :func:`write_safetensors` writes for the same ``spec`` (rounded); K-quants are random blocks of the same spread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(spec)
    config = hf_config(spec, tokenizer.get_vocab_size() + spec.extra_vocab)
    writer = gguf.GGUFWriter(path, spec.arch)
    _write_metadata(writer, spec, quant)
    _write_tokenizer(writer, spec, tokenizer)
    if spec.rope_scaling and spec.rope_scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(spec))
    generator = np.random.default_rng(spec.seed + 1)
    for name, value in random_weights(config, spec.seed):
        _write_tensor(writer, spec, name, value, quant, generator)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, spec: TinyModel, quant: str) -> None:
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if quant == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    scaling = spec.rope_scaling or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _write_tokenizer(writer: gguf.GGUFWriter, spec: TinyModel, tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(token) for token in range(size)]
    tokens += [f"[PAD{token}]" for token in range(size, size + spec.extra_vocab)]
    kinds = [
        gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens[:size]
    ] + [gguf.TokenType.UNUSED] * spec.extra_vocab
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(spec.family())
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(spec.add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)


def llama3_factors(spec: TinyModel) -> np.ndarray:
    """The divisor of each rotary frequency that the ``llama3`` scaling amounts to, float32 ``[head_dim / 2]``."""
    scaling = spec.rope_scaling or {}
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(spec.head_dim // 2):
        wavelength = 2 * math.pi * spec.rope_theta ** (2 * index / spec.head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _gguf_name(spec: TinyModel, name: str) -> str:
    leaves = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm"]
    leaves += ["ffn_gate", "ffn_up", "ffn_down"]
    candidates = ["token_embd.weight", "output_norm.weight", "output.weight"]
    for layer in range(spec.num_layers):
        candidates += [f"blk.{layer}.{leaf}.{kind}" for leaf in leaves for kind in ("weight", "bias")]
    return {canonical_name(candidate): candidate for candidate in candidates}[name]


def _write_tensor(
    writer: gguf.GGUFWriter, spec: TinyModel, name: str, value: np.ndarray, quant: str, generator: np.random.Generator
) -> None:
    if spec.arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        value = interleave_rotary_rows(value, spec.num_heads if ".q_proj." in name else spec.num_kv_heads)
    target = _gguf_name(spec, name)
    if value.ndim == 1 or quant == "f32":
        writer.add_tensor(target, value)
        return
    kind = gguf.GGMLQuantizationType[quant.upper()]
    if quant.endswith("_k"):
        data = random_k_blocks(kind, value.shape, generator)
    else:
        data = gguf.quants.quantize(value, kind)
    writer.add_tensor(target, data, raw_dtype=kind)


def interleave_rotary_rows(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from two rotary halves to interleaved pairs, the order that llama GGUFs store."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def random_k_blocks(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """Random packed rows of a K-quant type whose decoded values are centred with standard deviation 0.08."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % elements:
        raise SystemExit(f"{kind.name} needs rows of a multiple of {elements}, not {shape[-1]}")
    blocks = generator.integers(0, 256, (math.prod(shape) // elements, size), dtype=np.uint8)
    # Byte offset of the scale, then of the minimum's scale with the ratio that centres the values.
    scale_at, min_at, ratio = {
        "Q2_K": (80, 82, 1.5),
        "Q3_K": (108, None, 0.0),
        "Q4_K": (0, 2, 7.5),
        "Q5_K": (0, 2, 15.5),
        "Q6_K": (208, None, 0.0),
    }[kind.name]

    def set_scale(scale: float) -> None:
        blocks[:, scale_at : scale_at + 2] = np.array([scale], dtype="<f2").view(np.uint8)
        if min_at is not None:
            blocks[:, min_at : min_at + 2] = np.array([scale * ratio], dtype="<f2").view(np.uint8)

    set_scale(0.01)
    spread = float(gguf.quants.dequantize(blocks[:64], kind).std())
    set_scale(0.01 * WEIGHT_STD / spread)
    return blocks.reshape(*shape[:-1], shape[-1] // elements * size)


def make_tiny_model(
    path: str | Path, *, format: str = "safetensors", quant: str = "f32", shards: int = 1, **options: Any
) -> Path:
    """Write a checkpoint at ``path`` (a folder, or a ``.gguf`` file) and return it; ``options`` are those of
    :class:`TinyModel`."""
    spec = TinyModel(**options)
    if format == "gguf":
        if spec.arch not in IN_GGUF or spec.fp8:
            raise SystemExit(f"GGUF files hold {' or '.join(IN_GGUF)}, without FP8")
        return write_gguf(Path(path), spec, quant)
    return write_safetensors(Path(path), spec, quant, shards)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint.")
    parser.add_argument("path", type=Path, help="folder, or .gguf file, to write")
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument("--quant", choices=QUANTS, default="f32", help="block types need --format gguf")
    parser.add_argument("--shards", type=int, default=1, help="safetensors files to spread the weights over")
    for field in dataclasses.fields(TinyModel):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        elif field.name == "rope_scaling":
            parser.add_argument(flag, type=json.loads, help="JSON object, as in config.json")
        else:
            choices = tuple(ARCHITECTURES) if field.name == "arch" else None
            kind = type(field.default) if field.default is not None else str
            parser.add_argument(flag, type=kind, default=field.default, choices=choices)
    args = parser.parse_args()
    if args.format == "safetensors" and args.quant not in FLOAT_QUANTS:
        parser.error(f"--quant {args.quant} needs --format gguf")
    print(make_tiny_model(**vars(args)))


if __name__ == "__main__":
    main()
