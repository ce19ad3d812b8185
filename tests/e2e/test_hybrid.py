"""Tiny random Qwen3.5 checkpoints against transformers: token for token, however the scheduler cuts the work."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model
from oracle import Oracle
from rig import Answer, Rig
from ways import BUCKETS, WAYS, Model, Way, check, chunked, random_prompts, serve_all_ways

GEOMETRIES: dict[str, dict[str, Any]] = {
    "equal heads": {"linear_value_heads": 2, "seed": 1},
    "one to two": {"seed": 2},
    "one to three, tied": {"linear_value_heads": 6, "tied": True, "seed": 3},
    "odd": {
        "linear_key_heads": 1,
        "linear_value_heads": 3,
        "linear_key_dim": 12,
        "linear_value_dim": 20,
        "conv_width": 3,
        "layer_pattern": "llflf",
        "extra_vocab": 5,
        "seed": 4,
    },
    "full attention first": {"layer_pattern": "fl", "conv_width": 2, "num_kv_heads": 1, "seed": 5},
    "bias, half rotated": {"layer_pattern": "lffll", "attention_bias": True, "partial_rotary": 0.5, "seed": 6},
    "beside a vision tower": {"vision": True, "tied": True, "shards": 2, "linear_value_heads": 6, "seed": 7},
    "yarn": {
        "layer_pattern": "llf",
        "head_dim": 32,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        "seed": 8,
    },
}


@pytest.fixture(scope="session")
def open_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A checkpoint of :data:`GEOMETRIES` and its oracle, made on first use."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            options = {"num_layers": len(GEOMETRIES[name].get("layer_pattern", "lllf")), **GEOMETRIES[name]}
            path = make_tiny_model(tmp_path_factory.mktemp("hybrid") / "tiny", arch="qwen3_5", **options)
            made[name] = Model(path, Oracle(path, 384))
        return made[name]

    return get


@pytest.fixture
def model(open_hybrid: Callable[[str], Model]) -> Model:
    """For what does not depend on the geometry."""
    return open_hybrid("odd")


def long_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 100 to 220 ids: several chunks of the delta rule, and room for a checkpoint."""
    draw = random.Random(seed)
    return [[draw.randrange(384) for _ in range(draw.randint(100, 220))] for _ in range(count)]


def poison(rig: Rig) -> Rig:
    """NaN in every slot: whoever reads what it has not written is found out."""
    states = rig.runner.states
    assert states is not None
    with torch.inference_mode():
        for spec in states.specs:
            for layer in range(spec.layers):
                states.layer(spec.name, layer).fill_(float("nan"))
    return rig


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometry(name: str, open_hybrid: Callable[[str], Model]) -> None:
    """Each checkpoint through mixed steps of short pieces, then again off the checkpoints of the prefix cache."""
    model = open_hybrid(name)
    prompts = [*random_prompts(6), *long_prompts(2)]
    rig = serve_all_ways(model.path, prompts, chunked_prefill_size=16)
    assert any(shape.mixed for shape in rig.shapes)
    rig.serve(prompts, max_new_tokens=24)
    poison(rig)
    again = rig.serve(prompts, max_new_tokens=24, logprobs=1)
    assert [answer.cached_tokens >= 64 for answer in again] == [False] * 6 + [True] * 2
    check(model.oracle, list(rig.answers.values()))


SPLITS = {f"chunks of {size}": chunked(size) for size in (1, 5, 63, 64, 65)}


@pytest.mark.parametrize("way", [*WAYS, *(name for name in SPLITS if name not in WAYS)])
def test_greedy_is_the_same_in_every_way(way: str, model: Model) -> None:
    chosen: Way = {**WAYS, **SPLITS}[way]
    rig = serve_all_ways(model.path, random_prompts(12), chosen.every, **chosen.options)
    assert chosen.happened(rig)
    check(model.oracle, list(rig.answers.values()))


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65])
def test_long_prompts_in_chunks(size: int, model: Model) -> None:
    """Prompts longer than a chunk of the delta rule, cut on, before and behind its borders."""
    rig = Rig(model.path, chunked_prefill_size=size, max_prefill_tokens=size, cuda_graph_bs=BUCKETS)
    check(model.oracle, rig.serve(long_prompts(3), every=2, max_new_tokens=20, logprobs=1))


@pytest.mark.parametrize("overlap", [False, True])
def test_states_do_not_depend_on_the_way(overlap: bool, model: Model) -> None:
    """After the same tokens the slot holds the same, whether the prompt came whole, in pieces, or behind others."""

    def slot_states(**options: Any) -> list[torch.Tensor]:
        rig = Rig(model.path, **options)
        rig.add(long_prompts(1)[0], max_new_tokens=30)
        while not (rig.scheduler.decoding and rig.scheduler.decoding[0].computed == tokens):
            rig.step()
        states, row = rig.runner.states, rig.scheduler.decoding[0].row
        assert states is not None
        return [states.layer(spec.name, layer)[row].clone() for spec in states.specs for layer in range(spec.layers)]

    tokens = len(long_prompts(1)[0]) + 10
    whole = slot_states()
    for options in ({"chunked_prefill_size": 7, "max_prefill_tokens": 7}, {"cuda_graph_bs": BUCKETS}):
        for actual, wanted in zip(slot_states(overlap=overlap, **options), whole, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


# --- prefix hits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("options", [{}, {"overlap": True, "cuda_graph_bs": BUCKETS}, {"chunked_prefill_size": 50}])
def test_prefix_hits(page: int, options: dict[str, Any], model: Model) -> None:
    """Hits end where a state was kept: at the end of a prompt, at a junction, or nowhere."""
    rig = Rig(model.path, page_size=page, state_checkpoint_interval=10**6, **options)
    base = [(7 * index + 3) % 384 for index in range(200)]
    (first,) = rig.serve([base], max_new_tokens=24, logprobs=2)
    kept = 199 // page * page
    parting, other = [*base[:120], 5, 9, 200], [*base[:120], 8, 8, 8, 8]
    junction = 120 // page * page
    cases = [
        (base, kept),
        (base + first.ids, kept),
        ([*base[:150]], 0),
        (parting, 0),
        (other, junction),
        ([383, *base], 0),
    ]
    poison(rig)
    follow = [rig.serve([prompt], max_new_tokens=12, logprobs=2)[0] for prompt, _ in cases]
    assert [answer.cached_tokens for answer in follow][:4] == [cached for _, cached in cases[:4]]
    assert follow[4].cached_tokens > 0 and follow[5].cached_tokens == 0
    poison(rig)
    together = rig.serve([prompt for prompt, _ in cases], max_new_tokens=20, logprobs=2)
    assert rig.scheduler.stats().state_hits > 4
    check(model.oracle, [first, *follow, *together])


def test_checkpoints_at_an_interval(model: Model) -> None:
    """A prompt that parts from a stored one goes on from the last multiple of the interval before."""
    rig = Rig(model.path, state_checkpoint_interval=64)
    base = [(5 * index + 1) % 384 for index in range(300)]
    (first,) = rig.serve([base], max_new_tokens=8)
    follow = [rig.serve([[*base[:cut], 7]], max_new_tokens=12)[0] for cut in (70, 180, 290)]
    assert [answer.cached_tokens for answer in follow] == [64, 128, 192]
    check(model.oracle, [first, *follow])


def test_few_blocks_are_shared_by_many(model: Model) -> None:
    """Host memory for two states, five conversations that take turns: what was given up is computed again."""
    block = Rig(model.path).runner.state_plan.slot_bytes
    rig = Rig(model.path, state_cache_gb=2.5 * block / 1e9)
    assert rig.state_blocks == 2
    prompts = [[(13 * index + 50 * talk) % 384 for index in range(120)] for talk in range(5)]
    answers: list[Answer] = []
    for turn in range(3):
        for talk in (0, 1, 0, 2, 3, 4, 4):
            answers += rig.serve([prompts[talk][: 90 + 10 * turn]], max_new_tokens=6)
    stats = rig.scheduler.stats()
    assert stats.state_hits > 2 and stats.state_evictions > 4
    check(model.oracle, answers)


@pytest.mark.parametrize("options", [{"state_cache_gb": 0}, {"disable_radix_cache": True}])
def test_without_checkpoints_nothing_is_a_hit(options: dict[str, Any], model: Model) -> None:
    rig = Rig(model.path, **options)
    assert rig.state_blocks == 0
    prompts = long_prompts(2) * 2
    answers = [rig.serve([prompt], max_new_tokens=8)[0] for prompt in prompts]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 0]
    check(model.oracle, answers)


# --- storms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"overlap": True, "cuda_graph_bs": BUCKETS}])
def test_abort_storm(seed: int, options: dict[str, Any], model: Model) -> None:
    """Arrivals, aborts at any moment and retraction, in few rows: those that stay are as if they had been alone."""
    draw = random.Random(seed)
    shared = long_prompts(3, seed=seed)
    rig = Rig(
        model.path,
        max_total_tokens=700,
        max_running_requests=5,
        chunked_prefill_size=40,
        state_checkpoint_interval=64,
        **options,
    )
    kept: list[Answer] = []
    for _ in range(30):
        prompt = draw.choice(shared)[: draw.randint(60, 200)] + [draw.randrange(384) for _ in range(draw.randint(0, 9))]
        answer = rig.add(prompt, max_new_tokens=draw.randint(1, 60), logprobs=1 if draw.random() < 0.3 else None)
        rid = list(rig.answers)[-1]
        kept.append(answer)
        for _ in range(draw.randint(0, 6)):
            rig.step()
        if draw.random() < 0.5:
            rig.scheduler.abort(draw.choice([rid, *rig.answers]))
    rig.run()
    ended = [answer for answer in kept if answer.finish is not None and answer.finish.kind == "length"]
    assert len(ended) > 8 and any(answer.cached_tokens for answer in ended)
    check(model.oracle, ended)


def test_few_rows_when_memory_is_short(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """States for three requests fit: the fourth queues, and all are served."""
    from freetoken.runner import model_runner

    real = model_runner.plan_states

    def three(*arguments: Any, **options: Any) -> Any:
        slot = real(*arguments, **options).slot_bytes
        return real(
            *arguments, **{**options, "total_bytes": 9 * slot, "free_bytes": 9 * slot, "fraction": 1.0, "step_bytes": 0}
        )

    monkeypatch.setattr(model_runner, "plan_states", three)
    rig = Rig(model.path, cuda_graph_bs=BUCKETS)
    assert rig.max_rows == 3 and rig.runner.info()["max_running_requests"] == 3
    assert "of state a request" in rig.runner.info()["states"]["rows_limit"]
    answers = rig.serve(random_prompts(7), max_new_tokens=12)
    assert max(shape.decodes for shape in rig.shapes) == 3
    check(model.oracle, answers)
