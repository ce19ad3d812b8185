"""From GGUF metadata to a Hugging Face style configuration dictionary (torch-free)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from freetoken.loader.gguf import GGUFFile
from freetoken.loader.gguf_keys import HF_CLASS, Keys
from freetoken.loader.gguf_names import EMBEDDING, HEAD, ROPE_FACTORS
from freetoken.loader.gguf_qwen4_exp import ARCHITECTURE as QWEN4_EXP
from freetoken.loader.gguf_qwen4_exp import qwen4_exp_config
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION

HYBRIDS = ("qwen35", "qwen35moe", QWEN4_EXP)
MIXTURES, SHARED = ("qwen3moe", "qwen35moe", QWEN4_EXP), ("qwen35moe", QWEN4_EXP)
# Control tokens that end a turn or a text under any tokenizer that has them, beside the ids that the file names.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
CONTROL = 3
SOFTMAX = 1
"""The number by which files name a softmax over the logits of a router."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FILE_DTYPES = {0: "float32", 1: "float16"}


def hf_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """What ``config.json`` of the same model would say, from the metadata and tensor shapes of ``file``.

    The vocabulary counts embedding rows, embeddings are tied when ``output.weight`` is absent, and the divisors in
    ``rope_freqs.weight`` become ``rope_scaling`` of type ``factors``. Raises :class:`StartupError` naming the key.
    """
    keys = Keys(file)
    hidden_size = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        keys.fail(f"tensor {EMBEDDING!r} is missing")
    head_dim = keys.integer("attention.key_length", hidden_size // heads if heads else 0)
    if not head_dim:
        keys.fail(f"metadata key '{keys.prefix}.attention.key_length' must be at least 1")
    hybrid, mixture = keys.prefix in HYBRIDS, keys.prefix in MIXTURES
    for key in ("attention.value_length", *(() if hybrid else ("rope.dimension_count",))):
        if keys.integer(key, head_dim) != head_dim:
            keys.fail(
                f"metadata key '{keys.prefix}.{key}' must equal the head size {head_dim}, not {keys.integer(key)}"
            )
    for key in ("attention.sliding_window", *(() if mixture else ("expert_count",))):
        if keys.integer(key, 0):
            keys.fail(f"metadata key '{keys.prefix}.{key}' is {keys.integer(key)}, which is not served")
    config = {
        "architectures": [HF_CLASS[keys.prefix]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": None if mixture else keys.integer("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "attention_bias": any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "k", "v", "output")),
        "mlp_bias": any(f"blk.0.ffn_{part}.bias" in file.tensors for part in ("gate", "up", "down")),
        "torch_dtype": _dtype(file),
        "bos_token_id": _token_id(keys, "bos_token_id"),
        "eos_token_id": _end_ids(keys),
    }
    if hybrid:
        config |= _hybrid_config(keys, head_dim)
    if mixture:
        config |= _moe_config(keys)
    if keys.prefix == QWEN4_EXP:
        config |= qwen4_exp_config(keys, _layer_types(keys, config))
    return config


def mtp_blocks(file: GGUFFile) -> int:
    """How many of the last blocks are for multi-token prediction, which are not part of the model itself."""
    keys = Keys(file)
    count, blocks = keys.integer("nextn_predict_layers", 0), keys.integer("block_count")
    if count >= blocks and count:
        keys.fail(f"metadata key '{keys.prefix}.nextn_predict_layers' is {count}, but there are {blocks} blocks in all")
    return count


def _hybrid_config(keys: Keys, head_dim: int) -> dict[str, Any]:
    """What ``qwen35`` has beside the rest, and keys that mean something else in it."""
    layers = keys.integer("block_count") - mtp_blocks(keys.file)
    heads, width = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if not heads or width % heads:
        keys.fail(
            f"metadata key '{keys.prefix}.ssm.inner_size' {width} is not a multiple of ssm.time_step_rank {heads}"
        )
    scale = keys.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-5):
        keys.fail(
            f"metadata key '{keys.prefix}.attention.scale' is {scale:g}, which is not served; 1/sqrt of the head size is"
        )
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width // heads,
    }
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        share = rotated / head_dim
        config["partial_rotary_factor"] = share if int(head_dim * share) == rotated else math.nextafter(share, 2.0)
    else:
        config["partial_rotary_factor"] = 1.0
    recurrent = keys.file.metadata.get(f"{keys.prefix}.attention.recurrent_layers")
    if recurrent is not None:
        if not isinstance(recurrent, np.ndarray) or recurrent.dtype != np.bool_ or len(recurrent) < layers:
            keys.fail(f"metadata key '{keys.prefix}.attention.recurrent_layers' must hold a boolean for each block")
        kinds = {True: LINEAR_ATTENTION, False: FULL_ATTENTION}
        config["layer_types"] = [kinds[bool(entry)] for entry in recurrent[:layers]]
    return config


def _layer_types(keys: Keys, config: dict[str, Any]) -> list[str]:
    """The kind of each layer that ``config`` means."""
    listed: list[str] | None = config.get("layer_types")
    if listed is not None:
        return listed
    interval = config["full_attention_interval"]
    if interval < 1:
        keys.fail(f"metadata key '{keys.prefix}.full_attention_interval' must be at least 1")
    return [
        LINEAR_ATTENTION if (layer + 1) % interval else FULL_ATTENTION for layer in range(config["num_hidden_layers"])
    ]


def _moe_config(keys: Keys) -> dict[str, Any]:
    """Experts. Their weights are always normalised, unless the file says otherwise: there is no other form without a key."""
    for key, served in (("leading_dense_block_count", 0), ("expert_gating_func", SOFTMAX), ("expert_group_count", 1)):
        if keys.integer(key, served) not in (0, served):
            keys.fail(f"metadata key '{keys.prefix}.{key}' is {keys.integer(key)}, but only {served} is served")
    if keys.number("expert_weights_scale", 1.0) != 1.0:
        keys.fail(f"metadata key '{keys.prefix}.expert_weights_scale' is not 1, which is not served")
    normalised = keys.get("expert_weights_norm")
    if normalised is not None and not isinstance(normalised, bool):
        keys.fail(f"metadata key '{keys.prefix}.expert_weights_norm' must be a boolean")
    config: dict[str, Any] = {
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "norm_topk_prob": normalised is not False,
    }
    if keys.prefix in SHARED:
        config["shared_expert_intermediate_size"] = keys.positive("expert_shared_feed_forward_length")
    return config


def _dtype(file: GGUFFile) -> str:
    kind = file.metadata.get("general.file_type")
    return _FILE_DTYPES.get(kind, "bfloat16") if isinstance(kind, int) else "bfloat16"


def _rope_scaling(keys: Keys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    factors = keys.file.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if kind not in (None, "none"):
            keys.fail(f"tensor '{ROPE_FACTORS}' beside rope.scaling.type {str(kind)[:40]!r} is not served")
        if factors.type_name != "F32":
            keys.fail(f"tensor '{ROPE_FACTORS}' must have type F32, not {factors.type_name}")
        return {"rope_type": "factors", "factors": keys.file.raw(ROPE_FACTORS).view("<f4").astype(float).tolist()}
    if kind is None and keys.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": keys.number("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        keys.fail(
            f"metadata key '{keys.prefix}.rope.scaling.type' is {str(kind)[:40]!r}; none, linear and yarn are served"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        if keys.get("rope.scaling.original_context_length") is not None:
            scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
        for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if keys.get(f"rope.scaling.{key}") is not None:
                scaling[ours] = keys.number(f"rope.scaling.{key}")
        if keys.get("rope.scaling.attn_factor") is not None:
            # Here it multiplies the magnitude that yarn derives from its factor; in Hugging Face terms it replaces it.
            derived = 1.0 + 0.1 * float(np.log(scaling["factor"])) if scaling["factor"] > 1.0 else 1.0
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor") * derived
    return scaling


def _token_id(keys: Keys, key: str) -> int | None:
    value = keys.file.metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _end_ids(keys: Keys) -> list[int]:
    ids = [token for key in _END_KEYS if (token := _token_id(keys, key)) is not None]
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    types = keys.file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        control = {tokens[index]: int(index) for index in np.flatnonzero(types == CONTROL)}
        ids += [control[text] for text in END_TOKENS if text in control]
    return list(dict.fromkeys(ids))
