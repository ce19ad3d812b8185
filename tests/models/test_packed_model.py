"""Packed and rotated GGUF files against transformers with the float weights that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import OneRequest
from make_tiny_model import TinyModel, make_tiny_model
from tiny_spec import hf_config

from freetoken.errors import StartupError
from freetoken.hardware import probe
from freetoken.kernels import launch, pq2_gemv
from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.kernels.hadamard import Hadamard, Rotation, rotate
from freetoken.kernels.pq2_gemm import PQ2Gemm
from freetoken.kernels.pq2_gemv import PQ2Product
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.loader.checkpoint import Checkpoint, open_checkpoint
from freetoken.loader.gguf import GGUFFile
from freetoken.loader.names import expected_tensors, weight_bytes
from freetoken.loader.packing import packing_from_config
from freetoken.loader.stream import stream_tensors
from freetoken.models import decoder
from freetoken.models import packed as packed_layers
from freetoken.models.decoder import DecoderModel
from freetoken.models.layers import ColumnLinear, Placement
from freetoken.models.parse import parse_hf_config
from freetoken.models.registry import build_model, find
from gguf_oracle import decode, hf_model
from rewrite_gguf import rewrite_metadata

TOKENS = 90
GROUP = "FREETOKEN_PQ2_ACTIVATION_GROUP"
HYBRID: dict[str, Any] = {
    "arch": "qwen3_5",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 3,
    "layer_pattern": "llf",
    "head_dim": 32,
    "linear_key_heads": 2,
    "linear_value_heads": 6,
    "linear_key_dim": 16,
    "linear_value_dim": 64,
    "tokenizer_vocab": 300,
}
DENSE: dict[str, Any] = {
    "arch": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_heads": 4,
    "head_dim": 32,
    "tokenizer_vocab": 300,
}
ROTATED = {"hadamard": 128, "gdn_v_grouped": True}
# What is packed: every matrix, or all but the output projections of linear attention, or none.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotated": ("pq2_0", {**HYBRID, **ROTATED, "extra_vocab": 5}, "all"),
    "rotated, ternary bytes, tied, MTP block": ("ptq1_0", {**HYBRID, **ROTATED, "tied": True, "mtp": 1}, "all"),
    "rotated, no signs, small blocks": ("q2_0", {**HYBRID, "hadamard": 64, "gdn_v_grouped": True, "plain_signs": True}, "all"),
    "rotated in the tiled order": ("pq2_0", {**HYBRID, "hadamard": 128}, "not out"),
    "plain, heads of half a scale": ("q2_0_g128", HYBRID, "not out"),
    "plain, heads of a scale": ("pq2_0", {**HYBRID, "linear_value_dim": 128, "linear_value_heads": 4}, "all"),
    "plain, heads of a scale of 64": ("q2_0", {**HYBRID, "tied": True}, "all"),
    "as many value heads": ("pq2_0", {**HYBRID, **ROTATED, "linear_value_heads": 2, "gdn_v_grouped": False}, "all"),
    "rotated floats": ("f32", {**HYBRID, **ROTATED}, "none"),
    "rotated floats, tiled": ("f16", {**HYBRID, "hadamard": 32, "tied": True}, "none"),
    "rotated 8 bits": ("q8_0", {**HYBRID, **ROTATED}, "none"),
    "qwen3, rotated": ("pq2_0", {**DENSE, "hadamard": 128}, "all"),
    "qwen3, ternary bytes, rotated, tied": ("ptq1_0", {**DENSE, "hadamard": 128, "tied": True}, "all"),
    "qwen3, plain": ("q2_0", DENSE, "all"),
    "llama, rotated, bias": ("pq2_0", {**DENSE, "arch": "llama", "hadamard": 128, "attention_bias": True, "mlp_bias": True}, "all"),
    "qwen3, rotated floats": ("bf16", {**DENSE, "hadamard": 128}, "none"),
}  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("packed")

    @cache
    def path(case: str) -> Path:
        quant, options, _ = CASES[case]
        return make_tiny_model(folder / f"{len(list(folder.iterdir()))}.gguf", format="gguf", quant=quant, **options)

    return path


@pytest.fixture(scope="module")
def expected(paths: Callable[[str], Path]) -> Callable[[str], tuple[list[int], torch.Tensor]]:
    @cache
    def logits(case: str) -> tuple[list[int], torch.Tensor]:
        spec = TinyModel(**CASES[case][1])
        ids = torch.randint(300, (1, TOKENS), generator=torch.Generator().manual_seed(11))
        with torch.no_grad():
            return ids[0].tolist(), hf_model(paths(case), spec)(ids).logits[0]

    return logits


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> DecoderModel:
    model = build_model(checkpoint.model, dtype=dtype, device="cpu", max_positions=128)
    model.load_weights(stream_tensors(checkpoint, dtype))
    return model


def run(model: DecoderModel, ids: list[int]) -> torch.Tensor:
    """Logits of all tokens: two pieces of a prompt, then single tokens."""
    request = OneRequest(model, TOKENS)
    logits = [request.feed(ids[:37]), request.feed(ids[37:80])]
    return torch.cat([*logits, *(request.feed([token], decode=True) for token in ids[80:])])


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


Expected = Callable[[str], tuple[list[int], torch.Tensor]]
Paths = Callable[[str], Path]


@pytest.mark.parametrize("case", CASES)
def test_float_activations_give_the_logits_of_transformers(
    case: str, paths: Paths, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GROUP, "0")
    checkpoint = open_checkpoint(paths(case))
    packed, wanted = checkpoint.model.packed, CASES[case][2]
    assert (packed is None) == (wanted == "none")
    if packed is not None:
        outs = [f"model.layers.{layer}.linear_attn.out_proj.weight" for layer in range(2)]
        hybrid = CASES[case][1]["arch"] == "qwen3_5"
        assert not hybrid or all((name in packed.groups) == (wanted == "all") for name in outs)
        assert "model.embed_tokens.weight" in packed.groups and "model.layers.0.mlp.down_proj.weight" in packed.groups
    ids, logits = expected(case)
    assert relative(run(load(checkpoint), ids), logits) < 2e-5


# Relative RMS of the logits, by neighbours that share a scale; the first is what is served.
BOUNDS = {128: 0.05, 64: 0.045, 32: 0.04}


@pytest.mark.parametrize(
    "case", ["rotated", "plain, heads of a scale of 64", "as many value heads", "qwen3, ternary bytes, rotated, tied"]
)
def test_activations_of_8_bits_stay_near(
    case: str, paths: Paths, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, logits = expected(case)
    for group, bound in BOUNDS.items():
        monkeypatch.setenv(GROUP, str(group))
        assert 1e-4 < relative(run(load(open_checkpoint(paths(case))), ids), logits) < bound


def test_bfloat16_and_8_bits_stay_near(paths: Paths, expected: Expected) -> None:
    ids, logits = expected("rotated")
    assert relative(run(load(open_checkpoint(paths("rotated")), torch.bfloat16), ids).float(), logits) < 0.08


def as_floats(path: Path, name: str) -> tuple[np.ndarray, str]:
    return decode(GGUFFile.open(path), name).astype("<f4").view(np.uint8), "F32"


def in_smaller_groups(path: Path, name: str) -> tuple[np.ndarray, str]:
    """The rows of a PQ2_0 tensor as Q2_0 in groups of 64: every scale twice."""
    file = GGUFFile.open(path)
    blocks = file.raw(name).reshape(-1, 34)
    halves = [np.concatenate((blocks[:, :2], blocks[:, at : at + 16]), 1) for at in (2, 18)]
    return np.stack(halves, 1).reshape(file.tensors[name].shape[0], -1), "Q2_0"


@pytest.mark.parametrize(
    ("changed", "dense"),
    [
        (["blk.0.attn_gate.weight"], ["model.layers.0.linear_attn.in_proj_qkv.weight"]),
        (["blk.2.attn_v.weight", "blk.0.ssm_out.weight"], ["model.layers.2.self_attn.q_proj.weight"]),
        (["blk.0.ffn_down.weight", "blk.1.ffn_up.weight"], ["model.layers.1.mlp.gate_proj.weight"]),
        (["blk.2.attn_output.weight", "token_embd.weight"], ["model.embed_tokens.weight"]),
        (["output.weight"], ["lm_head.weight"]),
        (["blk.0.attn_qkv.weight", "blk.1.ffn_gate.weight", "blk.2.attn_k.weight"], []),
    ],
)
def test_types_may_differ_within_a_file(
    changed: list[str],
    dense: list[str],
    paths: Paths,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is merged with a float matrix is decoded with it; smaller groups are packed beside larger ones, as smaller ones."""
    monkeypatch.setenv(GROUP, "0")
    source = paths("rotated")
    store = as_floats if dense else in_smaller_groups
    path = rewrite_metadata(source, tmp_path / "mixed.gguf", {}, {name: store(source, name) for name in changed})
    checkpoint = open_checkpoint(path)
    packed, whole = checkpoint.model.packed, open_checkpoint(source).model.packed
    assert packed is not None and whole is not None
    if dense:
        assert not set(dense) & set(packed.groups) and len(packed.groups) < len(whole.groups)
    else:
        assert set(packed.groups) == set(whole.groups) and sorted(packed.groups.values()).count(64) == 2 + 2 + 3
    ids, logits = expected("rotated")
    assert relative(run(load(checkpoint), ids), logits) < 2e-5


@pytest.mark.parametrize("case", ["rotated", "qwen3, plain"])
def test_packed_weights_are_not_split_over_ranks(case: str, paths: Paths) -> None:
    model = open_checkpoint(paths(case)).model
    found = find(model.architecture).load_class()
    with pytest.raises(StartupError, match="not split over tensor-parallel ranks"):
        found(model, dtype=torch.float32, device="cpu", max_positions=64, tp_size=2)


def _other_signs(checkpoint: Checkpoint) -> Checkpoint:
    packed = checkpoint.model.packed
    assert packed is not None
    signs = {width: values[::-1] for width, values in packed.signs.items()}
    return replace(checkpoint, model=replace(checkpoint.model, packed=replace(packed, signs=signs)))


def _no_rotation(checkpoint: Checkpoint) -> Checkpoint:
    packed = checkpoint.model.packed
    assert packed is not None
    return replace(checkpoint, model=replace(checkpoint.model, packed=replace(packed, rotated=frozenset())))


def _smaller_block(checkpoint: Checkpoint) -> Checkpoint:
    packed = checkpoint.model.packed
    assert packed is not None
    return replace(checkpoint, model=replace(checkpoint.model, packed=replace(packed, block=packed.block // 2)))


def _plain_embedding(checkpoint: Checkpoint) -> Checkpoint:
    packed = checkpoint.model.packed
    assert packed is not None
    rest = packed.rotated - {"model.embed_tokens.weight"}
    return replace(checkpoint, model=replace(checkpoint.model, packed=replace(packed, rotated=rest)))


@pytest.mark.parametrize("spoil", [_other_signs, _no_rotation, _smaller_block, _plain_embedding])
def test_a_wrong_rotation_would_show(
    spoil: Callable[[Checkpoint], Checkpoint], paths: Paths, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GROUP, "0")
    ids, logits = expected("rotated")
    assert relative(run(load(spoil(open_checkpoint(paths("rotated")))), ids), logits) > 0.3


def test_gates_of_linear_attention_take_plain_activations(
    paths: Paths, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GROUP, "0")
    model = load(open_checkpoint(paths("rotated")))
    mixer = model.layers[0].mixer
    assert mixer.beside is mixer.gates and mixer.gates.feed is None and model.layers[2].mixer.beside is None
    gates = type(mixer.gates).__call__
    feed = mixer.feed
    monkeypatch.setattr(
        type(mixer.gates),
        "__call__",
        lambda self, x: gates(self, rotate(x, feed.rotation.signs, 128) if self is mixer.gates else x),
    )
    ids, logits = expected("rotated")
    assert relative(run(model, ids), logits) > 1e-2


def test_gates_that_the_norm_has_made(paths: Paths, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, and no product of their own; with a bias they are left to it."""
    monkeypatch.setenv(GROUP, "0")
    model = load(open_checkpoint(paths("rotated")))
    mixer = model.layers[0].mixer
    ids, _ = expected("rotated")
    logits = run(model, ids)
    assert not mixer.gates.joins(torch.empty(1, 8))
    called = []
    linear = SmallGemm.linear
    monkeypatch.setattr(
        SmallGemm, "linear", lambda self, x, weight, *more: (called.append(weight), linear(self, x, weight, *more))[1]
    )
    monkeypatch.setattr(SmallGemm, "joins", lambda *_: True)
    monkeypatch.setattr(Hadamard, "joins", lambda *_: True)
    assert relative(run(model, ids), logits) < 1e-6
    gates = [layer.mixer.gates.weight for layer in model.layers if layer.mixer.beside is not None]
    assert gates and not any(weight is gate for weight in called for gate in gates)
    mixer.gates.bias = torch.zeros(mixer.gates.weight.shape[0])
    assert not mixer.gates.joins(torch.empty(1, 8))
    assert relative(run(model, ids), logits) < 1e-6
    assert any(weight is mixer.gates.weight for weight in called)


@pytest.mark.parametrize("bias", [False, True])
def test_gates_run_under_the_projection(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both kernels start early the packed product is launched first; a bias, added by another kernel, keeps the old order."""
    device = "cuda" if probe().usable_gpu else "cpu"
    monkeypatch.setattr(launch, "EARLY_LAUNCH", False)

    def made(name: str) -> Choice:
        return Choice(name, "", "triton", "for this test")

    monkeypatch.setattr(pq2_gemv, "_product", lambda _: PQ2Product(made("pq2_gemv"), made("pq2_single")))
    place, generator = Placement(torch.float16, torch.device(device)), torch.Generator(device).manual_seed(3)
    feed = packed_layers.Feed(Hadamard(Choice("hadamard", "", "reference", "for this test")), Rotation(), 128)
    wide = packed_layers.PackedLinear(feed, place, {"q": 16, "z": 16}, 128, 128, bias=bias)
    small = ColumnLinear(SmallGemm(made("small_gemm"), SiluMul(made("silu_mul"))), place, {"b": 3, "a": 3}, 128)
    for layer in (wide, small):
        layer.randomise(generator)
    order: list[str] = []
    for name, owner, attribute in (
        ("wide", PQ2Product, "linear"),
        ("small", SmallGemm, "linear"),
        ("under", SmallGemm, "linear_under"),
    ):
        real = getattr(owner, attribute)
        monkeypatch.setattr(
            owner,
            attribute,
            lambda *args, real=real, name=name, **more: (
                order.append(f"{name} late" if more.get("late") else name),
                real(*args, **more),
            )[1],
        )
    x = torch.randn(3, 128, device=device, generator=generator).half()
    fed = replace(feed.take(x), plain=x)
    found = [wide.beside(fed, small)]
    assert order == ["small", "wide"]
    # As on a GPU that starts kernels early; what is launched still starts in the ordinary way.
    monkeypatch.setattr(packed_layers, "leads", lambda _: True)
    monkeypatch.setattr(SmallGemm, "hides", lambda *_: True)
    found.append(wide.beside(fed, small))
    assert order[2:] == (["small", "wide"] if bias else ["wide late", "under"])
    monkeypatch.setattr(SmallGemm, "hides", lambda *_: False)
    found.append(wide.beside(fed, small))
    assert order[4:] == ["small", "wide"]
    for both in found:
        assert torch.equal(both[0], found[0][0]) and torch.equal(both[1], found[0][1])
        assert relative(both[1], x.float() @ small.weight.float().t()) < 2e-3
    with pytest.raises(ValueError, match="plain"):
        wide.beside(feed.take(x), small)


def test_weights_stay_packed(paths: Paths) -> None:
    """2.125 bits an element of every matrix, and what is held is what was counted beforehand."""
    checkpoint = open_checkpoint(paths("rotated"))
    model = load(checkpoint, torch.bfloat16)
    packed = checkpoint.model.packed
    assert packed is not None
    shapes = expected_tensors(checkpoint.model)
    bits = sum(8 * packed.nbytes(name, shapes[name][0] * shapes[name][1]) for name in packed.groups)
    assert bits == 2.125 * sum(shapes[name][0] * shapes[name][1] for name in packed.groups)
    norms = sum(slot.target.nbytes // 2 for name, slot in model.slots.items() if slot.target.dtype == torch.float32)
    assert model.weight_bytes == weight_bytes(checkpoint.model, 2) + norms


@pytest.mark.parametrize("block", [0, 128])
def test_random_packed_weights_of_a_config(block: int) -> None:
    config = hf_config(TinyModel(**HYBRID), 300) | {
        "quantization_config": {"quant_method": "pq2", "hadamard_block": block}
    }
    parsed = parse_hf_config(config, None, "random")
    parsed = replace(parsed, packed=packing_from_config(config, parsed, "config.json"))
    model = build_model(parsed, dtype=torch.float32, device="cpu", max_positions=128)
    model.random_weights(3)
    down = model.layers[0].mlp.down.weight
    assert set(down.unpack().unique().tolist()) == {0, 1, 2}
    assert abs(float(down.dequantise().var()) * down.in_features - 1) < 0.1
    assert len(down.scales.unique()) > 100
    logits = run(model, list(range(TOKENS)))
    assert torch.isfinite(logits).all() and 0.2 < float(logits.std()) < 10
    again = build_model(parsed, dtype=torch.float32, device="cpu", max_positions=128)
    again.random_weights(3)
    assert torch.equal(again.layers[0].mlp.down.weight.codes, down.codes)


def test_interleaved_weights_change_no_logit(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that runs the fused kernels; here the reference reads them."""
    checkpoint = open_checkpoint(paths("rotated"))
    ids = list(range(TOKENS))
    model = load(checkpoint)
    projections = [module for module in model.modules() if isinstance(module, packed_layers.PackedLinear)]
    assert projections and not any(module.weight.interleaved for module in [*projections, model.head])
    wanted = run(model, ids)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(decoder, "choose_op", lambda name, kind: Choice(name, "", "triton", "for this test"))
    model.settle()
    monkeypatch.undo()
    assert any(module.weight.interleaved for module in projections) and not model.embedding.weight.interleaved
    for module in [*projections, model.head]:
        assert module.weight.interleaved == (module.weight.out_features % 8 == 0)
    assert torch.equal(run(model, ids), wanted)


@pytest.mark.skipif(probe().usable_gpu, reason="interpreted kernels; a GPU runs them in tests of its own")
def test_fused_kernels_in_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What feeds packed layers, and their products of many tokens, as on a GPU, interpreted: a prompt and a single token."""
    options = {
        **HYBRID,
        **ROTATED,
        "num_layers": 2,
        "layer_pattern": "lf",
        "linear_value_heads": 2,
        "intermediate_size": 128,
    }
    path = make_tiny_model(tmp_path / "tiny.gguf", format="gguf", quant="pq2_0", **options)
    checkpoint = open_checkpoint(path)
    plain = load(checkpoint)

    def fused(name: str) -> Choice:
        return Choice(name, choose_op(name, "cpu").flag, "triton", "for this test")

    # Products of few tokens take seconds interpreted; they have tests of their own.
    product = PQ2Product(
        choose_op("pq2_gemv", "cpu"), choose_op("pq2_single", "cpu"), PQ2Gemm(fused("pq2_gemm"), "int8")
    )
    monkeypatch.setattr(pq2_gemv, "_product", lambda device: product)
    monkeypatch.setattr(packed_layers, "choose_op", lambda name, device: fused(name))
    model = load(checkpoint)
    assert all(choice.impl == "triton" for choice in model.kernel_choices() if choice.op in ("hadamard", "pq2_gemm"))
    ids = list(range(18))
    ours, wanted = OneRequest(model, TOKENS), OneRequest(plain, TOKENS)
    for piece, alone in ((ids[:17], False), (ids[17:], True)):
        assert relative(ours.feed(piece, decode=alone), wanted.feed(piece, decode=alone)) < 0.02
