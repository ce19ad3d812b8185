"""From a Hugging Face style configuration dictionary to :class:`ModelConfig` (torch-free).

Key names and defaults are those of ``config.json`` as published with Llama, Qwen3, Qwen3.5 (with experts or without) and ``qwen4_exp`` checkpoints, both the older
form (``rope_theta`` and ``rope_scaling`` at the top level, ``torch_dtype``) and the newer one (``rope_parameters``, ``dtype``).
A checkpoint with a vision tower describes its language model in ``text_config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from freetoken.errors import StartupError
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION, LinearAttentionConfig, ModelConfig
from freetoken.models.parse_moe import parse_fp8, parse_moe
from freetoken.models.parse_qwen4_exp import (
    INDEXED_ATTENTION,
    QWEN4_EXP_ARCHITECTURES,
    parse_gate,
    parse_hyper,
    parse_indexer,
)
from freetoken.models.ple_config import parse_ple

HYBRID_ARCHITECTURES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    *QWEN4_EXP_ARCHITECTURES,
)
SERVED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *HYBRID_ARCHITECTURES)
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
}
# Of a config with text_config these are read beside it, and win.
_OUTER_KEYS = ("architectures", "model_type", "tie_word_embeddings")
_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LARGEST = 2**31 - 1
MAX_LAYERS = 1024
CONV_WIDTHS = (2, 3, 4)
"""Widths of the convolution of linear attention that the kernels take."""
MAX_LINEAR_HEAD_DIM = 256
# Beside the rope_type: keys that must be there, and keys that may be.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ),
    ),
}


class _Reader:
    """Typed reads from one dictionary; every fault is a :class:`StartupError` naming ``where`` and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fail(self, key: str, problem: str) -> NoReturn:
        raise StartupError(f"{self.where}: {key} {problem}")

    def integer(self, key: str, default: int | None = None, *, most: int = _LARGEST) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.fail(key, f"must be an integer from 1 to {most}, not {_brief(value)}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(key, f"must be a number, not {_brief(value)}")
        if positive and value <= 0:
            self.fail(key, f"must be above 0, not {_brief(value)}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {_brief(value)}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for entry in listed:
            if not isinstance(entry, int) or isinstance(entry, bool) or not -1 <= entry <= _LARGEST:
                self.fail(key, f"must be a token id or a list of them, not {_brief(value)}")
        return tuple(entry for entry in listed if entry >= 0)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def flatten_text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """``hf`` with the keys of its ``text_config`` at the top and ``vision_config`` left out; the same where there is none.

    Raises :class:`StartupError` when ``text_config`` is not an object.
    """
    text = hf.get("text_config")
    if text is None:
        return hf
    if not isinstance(text, dict):
        raise StartupError(f"text_config must be an object, not {_brief(text)}")
    outer = {key: value for key, value in hf.items() if key not in ("text_config", "vision_config")}
    kept = {key: outer[key] for key in _OUTER_KEYS if outer.get(key) is not None}
    return {**outer, **text, **kept}


def parse_hf_config(
    hf: dict[str, Any], generation: dict[str, Any] | None, name: str, *, source: str = "config.json"
) -> ModelConfig:
    """The model that ``hf`` (``config.json``) describes.

    ``generation`` is ``generation_config.json`` where there is one; its end-of-sequence ids are united with those of
    ``hf`` and its sampling values become defaults. ``name`` is the served name, ``source`` names ``hf`` in errors. A ``rope_scaling`` whose ``rope_type`` is
    ``factors`` carries one divisor for each rotary frequency (``inverse frequency / factors[i]``). Sections of a multimodal
    rotary embedding have no meaning for text, where all positions are equal. Raises :class:`StartupError`, naming the key,
    for an architecture, feature or geometry that is not served.
    """
    r = _Reader(flatten_text_config(hf), source)
    architecture = _architecture(r)
    hybrid = architecture in HYBRID_ARCHITECTURES
    fourth = architecture in QWEN4_EXP_ARCHITECTURES
    _refuse_unserved_features(r, hybrid, fourth)
    hidden_size = r.integer("hidden_size")
    num_heads = r.integer("num_attention_heads")
    num_kv_heads = r.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        r.fail("num_attention_heads", f"{num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    head_dim = _head_dim(r, architecture, hidden_size, num_heads)
    max_positions = r.integer("max_position_embeddings", 2048 if architecture == "LlamaForCausalLM" else 32768)
    rotary_dim = _rotary_dim(r, head_dim, 1.0 if fourth else 0.25 if hybrid else None)
    rope_theta, rope_scaling = _rope(r, rotary_dim or head_dim, max_positions)
    num_layers = r.integer("num_hidden_layers", most=MAX_LAYERS)
    layer_types = _layer_types(r, num_layers) if hybrid else ()
    moe = parse_moe(r, architecture, num_layers)
    # Where every layer has experts a plain MLP has no size.
    has_mlp = moe is None or len(moe.dense_layers) > 0
    vocab_size = r.integer("vocab_size")
    g = _Reader(generation or {}, "generation_config.json")
    eos = tuple(dict.fromkeys((*r.ids("eos_token_id"), *g.ids("eos_token_id"))))
    for token in eos:
        if token >= vocab_size:
            r.fail("eos_token_id", f"{token} lies outside the vocabulary of {vocab_size}")
    bos = r.ids("bos_token_id") or g.ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        name=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=r.integer("intermediate_size") if has_mlp else 0,
        rms_norm_eps=r.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=r.boolean("tie_word_embeddings", False),
        qk_norm=architecture != "LlamaForCausalLM",
        attention_bias=r.boolean("attention_bias", False),
        mlp_bias=architecture == "LlamaForCausalLM" and r.boolean("mlp_bias", False),
        layer_types=layer_types,
        linear_attention=_linear_attention(r, parse_gate(r) if fourth else False)
        if LINEAR_ATTENTION in layer_types
        else None,
        rotary_dim=rotary_dim,
        attn_output_gate=hybrid,
        zero_centred_norm=hybrid,
        float32_norm=hybrid,
        moe=moe,
        fp8=parse_fp8(r),
        ple=parse_ple(r, layer_types=layer_types, hidden_size=hidden_size, vocab_size=vocab_size) if fourth else None,
        hyper=parse_hyper(r) if fourth else None,
        indexer=parse_indexer(r, rotary_dim or head_dim) if fourth else None,
        dtype=_dtype(r),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        sampling_defaults=_sampling_defaults(g),
    )


def _architecture(r: _Reader) -> str:
    listed = r.values.get("architectures")
    if listed is None:
        model_type = r.values.get("model_type")
        name = _BY_MODEL_TYPE.get(model_type, model_type) if isinstance(model_type, str) else None
    else:
        name = listed[0] if isinstance(listed, list) and listed else listed
    if not isinstance(name, str):
        r.fail("architectures", "must name a model class")
    if name not in SERVED_ARCHITECTURES:
        raise StartupError(
            f"{r.where}: architecture {_brief(name)} is not served; {', '.join(SERVED_ARCHITECTURES)} are"
        )
    return name


def _refuse_unserved_features(r: _Reader, hybrid: bool, indexed: bool) -> None:
    activation = r.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        r.fail("hidden_act", f"{_brief(activation)} is not served; silu is")
    if r.boolean("use_sliding_window", False):
        r.fail("use_sliding_window", "is true, but sliding-window attention is not served")
    served = [FULL_ATTENTION, *([LINEAR_ATTENTION] if hybrid else []), *([INDEXED_ATTENTION] if indexed else [])]
    layer_types = r.values.get("layer_types")
    if isinstance(layer_types, list):
        for kind in layer_types:
            if kind not in served:
                r.fail("layer_types", f"holds {_brief(kind)}, but only {' and '.join(served)} can be served")
    if hybrid and not r.boolean("attn_output_gate", True):
        r.fail("attn_output_gate", "is false, which is not served")


def _layer_types(r: _Reader, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer of a hybrid model: listed, or every ``full_attention_interval``-th with full attention."""
    listed = r.values.get("layer_types")
    if listed is None:
        interval = r.integer("full_attention_interval", 4)
        listed = [LINEAR_ATTENTION if (layer + 1) % interval else FULL_ATTENTION for layer in range(num_layers)]
    if not isinstance(listed, list):
        r.fail("layer_types", f"must be a list, not {_brief(listed)}")
    if len(listed) != num_layers:
        r.fail("layer_types", f"has {len(listed)} entries, but num_hidden_layers is {num_layers}")
    # Attention that is called full here is indexed where the model has an indexer.
    listed = [FULL_ATTENTION if kind == INDEXED_ATTENTION else kind for kind in listed]
    if FULL_ATTENTION not in listed:
        r.fail("layer_types", f"holds no {FULL_ATTENTION}, which is not served")
    return tuple(listed)


def _linear_attention(r: _Reader, sigmoid_gate: bool) -> LinearAttentionConfig:
    width = r.integer("linear_conv_kernel_dim", 4)
    if width not in CONV_WIDTHS:
        r.fail("linear_conv_kernel_dim", f"must be from {CONV_WIDTHS[0]} to {CONV_WIDTHS[-1]}, not {width}")
    key_heads, value_heads = r.integer("linear_num_key_heads", 16), r.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        r.fail("linear_num_value_heads", f"{value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    return LinearAttentionConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=r.integer("linear_key_head_dim", 128, most=MAX_LINEAR_HEAD_DIM),
        value_head_dim=r.integer("linear_value_head_dim", 128, most=MAX_LINEAR_HEAD_DIM),
        conv_width=width,
        sigmoid_gate=sigmoid_gate,
    )


def _head_dim(r: _Reader, architecture: str, hidden_size: int, num_heads: int) -> int:
    divided = architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
    if r.values.get("head_dim") is None and divided and hidden_size % num_heads:
        r.fail(
            "hidden_size",
            f"{hidden_size} is not a multiple of num_attention_heads {num_heads}, and head_dim is missing",
        )
    default = hidden_size // num_heads if divided else 128 if architecture == "Qwen3ForCausalLM" else 256
    head_dim = r.integer("head_dim", max(default, 1))
    if head_dim % 2:
        r.fail("head_dim", f"must be even for the rotary embedding, not {head_dim}")
    return head_dim


def _dtype(r: _Reader) -> str:
    value = r.values.get("dtype")
    key = "dtype"
    if value is None:
        value, key = r.values.get("torch_dtype"), "torch_dtype"
    if value is None:
        return "bfloat16"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        r.fail(key, f"{_brief(value)} is not served; {', '.join(_DTYPES)} are")
    return str(name)


def _sampling_defaults(g: _Reader) -> dict[str, float]:
    return {key: g.number(key, positive=False) for key in _SAMPLING_KEYS if g.values.get(key) is not None}


def _rope_reader(r: _Reader) -> _Reader:
    """The dictionary of the rotary embedding, under its newer or its older name; empty where there is none."""
    parameters, key = r.values.get("rope_parameters"), "rope_parameters"
    if parameters is None:
        parameters, key = r.values.get("rope_scaling"), "rope_scaling"
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        r.fail(key, f"must be an object, not {_brief(parameters)}")
    return _Reader(parameters, f"{r.where}: {key}")


def _rotary_dim(r: _Reader, head_dim: int, default: float | None) -> int | None:
    """How much of a head is rotated, by ``partial_rotary_factor``; ``None`` for all of it.

    ``default`` is the factor where none is given; with ``None`` the architecture takes no other than 1.
    """
    s = _rope_reader(r)
    reader = s if s.values.get("partial_rotary_factor") is not None else r
    share = reader.number("partial_rotary_factor", default or 1.0)
    if share == 1.0:
        return None
    if default is None:
        reader.fail("partial_rotary_factor", f"{share:g} is not served; the whole head must be rotated")
    size = int(head_dim * share)
    if share > 1.0 or size < 2 or size % 2:
        reader.fail("partial_rotary_factor", f"{share:g} of a head of {head_dim} is not an even part of it")
    return size


def _rope(r: _Reader, rotary_dim: int, max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """``(rope_theta, rope_scaling)``, with the scaling's keys checked and its rope_type made explicit."""
    s = _rope_reader(r)
    parameters = s.values
    theta = (r if parameters.get("rope_theta") is None else s).number("rope_theta", 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    if kind == "factors":
        return theta, {"rope_type": "factors", "factors": _factors(s, rotary_dim)}
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        s.fail("rope_type", f"{_brief(kind)} is not served; default, {', '.join(_ROPE_KEYS)} are")
    return theta, _scaling(s, kind, max_positions)


def _scaling(s: _Reader, kind: str, max_positions: int) -> dict[str, Any]:
    required, optional = _ROPE_KEYS[kind]
    scaling: dict[str, Any] = {"rope_type": kind}
    for key in (*required, *optional):
        if key in required or s.values.get(key) is not None:
            scaling[key] = s.integer(key) if key == "original_max_position_embeddings" else s.number(key)
    if scaling["factor"] < 1.0:
        s.fail("factor", f"must be at least 1, not {scaling['factor']:g}")
    if kind in ("yarn", "dynamic"):
        scaling.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        scaling["truncate"] = s.boolean("truncate", True)
        if scaling.get("beta_fast", 32.0) < scaling.get("beta_slow", 1.0):
            s.fail("beta_fast", "must not be below beta_slow")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        s.fail("low_freq_factor", "must be below high_freq_factor")
    return scaling


def _factors(s: _Reader, rotary_dim: int) -> list[float]:
    values = s.values.get("factors")
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        s.fail("factors", f"must be a list of {rotary_dim // 2} numbers, one for each rotary frequency")
    for value in values:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            s.fail("factors", f"must hold numbers above 0, not {_brief(value)}")
    return [float(value) for value in values]
