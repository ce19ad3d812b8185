"""Qwen3.5 against transformers: logits, states however the tokens are split, conventions, checkpoints that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from dense_attention import OneRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from freetoken.errors import StartupError
from freetoken.hardware import probe
from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.models import decoder, gdn
from freetoken.models.config import ModelConfig
from freetoken.models.decoder import DecoderModel
from freetoken.models.parse import parse_hf_config
from freetoken.models.registry import build_model, find
from freetoken.models.state import CONV_STATE, REC_STATE, linear_attention_states

VOCAB, TOKENS = 97, 150
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}


def pattern(letters: str) -> dict[str, Any]:
    kinds = {"l": "linear_attention", "f": "full_attention"}
    return {"num_hidden_layers": len(letters), "layer_types": [kinds[letter] for letter in letters]}


CASES: dict[str, dict[str, Any]] = {
    "equal heads": {"linear_num_value_heads": 2},
    "one to two": {},
    "one to three, tied": {"linear_num_value_heads": 6, "tie_word_embeddings": True},
    "odd dims": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 3,
    },
    "wide values": {"linear_key_head_dim": 7, "linear_value_head_dim": 33, "linear_num_key_heads": 4},
    "full attention first": {**pattern("flfl"), "linear_conv_kernel_dim": 2},
    "attention in the middle": {**pattern("llfll"), "num_attention_heads": 3, "num_key_value_heads": 1},
    "half rotated, bias": {
        **pattern("lf"),
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "yarn": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "no linear attention": pattern("ff"),
}
HYBRID = [name for name in CASES if name != "no linear attention"]


@cache
def make_oracle(case: str) -> PreTrainedModel:
    """A tiny random model whose logits are well apart, whose norms are not trivial, and that remembers hundreds of tokens."""
    torch.manual_seed(sorted(CASES).index(case))
    oracle = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**BASE, **CASES[case]})).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.normal_().sub_(2.0)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(2 if parameter.ndim == 3 else 4)
    return oracle


def model_config(case: str) -> ModelConfig:
    values = make_oracle(case).config.to_dict()
    return parse_hf_config({**values, "architectures": ["Qwen3_5ForCausalLM"]}, None, "tiny")


@cache
def loaded(case: str) -> DecoderModel:
    model = build_model(model_config(case), dtype=torch.float32, device="cpu", max_positions=256)
    model.load_weights(make_oracle(case).state_dict().items())
    return model


@cache
def expected(case: str) -> tuple[list[int], torch.Tensor, Any]:
    """Ids, and from one forward of transformers their logits and its cache."""
    ids = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = make_oracle(case)(ids, use_cache=True)
    return ids[0].tolist(), out.logits[0], out.past_key_values


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


def feed(request: OneRequest, ids: list[int], lengths: list[int], decodes: int = 0) -> torch.Tensor:
    """Feed pieces of these lengths and, of what is left, a last piece and ``decodes`` single tokens; all logits."""
    logits, done = [], 0
    for length in [*lengths, len(ids) - sum(lengths) - decodes]:
        if length:
            logits.append(request.feed(ids[done : done + length]))
            done += length
    logits += [request.feed([token], decode=True) for token in ids[done:]]
    return torch.cat(logits)


def states(request: OneRequest) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each linear layer the last inputs of its convolution, oldest first, and its recurrent state."""
    config = request.model.config
    assert config.linear_attention is not None
    width, slot = config.linear_attention.conv_width, request.slot
    order = [(request.length - width + back) % width for back in range(width)]
    return [
        (request.states.layer(CONV_STATE, layer)[slot, order], request.states.layer(REC_STATE, layer)[slot])
        for layer in range(config.num_linear_layers)
    ]


SPLITS: dict[str, tuple[list[int], int]] = {
    "whole": ([], 0),
    "prompt and decodes": ([], 40),
    "ones": ([1] * 20, 0),
    "fives": ([5] * 29, 0),
    "63": ([63, 63], 3),
    "64": ([64, 64], 3),
    "65": ([65, 65], 3),
    "decodes from the first token": ([1], 149),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", SPLITS)
def test_logits_equal_transformers(case: str, split: str) -> None:
    ids, wanted, _ = expected(case)
    actual = feed(OneRequest(loaded(case), TOKENS), ids, *SPLITS[split])
    assert actual.dtype == torch.float32
    assert relative(actual, wanted) < 1e-5
    assert torch.equal(actual.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("case", HYBRID)
def test_states_equal_those_of_transformers(case: str) -> None:
    ids, _, cache = expected(case)
    request = OneRequest(loaded(case), TOKENS)
    feed(request, ids, [64], 20)
    config = make_oracle(case).config
    layers = [index for index, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    for layer, (conv, rec) in zip(layers, states(request), strict=True):
        wanted = cache.get_conv_state(layer, state_idx=0)[0].T
        assert relative(conv[-wanted.shape[0] :], wanted) < 1e-5
        assert relative(rec, cache.get_recurrent_state(layer, state_idx=0)[0].transpose(1, 2)) < 1e-5


@cache
def whole_states(case: str, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    request = OneRequest(loaded(case), TOKENS)
    request.feed(expected(case)[0][:tokens])
    return states(request)


@settings(max_examples=25, deadline=None)
@given(
    case=st.sampled_from(["one to three, tied", "odd dims"]),
    lengths=st.lists(st.one_of(st.integers(1, 6), st.sampled_from([63, 64, 65])), max_size=6),
    decodes=st.integers(0, 8),
)
def test_states_do_not_depend_on_the_split(case: str, lengths: list[int], decodes: int) -> None:
    kept: list[int] = []
    for length in lengths:
        if sum(kept) + length <= TOKENS - 9:
            kept.append(length)
    tokens = sum(kept) + 1 + decodes
    request = OneRequest(loaded(case), TOKENS)
    feed(request, expected(case)[0][:tokens], kept, decodes)
    width = loaded(case).config.linear_attention.conv_width
    for (conv, rec), (whole_conv, whole_rec) in zip(states(request), whole_states(case, tokens), strict=True):
        seen = min(tokens, width)
        torch.testing.assert_close(conv[-seen:], whole_conv[-seen:], rtol=0, atol=1e-5)
        assert relative(rec, whole_rec) < 1e-5


def test_a_state_kept_and_given_back_goes_on_as_if_nothing_had_been() -> None:
    """Copied out at 70 tokens, overwritten by another request, and copied into another slot."""
    ids, wanted, _ = expected("odd dims")
    request = OneRequest(loaded("odd dims"), TOKENS)
    request.feed(ids[:70])
    request.states.snapshot([(request.slot, 1)])
    for spec in linear_attention_states(request.model.config):
        for layer in range(spec.layers):
            request.states.layer(spec.name, layer).fill_(float("nan"))
    request.page_table[0] = request.page_table[request.slot]
    request.slot = 0
    request.states.restore([(0, 1)])
    assert relative(request.feed(ids[70:]), wanted[70:]) < 1e-5


def _exchange_gates(stream: dict[str, torch.Tensor], config: ModelConfig) -> None:
    """Query and gate in halves of the whole projection instead of per head."""
    name = "model.layers.3.self_attn.q_proj.weight"
    halves = stream[name].view(2, config.num_heads, config.head_dim, -1)
    stream[name] = halves.transpose(0, 1).reshape(stream[name].shape)


def _whole_norms(stream: dict[str, torch.Tensor], config: ModelConfig) -> None:
    stream["model.norm.weight"] = stream["model.norm.weight"] + 1


def _tiled_heads(stream: dict[str, torch.Tensor], config: ModelConfig) -> None:
    linear = config.linear_attention
    assert linear is not None
    name = "model.layers.0.linear_attn.A_log"
    stream[name] = stream[name].view(linear.num_key_heads, -1).T.reshape(-1)


@pytest.mark.parametrize("spoil", [_exchange_gates, _whole_norms, _tiled_heads])
def test_a_wrong_convention_would_show(spoil: Callable[[dict[str, torch.Tensor], ModelConfig], None]) -> None:
    ids, wanted, _ = expected("one to two")
    config, stream = model_config("one to two"), dict(make_oracle("one to two").state_dict())
    spoil(stream, config)
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=256)
    model.load_weights(stream.items())
    assert relative(OneRequest(model, TOKENS).feed(ids), wanted) > 1e-2


def test_a_larger_rotated_part_would_show() -> None:
    ids, wanted, _ = expected("one to two")
    config = dataclasses.replace(model_config("one to two"), rotary_dim=8)
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=256)
    model.load_weights(make_oracle("one to two").state_dict().items())
    assert relative(OneRequest(model, TOKENS).feed(ids), wanted) > 1e-2


def test_bfloat16_stays_near_and_keeps_decays_and_norms_in_float32() -> None:
    ids, wanted, _ = expected("one to two")
    oracle = make_oracle("one to two")
    model = build_model(model_config("one to two"), dtype=torch.bfloat16, device="cpu", max_positions=256)
    model.load_weights(oracle.state_dict().items())
    assert relative(feed(OneRequest(model, TOKENS), ids, [64], 10), wanted) < 5e-2
    stored = oracle.state_dict()
    first = model.layers[0]
    assert torch.equal(first.mixer.weights.A_log, stored["model.layers.0.linear_attn.A_log"])
    assert torch.equal(first.mixer.weights.dt_bias, stored["model.layers.0.linear_attn.dt_bias"])
    assert torch.equal(first.input_norm.weight, stored["model.layers.0.input_layernorm.weight"] + 1)
    assert first.mixer.projection.weight.dtype == first.mixer.weights.conv.dtype == torch.bfloat16


def test_random_weights_remember_and_stay_finite() -> None:
    model = build_model(model_config("one to three, tied"), dtype=torch.float32, device="cpu", max_positions=256)
    model.random_weights(5)
    logits = OneRequest(model, TOKENS).feed(expected("one to two")[0])
    assert torch.isfinite(logits).all() and 0.2 < float(logits.std()) < 10


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("linear_attn.in_proj_z.weight", None, r"lacks tensor model\.layers\.0\.linear_attn\.in_proj_z\.weight$"),
        ("linear_attn.A_log", None, r"lacks tensor model\.layers\.0\.linear_attn\.A_log$"),
        ("linear_attn.conv1d.weight", (128, 4), r"conv1d\.weight has shape \[128, 4\].*\[128, 1, 4\]"),
        ("linear_attn.dt_bias", (2,), r"dt_bias has shape \[2\].*\[4\]"),
        ("linear_attn.in_proj_ba.weight", (8, 48), r"in_proj_ba\.weight has no place"),
        ("self_attn.q_proj.weight", (96, 48), r"q_proj\.weight has no place"),
    ],
)
def test_bad_checkpoints_name_the_tensor(name: str, shape: tuple[int, ...] | None, message: str) -> None:
    stream = dict(make_oracle("one to two").state_dict())
    full = f"model.layers.0.{name}"
    if shape is None:
        del stream[full]
    else:
        stream[full] = torch.zeros(shape)
    model = build_model(model_config("one to two"), dtype=torch.float32, device="cpu", max_positions=256)
    with pytest.raises(StartupError, match=message):
        model.load_weights(stream.items())


def test_linear_attention_is_not_split_over_ranks() -> None:
    found = find("Qwen3_5ForCausalLM").load_class()
    with pytest.raises(StartupError, match=r"layers\.0\.linear_attn: .* tensor-parallel"):
        found(model_config("one to two"), dtype=torch.float32, device="cpu", max_positions=64, tp_size=2)


def test_what_a_request_keeps() -> None:
    """The 27B model: 144 MiB of recurrent state a request, and the ring of each convolution."""
    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 48, "num_hidden_layers": 64}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "hidden_size": 5120, "head_dim": 256}
    hf = {**BASE, **sizes, **dims, "architectures": ["Qwen3_5ForCausalLM"]}
    config = parse_hf_config(hf, None, "27B")
    conv, rec = find("Qwen3_5ForCausalLM").state_specs(config)
    assert rec.elements * 4 == 144 * 2**20
    assert (conv.layers, conv.shape, conv.dtype) == (48, (4, 10240), None)
    assert config.num_attention_layers == 16 and config.rotary_dim == 64
    assert find("Qwen3ForCausalLM").state_specs(config) == ()


@pytest.mark.skipif(
    probe().usable_gpu, reason="interpreted kernels; a GPU runs them in tests/runner/test_model_runner.py"
)
@pytest.mark.parametrize("case", ["odd dims", "one to three, tied"])
def test_fused_kernels_in_their_places(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of the mixers and norms as on a GPU, interpreted: views of the merged projection and of the state pool, pieces and
    decodes."""

    def fused(name: str, device: str) -> Choice:
        choice = choose_op(name, device)
        return choice if name in ("small_gemm", "silu_mul") else Choice(name, choice.flag, "triton", "for this test")

    for module in (decoder, gdn):
        monkeypatch.setattr(module, "choose_op", fused)
    model = build_model(model_config(case), dtype=torch.float32, device="cpu", max_positions=256)
    assert {choice.impl for choice in model.kernel_choices() if choice.op.startswith("gdn")} == {"triton"}
    model.load_weights(make_oracle(case).state_dict().items())
    ids, wanted, _ = expected(case)
    request = OneRequest(model, 80)
    actual = feed(request, ids[:80], [1, 5, 66], 4)
    assert relative(actual, wanted[:80]) < 1e-4
