"""What a packed or rotated GGUF file means, worked out apart from the loader: weights for transformers in float32.

Codes are looked up in tables written out byte by byte, rotations are products with the whole Walsh-Hadamard matrix in float64,
and value heads are moved one at a time.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_spec import TinyModel, hf_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from freetoken.loader.gguf import GGUFFile

PAIR = {0: -1.0, 1: 0.0, 2: 1.0, 3: 2.0}
FOUR = np.array([[PAIR[byte >> 2 * place & 3] for place in range(4)] for byte in range(256)])
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}


def trits(byte: int) -> list[float]:
    """The digits of a byte of PTQ1_0 as values: multiply by 3, the digit is what passes 256."""
    values = []
    for _ in range(5):
        byte *= 3
        values.append(float(byte // 256 - 1))
        byte %= 256
    return values


TRITS = np.array([trits(byte) for byte in range(256)])


def decode_ptq1(block: np.ndarray) -> np.ndarray:
    """128 values of one block of 28 bytes, element by element."""
    values = np.full(128, np.nan)
    for byte in range(16):
        for digit in range(5):
            values[16 * digit + byte] = TRITS[block[byte], digit]
    for byte in range(8):
        for digit in range(5):
            values[80 + 8 * digit + byte] = TRITS[block[16 + byte], digit]
    for byte in range(2):
        for digit in range(4):
            values[120 + 2 * digit + byte] = TRITS[block[24 + byte], digit]
    return values * float(block[26:].view("<f2")[0])


def decode(file: GGUFFile, name: str) -> np.ndarray:
    """Float64 values of a tensor as it is stored."""
    tensor = file.tensors[name]
    raw, kind = np.array(file.raw(name)), tensor.type_name
    if kind == "F32":
        return raw.view("<f4").astype(np.float64).reshape(tensor.shape)
    if kind == "F16":
        return raw.view("<f2").astype(np.float64).reshape(tensor.shape)
    if kind == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64).reshape(tensor.shape)
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        return (blocks[:, :2].copy().view("<f2").astype(float) * blocks[:, 2:].view("i1")).reshape(tensor.shape)
    if kind == "PTQ1_0":
        return np.stack([decode_ptq1(block) for block in raw.reshape(-1, 28)]).reshape(tensor.shape)
    blocks = raw.reshape(-1, {"PQ2_0": 34, "Q2_0": 18, "Q2_0_G128": 34}[kind])
    scales = blocks[:, :2].copy().view("<f2").astype(float)
    return (scales * FOUR[blocks[:, 2:]].reshape(len(blocks), -1)).reshape(tensor.shape)


def unfold(value: np.ndarray, sign: np.ndarray, block: int) -> np.ndarray:
    ones = np.array([[(row & column).bit_count() for column in range(block)] for row in range(block)])
    matrix = (-1.0) ** ones / math.sqrt(block)
    return (value.reshape(*value.shape[:-1], -1, block) @ matrix).reshape(value.shape) * sign


def grouped(value: np.ndarray, spec: TinyModel, size: int, first: int = 0) -> np.ndarray:
    """Rows from ``first`` on, which are value heads of ``size`` rows in the tiled order, put head by head into the grouped one."""
    repeats = spec.linear_value_heads // spec.linear_key_heads
    out = value.copy()
    for tiled in range(spec.linear_value_heads):
        place = repeats * (tiled % spec.linear_key_heads) + tiled // spec.linear_key_heads
        out[first + place * size : first + (place + 1) * size] = value[
            first + tiled * size : first + (tiled + 1) * size
        ]
    return out


def hf_weights(path: Path, spec: TinyModel) -> dict[str, torch.Tensor]:
    """The checkpoint that ``path`` was converted and rotated from, of the values its types left, float32."""
    file = GGUFFile.open(path)
    keys = {key.removeprefix("prism.hadamard."): value for key, value in file.metadata.items()}
    block, turned = keys.get("block_size", 0), [*keys.get("weight_names", []), *keys.get("inverse_weight_names", [])]
    signs: dict[int, np.ndarray] = {}
    values = list(keys.get("sign_values", []))
    for width in list(keys.get("sign_widths", [])):
        signs[int(width)], values = np.array(values[:width], dtype=float), values[width:]
    weights = {}
    for name, tensor in file.tensors.items():
        parts = name.split(".", 2)
        if parts[0] == "blk" and int(parts[1]) >= spec.num_layers:
            continue
        value = decode(file, name)
        if name in turned:
            width = tensor.shape[-1]
            value = unfold(value, signs.get(width, np.ones(width)), block)
        if spec.arch == "llama" and parts[-1].startswith(("attn_q.", "attn_k.")):
            value = _halves(value, spec.num_heads if "attn_q" in name else spec.num_kv_heads)
        if spec.arch == "qwen3_5":
            value = _as_published(name, value, spec, name in turned and bool(keys.get("gdn_v_grouped", False)))
        top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
        top["output.weight"] = "lm_head.weight"
        if name in top:
            canonical = top[name]
        elif parts[2] in LAYER:
            canonical = f"model.layers.{parts[1]}.{LAYER[parts[2]]}"
        else:  # a bias, beside its weight
            canonical = f"model.layers.{parts[1]}." + LAYER[parts[2].replace("bias", "weight")].replace(
                "weight", "bias"
            )
        weights[canonical] = torch.from_numpy(value.astype(np.float32))
    return weights


def _halves(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from rotary pairs side by side to two halves, row by row."""
    size = len(value) // heads
    out = value.copy()
    for head in range(heads):
        for index in range(size):
            out[head * size + index % 2 * (size // 2) + index // 2] = value[head * size + index]
    return out


def _as_published(name: str, value: np.ndarray, spec: TinyModel, columns_grouped: bool) -> np.ndarray:
    leaf = name.split(".", 2)[-1]
    if name.endswith("norm.weight") and leaf != "ssm_norm.weight":
        return value - 1
    size = spec.linear_value_dim
    if leaf == "ssm_a":
        return np.log(-grouped(value, spec, 1))
    if leaf in ("ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return grouped(value, spec, 1)
    if leaf == "attn_gate.weight":
        return grouped(value, spec, size)
    if leaf in ("attn_qkv.weight", "ssm_conv1d.weight"):
        value = grouped(value, spec, size, 2 * spec.linear_key_heads * spec.linear_key_dim)
        return value[:, None] if leaf == "ssm_conv1d.weight" else value
    if leaf == "ssm_out.weight" and not columns_grouped:
        return np.ascontiguousarray(grouped(np.ascontiguousarray(value.T), spec, size).T)
    return value


def hf_model(path: Path, spec: TinyModel) -> PreTrainedModel:
    """transformers' model of those weights."""
    weights = hf_weights(path, spec)
    config: dict[str, Any] = hf_config(spec, weights["model.embed_tokens.weight"].shape[0])
    made = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if spec.tied else set()), (missing, unexpected)
    model.tie_weights()
    return model
