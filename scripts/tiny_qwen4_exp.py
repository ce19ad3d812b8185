"""What a tiny ``qwen4_exp`` checkpoint has beside that of Qwen3.5 with experts: its configuration keys and n-gram tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from freetoken.models.parse import parse_hf_config

if TYPE_CHECKING:
    from tiny_spec import TinyModel


def qwen4_exp_config(spec: TinyModel) -> dict[str, Any]:
    """The keys of ``config.json`` that only this architecture has."""
    return {
        "hc_count": spec.streams,
        "hc_lowrank": spec.hyper_rank,
        "norm_topk_prob": spec.norm_topk,
        "output_gate_type": spec.output_gate,
        "ple_layer_ids": [int(layer) for layer in spec.ple_layers.split(",") if layer],
        "ple_embed_dim": spec.ple_width,
        "ple_conv_kernel_size": 4,
        "ngram_size": spec.ngram_size,
        "heads_per_ngram": spec.ngram_heads,
        "ngram_vocab_size_base": spec.ngram_base,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": spec.table_shards,
        "seed": 1234,
        "indexer_n_heads": spec.index_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": spec.index_dim,
        "indexer_budget": spec.index_budget,
        "indexer_compress_ratio": spec.index_ratio,
    }


def table_tensors(config: dict[str, Any], shards: int, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tables in ``shards`` pieces, and the constants of their hashes, under canonical names."""
    ple = parse_hf_config(config, None, "tiny").ple
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for ordinal, layer in enumerate(() if ple is None else ple.layers):
        assert ple is not None
        prefix = f"model.layers.{layer}.ple.ple_embedding."
        constants = ple.constants(ordinal)
        tensors[f"{prefix}layer_multipliers"] = torch.tensor(constants.multipliers)
        tensors[f"{prefix}ngram_heads_vocab_sizes"] = torch.tensor(constants.vocab_sizes)
        tensors[f"{prefix}ngram_heads_offsets"] = torch.tensor(constants.offsets)
        table = torch.randn(ple.table_rows(ordinal), ple.row_width, generator=generator).to(dtype)
        if table.shape[0] % shards:
            raise ValueError(f"a table of {table.shape[0]} rows does not divide into --table-shards {shards}")
        for number, part in enumerate(table.chunk(shards)):
            tensors[f"{prefix}ngram_embedding.shard_{number}.weight"] = part.contiguous()
    return tensors
