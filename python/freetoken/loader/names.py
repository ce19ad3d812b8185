"""Which tensors a model has, under which names, and how GGUF spells them (torch-free)."""

from __future__ import annotations

import re

from freetoken.models.config import ModelConfig

# GGUF types that can be decoded at load.
DECODABLE_TYPES = frozenset(
    ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


def canonical_name(gguf_name: str) -> str | None:
    """The Hugging Face name of tensor ``gguf_name``, or ``None`` when it is not part of a served model."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    match = _GGUF_BLOCK.fullmatch(gguf_name)
    if match is None or match[2] not in _GGUF_LAYER:
        return None
    return f"model.layers.{int(match[1])}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def expected_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and torch shape of every tensor of ``model``; a tied ``lm_head.weight`` is not among them."""
    hidden, ffn, q, kv = model.hidden_size, model.intermediate_size, model.q_size, model.kv_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    projections = {
        "self_attn.q_proj": (q, hidden, model.attention_bias),
        "self_attn.k_proj": (kv, hidden, model.attention_bias),
        "self_attn.v_proj": (kv, hidden, model.attention_bias),
        "self_attn.o_proj": (hidden, q, model.attention_bias),
        "mlp.gate_proj": (ffn, hidden, model.mlp_bias),
        "mlp.up_proj": (ffn, hidden, model.mlp_bias),
        "mlp.down_proj": (hidden, ffn, model.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if model.qk_norm:
        norms |= {"self_attn.q_norm": model.head_dim, "self_attn.k_norm": model.head_dim}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        for part, (rows, columns, biased) in projections.items():
            shapes[f"{prefix}{part}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}{part}.bias"] = (rows,)
        for part, size in norms.items():
            shapes[f"{prefix}{part}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def is_ignorable(name: str, model: ModelConfig) -> bool:
    """Whether a checkpoint may hold ``name`` beside the expected tensors: rotary buffers, and a head that is tied."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and model.tie_word_embeddings)
