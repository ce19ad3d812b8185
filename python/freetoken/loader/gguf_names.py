"""How the tensors of a model are called in GGUF files, and in what shapes they lie there (torch-free).

Names are those of llama.cpp. A tensor of a checkpoint may lie in a file in parts: the experts of a layer as one stack of gates, of
ups and of downs (or of gates above ups), the projection of an indexer as queries and keys. Parts have names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from freetoken.loader.names import STACKED_DOWN, STACKED_GATE_UP, expected_tensors
from freetoken.models.config import ModelConfig

ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
EXPERTS = ".mlp.experts."
SHARED_GATE = "mlp.shared_expert_gate.weight"
INDEX_PROJECTION = "self_attn.indexer.index_qk_proj.weight"
INDEX_PARTS = ("self_attn.indexer.index_q_proj.weight", "self_attn.indexer.index_k_proj.weight")

_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
    "output_hc_norm.weight": "model.hyper_connection_mixer.hc_norm.weight",
    "output_hc_down.weight": "model.hyper_connection_mixer.input_mix_weight_down.weight",
    "output_hc_up.weight": "model.hyper_connection_mixer.input_mix_weight_up.weight",
}
# Modules whose weights, and biases where they have them, go by one name.
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LAYER = {f"{source}.{kind}": f"{name}.{kind}" for source, name in _MODULES.items() for kind in ("weight", "bias")} | {
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_gate_up_exps.weight": STACKED_GATE_UP,
    "ffn_down_exps.weight": STACKED_DOWN,
    "ffn_gate_inp_shexp.weight": SHARED_GATE,
}
_DENSE = _LAYER | {"ffn_norm.weight": "post_attention_layernorm.weight"}
_HYBRID = _LAYER | {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "indexer.q_proj.weight": INDEX_PARTS[0],
    "indexer.k_proj.weight": INDEX_PARTS[1],
    "indexer.q_norm.weight": "self_attn.indexer.q_layernorm.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_layernorm.weight",
    "ple_key.weight": "ple.key_proj.weight",
    "ple_value.weight": "ple.value_proj.weight",
    "ple_norm_key.weight": "ple.norm_key.weight",
    "ple_norm_query.weight": "ple.norm_query.weight",
    "ple_norm_conv.weight": "ple.norm_conv.weight",
    "ple_conv1d.weight": "ple.conv1d.weight",
}
_HYPER_PARTS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
for _site, _part in (("attn", "attn_hyper_connection"), ("ffn", "mlp_hyper_connection")):
    _HYBRID |= {f"hc_{_site}_{key}.weight": f"{_part}.{name}.weight" for key, name in _HYPER_PARTS.items()}
_MTP = re.compile(
    r"nextn\.(eh_proj|enorm|hnorm|shared_head_norm|shared_head_head|embed_tokens|hc_head_(norm|down|up))\.weight"
)
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NAMES = {name: source for source, name in _TOP.items()}
_LEAVES = {
    hybrid: {name: source for source, name in leaves.items()} for hybrid, leaves in ((False, _DENSE), (True, _HYBRID))
}


def gguf_tensors(model: ModelConfig, present: Container[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name of every tensor of ``model``, but for tables of n-grams: the name of the part that it is, and its shape in the file.

    ``present`` are the names in the file, which decide whether gates and ups of experts are one tensor or two.
    """
    leaves = _LEAVES[bool(model.layer_types)]
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in expected_tensors(model, stacked=True).items():
        match = _OF_LAYER.fullmatch(name)
        if match is None:
            found[_NAMES[name]] = (name, shape)
            continue
        prefix, block = f"model.layers.{match[1]}.", f"blk.{match[1]}."
        for leaf, stored in _parts(model, match[2], shape, f"{block}ffn_gate_up_exps.weight" in present):
            found[block + leaves[leaf]] = (prefix + leaf, stored)
    return found


def _parts(model: ModelConfig, leaf: str, shape: tuple[int, ...], fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What tensor ``leaf`` of a layer, of ``shape``, is in a file; ``fused`` keeps gates and ups of experts together."""
    if leaf.endswith("conv1d.weight"):
        # Converters drop the axis of one channel a group.
        yield leaf, (shape[0], shape[2])
    elif leaf == STACKED_GATE_UP and not fused:
        for part in ("gate", "up"):
            yield f"mlp.experts.{part}_proj", (shape[0], shape[1] // 2, shape[2])
    elif leaf == INDEX_PROJECTION and model.indexer is not None:
        size = model.indexer.head_dim
        yield INDEX_PARTS[0], (shape[0] - size, shape[1])
        yield INDEX_PARTS[1], (size, shape[1])
    else:
        yield leaf, shape


def is_gguf_mtp(gguf_name: str, model: ModelConfig, blocks: int) -> bool:
    """Whether ``gguf_name`` belongs to a block of multi-token prediction: those from ``model.num_layers`` to ``blocks``."""
    match = _BLOCK.fullmatch(gguf_name)
    if match is None or not model.num_layers <= int(match[1]) < blocks:
        return False
    return match[2] in _HYBRID or _MTP.fullmatch(match[2]) is not None
