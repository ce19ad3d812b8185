"""What a configuration dictionary says of experts and of FP8 weights (torch-free).

Keys are those of ``config.json`` as published with Qwen3 and Qwen3.5 mixture-of-experts checkpoints, and of their
``quantization_config``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetoken.models.config import PACKED_METHOD, Fp8Config, MoeConfig

if TYPE_CHECKING:
    from freetoken.models.parse import _Reader


@dataclass(frozen=True)
class _Family:
    """``normalised``: what a missing norm_topk_prob means; ``fixed``: it may mean nothing else; ``shared``: there is a shared expert,
    and every layer has experts; ``top_k``: what a missing num_experts_per_tok means."""

    normalised: bool
    fixed: bool
    shared: bool
    top_k: int = 8


_QWEN3_5 = _Family(normalised=True, fixed=True, shared=True)
_QWEN4_EXP = _Family(normalised=True, fixed=False, shared=True, top_k=10)
MOE_ARCHITECTURES = {
    "Qwen3MoeForCausalLM": _Family(normalised=False, fixed=False, shared=False),
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen4ExpForCausalLM": _QWEN4_EXP,
    "Qwen4ExpForConditionalGeneration": _QWEN4_EXP,
}
# More would not fit the index arithmetic of one program that looks at all experts.
MAX_EXPERTS = 4096
_BLOCK = [128, 128]
_LANGUAGE_MODEL = "model.language_model."


def parse_moe(r: _Reader, architecture: str, num_layers: int) -> MoeConfig | None:
    """The experts of a model, ``None`` for an architecture without; ``StartupError`` naming the key for what does not fit."""
    family = MOE_ARCHITECTURES.get(architecture)
    if family is None:
        return None
    count_key = "num_experts" if r.values.get("num_experts") is not None else "num_local_experts"
    if r.values.get(count_key) is None:
        r.fail("num_experts", "is missing")
    num_experts = r.integer(count_key, most=MAX_EXPERTS)
    top_k = r.integer("num_experts_per_tok", family.top_k)
    if top_k > num_experts:
        r.fail("num_experts_per_tok", f"{top_k} is more than num_experts {num_experts}")
    normalised = r.boolean("norm_topk_prob", family.normalised)
    if family.fixed and normalised != family.normalised:
        r.fail("norm_topk_prob", f"is {str(normalised).lower()}, which a {architecture} does not have")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=r.integer("moe_intermediate_size"),
        norm_topk_prob=normalised,
        shared_intermediate_size=r.integer("shared_expert_intermediate_size", 512) if family.shared else 0,
        dense_layers=() if family.shared else _dense_layers(r, num_layers),
    )


def _dense_layers(r: _Reader, num_layers: int) -> tuple[int, ...]:
    """Layers with a plain MLP: those listed, and all but every ``decoder_sparse_step``-th."""
    step, listed = r.integer("decoder_sparse_step", 1), r.values.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        r.fail("mlp_only_layers", f"must list layers from 0 to {num_layers - 1}")
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def parse_fp8(r: _Reader) -> Fp8Config | None:
    """The FP8 weights that ``quantization_config`` describes, ``None`` where there are none; ``StartupError`` for other schemes than
    this and the one of packed weights."""
    found = r.values.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method == PACKED_METHOD:
        return None
    if not isinstance(found, dict) or method != "fp8":
        r.fail(
            "quantization_config",
            f"says {method!r:.60}, which is not served; use FP8 with blocks of 128 x 128, an unquantised folder or a GGUF",
        )
    for key, served in (
        ("weight_block_size", _BLOCK),
        ("activation_scheme", "dynamic"),
        ("fmt", "e4m3"),
        ("scale_fmt", "float"),
        ("expert_dtype", "fp8"),
    ):
        value = found.get(key)
        if value != served and not (value is None and key != "weight_block_size"):
            r.fail("quantization_config", f"has {key} {value!r:.60}, but only {served} is served")
    return Fp8Config(skipped=_skipped(r, found))


def _skipped(r: _Reader, found: dict[str, Any]) -> tuple[str, ...]:
    key = "ignored_layers" if found.get("modules_to_not_convert") is None else "modules_to_not_convert"
    listed = found.get(key)
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        r.fail("quantization_config", f"has {key} that is not a list of module names")
    return tuple(name.replace(_LANGUAGE_MODEL, "model.") for name in listed)
