"""Which tensors a model has, under which names, and how files spell them (torch-free)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from freetoken.models.config import (
    LINEAR_ATTENTION,
    HyperConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    PackedWeights,
)
from freetoken.models.ple_config import PleConfig

# GGUF types that can be decoded at load, all by the ``gguf`` package.
DECODABLE_TYPES = frozenset(
    [
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
    ]
)
# GGUF types that can stay packed, with the elements that share a scale.
PACKABLE_TYPES = {"PQ2_0": 128, "PTQ1_0": 128, "Q2_0": 64, "Q2_0_G128": 128}


def stored_name(name: str) -> str:
    """The canonical name of a tensor of a safetensors file: that of the language model beside a vision tower loses its prefix."""
    prefix = "model.language_model."
    return f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


VISION, MTP = "vision tower", "multi-token prediction"
_ASIDE = (("model.visual.", VISION), ("mtp.", MTP))


def set_aside(name: str, model: ModelConfig) -> str | None:
    """What part of a hybrid checkpoint ``name`` belongs to when it is none of the language model itself, or ``None``."""
    if not model.layer_types:
        return None
    return next((part for prefix, part in _ASIDE if name.startswith(prefix)), None)


def _attention_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, q, kv = model.hidden_size, model.q_size, model.kv_size
    projections = {
        "q_proj": (2 * q if model.attn_output_gate else q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
    }
    shapes = _linears("self_attn", projections, model.attention_bias)
    if model.qk_norm:
        shapes |= {f"self_attn.{part}.weight": (model.head_dim,) for part in ("q_norm", "k_norm")}
    if model.indexer is not None:
        size, heads = model.indexer.head_dim, model.indexer.num_heads
        shapes["self_attn.indexer.index_qk_proj.weight"] = ((heads + 1) * size, hidden)
        shapes |= {f"self_attn.indexer.{part}_layernorm.weight": (size,) for part in "qk"}
    return shapes


def _linear_attention_tensors(hidden: int, linear: LinearAttentionConfig) -> dict[str, tuple[int, ...]]:
    heads = linear.num_value_heads
    projections = {
        "in_proj_qkv": (linear.channels, hidden),
        "in_proj_z": (linear.value_size, hidden),
        "in_proj_b": (heads, hidden),
        "in_proj_a": (heads, hidden),
        "out_proj": (hidden, linear.value_size),
    }
    return _linears("linear_attn", projections, biased=False) | {
        "linear_attn.conv1d.weight": (linear.channels, 1, linear.conv_width),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (linear.value_head_dim,),
    }


def _ple_tensors(ple: PleConfig) -> dict[str, tuple[int, ...]]:
    """Of a layer with n-gram embeddings, all but the table and the constants of its hash."""
    channels = ple.channels
    projections = {"key_proj": (channels, ple.embed_dim), "value_proj": (ple.hidden_size, ple.embed_dim)}
    shapes = _linears("ple", projections, biased=False)
    shapes |= {f"ple.{norm}.weight": (channels,) for norm in ("norm_key", "norm_query", "norm_conv")}
    return shapes | {"ple.conv1d.weight": (channels, 1, ple.conv_width)}


def _hyper_tensors(name: str, hidden: int, hyper: HyperConfig, injects: bool) -> dict[str, tuple[int, ...]]:
    """Of the hyper-connection ``name``; the last one of a model writes nothing back."""
    channels = hyper.streams * hidden
    projections = {"input_mix_weight_down": (hyper.rank, channels), "input_mix_weight_up": (channels, hyper.rank)}
    if injects:
        projections["block_inject_weight"] = (hyper.streams, channels)
    return {f"{name}.hc_norm.weight": (channels,), **_linears(name, projections, biased=False)}


def _linears(prefix: str, projections: dict[str, tuple[int, int]], biased: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part, shape in projections.items():
        shapes[f"{prefix}.{part}.weight"] = shape
        if biased:
            shapes[f"{prefix}.{part}.bias"] = shape[:1]
    return shapes


def _mlp_tensors(prefix: str, hidden: int, width: int, biased: bool = False) -> dict[str, tuple[int, ...]]:
    projections = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return _linears(prefix, projections, biased)


STACKED_GATE_UP, STACKED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _expert_tensors(hidden: int, moe: MoeConfig, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Router, experts (each by itself, or ``stacked`` along a first dimension) and shared expert of one layer."""
    count, width, shared = moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, hidden)}
    if stacked:
        shapes |= {STACKED_GATE_UP: (count, 2 * width, hidden), STACKED_DOWN: (count, hidden, width)}
    else:
        for expert in range(count):
            shapes |= _mlp_tensors(f"mlp.experts.{expert}", hidden, width)
    if shared:
        shapes |= _mlp_tensors("mlp.shared_expert", hidden, shared) | {"mlp.shared_expert_gate.weight": (1, hidden)}
    return shapes


SCALE_SUFFIX = "_scale_inv"
FP8_BLOCK = 128


def scale_name(name: str) -> str:
    """The tensor of block scales that belongs to FP8 tensor ``name``."""
    return name + SCALE_SUFFIX


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the block scales of an FP8 tensor of ``shape``."""
    return (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))


# Linear layers that become one weight: in FP8 together or not at all.
_MERGED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("linear_attn.out_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
    ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    ("mlp.shared_expert.down_proj",),
)
_STACKS = (STACKED_GATE_UP, STACKED_DOWN)


def fp8_tensors(model: ModelConfig, layer: int, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Which of a layer's tensors ``shapes`` are held in FP8, by their names inside the layer."""
    if model.fp8 is None:
        return []
    prefix = f"model.layers.{layer}."
    found = []
    for group in _MERGED:
        if model.fp8.holds(prefix + module for module in group):
            found += [f"{module}.weight" for module in group if f"{module}.weight" in shapes]
    if model.is_sparse(layer) and model.fp8.converts(f"{prefix}mlp.experts"):
        found += [name for name in shapes if name in _STACKS or name.startswith("mlp.experts.")]
    return found


def expected_tensors(model: ModelConfig, *, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Canonical name and torch shape of every tensor of ``model``; a tied ``lm_head.weight`` is not among them.

    Experts are tensors of their own, or ``stacked``. Tensors held in FP8 are followed by their scales.
    """
    hidden = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    norms: dict[str, tuple[int, ...]] = {}
    if model.hyper is None:
        norms = {f"{part}.weight": (hidden,) for part in ("input_layernorm", "post_attention_layernorm")}
    else:
        for part in ("attn_hyper_connection", "mlp_hyper_connection"):
            norms |= _hyper_tensors(part, hidden, model.hyper, injects=True)
    for layer in range(model.num_layers):
        linear = model.linear_attention if model.layer_type(layer) == LINEAR_ATTENTION else None
        mine = _attention_tensors(model) if linear is None else _linear_attention_tensors(hidden, linear)
        if model.ple is not None and layer in model.ple.layers:
            mine |= _ple_tensors(model.ple)
        if model.moe is not None and model.is_sparse(layer):
            mine |= _expert_tensors(hidden, model.moe, stacked)
        else:
            mine |= _mlp_tensors("mlp", hidden, model.intermediate_size, model.mlp_bias)
        mine |= norms
        mine |= {scale_name(name): scale_shape(mine[name]) for name in fp8_tensors(model, layer, mine)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in mine.items()}
    if model.hyper is None:
        shapes["model.norm.weight"] = (hidden,)
    else:
        shapes |= _hyper_tensors("model.hyper_connection_mixer", hidden, model.hyper, injects=False)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def merged_projections(model: ModelConfig) -> Iterator[tuple[str, ...]]:
    """The matrices of ``model`` that can stay packed, those that a layer merges into one together, by canonical names."""
    yield ("model.embed_tokens.weight",)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        if model.layer_type(layer) == LINEAR_ATTENTION:
            yield tuple(f"{prefix}.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z"))
            yield (f"{prefix}.linear_attn.out_proj.weight",)
        else:
            yield tuple(f"{prefix}.self_attn.{part}_proj.weight" for part in ("q", "k", "v"))
            yield (f"{prefix}.self_attn.o_proj.weight",)
        if not model.is_sparse(layer):
            yield tuple(f"{prefix}.mlp.{part}_proj.weight" for part in ("gate", "up"))
            yield (f"{prefix}.mlp.down_proj.weight",)
    if not model.tie_word_embeddings:
        yield ("lm_head.weight",)


def weight_bytes(model: ModelConfig, element_bytes: int) -> int:
    """Bytes of all weights of ``model`` as they are held, most of them of ``element_bytes`` an element."""
    shapes = expected_tensors(model, stacked=True)
    return sum(tensor_bytes(name, shape, shapes, element_bytes, model.packed) for name, shape in shapes.items())


def tensor_bytes(
    name: str,
    shape: tuple[int, ...],
    shapes: dict[str, tuple[int, ...]],
    element_bytes: int,
    packed: PackedWeights | None = None,
) -> int:
    """Bytes of one tensor of ``shapes``, all of a model's: packed, one an element in FP8, four for a scale."""
    elements = math.prod(shape)
    if packed is not None and name in packed.groups:
        return packed.nbytes(name, elements)
    return elements * (4 if is_scale(name) else 1 if scale_name(name) in shapes else element_bytes)


def is_scale(name: str) -> bool:
    """Whether ``name`` is that of block scales."""
    return name.endswith(SCALE_SUFFIX)


def keeps_float32(name: str, model: ModelConfig) -> bool:
    """Whether tensor ``name`` is used in float32 whatever the type of the model.

    Decays of linear attention, where a rounding adds up over a long text, the norm weights of hybrid models, and scales.
    """
    if name.endswith((".A_log", ".dt_bias")) or is_scale(name):
        return True
    return model.float32_norm and is_zero_centred(name)


def is_zero_centred(name: str) -> bool:
    """Whether ``name`` is a norm weight that a checkpoint with ``zero_centred_norm`` stores less 1."""
    return (name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")) or ".ple.norm_" in name


def is_ignorable(name: str, model: ModelConfig) -> bool:
    """Whether a checkpoint may hold ``name`` beside the expected tensors: rotary buffers, and a head that is tied."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and model.tie_word_embeddings)
