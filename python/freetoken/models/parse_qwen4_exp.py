"""What a ``qwen4_exp`` configuration says beside that of Qwen3.5 with experts (torch-free).

Keys and defaults are those of ``Qwen4ExpTextConfig`` in transformers; n-gram embeddings are in :mod:`freetoken.models.ple_config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.models.config import HyperConfig, IndexerConfig

if TYPE_CHECKING:
    from freetoken.models.parse import _Reader

QWEN4_EXP_ARCHITECTURES = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
INDEXED_ATTENTION = "indexed_attention"
"""What newer configurations call full attention behind an indexer."""
MAX_STREAMS = 16
MAX_INDEX_HEADS, MAX_INDEX_HEAD_DIM = 64, 256


def parse_gate(r: _Reader) -> bool:
    """Whether linear attention is gated by a sigmoid, not by SiLU."""
    kind = r.values.get("output_gate_type")
    if kind is None:
        return False
    if kind not in ("sigmoid", "silu", "swish"):
        r.fail("output_gate_type", f"{kind!r:.60} is not served; sigmoid and silu are")
    return bool(kind == "sigmoid")


def parse_hyper(r: _Reader) -> HyperConfig:
    """The hyper-connections."""
    streams = r.integer("hc_count", 4, most=MAX_STREAMS)
    if streams < 2:
        r.fail("hc_count", f"must be at least 2, not {streams}")
    return HyperConfig(streams=streams, rank=r.integer("hc_lowrank", 320))


def parse_indexer(r: _Reader, rotary_dim: int) -> IndexerConfig:
    """The indexer of full attention, ``rotary_dim`` dimensions of whose heads are rotated as those of attention are."""
    found = IndexerConfig(
        num_heads=r.integer("indexer_n_heads", most=MAX_INDEX_HEADS),
        head_dim=r.integer("indexer_head_dim", most=MAX_INDEX_HEAD_DIM),
        budget=r.integer("indexer_budget"),
        ratio=r.integer("indexer_compress_ratio"),
    )
    kv_heads = r.integer("indexer_kv_heads")
    if kv_heads != 1:
        r.fail("indexer_kv_heads", f"is {kv_heads}, but only 1 is served")
    if found.budget % found.ratio:
        r.fail("indexer_budget", f"{found.budget} is not a multiple of indexer_compress_ratio {found.ratio}")
    if rotary_dim > found.head_dim:
        r.fail("indexer_head_dim", f"{found.head_dim} is less than the {rotary_dim} dimensions that are rotated")
    return found
