"""Geometries of per-layer embeddings in tests: the published one, and one that runs in Triton's interpreter."""

from __future__ import annotations

from freetoken.models.ple_config import PleConfig

PRODUCTION = PleConfig(
    layers=(1,), streams=4, hidden_size=2560, vocab_size=248_320, boundary_id=248_044, embed_dim=2560
)
SMALL = PleConfig(
    layers=(1,),
    streams=4,
    hidden_size=128,
    vocab_size=512,
    boundary_id=7,
    embed_dim=64,
    heads_per_ngram=2,
    vocab_base=1000,
    divisible_by=8,
)
