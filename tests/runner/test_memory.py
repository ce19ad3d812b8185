"""Byte arithmetic of the KV cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.errors import StartupError
from freetoken.models.config import Fp8Config, ModelConfig, MoeConfig
from freetoken.runner.memory import GIB, check_model_fits, plan_memory, step_bytes


def model(**changes: object) -> ModelConfig:
    base: dict[str, object] = {
        "architecture": "Qwen3ForCausalLM",
        "name": "m",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    }
    return ModelConfig(**{**base, **changes})  # type: ignore[arg-type]


def plan(**changes: object):  # type: ignore[no-untyped-def]
    base: dict[str, object] = {
        "kv_dtype": "bfloat16",
        "page_size": 16,
        "context_length": 40_960,
        "max_total_tokens": None,
        "total_bytes": 140 * GIB,
        "free_bytes": 124 * GIB,
        "fraction": 0.88,
        "weight_bytes": 16 * GIB,
        "step_bytes": 2 * GIB,
    }
    return plan_memory(model(), **{**base, **changes})  # type: ignore[arg-type]


def test_qwen3_8b_token_is_144_kib() -> None:
    assert model().kv_bytes_per_token(2) == 2 * 36 * 8 * 128 * 2 == 144 * 1024


def test_pages_fill_the_fraction_and_no_more() -> None:
    result = plan()
    budget = int(140 * GIB * 0.88) - 16 * GIB - 2 * GIB
    page = 16 * 144 * 1024
    assert result.kv_bytes <= budget < result.kv_bytes + page
    assert result.num_tokens == (result.num_pages - 1) * 16


def test_operator_limit_is_rounded_up_to_pages() -> None:
    result = plan(max_total_tokens=1000)
    assert result.num_pages == 63 + 1
    assert result.reason == "--max-total-tokens"


def test_cap_limits_a_small_model() -> None:
    assert plan(cap_tokens=5000).num_tokens == 5008


def test_operator_limit_too_large_names_both_flags() -> None:
    with pytest.raises(StartupError, match=r"--max-total-tokens 10000000 needs .* GiB .*--mem-fraction-static"):
        plan(max_total_tokens=10_000_000)


def test_too_little_memory_says_what_is_needed() -> None:
    with pytest.raises(StartupError, match=r"too little memory.*GiB is needed.*--mem-fraction-static 0\.1"):
        plan(fraction=0.1)


@given(
    free=st.integers(0, 140),
    fraction=st.floats(0.05, 0.98),
    page_size=st.sampled_from([1, 4, 16, 256]),
    wanted=st.one_of(st.none(), st.integers(1, 10**7)),
)
def test_never_plans_more_than_there_is(free: int, fraction: float, page_size: int, wanted: int | None) -> None:
    total = 140 * GIB
    try:
        result = plan(free_bytes=free * GIB, fraction=fraction, page_size=page_size, max_total_tokens=wanted)
    except StartupError as error:
        assert "--" in str(error)
        return
    assert result.kv_bytes <= int(total * fraction) - (total - free * GIB) - 2 * GIB
    assert wanted is None or wanted <= result.num_tokens < wanted + page_size


def test_step_bytes_grow_with_each_part() -> None:
    base = {"dtype": "bfloat16", "prefill_tokens": 2048, "rows": 64, "page_table_entries": 1000}
    small = step_bytes(model(), **base)  # type: ignore[arg-type]
    for key, value in (("prefill_tokens", 4096), ("rows", 128), ("page_table_entries", 2000), ("dtype", "float32")):
        assert step_bytes(model(), **{**base, key: value}) > small  # type: ignore[arg-type]


def test_a_step_of_experts() -> None:
    """Activations and outputs of every route, of at most one slice of tokens; FP8 keeps room for one matrix as floats."""
    moe = MoeConfig(num_experts=8, top_k=3, intermediate_size=5_000, norm_topk_prob=True)
    sizes = {"dtype": "bfloat16", "rows": 1, "page_table_entries": 0}

    def needs(tokens: int, **changes: object) -> int:
        return step_bytes(model(moe=moe, intermediate_size=0, **changes), prefill_tokens=tokens, **sizes)  # type: ignore[arg-type]

    routes = (3 + 1) * ((5_000 + 4096) * 2 + 16)
    alone = (4 * 4096 + 8 + 2 * 4096) * 2
    assert needs(200) - needs(100) == 100 * (routes + alone)
    assert needs(3 * 8192) - needs(2 * 8192) == 8192 * alone
    assert needs(100, fp8=Fp8Config()) > needs(100)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    """Qwen3-8B: 8.19 G weights; 256 rows of 151,936 ids at 2 bytes are 0.07 GiB."""

    def check(dtype: str, rows: int, free: int) -> None:
        check_model_fits(
            model(), dtype=dtype, rows=rows, page_table_entries=0, free_bytes=free * GIB, total_bytes=32 * GIB
        )

    check("bfloat16", 256, 16)
    with pytest.raises(
        StartupError, match=r"weights need 15\.26 GiB in bfloat16 .* 15\.00 GiB of 32\.00 GiB .* smaller"
    ):
        check("bfloat16", 256, 15)
    with pytest.raises(StartupError, match=r"weights need 30\.51 GiB in float32 .*--dtype bfloat16"):
        check("float32", 256, 16)
    with pytest.raises(StartupError, match=r"8000 running requests 2\.26 GiB.*--max-running-requests"):
        check("bfloat16", 8000, 16)
    sizes = {"page_table_entries": 0, "free_bytes": 32 * GIB, "total_bytes": 40 * GIB, "rows": 1}
    with pytest.raises(
        StartupError, match=r"rotary table of 1000000000 positions needs .* GiB, .*lower --context-length"
    ):
        check_model_fits(model(), dtype="bfloat16", positions=10**9, **sizes)  # type: ignore[arg-type]
    check_model_fits(model(), dtype="bfloat16", positions=10**6, **sizes)  # type: ignore[arg-type]
