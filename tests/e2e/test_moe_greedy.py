"""Tiny random Qwen3 and Qwen3.5 checkpoints with experts against transformers: token for token, however the scheduler cuts the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model
from oracle import Oracle
from rig import Rig
from ways import BUCKETS, TIGHT, WAYS, Model, check, dequantised, random_prompts, serve_all_ways

GEOMETRIES: dict[str, dict[str, Any]] = {
    "sums of the softmax": {"arch": "qwen3_moe", "seed": 1, "shards": 2},
    "renormalised, stacked": {"arch": "qwen3_moe", "norm_topk": True, "stacked": True, "tied": True, "seed": 2},
    "every second layer": {"arch": "qwen3_moe", "num_layers": 4, "sparse_step": 2, "top_k": 4, "seed": 3},
    "listed dense layers": {"arch": "qwen3_moe", "dense_layers": "0", "norm_topk": True, "num_experts": 5, "seed": 4},
    "shared": {"arch": "qwen3_5_moe", "num_layers": 4, "num_experts": 16, "top_k": 5, "seed": 5},
    "shared, beside a vision tower": {
        "arch": "qwen3_5_moe",
        "layer_pattern": "lfl",
        "num_layers": 3,
        "vision": True,
        "stacked": True,
        "shared_size": 64,
        "expert_size": 33,
        "seed": 6,
    },
    "shared, like the others": {"arch": "qwen3_5_moe", "layer_pattern": "lf", "shared_size": 24, "seed": 10},
    "FP8": {"arch": "qwen3_moe", "norm_topk": True, "fp8": True, "hidden_size": 144, "expert_size": 136, "seed": 7},
    "FP8, stacked, shared": {
        "arch": "qwen3_5_moe",
        "num_layers": 4,
        "fp8": True,
        "stacked": True,
        "vision": True,
        "head_dim": 24,
        "shared_size": 24,
        "seed": 8,
    },
    "FP8, dense": {"arch": "qwen3_5", "num_layers": 4, "fp8": True, "attention_bias": True, "seed": 9},
}


@pytest.fixture(scope="session")
def open_moe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A checkpoint of :data:`GEOMETRIES` and its oracle, made on first use. The oracle of FP8 is the dequantised model."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            folder = tmp_path_factory.mktemp("moe")
            path = make_tiny_model(folder / "tiny", **GEOMETRIES[name])
            plain = dequantised(path, folder / "plain") if GEOMETRIES[name].get("fp8") else path
            made[name] = Model(path, Oracle(plain, 384))
        return made[name]

    return get


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometry(name: str, open_moe: Callable[[str], Model]) -> None:
    """Each checkpoint through mixed steps of short pieces, alone, and again off the prefix cache."""
    model = open_moe(name)
    prompts = random_prompts(6, longest=50)
    rig = serve_all_ways(model.path, prompts, count=16, chunked_prefill_size=16)
    assert any(shape.mixed for shape in rig.shapes)
    base = [(7 * index + 3) % 384 for index in range(100)]
    (alone,) = rig.serve([base], max_new_tokens=12)
    follow = rig.serve([base + alone.ids, [*base, 5, 9]], max_new_tokens=12, logprobs=1)
    assert all(answer.cached_tokens >= 96 for answer in follow)
    check(model.oracle, list(rig.answers.values()))


MOE_WAYS = {
    "sums of the softmax": ("one batch", "one by one", "chunks of 7", "retraction"),
    "shared": ("chunks of 7", "graphs, overlap, retraction"),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in MOE_WAYS.items() for way in ways])
def test_greedy_is_the_same_in_every_way(name: str, way: str, open_moe: Callable[[str], Model]) -> None:
    model, chosen = open_moe(name), WAYS[way]
    rig = serve_all_ways(model.path, random_prompts(12), chosen.every, **chosen.options)
    assert chosen.happened(rig)
    check(model.oracle, list(rig.answers.values()))


def test_padded_lanes(open_moe: Callable[[str], Model]) -> None:
    """Three requests in a graph for four: the lane that pads routes somewhere too, and nothing of it shows."""
    model = open_moe("shared")
    rig = Rig(model.path, cuda_graph_bs=BUCKETS, **TIGHT)
    answers = rig.serve(random_prompts(3), max_new_tokens=12, logprobs=2)
    assert any(shape.decodes == 3 and not shape.pieces for shape in rig.shapes)
    check(model.oracle, answers)


@pytest.mark.parametrize("name", ["every second layer", "FP8, stacked, shared"])
def test_random_weights_from_a_configuration_alone(name: str, open_moe: Callable[[str], Model]) -> None:
    rig = Rig(open_moe(name).path, load_format="dummy")
    (answer,) = rig.serve([list(range(20))], max_new_tokens=8)
    assert len(answer.ids) == 8 and len(set(answer.ids)) > 1
    held = [slot.target.dtype for slot in rig.runner.model.slots.values()]
    assert (torch.float8_e4m3fn in held) == name.startswith("FP8")


def test_memory_counts_what_is_held(open_moe: Callable[[str], Model]) -> None:
    """The bytes asked for before anything is allocated are those of the model that is then there."""
    from freetoken.loader.names import weight_bytes

    for name in ("sums of the softmax", "FP8"):
        rig = Rig(open_moe(name).path)
        counted, held = weight_bytes(rig.config.model, 4), rig.runner.model.weight_bytes
        # Routers are filled up, and scales are held for smaller groups of rows than stored where sizes do not divide by 128.
        assert 0 <= held - counted < 0.1 * counted
