"""Qwen3 and Qwen3.5 with experts against transformers: logits, both layouts of experts, FP8, conventions, checkpoints that do not fit."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from dense_attention import OneRequest
from transformers import (
    PreTrainedModel,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from freetoken.errors import StartupError
from freetoken.hardware import probe
from freetoken.kernels.block_fp8 import BLOCK, Fp8Weight, dequantise
from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.models import decoder, gdn, moe
from freetoken.models.config import Fp8Config, ModelConfig
from freetoken.models.decoder import DecoderModel
from freetoken.models.moe import MoeBlock, ResidentExperts
from freetoken.models.parse import parse_hf_config
from freetoken.models.registry import build_model, find

VOCAB, TOKENS = 97, 60
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
PLAIN = {"intermediate_size": 56}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 28,
}
CASES: dict[str, dict[str, Any]] = {
    "sums of the softmax": {**PLAIN, "norm_topk_prob": False},
    "renormalised": {**PLAIN, "norm_topk_prob": True, "tie_word_embeddings": True},
    "every second layer": {**PLAIN, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "listed dense layers": {**PLAIN, "mlp_only_layers": [0, 2], "num_experts": 5, "num_experts_per_tok": 5},
    "one expert a token": {**PLAIN, "num_experts_per_tok": 1, "attention_bias": True},
    "shared": HYBRID,
    "shared, like the others": {**HYBRID, "shared_expert_intermediate_size": 20},
    "shared, wide": {**HYBRID, "shared_expert_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 8},
}


@cache
def make_oracle(case: str) -> PreTrainedModel:
    """A tiny random model whose logits and router are well apart."""
    torch.manual_seed(sorted(CASES).index(case))
    values = {**BASE, **CASES[case]}
    if "layer_types" in values:
        oracle = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**values))
    else:
        oracle = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.normal_().sub_(2.0)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(std=0.3)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(6 if "experts" in name else 4)
    return oracle.eval()


def model_config(case: str) -> ModelConfig:
    oracle = make_oracle(case)
    return parse_hf_config({**oracle.config.to_dict(), "architectures": [type(oracle).__name__]}, None, "tiny")


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return build_model(config, dtype=dtype, device="cpu", max_positions=128)


@cache
def expected(case: str) -> tuple[list[int], torch.Tensor]:
    ids = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return ids[0].tolist(), make_oracle(case)(ids).logits[0]


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


def feed(model: DecoderModel, ids: list[int], pieces: tuple[int, ...], decodes: int) -> torch.Tensor:
    """Logits of all ids: prompt pieces of these lengths, what is left, and last single tokens."""
    request, done, logits = OneRequest(model, TOKENS), 0, []
    for length in [*pieces, len(ids) - sum(pieces) - decodes]:
        logits.append(request.feed(ids[done : done + length]))
        done += length
    logits += [request.feed([token], decode=True) for token in ids[done:]]
    return torch.cat(logits)


def split_experts(stream: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with every expert by itself, as older checkpoints are published."""
    result = {}
    for name, tensor in stream.items():
        prefix, _, kind = name.rpartition(".experts.")
        if not prefix:
            result[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = weight.chunk(2) if kind == "gate_up_proj" else (weight,)
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, value in zip(names, parts, strict=True):
                result[f"{prefix}.experts.{expert}.{part}.weight"] = value
    return result


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("pieces", "decodes"), [((), 0), ((1, 5, 20), 12)])
def test_logits_equal_transformers(case: str, pieces: tuple[int, ...], decodes: int) -> None:
    ids, wanted = expected(case)
    model = build(model_config(case))
    stream = dict(make_oracle(case).state_dict())
    model.load_weights((split_experts(stream) if pieces else stream).items())
    actual = feed(model, ids, pieces, decodes)
    assert actual.dtype == torch.float32
    assert relative(actual, wanted) < 1e-5
    assert torch.equal(actual.argmax(-1), wanted.argmax(-1))


def test_a_shared_expert_like_the_others_is_one_of_them() -> None:
    """Unless one of both is in FP8 and the other is not."""

    def joins(case: str, *skipped: str, fp8: bool = False) -> bool:
        model = build(dataclasses.replace(model_config(case), fp8=Fp8Config(skipped=skipped) if fp8 else None))
        block = model.layers[0].mlp
        assert (block.shared is None) == block.experts.joins_shared
        assert block.experts.down.shape[0] == 7 + block.experts.joins_shared
        return block.experts.joins_shared

    same = "shared, like the others"
    assert joins(same) and joins(same, fp8=True) and joins(same, "mlp.experts", "shared_expert", fp8=True) is False
    assert not joins("shared") and not joins(same, "mlp.experts", fp8=True)
    skipped = [f"model.layers.0.mlp.{part}" for part in ("experts", "shared_expert")]
    assert joins(same, *skipped, fp8=True) and not joins(same, skipped[1], fp8=True)


def test_which_layers_have_experts() -> None:
    for case, wanted in (("every second layer", [1]), ("listed dense layers", [1]), ("shared", [0, 1, 2])):
        model = build(model_config(case))
        found = [index for index, layer in enumerate(model.layers) if isinstance(layer.mlp, MoeBlock)]
        assert found == wanted and model.config.num_sparse_layers == len(wanted)


def _exchange_halves(stream: dict[str, torch.Tensor]) -> None:
    for name in stream:
        if name.endswith("gate_up_proj"):
            stream[name] = stream[name].roll(stream[name].shape[1] // 2, 1)


def _no_shared_gate(stream: dict[str, torch.Tensor]) -> None:
    for name in stream:
        if name.endswith("shared_expert_gate.weight"):
            stream[name] = torch.zeros_like(stream[name])


def _rotate_experts(stream: dict[str, torch.Tensor]) -> None:
    for name in stream:
        if name.endswith("mlp.gate.weight"):
            stream[name] = stream[name].roll(1, 0)


@pytest.mark.parametrize("spoil", [_exchange_halves, _no_shared_gate, _rotate_experts])
def test_a_wrong_convention_would_show(spoil: Any) -> None:
    ids, wanted = expected("shared")
    stream = dict(make_oracle("shared").state_dict())
    spoil(stream)
    model = build(model_config("shared"))
    model.load_weights(stream.items())
    assert relative(feed(model, ids, (), 0), wanted) > 1e-2


def test_renormalising_would_show() -> None:
    ids, wanted = expected("sums of the softmax")
    config = model_config("sums of the softmax")
    assert config.moe is not None
    model = build(dataclasses.replace(config, moe=dataclasses.replace(config.moe, norm_topk_prob=True)))
    model.load_weights(make_oracle("sums of the softmax").state_dict().items())
    assert relative(feed(model, ids, (), 0), wanted) > 1e-2


def quantised(config: ModelConfig) -> tuple[DecoderModel, DecoderModel]:
    """A model with random FP8 weights, and a float one of what they are worth."""
    config = dataclasses.replace(config, fp8=Fp8Config())
    model = build(config)
    model.random_weights(3)
    floats = dataclasses.replace(config, fp8=None)
    slots, stream = model.slots, {}
    for name, slot in slots.items():
        if not name.endswith("_scale_inv"):
            stream[name] = slot.target.float().reshape(slot.shape) - slot.shift
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in slots if name.endswith("_scale_inv")]:
        owner = name.removesuffix("_scale_inv")
        slot = slots[name]
        scale = (torch.rand(slot.shape, generator=generator) + 0.5) * stream[owner].shape[-1] ** -0.5 / 64
        slot.fill(scale)
        rows, columns = stream[owner].shape[-2:]
        wide = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
        stream[owner] = stream[owner] * wide
    twin = build(floats)
    twin.load_weights(stream.items())
    return model, twin


@pytest.mark.parametrize(
    "case", ["every second layer", "one expert a token", "shared, wide", "shared, like the others"]
)
def test_fp8_equals_the_dequantised_model(case: str) -> None:
    """In float32 within 1e-5 relative RMS of the logits: experts, dense MLPs, gated and plain attention, linear attention, biases."""
    with torch.inference_mode():
        model, twin = quantised(model_config(case))
    held = [slot for name, slot in model.slots.items() if slot.target.dtype == torch.float8_e4m3fn]
    assert len(held) == sum(name.endswith("_scale_inv") for name in model.slots) > 10
    assert model.weight_bytes < twin.weight_bytes / 2
    ids = expected(case)[0]
    actual, wanted = (feed(which, ids, (1, 30), 5) for which in (model, twin))
    assert relative(actual, wanted) < 1e-5
    assert torch.isfinite(wanted).all() and float(wanted.std()) > 0.1


def test_skipped_modules_stay_as_they_are() -> None:
    config = dataclasses.replace(
        model_config("shared"), fp8=Fp8Config(skipped=("model.layers.0", "q_proj", "mlp.experts"))
    )
    model = build(config)
    held = {name for name, slot in model.slots.items() if slot.target.dtype == torch.float8_e4m3fn}
    assert "model.layers.2.linear_attn.in_proj_qkv.weight" in held
    assert "model.layers.1.mlp.shared_expert.down_proj.weight" in held
    assert "model.layers.1.self_attn.o_proj.weight" in held
    assert not any("layers.0." in name or "experts." in name or "k_proj" in name for name in held)
    assert model.layers[2].mixer.gates is not None and model.layers[0].mixer.gates is None


def test_bfloat16_stays_near() -> None:
    ids, wanted = expected("shared")
    model = build(model_config("shared"), torch.bfloat16)
    model.load_weights(make_oracle("shared").state_dict().items())
    assert model.layers[0].mlp.experts.gate_up.dtype == torch.bfloat16
    assert relative(feed(model, ids, (), 4), wanted) < 0.15


def test_random_experts_differ_and_keep_the_scale() -> None:
    for fp8 in (None, Fp8Config()):
        model = build(dataclasses.replace(model_config("shared"), fp8=fp8))
        model.random_weights(5)
        weight = model.layers[1].mlp.experts.down
        values = dequantise(weight, torch.float32) if isinstance(weight, Fp8Weight) else weight
        assert not torch.equal(values[0], values[1])
        assert 0.9 < float(values.std()) * values.shape[-1] ** 0.5 < 1.1


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mlp.gate.weight", None, r"lacks tensor model\.layers\.1\.mlp\.gate\.weight$"),
        ("mlp.gate.weight", (8, 48), r"mlp\.gate\.weight has shape \[8, 48\].*\[7, 48\]"),
        ("mlp.shared_expert_gate.weight", None, r"lacks tensor model\.layers\.1\.mlp\.shared_expert_gate\.weight$"),
        ("mlp.gate_proj.weight", (20, 48), r"mlp\.gate_proj\.weight has no place"),
        ("mlp.experts.7.up_proj.weight", (20, 48), r"experts\.7\.up_proj\.weight has no place"),
        ("mlp.experts.6.up_proj.weight", None, r"lacks tensor model\.layers\.1\.mlp\.experts\.6\.up_proj\.weight$"),
        ("mlp.experts.6.down_proj.weight", (48, 21), r"down_proj\.weight has shape \[48, 21\].*\[48, 20\]"),
        ("mlp.experts.down_proj", (8, 48, 20), r"down_proj has shape \[8, 48, 20\].*\[7, 48, 20\]"),
    ],
)
def test_bad_checkpoints_name_the_tensor(name: str, shape: tuple[int, ...] | None, message: str, split: bool) -> None:
    stream = dict(make_oracle("shared").state_dict())
    full = f"model.layers.1.{name}"
    if split or ".experts.6." in name:
        stream = split_experts(stream)
    if "experts.down_proj" in name and split:
        message = r"experts\.down_proj comes twice"
    if shape is None:
        del stream[full]
    else:
        stream[full] = torch.zeros(shape)
    with pytest.raises(StartupError, match=message):
        build(model_config("shared")).load_weights(stream.items())


def test_an_expert_twice_is_refused() -> None:
    stream = list(split_experts(dict(make_oracle("shared").state_dict())).items())
    again = next(pair for pair in stream if ".experts.3." in pair[0])
    with pytest.raises(StartupError, match="comes twice"):
        build(model_config("shared")).load_weights([*stream, again])


def test_experts_are_not_split_over_ranks() -> None:
    found = find("Qwen3MoeForCausalLM").load_class()
    with pytest.raises(StartupError, match=r"layers\.0\.mlp\.experts: .* tensor-parallel"):
        found(model_config("renormalised"), dtype=torch.float32, device="cpu", max_positions=64, tp_size=2)


@pytest.mark.parametrize("case", ["shared", "shared, like the others"])
def test_experts_can_be_exchanged(case: str) -> None:
    """The block needs of its experts no more than the protocol: here they are held in another order and found by a table."""
    ids, wanted = expected(case)
    model = build(model_config(case))
    model.load_weights(make_oracle(case).state_dict().items())

    class Elsewhere:
        def __init__(self, inner: ResidentExperts) -> None:
            self.gemm = inner._gemm
            places = torch.randperm(inner.down.shape[0])
            self.table = places.argsort().to(torch.int32)
            self.gate_up, self.down = inner.gate_up[places], inner.down[places]
            self.joins_shared = inner.joins_shared

        def __call__(self, x: Any, ids: Any, weights: Any, shared: Any) -> torch.Tensor:
            return self.gemm(x, self.table[ids], weights, self.gate_up, self.down, shared)

    for layer in model.layers:
        layer.mlp.experts = Elsewhere(layer.mlp.experts)
    assert relative(feed(model, ids, (), 5), wanted) < 1e-5


@pytest.mark.skipif(probe().usable_gpu, reason="interpreted kernels")
@pytest.mark.parametrize(
    ("case", "fp8"), [("renormalised", False), ("shared", False), ("shared, like the others", True)]
)
def test_fused_kernels_in_their_places(case: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routing, experts and FP8 products as on a GPU, interpreted: grouped pieces, and single tokens route by route."""

    def fused(name: str, device: str) -> Choice:
        choice = choose_op(name, device)
        wanted = name in ("moe_route", "moe_gemm", "fp8_gemm")
        return Choice(name, choice.flag, "triton", "for this test") if wanted else choice

    ids, wanted = expected(case)
    with torch.inference_mode():
        # One layer: the products of FP8 weights are many programs for an interpreter.
        config = dataclasses.replace(model_config(case), num_layers=1, layer_types=("full_attention",))
        source, twin = quantised(config) if fp8 else (None, None)
    for module in (decoder, gdn, moe):
        monkeypatch.setattr(module, "choose_op", fused)
    if source is None or twin is None:
        model = build(model_config(case))
        model.load_weights(make_oracle(case).state_dict().items())
    else:
        model, wanted = build(source.config), feed(twin, ids[:4], (), 0)
        with torch.inference_mode():
            for name, slot in model.slots.items():
                slot.target.copy_(source.slots[name].target)
    assert [choice.impl for choice in model.kernel_choices()].count("triton") == 2 + fp8
    assert relative(feed(model, ids[:4], (), 1), wanted[:4]) < 1e-5
