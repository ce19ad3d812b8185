"""What the metadata of a ``qwen4exp`` GGUF file say beside those of other hybrids with experts (torch-free)."""

from __future__ import annotations

from typing import Any

import numpy as np

from freetoken.loader.gguf import GGUFFile
from freetoken.loader.gguf_keys import Keys
from freetoken.loader.gguf_names import EMBEDDING
from freetoken.loader.ple_table import GGUF_TABLE
from freetoken.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from freetoken.models.ple_config import HashConstants, PleConfig

ARCHITECTURE = "qwen4exp"
_CONSTANTS = {
    "multipliers": "ple.layer_multipliers",
    "vocab_sizes": "ple.head_vocab_sizes",
    "offsets": "ple.head_offsets",
}


def qwen4_exp_config(keys: Keys, layer_types: list[str]) -> dict[str, Any]:
    """Hyper-connections, the indexer and n-gram embeddings, as ``config.json`` has them; ``layer_types`` is the kind of each layer.

    Linear attention is gated by a sigmoid, for which there is no key.
    """
    config: dict[str, Any] = {
        "layer_types": layer_types,
        "output_gate_type": "sigmoid",
        "hc_count": keys.positive("hyper_connection.count"),
        "hc_lowrank": keys.positive("hyper_connection.low_rank"),
        "indexer_n_heads": keys.positive("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys.positive("attention.indexer.key_length"),
        "indexer_budget": keys.positive("attention.indexer.top_k"),
        "indexer_compress_ratio": _ratio(keys, layer_types),
    }
    return config | _ngram_config(keys, layer_types)


def _ratio(keys: Keys, layer_types: list[str]) -> int:
    """Tokens in a block of the indexer: one number, or one a layer with zeros where there is linear attention."""
    key, value = "attention.compress_ratios", keys.required("attention.compress_ratios")
    if not isinstance(value, np.ndarray):
        return keys.positive(key)
    ratios = keys.integers(key)
    if len(ratios) < len(layer_types):
        keys.fail(
            f"metadata key '{keys.prefix}.{key}' has {len(ratios)} entries, but there are {len(layer_types)} layers"
        )
    # What follows is of blocks for multi-token prediction.
    found = {ratio for ratio, kind in zip(ratios, layer_types) if kind == FULL_ATTENTION}
    for layer, (ratio, kind) in enumerate(zip(ratios, layer_types)):
        if (ratio > 0) != (kind == FULL_ATTENTION):
            keys.fail(f"metadata key '{keys.prefix}.{key}' is {ratio} for block {layer}, which has {kind}")
    if len(found) != 1:
        keys.fail(f"metadata key '{keys.prefix}.{key}' must be the same number for all layers with {FULL_ATTENTION}")
    return found.pop()


def _ngram_config(keys: Keys, layer_types: list[str]) -> dict[str, Any]:
    """N-gram embeddings; without ``ple.layers`` there are none. Blocks are counted from 0 here and from 1 in ``config.json``.

    A file has no seed: the published one is taken, and held against the multipliers in :func:`check_constants`.
    """
    blocks = [] if keys.file.metadata.get(f"{keys.prefix}.ple.layers") is None else keys.integers("ple.layers")
    if not blocks:
        return {"ple_layer_ids": []}
    if len(blocks) > 1:
        keys.fail(
            f"metadata key '{keys.prefix}.ple.layers' names {len(blocks)} blocks, but a file holds one n-gram table"
        )
    kind = layer_types[blocks[0]] if blocks[0] < len(layer_types) else "no attention"
    if kind != LINEAR_ATTENTION:
        keys.fail(
            f"metadata key '{keys.prefix}.ple.layers' names block {blocks[0]}, which has {kind}; only one with {LINEAR_ATTENTION} can have n-grams"
        )
    ngram_size, heads = keys.positive("ple.ngram_size"), keys.positive("ple.heads_per_ngram")
    if ngram_size < 2:
        keys.fail(f"metadata key '{keys.prefix}.ple.ngram_size' must be at least 2")
    constants = _stored_constants(keys)
    # Before anything is derived from numbers that a damaged file may hold.
    for part, key in _CONSTANTS.items():
        count, asked = len(getattr(constants, part)), ngram_size if part == "multipliers" else (ngram_size - 1) * heads
        if count != asked:
            keys.fail(
                f"metadata key '{keys.prefix}.{key}' has {count} entries, but ngram_size and heads ask for {asked}"
            )
    return {
        "ple_layer_ids": [blocks[0] + 1],
        "ple_embed_dim": keys.positive("embedding_length_per_layer_input") * (ngram_size - 1) * heads,
        "ple_conv_kernel_size": keys.positive("ple.conv_kernel"),
        "ngram_size": ngram_size,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": constants.vocab_sizes[0],
        "make_ngram_vocab_size_divisible_by": _rows(keys, constants),
        "ple_boundary_token_id": _boundary(keys),
    }


def _boundary(keys: Keys) -> int:
    """The id that no n-gram reaches over."""
    token, rows = keys.integer("ple.eos_token_id"), keys.file.tensors[EMBEDDING].shape[0]
    if token >= rows:
        keys.fail(f"metadata key '{keys.prefix}.ple.eos_token_id' is {token}, outside the vocabulary of {rows}")
    return token


def _rows(keys: Keys, constants: HashConstants) -> int:
    """How many rows the table has: those that are looked up, and any number to fill it."""
    table = keys.file.tensors.get(GGUF_TABLE)
    needed = max(offset + size for offset, size in zip(constants.offsets, constants.vocab_sizes))
    if table is None:
        keys.fail(f"tensor {GGUF_TABLE!r} is missing, though '{keys.prefix}.ple.layers' says that there are n-grams")
    if table.shape[0] < needed:
        keys.fail(f"tensor {GGUF_TABLE!r} has {table.shape[0]} rows, but n-grams have {needed}; some of it is missing")
    return table.shape[0]


def _stored_constants(keys: Keys) -> HashConstants:
    return HashConstants(**{part: tuple(keys.integers(key)) for part, key in _CONSTANTS.items()})


def check_constants(file: GGUFFile, config: PleConfig) -> None:
    """:class:`StartupError` where the constants of the hash in ``file`` are not those that ``config`` gives."""
    config.check_constants(0, _stored_constants(Keys(file)), f"{file.path}: {ARCHITECTURE}.ple")
