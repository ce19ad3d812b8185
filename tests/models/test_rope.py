"""Rotary tables against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from freetoken.errors import StartupError
from freetoken.models import rope
from freetoken.models.config import ModelConfig
from freetoken.models.rope import rotary_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CASES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
}


def config(scaling: dict[str, Any] | None, *, head_dim: int = 64, theta: float = 500000.0) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        name="tiny",
        vocab_size=8,
        hidden_size=128,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=head_dim,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("length", [300, 200_000])
@pytest.mark.parametrize("case", sorted(CASES))
def test_equals_transformers(case: str, length: int) -> None:
    scaling = CASES[case]
    oracle_config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})},
    )
    positions = torch.cat([torch.arange(200), torch.arange(length - 100, length)])[None]
    cos, sin = LlamaRotaryEmbedding(oracle_config)(torch.zeros(1), positions)
    table = rotary_table(config(scaling), length, "cpu")[positions[0]]
    assert table.dtype == torch.float32 and table.shape == (300, 64)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=2e-6 * max(1, length / 1000))
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=2e-6 * max(1, length / 1000))


def test_explicit_factors_divide_each_frequency() -> None:
    factors = [1.0 + 0.25 * index for index in range(8)]
    table = rotary_table(config({"rope_type": "factors", "factors": factors}, head_dim=16, theta=100.0), 5, "cpu")
    for position in range(5):
        for index in range(8):
            angle = position * 100.0 ** (-2 * index / 16) / factors[index]
            assert math.isclose(float(table[position, index]), math.cos(angle), abs_tol=1e-6)
            assert math.isclose(float(table[position, 8 + index]), math.sin(angle), abs_tol=1e-6)


def test_partial_rotary_uses_its_own_width() -> None:
    partial = rotary_table(config(None, head_dim=64), 7, "cpu", rotary_dim=16)
    whole = rotary_table(config(None, head_dim=16), 7, "cpu")
    assert torch.equal(partial, whole)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not known"),
        ({"rope_type": "linear"}, "'linear' needs a number in 'factor', not None"),
        ({"rope_type": "llama3", "factor": "8"}, "'llama3' needs a number in 'factor'"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor above"),
        ({"rope_type": "factors", "factors": [1.0, 2.0]}, "needs 32 positive divisors, not 2"),
    ],
)
def test_bad_scaling_is_one_sentence(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        rotary_table(config(scaling), 4, "cpu")


def test_a_long_table_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rotary_table(config(None), 100, "cpu")
    monkeypatch.setattr(rope, "TABLE_BLOCK", 7)
    assert torch.equal(rotary_table(config(None), 100, "cpu"), whole)
