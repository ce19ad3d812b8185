"""What a model behind an indexer must move and compute: no more than its queries see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetoken.bench import roof
from freetoken.models.parse import parse_hf_config
from freetoken.profiling.roles import role_of_weight

PUBLISHED = Path(__file__).parents[2] / "benchmarks/configs/qwen3.8-flash-next-fp8/config.json"
MODEL = parse_hf_config(json.loads(PUBLISHED.read_text()), None, "big")


def test_keys_and_values_are_cut_off_at_what_is_seen() -> None:
    assert roof.kv_bytes_read(MODEL, 2051, 2) == 2051 * 24_576
    assert roof.kv_bytes_read(MODEL, 16_384, 2) == 2051 * 24_576 + 4096 * 128 * 12 * 2


@pytest.mark.parametrize("tokens", [5, 2051, 2052, 2100])
def test_pairs_are_counted_query_by_query(tokens: int) -> None:
    assert roof.pairs_seen(MODEL, tokens) == sum(min(at + 1, 2051) for at in range(tokens))


def test_a_decode_of_the_published_geometry() -> None:
    """Six billion active parameters in FP8 or wider, and the state that is read and written."""
    moved = roof.decode_bytes(MODEL, requests=1, depth=1024, dtype="bfloat16", kv_dtype="bfloat16")
    assert 6e9 < moved < 12e9


def test_streams_have_a_role_of_their_own() -> None:
    for name in ("model.layers.3.mlp_hyper_connection.hc_norm.weight", "model.hyper_connection_mixer.hc_norm.weight"):
        assert role_of_weight(name) == "hyper-connections"
