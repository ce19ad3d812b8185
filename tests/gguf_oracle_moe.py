"""What a GGUF file of a model with experts means, worked out apart from the loader: a folder of float32 safetensors for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_spec import HYBRIDS, TinyModel, hf_config

from freetoken.loader.gguf import GGUFFile
from gguf_oracle import LAYER, _as_published, decode

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "output_hc_norm.weight": "model.hyper_connection_mixer.hc_norm.weight",
    "output_hc_down.weight": "model.hyper_connection_mixer.input_mix_weight_down.weight",
    "output_hc_up.weight": "model.hyper_connection_mixer.input_mix_weight_up.weight",
}
MORE = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "indexer.q_norm.weight": "self_attn.indexer.q_layernorm.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_layernorm.weight",
    "hc_attn_norm.weight": "attn_hyper_connection.hc_norm.weight",
    "hc_attn_down.weight": "attn_hyper_connection.input_mix_weight_down.weight",
    "hc_attn_up.weight": "attn_hyper_connection.input_mix_weight_up.weight",
    "hc_attn_inject.weight": "attn_hyper_connection.block_inject_weight.weight",
    "hc_ffn_norm.weight": "mlp_hyper_connection.hc_norm.weight",
    "hc_ffn_down.weight": "mlp_hyper_connection.input_mix_weight_down.weight",
    "hc_ffn_up.weight": "mlp_hyper_connection.input_mix_weight_up.weight",
    "hc_ffn_inject.weight": "mlp_hyper_connection.block_inject_weight.weight",
    "ple_key.weight": "ple.key_proj.weight",
    "ple_value.weight": "ple.value_proj.weight",
    "ple_norm_key.weight": "ple.norm_key.weight",
    "ple_norm_query.weight": "ple.norm_query.weight",
    "ple_norm_conv.weight": "ple.norm_conv.weight",
    "ple_conv1d.weight": "ple.conv1d.weight",
}


NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FOUR_BITS = {"IQ4_NL": NON_LINEAR, "Q4_0": range(-8, 8)}


def decoded(file: GGUFFile, name: str) -> np.ndarray:
    """Float64 values of a tensor, those of 4 bits byte by byte: low halves first."""
    tensor = file.tensors[name]
    values = FOUR_BITS.get(tensor.type_name)
    if values is None:
        return decode(file, name)
    found: list[float] = []
    for block in file.raw(name).reshape(-1, 18):
        factor = float(block[:2].copy().view("<f2")[0])
        found += [factor * values[byte & 15] for byte in block[2:].tolist()]
        found += [factor * values[byte >> 4] for byte in block[2:].tolist()]
    return np.array(found).reshape(tensor.shape)


def published(path: Path, spec: TinyModel) -> dict[str, torch.Tensor]:
    """Weights, tables and constants under the names of a checkpoint, float32, every expert by itself."""
    file = GGUFFile.open(path)
    weights: dict[str, np.ndarray] = {}
    for name in file.tensors:
        value = decoded(file, name)
        if name == "per_layer_token_embd.weight":
            weights |= _table(file, value, spec)
            continue
        _, layer, leaf = name.split(".", 2) if name.startswith("blk.") else ("", "", name)
        if layer and int(layer) >= spec.num_layers:
            continue
        if spec.arch in HYBRIDS:
            value = _as_published(name, value, spec, False)
        if leaf.startswith("ple_norm_"):
            value = value - 1
        if name in TOP:
            weights[TOP[name]] = value
            continue
        prefix = f"model.layers.{layer}."
        if leaf.startswith("ffn_") and leaf.endswith("_exps.weight"):
            for expert, matrix in enumerate(value):
                where = f"{prefix}mlp.experts.{expert}."
                if "gate_up" in leaf:
                    weights[f"{where}gate_proj.weight"] = matrix[: spec.expert_size]
                    weights[f"{where}up_proj.weight"] = matrix[spec.expert_size :]
                else:
                    weights[f"{where}{leaf.split('_')[1]}_proj.weight"] = matrix
        elif leaf == "indexer.q_proj.weight":
            keys = decoded(file, name.replace("q_proj", "k_proj"))
            weights[f"{prefix}self_attn.indexer.index_qk_proj.weight"] = np.concatenate((value, keys))
        elif leaf == "indexer.k_proj.weight":
            continue
        else:
            if leaf == "ple_conv1d.weight":
                value = value[:, None, :]
            if leaf == "ffn_gate_inp_shexp.weight":
                value = value.reshape(1, -1)
            weights[prefix + (MORE.get(leaf) or LAYER[leaf])] = value
    return {
        name: torch.from_numpy(np.ascontiguousarray(value if value.dtype == np.int64 else value.astype(np.float32)))
        for name, value in weights.items()
    }


def _table(file: GGUFFile, rows: np.ndarray, spec: TinyModel) -> dict[str, np.ndarray]:
    keys = {key.rpartition(".")[2]: value for key, value in file.metadata.items() if ".ple." in key}
    prefix = f"model.layers.{int(keys['layers'][0])}.ple.ple_embedding."
    parts = {
        f"{prefix}ngram_embedding.shard_{number}.weight": part
        for number, part in enumerate(np.split(rows, spec.table_shards))
    }
    stored = {"layer_multipliers": "layer_multipliers", "ngram_heads_vocab_sizes": "head_vocab_sizes"}
    stored["ngram_heads_offsets"] = "head_offsets"
    return parts | {prefix + name: np.array(keys[key]).astype(np.int64) for name, key in stored.items()}


def write_published(path: Path, spec: TinyModel, folder: Path) -> Path:
    """A folder that means what the file at ``path`` does, with the configuration of ``spec``."""
    weights = published(path, spec)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(spec, weights["model.embed_tokens.weight"].shape[0])
    (folder / "config.json").write_text(json.dumps(config))
    return folder
