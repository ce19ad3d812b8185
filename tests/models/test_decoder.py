"""Llama and Qwen3 against transformers, and the loading of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from dense_attention import OneRequest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from freetoken.errors import StartupError
from freetoken.models.config import ModelConfig
from freetoken.models.decoder import DecoderModel
from freetoken.models.registry import build_model

VOCAB = 97
PROMPT = [3, 17, 96, 0, 41, 41, 8, 25, 60, 2, 11]

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "llama-tied": (LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-bias": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": (LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama-mqa": (LlamaForCausalLM, {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": 8}),
    "llama3": (LlamaForCausalLM, {"rope_parameters": {"rope_theta": 10000.0, **LLAMA3}}),
    "llama-linear": (
        LlamaForCausalLM,
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}},
    ),
    "qwen3": (Qwen3ForCausalLM, {}),
    "qwen3-tied-bias": (Qwen3ForCausalLM, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-yarn": (
        Qwen3ForCausalLM,
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}


def make_oracle(case: str) -> PreTrainedModel:
    """A tiny random model whose logits are well apart, whose norms and biases are not trivial."""
    cls, overrides = CASES[case]
    torch.manual_seed(sorted(CASES).index(case))
    config_class = LlamaConfig if cls is LlamaForCausalLM else Qwen3Config
    oracle = cls(config_class(**{**BASE, **overrides})).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return oracle


def model_config(oracle: PreTrainedModel) -> ModelConfig:
    config = oracle.config
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    return ModelConfig(
        architecture=type(oracle).__name__,
        name="tiny",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=rope,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        qk_norm=isinstance(oracle, Qwen3ForCausalLM),
        attention_bias=config.attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
    )


def loaded(oracle: PreTrainedModel, **changes: Any) -> DecoderModel:
    config = dataclasses.replace(model_config(oracle), **changes)
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=64)
    model.load_weights(oracle.state_dict().items())
    return model


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_equal_transformers(case: str) -> None:
    oracle = make_oracle(case)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    model = loaded(oracle)
    actual = OneRequest(model, 32).feed(PROMPT)
    assert actual.dtype == torch.float32
    assert relative(actual, expected) < 1e-5
    pieces = OneRequest(model, 32)
    chunked = torch.cat([pieces.feed(PROMPT[:1]), pieces.feed(PROMPT[1:8]), pieces.feed(PROMPT[8:])])
    assert relative(chunked, expected) < 1e-5


@pytest.mark.parametrize("case", ["llama", "qwen3-tied-bias"])
def test_greedy_tokens_equal_transformers(case: str) -> None:
    oracle = make_oracle(case)
    with torch.no_grad():
        expected = oracle.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(PROMPT) :].tolist()
    request = OneRequest(loaded(oracle), 40)
    ids = [int(request.feed(PROMPT)[-1].argmax())]
    while len(ids) < 12:
        ids.append(int(request.feed(ids[-1:])[-1].argmax()))
    assert ids == expected


def test_a_wrong_convention_would_show() -> None:
    oracle = make_oracle("qwen3")
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    model = loaded(oracle, rope_theta=20000.0)
    assert relative(OneRequest(model, 32).feed(PROMPT), expected) > 1e-2


def test_bfloat16_stays_near_transformers() -> None:
    oracle = make_oracle("qwen3").bfloat16()
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0].float()
    model = build_model(model_config(oracle), dtype=torch.bfloat16, device="cpu", max_positions=64)
    model.load_weights(oracle.state_dict().items())
    assert relative(OneRequest(model, 32).feed(PROMPT), expected) < 5e-2


def test_weights_convert_to_the_model_type() -> None:
    oracle = make_oracle("llama")
    model = build_model(model_config(oracle), dtype=torch.float16, device="cpu", max_positions=64)
    model.load_weights(oracle.state_dict().items())
    expected = oracle.state_dict()["model.layers.1.self_attn.k_proj.weight"].half()
    assert torch.equal(model.layers[1].mixer.qkv.weight[96:128], expected)
    assert model.weight_bytes == 2 * sum(tensor.numel() for tensor in oracle.state_dict().values())


def test_ignored_tensors() -> None:
    oracle = make_oracle("llama-tied")
    tensors = dict(oracle.state_dict())
    tensors["lm_head.weight"] = torch.zeros(3)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    model = build_model(model_config(oracle), dtype=torch.float32, device="cpu", max_positions=64)
    model.load_weights(tensors.items())
    assert model.head.weight is model.embedding.weight
    assert model.weight_bytes == 4 * sum(parameter.numel() for parameter in oracle.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"lacks tensor model\.layers\.2\.mlp\.up_proj\.weight$"),
        ("missing-many", r"lacks tensor model\.layers\.2\.self_attn\.q_proj\.weight and 1 more"),
        ("surplus", r"model\.layers\.3\.mlp\.up_proj\.weight has no place"),
        ("twice", r"model\.norm\.weight comes twice"),
        ("shape", r"model\.embed_tokens\.weight has shape \[96, 48\].*\[97, 48\]"),
        ("transposed", r"mlp\.up_proj\.weight has shape \[48, 80\].*\[80, 48\]"),
    ],
)
def test_bad_checkpoints_name_the_tensor(change: str, message: str) -> None:
    oracle = make_oracle("llama")
    stream = list(oracle.state_dict().items())
    up = "model.layers.2.mlp.up_proj.weight"
    if change.startswith("missing"):
        stream = [pair for pair in stream if pair[0] != up]
    if change == "missing-many":
        stream = [pair for pair in stream if pair[0] != "model.layers.2.self_attn.q_proj.weight"]
    if change == "surplus":
        stream.append(("model.layers.3.mlp.up_proj.weight", torch.zeros(80, 48)))
    if change == "twice":
        stream.append(("model.norm.weight", torch.ones(48)))
    if change == "shape":
        stream = [(name, tensor[:96] if "embed" in name else tensor) for name, tensor in stream]
    if change == "transposed":
        stream = [(name, tensor.t() if name == up else tensor) for name, tensor in stream]
    model = build_model(model_config(oracle), dtype=torch.float32, device="cpu", max_positions=64)
    with pytest.raises(StartupError, match=message):
        model.load_weights(stream)


def test_random_weights_are_seeded_and_sensible() -> None:
    config = model_config(make_oracle("qwen3"))
    models = [build_model(config, dtype=torch.bfloat16, device="cpu", max_positions=64) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        model.random_weights(seed)
    first, again, other = (model.layers[1].mlp.gate_up.weight for model in models)
    assert torch.equal(first, again) and not torch.equal(first, other)
    logits = OneRequest(models[0], 32).feed(PROMPT)
    assert torch.isfinite(logits).all() and 0.2 < float(logits.std()) < 5


def test_tensor_parallel_shards_add_up() -> None:
    oracle = make_oracle("llama-bias")
    whole = loaded(oracle).layers[0]
    ranks = []
    for rank in range(2):
        model = DecoderModel(
            model_config(oracle), dtype=torch.float32, device="cpu", max_positions=64, tp_rank=rank, tp_size=2
        )
        model.load_weights(oracle.state_dict().items())
        ranks.append(model.layers[0])
    x = torch.randn(5, 48)
    parts = [layer.mlp(x) for layer in ranks]
    torch.testing.assert_close(parts[0] + parts[1], whole.mlp(x))
    assert torch.equal(torch.cat([layer.mixer.qkv.weight[48:64] for layer in ranks]), whole.mixer.qkv.weight[96:128])
    with pytest.raises(StartupError, match=r"num_attention_heads \(6\) does not divide over 4"):
        DecoderModel(model_config(oracle), dtype=torch.float32, device="cpu", max_positions=64, tp_size=4)
