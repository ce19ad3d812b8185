"""What GGUF files of models with experts have beside the others, and above them those of ``qwen4exp``: keys, and tensors in their parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from tiny_qwen4_exp import table_tensors

from freetoken.models.parse import parse_hf_config

if TYPE_CHECKING:
    from tiny_spec import TinyModel

TABLE = "per_layer_token_embd.weight"


def write_experts(writer: gguf.GGUFWriter, prefix: str, spec: TinyModel, *, shared: bool) -> None:
    """The keys of experts."""
    writer.add_uint32(f"{prefix}.expert_count", spec.num_experts)
    writer.add_uint32(f"{prefix}.expert_used_count", spec.top_k)
    writer.add_uint32(f"{prefix}.expert_feed_forward_length", spec.expert_size)
    if shared:
        writer.add_uint32(f"{prefix}.expert_shared_feed_forward_length", spec.shared_size)
    if not spec.norm_topk and spec.arch != "qwen3_5_moe":
        writer.add_bool(f"{prefix}.expert_weights_norm", False)


def write_qwen4_exp(writer: gguf.GGUFWriter, prefix: str, spec: TinyModel, config: dict[str, Any]) -> None:
    """The keys of hyper-connections, the indexer and n-grams; ``config`` is that of the same model in a folder."""
    linear = [letter == "l" for letter in spec.layer_pattern or "lllf" * spec.num_layers][: spec.num_layers]
    ratios = [0 if kind else spec.index_ratio for kind in linear] + [0] * spec.mtp
    for key, value in (
        ("hyper_connection.count", spec.streams),
        ("hyper_connection.low_rank", spec.hyper_rank),
        ("attention.indexer.head_count", spec.index_heads),
        ("attention.indexer.key_length", spec.index_dim),
        ("attention.indexer.top_k", spec.index_budget),
    ):
        writer.add_uint32(f"{prefix}.{key}", value)
    _add_integers(writer, f"{prefix}.attention.compress_ratios", ratios, gguf.GGUFValueType.UINT32)
    ple = parse_hf_config(config, None, "tiny").ple
    if ple is None:
        return
    constants = ple.constants(0)
    _add_integers(writer, f"{prefix}.ple.layers", ple.layers, gguf.GGUFValueType.UINT32)
    for key, value in (
        ("ple.ngram_size", ple.ngram_size),
        ("ple.heads_per_ngram", ple.heads_per_ngram),
        ("ple.conv_kernel", ple.conv_width),
        ("ple.eos_token_id", ple.boundary_id),
        ("embedding_length_per_layer_input", ple.row_width),
    ):
        writer.add_uint32(f"{prefix}.{key}", value)
    for key, values in (
        ("layer_multipliers", constants.multipliers),
        ("head_offsets", constants.offsets),
        ("head_vocab_sizes", constants.vocab_sizes),
    ):
        _add_integers(writer, f"{prefix}.ple.{key}", values, gguf.GGUFValueType.UINT64)


def _add_integers(writer: gguf.GGUFWriter, key: str, values: Iterable[int], kind: gguf.GGUFValueType) -> None:
    writer.add_key_value(key, list(values), gguf.GGUFValueType.ARRAY, sub_type=kind)


def in_parts(spec: TinyModel, weights: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights by the names of parts: the experts of a layer stacked, the index projection as queries and keys."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, value in weights:
        prefix, experts, leaf = name.partition(".mlp.experts.")
        if name.endswith(".indexer.index_qk_proj.weight"):
            stem = name.removesuffix("qk_proj.weight")
            yield f"{stem}q_proj.weight", value[: -spec.index_dim]
            yield f"{stem}k_proj.weight", value[-spec.index_dim :]
        elif not experts:
            yield name, value
        elif leaf == "gate_up_proj":
            stacks["gate_proj"], stacks["up_proj"] = map(list, np.split(value, 2, axis=1))
        elif leaf == "down_proj":
            yield from _stacked(spec, prefix, stacks | {leaf: list(value)})
            stacks = {}
        else:
            part = leaf.split(".")[1]
            stacks.setdefault(part, []).append(value)
            if part == "down_proj" and len(stacks[part]) == spec.num_experts:
                yield from _stacked(spec, prefix, stacks)
                stacks = {}


def _stacked(spec: TinyModel, prefix: str, stacks: dict[str, list[np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    parts = {part: np.stack(values) for part, values in stacks.items()}
    if spec.fused_experts:
        parts["gate_up_proj"] = np.concatenate((parts.pop("gate_proj"), parts.pop("up_proj")), axis=1)
    for part, value in parts.items():
        yield f"{prefix}.mlp.experts.{part}", value


def table_rows(spec: TinyModel, config: dict[str, Any]) -> np.ndarray | None:
    """The n-gram table that a folder of the same ``spec`` has, whole; ``None`` without one."""
    tensors = table_tensors(config, 1, spec.seed, torch.float32)
    return next((value.numpy() for name, value in tensors.items() if "ngram_embedding" in name), None)
