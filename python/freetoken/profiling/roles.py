"""The roles that time is accounted to, and which of them a weight plays (torch-free)."""

from __future__ import annotations

ROLES = (
    "embedding",
    "norms",
    "hyper-connections",
    "attn qkv",
    "rotation",
    "attn",
    "attn out",
    "gdn in",
    "gdn step",
    "gdn out",
    "gate+up",
    "down",
    "router",
    "experts",
    "shared expert",
    "n-grams",
    "head",
    "sampler",
    "other",
)
"""In the order of a forward pass; ``other`` is what no range names."""
OTHER = "other"

# The first part that a tensor's name contains decides.
_BY_NAME = (
    ("embed_tokens.", "embedding"),
    ("lm_head.", "head"),
    (".ple.", "n-grams"),
    ("hyper_connection", "hyper-connections"),
    (".shared_expert_gate.", "router"),
    (".shared_expert.", "shared expert"),
    (".experts.", "experts"),
    (".mlp.gate.", "router"),
    (".linear_attn.in_proj", "gdn in"),
    (".linear_attn.out_proj", "gdn out"),
    (".linear_attn.", "gdn step"),
    (".self_attn.q_norm", "rotation"),
    (".self_attn.k_norm", "rotation"),
    (".self_attn.o_proj", "attn out"),
    (".self_attn.", "attn qkv"),
    ("norm.", "norms"),
    (".gate_proj", "gate+up"),
    (".up_proj", "gate+up"),
    (".gate_up_proj", "gate+up"),
    (".down_proj", "down"),
)


def role_of_weight(name: str) -> str:
    """Role of the checkpoint tensor ``name`` (Hugging Face): ``model.layers.0.self_attn.q_proj.weight`` is ``attn qkv``."""
    return next((role for part, role in _BY_NAME if part in name), OTHER)
