"""Tiny random checkpoints as GGUF files: metadata, and weights as a converter to GGUF would leave them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from tiny_checks import check_rows
from tiny_gguf_moe import TABLE, in_parts, table_rows, write_experts, write_qwen4_exp
from tiny_spec import (
    CHAT_TEMPLATE,
    HYBRIDS,
    MIXTURES,
    PACKED_QUANTS,
    SHARED,
    SPECIAL_TOKENS,
    WEIGHT_STD,
    TinyModel,
    hf_config,
    random_weights,
    train_tokenizer,
)
from tokenizers import Tokenizer

from freetoken.loader.gguf_names import gguf_tensors
from freetoken.models.config import ModelConfig
from freetoken.models.parse import parse_hf_config

PREFIX = "prism.hadamard."
# Type id, elements and bytes of a block. The first two are told apart in a file by the distances between tensors alone.
PACKED_TYPES = {"q2_0": (42, 64, 18), "q2_0_g128": (42, 128, 34), "pq2_0": (142, 128, 34), "ptq1_0": (143, 128, 28)}
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_5": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_moe": "qwen35moe",
    "qwen4_exp": "qwen4exp",
}
# What quantisers leave in float32, by the last part of the name before the suffix.
_KEPT = ("ssm_conv1d", "ple_conv1d", "ffn_gate_inp", "ffn_gate_inp_shexp")
_FOLDED = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_gate",
    "attn_output",
    "ssm_out",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


def write_gguf(path: Path, spec: TinyModel, quant: str = "f32", shards: int = 1) -> Path:
    """Write a GGUF file, or ``shards`` parts of one named after ``path``; returns the first that was written. It holds the weights that ``write_safetensors`` writes for the same ``spec`` (rounded
    to the type, converted and, with ``spec.hadamard``, rotated); K-quants and IQ types are random blocks of the same spread."""
    check_rows(spec, quant, block_elements(quant))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(spec)
    config = hf_config(spec, tokenizer.get_vocab_size() + spec.extra_vocab)
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES[spec.arch])
    write_metadata(writer, spec, quant)
    if spec.arch == "qwen4_exp":
        write_qwen4_exp(writer, GGUF_ARCHITECTURES[spec.arch], spec, config)
    _write_tokenizer(writer, spec, tokenizer)
    tensors = dict(_converted(spec, config))
    folded = [name for name in tensors if spec.hadamard and is_folded(name, spec)]
    if spec.hadamard:
        write_hadamard(writer, spec, {tensors[name].shape[-1] for name in folded}, folded)
    if spec.rope_scaling and spec.rope_scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(spec))
    generator = np.random.default_rng(spec.seed + 1)
    for name, value in tensors.items():
        if name in folded or (spec.hadamard and name == "token_embd.weight"):
            value = fold(value, signs(spec, value.shape[-1]), spec.hadamard)
        _write_tensor(writer, name, value, quant, generator)
    table = table_rows(spec, config) if spec.arch == "qwen4_exp" else None
    if table is not None:
        _write_tensor(writer, TABLE, table, spec.table_quant or quant, generator)
    return finish(writer, shards)


def finish(writer: gguf.GGUFWriter, shards: int = 1) -> Path:
    """Write everything that was added, in ``shards`` parts of about as many tensors; returns the first file."""
    rows = [row for part in writer.tensors for row in part.items()]
    cuts = [len(rows) * part // shards for part in range(shards + 1)]
    writer.tensors = [dict(rows[start:end]) for start, end in pairwise(cuts)]
    assert writer.path is not None
    first: Path = writer.format_shard_names(writer.path)[0]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return first


def write_metadata(writer: gguf.GGUFWriter, spec: TinyModel, quant: str) -> None:
    """The keys that describe the model."""
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if quant == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(spec.num_layers + spec.mtp)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    if spec.arch in MIXTURES:
        write_experts(writer, GGUF_ARCHITECTURES[spec.arch], spec, shared=spec.arch in SHARED)
    else:
        writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    if spec.arch in HYBRIDS:
        _write_hybrid(writer, spec)
    else:
        writer.add_rope_dimension_count(spec.head_dim)
    scaling = spec.rope_scaling or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _write_hybrid(writer: gguf.GGUFWriter, spec: TinyModel) -> None:
    prefix = GGUF_ARCHITECTURES[spec.arch]
    rotated = int(spec.head_dim * spec.partial_rotary)
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_dimension_sections([rotated // 2 - 2 * (rotated // 6), rotated // 6, rotated // 6, 0])
    writer.add_uint32(f"{prefix}.ssm.conv_kernel", spec.conv_width)
    writer.add_uint32(f"{prefix}.ssm.state_size", spec.linear_key_dim)
    writer.add_uint32(f"{prefix}.ssm.group_count", spec.linear_key_heads)
    writer.add_uint32(f"{prefix}.ssm.time_step_rank", spec.linear_value_heads)
    writer.add_uint32(f"{prefix}.ssm.inner_size", spec.linear_value_heads * spec.linear_value_dim)
    writer.add_uint32(f"{prefix}.full_attention_interval", 4)
    if spec.layer_pattern is not None:
        kinds = [letter == "l" for letter in spec.layer_pattern] + [False] * spec.mtp
        writer.add_array(f"{prefix}.attention.recurrent_layers", kinds)
    if spec.mtp:
        writer.add_uint32(f"{prefix}.nextn_predict_layers", spec.mtp)


def write_hadamard(writer: gguf.GGUFWriter, spec: TinyModel, widths: set[int], folded: list[str]) -> None:
    """The keys that say which weights are rotated, and how."""
    writer.add_uint32(f"{PREFIX}version", 2 if spec.tied else 1)
    writer.add_uint32(f"{PREFIX}block_size", spec.hadamard)
    writer.add_string(f"{PREFIX}transform", "normalized-sylvester-walsh-hadamard")
    writer.add_string(f"{PREFIX}axis", "input-last-dimension")
    writer.add_string(f"{PREFIX}sign_mode", "identity" if spec.plain_signs else "explicit")
    writer.add_array(f"{PREFIX}weight_names", folded)
    writer.add_array(f"{PREFIX}inverse_weight_names", ["token_embd.weight"])
    if not spec.plain_signs:
        ordered = sorted(widths | {spec.hidden_size})
        values = [int(sign) for width in ordered for sign in signs(spec, width)]
        writer.add_array(f"{PREFIX}sign_widths", ordered)
        writer.add_array(f"{PREFIX}sign_values", values)
    if spec.gdn_v_grouped:
        writer.add_bool(f"{PREFIX}gdn_v_grouped", True)
    if spec.tied:
        writer.add_bool(f"{PREFIX}tied_output", True)


def signs(spec: TinyModel, width: int) -> np.ndarray:
    """1 and -1 for each column of an input ``width`` wide; all 1 with ``plain_signs``."""
    drawn = np.random.default_rng(spec.seed + width).integers(0, 2, width) * 2 - 1
    return np.ones(width) if spec.plain_signs else drawn.astype(np.float64)


def hadamard(block: int) -> np.ndarray:
    """The normalised Walsh-Hadamard matrix in natural order, float64."""
    ones = np.array([[(row & column).bit_count() for column in range(block)] for row in range(block)])
    return (-1.0) ** ones / math.sqrt(block)


def fold(value: np.ndarray, sign: np.ndarray, block: int) -> np.ndarray:
    """``W diag(s) H``: what is stored of a weight (or of an embedding) whose input is rotated."""
    signed = (value * sign).reshape(*value.shape[:-1], -1, block)
    return (signed @ hadamard(block)).reshape(value.shape).astype(np.float32)


def is_folded(name: str, spec: TinyModel) -> bool:
    """Whether tensor ``name`` is rotated where a file is: all matrices of the model but the gates of linear attention."""
    if name == "output.weight":
        return True
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2] in _FOLDED and int(parts[1]) < spec.num_layers


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


# --- what a converter changes ----------------------------------------------------------------------------------------


def _converted(spec: TinyModel, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights under GGUF names in the order and form of a converted file, not rotated yet."""
    names = gguf_names(parse_hf_config(config, None, "tiny"), fused=spec.fused_experts)
    for name, value in in_parts(spec, random_weights(config, spec.seed, spec.stacked)):
        if spec.arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = interleave_rotary_rows(value, spec.num_heads if ".q_proj." in name else spec.num_kv_heads)
        if name.endswith("shared_expert_gate.weight"):
            value = value[0]
        yield names[name], _hybrid_form(spec, name, value) if spec.arch in HYBRIDS else value
    if spec.mtp:
        yield from _mtp_block(spec)


def _hybrid_form(spec: TinyModel, name: str, value: np.ndarray) -> np.ndarray:
    """Norms whole, decays as rates, one axis less for the convolution, and value heads in the tiled order."""
    heads = (spec.linear_key_heads, spec.linear_value_heads // spec.linear_key_heads)

    def tile(rows: np.ndarray, axis: int = 0) -> np.ndarray:
        apart = rows.reshape(*rows.shape[:axis], *heads, -1, *rows.shape[axis + 1 :])
        return np.ascontiguousarray(apart.swapaxes(axis, axis + 1)).reshape(rows.shape)

    if name.endswith("norm.weight") or ".ple.norm_" in name:
        return value if name.endswith("linear_attn.norm.weight") else value + 1
    if name.endswith(".ple.conv1d.weight"):
        return value[:, 0]
    leaf = name.split(".linear_attn.")[-1]
    keys = 2 * spec.linear_key_heads * spec.linear_key_dim
    if leaf == "A_log":
        return -np.exp(tile(value))
    if leaf in ("dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight"):
        return tile(value)
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        rows = value.reshape(value.shape[0], -1)
        return np.concatenate((rows[:keys], tile(rows[keys:])))
    if leaf == "out_proj.weight" and not (spec.hadamard and spec.gdn_v_grouped):
        return tile(value, 1)
    return value


def _mtp_block(spec: TinyModel) -> Iterator[tuple[str, np.ndarray]]:
    """A block of multi-token prediction: attention, feed-forward and what joins it to the model."""
    generator = np.random.default_rng(spec.seed + 2)
    hidden, ffn, q = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    kv, prefix = spec.num_kv_heads * spec.head_dim, f"blk.{spec.num_layers}"
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (2 * q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
        "nextn.eh_proj": (hidden, 2 * hidden),
    }
    norms = dict.fromkeys(("attn_norm", "post_attention_norm"), hidden) | dict.fromkeys(
        ("attn_q_norm", "attn_k_norm"), spec.head_dim
    )
    norms |= dict.fromkeys((f"nextn.{part}" for part in ("enorm", "hnorm", "shared_head_norm")), hidden)
    if spec.arch == "qwen4_exp":
        channels = spec.streams * hidden
        shapes["nextn.hc_head_down"], shapes["nextn.hc_head_up"] = (
            (spec.hyper_rank, channels),
            (channels, spec.hyper_rank),
        )
        norms |= {"nextn.hc_head_norm": channels, "hc_attn_norm": channels}
    for leaf, shape in shapes.items():
        yield f"{prefix}.{leaf}.weight", (WEIGHT_STD * generator.standard_normal(shape)).astype(np.float32)
    for leaf, size in norms.items():
        yield f"{prefix}.{leaf}.weight", np.ones(size, dtype=np.float32)


def gguf_names(model: ModelConfig, *, fused: bool = False) -> dict[str, str]:
    """GGUF name of every tensor of ``model`` by the name of the part that it is; ``fused`` has gates and ups of experts in one."""
    present = {f"blk.{layer}.ffn_gate_up_exps.weight" for layer in range(model.num_layers)} if fused else ()
    return {name: source for source, (name, _) in gguf_tensors(model, present).items()}


def interleave_rotary_rows(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from two rotary halves to interleaved pairs, the order that llama GGUFs store."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


# --- types -----------------------------------------------------------------------------------------------------------


def block_elements(quant: str) -> int:
    """Neighbours in a row that a block of the type holds."""
    if quant in PACKED_QUANTS:
        return PACKED_TYPES[quant][1]
    return int(GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant.upper()]][0])


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, value: np.ndarray, quant: str, generator: np.random.Generator
) -> None:
    if value.ndim == 1 or quant == "f32" or name.split(".")[-2] in _KEPT:
        writer.add_tensor(name, value)
        return
    if name.split(".")[-2] in ("ssm_alpha", "ssm_beta") and quant in PACKED_QUANTS:
        quant = "bf16"
    if quant in PACKED_QUANTS:
        kind, elements, size = PACKED_TYPES[quant]
        with known_type(kind, elements, size):
            writer.add_tensor(name, pack_rows(value, quant), raw_dtype=kind)  # type: ignore[arg-type]
        return
    known = gguf.GGMLQuantizationType[quant.upper()]
    if quant in ("f16", "bf16") or quant.startswith(("q8_", "q4_0", "q4_1", "q5_0", "q5_1")):
        data = gguf.quants.quantize(value, known)
    else:
        data = random_blocks(known, value.shape, generator)
    writer.add_tensor(name, data, raw_dtype=known)


@contextmanager
def known_type(kind: int, elements: int, size: int) -> Iterator[None]:
    """For a while the package's writer takes type id ``kind``, which it does not know, or in one layout only."""
    before = GGML_QUANT_SIZES.get(kind)  # type: ignore[call-overload]
    GGML_QUANT_SIZES[kind] = (elements, size)  # type: ignore[index]
    try:
        yield
    finally:
        del GGML_QUANT_SIZES[kind]  # type: ignore[arg-type]
        if before is not None:
            GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] = before


def pack_rows(value: np.ndarray, quant: str) -> np.ndarray:
    """uint8 rows of a 2-bit type, each scale the mean magnitude of its group: -1, 0 or 1 scales, or also 2 where the type has it."""
    _, elements, size = PACKED_TYPES[quant]
    groups = value.reshape(-1, elements)
    scales = np.abs(groups).mean(1, keepdims=True).astype("<f2")
    most = 1 if quant == "ptq1_0" else 2
    codes = np.clip(np.rint(groups / scales.astype(np.float32)), -1, most).astype(np.uint8) + np.uint8(1)
    packer: Callable[[np.ndarray], np.ndarray] = pack_trits if quant == "ptq1_0" else pack_codes
    parts = [scales.view(np.uint8), packer(codes)]
    blocks = np.concatenate(parts[::-1] if quant == "ptq1_0" else parts, 1)
    assert blocks.shape[1] == size
    return blocks.reshape(*value.shape[:-1], -1)


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Four codes of 2 bits a byte, lowest bits first."""
    quads = codes.reshape(len(codes), -1, 4)
    return (quads << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(2).astype(np.uint8)


def pack_trits(codes: np.ndarray) -> np.ndarray:
    """Base-3 digits ``[blocks, 128]`` in the order of PTQ1_0: bytes of five digits, and two of four."""
    parts = []
    for start, count, digits in ((0, 16, 5), (80, 8, 5), (120, 2, 4)):
        number = np.zeros((len(codes), count), dtype=np.int64)
        for digit in range(digits):
            first = start + digit * count
            number = number * 3 + codes[:, first : first + count]
        number *= 3 ** (5 - digits)
        parts.append(((256 * number + 242) // 243).astype(np.uint8))
    return np.concatenate(parts, 1)


# Byte offset of the scale, then of the minimum's scale with the ratio that centres the values.
_SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "TQ1_0": (52, None, 0.0),
    "TQ2_0": (64, None, 0.0),
}


def random_blocks(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """Random packed rows of a K-quant, IQ or ternary type whose decoded values have about a standard deviation of 0.08."""
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (math.prod(shape) // elements, size), dtype=np.uint8)
    scale_at, min_at, ratio = _SCALES.get(kind.name, (0, None, 0.0))

    def set_scale(scale: float) -> None:
        bits = np.array([scale], dtype="<f2").view(np.uint8)
        if kind.name == "MXFP4":
            blocks[:, 0] = 127 + round(math.log2(scale))
        elif kind.name == "IQ1_M":  # a nibble of the scale on top of each of four words
            nibbles = np.array([bits[0] & 15, bits[0] >> 4, bits[1] & 15, bits[1] >> 4], dtype=np.uint8)
            blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | nibbles << 4
        else:
            blocks[:, scale_at : scale_at + 2] = bits
        if min_at is not None:
            blocks[:, min_at : min_at + 2] = np.array([scale * ratio], dtype="<f2").view(np.uint8)

    set_scale(0.01)
    spread = float(gguf.quants.dequantize(blocks[:64], kind).std())
    set_scale(0.01 * WEIGHT_STD / spread)
    return blocks.reshape(*shape[:-1], shape[-1] // elements * size)
