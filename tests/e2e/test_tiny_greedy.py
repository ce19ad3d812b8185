"""Tiny random Llama and Qwen3 checkpoints against transformers: token for token, however the scheduler cuts the work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import make_tiny_model
from oracle import Oracle
from rig import Answer, Rig
from ways import BUCKETS, WAYS, Model, check, random_prompts, retracts, serve_all_ways

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"num_kv_heads": 4, "tied": True, "seed": 1},
    "llama-bias": {"num_kv_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 24, "seed": 2},
    "llama3-rope": {"rope_scaling": LLAMA3, "num_layers": 3, "seed": 3},
    "llama-odd": {"tokenizer_vocab": 387, "extra_vocab": 6, "num_kv_heads": 4, "seed": 4},
    "llama-gguf": {"format": "gguf", "quant": "q8_0", "seed": 5},
    "qwen3": {"arch": "qwen3", "num_kv_heads": 4, "seed": 6},
    "qwen3-tied": {"arch": "qwen3", "tied": True, "head_dim": 32, "num_kv_heads": 1, "seed": 7},
    "qwen3-yarn": {"arch": "qwen3", "rope_scaling": YARN, "extra_vocab": 3, "seed": 8},
    "qwen3-bias": {"arch": "qwen3", "attention_bias": True, "head_dim": 24, "num_heads": 3, "num_kv_heads": 1},
    # transformers takes 128 for the head size of any qwen3 GGUF.
    "qwen3-gguf": {"arch": "qwen3", "format": "gguf", "quant": "f16", "head_dim": 128, "seed": 9},
}


@pytest.fixture(scope="session")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A checkpoint of :data:`GEOMETRIES` and its oracle, made on first use."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            options = GEOMETRIES[name]
            suffix = ".gguf" if options.get("format") == "gguf" else ""
            path = make_tiny_model(tmp_path_factory.mktemp("tiny") / f"{name}{suffix}", **options)
            made[name] = Model(path, Oracle(path, options.get("tokenizer_vocab", 384)))
        return made[name]

    return get


@pytest.fixture(params=["llama", "qwen3-yarn"])
def model(request: pytest.FixtureRequest, open_model: Callable[[str], Model]) -> Model:
    """One checkpoint of each family, for what does not depend on the geometry."""
    return open_model(request.param)


# --- geometries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometry(name: str, open_model: Callable[[str], Model]) -> None:
    """Each checkpoint through mixed steps of short pieces, then again off the prefix cache."""
    model = open_model(name)
    prompts = random_prompts(9)
    rig = serve_all_ways(model.path, prompts, chunked_prefill_size=16)
    assert any(shape.mixed for shape in rig.shapes)
    again = rig.serve(prompts, max_new_tokens=24, logprobs=1)
    assert sum(answer.cached_tokens for answer in again) > 100
    check(model.oracle, list(rig.answers.values()))


@pytest.mark.parametrize("name", ["llama3-rope", "qwen3-yarn", "qwen3-gguf"])
def test_far_positions(name: str, open_model: Callable[[str], Model]) -> None:
    """Prompts well past the original context of a rope scaling, up to the last position there is."""
    model = open_model(name)
    draw = random.Random(9)
    prompts = [[draw.randrange(384) for _ in range(length)] for length in (300, 700, 1008)]
    rig = Rig(model.path, max_total_tokens=2400, page_size=16)
    answers = rig.serve(prompts, every=2, max_new_tokens=16, logprobs=2, prompt_logprobs=1)
    check(model.oracle, answers)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_generate_of_transformers_gives_the_same(name: str, open_model: Callable[[str], Model]) -> None:
    """Teacher forcing says what transformers' own loop says, and ids that the tokenizer does not know stay out."""
    model = open_model(name)
    (prompt,) = random_prompts(1, seed=3)
    (answer,) = Rig(model.path).serve([prompt], max_new_tokens=40)
    assert answer.ids == model.oracle.generate(prompt, 40)


def test_the_oracle_notices_one_wrong_token(model: Model) -> None:
    (answer,) = Rig(model.path).serve(random_prompts(1), max_new_tokens=20)
    answer.ids[11] = (answer.ids[11] + 1) % 384
    with pytest.raises(AssertionError, match="output 11 is"):
        model.oracle.check([answer])


# --- ways of scheduling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_greedy_is_the_same_in_every_way(way: str, model: Model) -> None:
    chosen = WAYS[way]
    rig = serve_all_ways(model.path, random_prompts(12), chosen.every, **chosen.options)
    assert chosen.happened(rig)
    check(model.oracle, list(rig.answers.values()))


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "top_p": 0.8, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": -4},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "logit_bias": {"11": 4, "12": -100}, "seed": 7},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.7, "seed": 2**62},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 1.0},
]
SAMPLED_PROMPTS = random_prompts(len(SAMPLED), seed=1)


@pytest.fixture(scope="module")
def alone(open_model: Callable[[str], Model]) -> Callable[[Path], list[list[int]]]:
    """The texts of :data:`SAMPLED`, each served by itself from an empty cache."""
    made: dict[Path, list[list[int]]] = {}

    def get(path: Path) -> list[list[int]]:
        if path not in made:
            rig = Rig(path, disable_radix_cache=True)
            answers = [rig.serve([p], max_new_tokens=24, **s)[0] for p, s in zip(SAMPLED_PROMPTS, SAMPLED)]
            made[path] = [answer.ids for answer in answers]
        return made[path]

    return get


@pytest.mark.parametrize("way", [way for way in WAYS if way != "one by one"])
def test_a_seed_gives_one_text_in_every_way(way: str, model: Model, alone: Callable[[Path], list[list[int]]]) -> None:
    """Twelve neighbours of other seeds, arriving between; the server's own seed is another one too.

    Those under test come late, as it is the youngest that are retracted.
    """
    chosen = WAYS[way]
    rig = Rig(model.path, **{"random_seed": 77, **chosen.options})
    others = random_prompts(12, seed=2)
    answers: list[Answer] = []
    for index, prompt in enumerate(others):
        rig.add(prompt, max_new_tokens=24, temperature=1.0, **({"logprobs": 1} if index % 2 else {}))
        tested = index - (len(others) - len(SAMPLED))
        if tested >= 0:
            answers.append(rig.add(SAMPLED_PROMPTS[tested], max_new_tokens=24, **SAMPLED[tested]))
        for _ in range(chosen.every):
            rig.step()
    rig.run()
    assert rig.retractions > 0 or chosen.happened is not retracts
    assert [answer.ids for answer in answers] == alone(model.path)


@pytest.mark.parametrize("options", [{}, {"overlap": True, "cuda_graph_bs": BUCKETS}])
def test_penalties_count_the_same_tokens_after_retraction(options: dict[str, Any], model: Model) -> None:
    """A retracted request comes back on the row of another, whose tokens must not count against it."""
    prompts = random_prompts(10, seed=6, longest=20)
    wishes = [
        {"seed": 3, "temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.5}
    ]
    wishes += [{"repetition_penalty": 2.0}]
    sampling = [{**wishes[index % 2], "max_new_tokens": 60 - 2 * index} for index in range(10)]
    calm = Rig(model.path, disable_radix_cache=True)
    expected = [calm.serve([prompt], **wish)[0].ids for prompt, wish in zip(prompts, sampling)]
    rig = Rig(model.path, max_total_tokens=160, **options)
    answers = [rig.add(prompt, **wish) for prompt, wish in zip(prompts, sampling)]
    rig.run()
    assert rig.retractions > 1
    assert [answer.ids for answer in answers] == expected


def test_other_seeds_give_other_texts(model: Model) -> None:
    rig = Rig(model.path)
    prompt = SAMPLED_PROMPTS[0]
    seeded = [rig.serve([prompt], temperature=1.0, seed=seed)[0].ids for seed in (1, 2, 1)]
    free = [rig.serve([prompt], temperature=1.0)[0].ids for _ in range(2)]
    assert seeded[0] == seeded[2] != seeded[1]
    assert free[0] != free[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_id_ends_where_it_first_comes(overlap: bool, model: Model) -> None:
    """With overlap a request is in one step more when its end is seen; that step leaves no trace."""
    prompts = random_prompts(6, seed=4)
    full = Rig(model.path).serve(prompts, max_new_tokens=30)
    rig = Rig(model.path, overlap=overlap, cuda_graph_bs=BUCKETS)
    answers = [
        rig.add(p, max_new_tokens=30, stop_token_ids=[f.ids[10 + i]]) for i, (p, f) in enumerate(zip(prompts, full))
    ]
    rig.run()
    for index, (answer, expected) in enumerate(zip(answers, full)):
        end = expected.ids.index(expected.ids[10 + index]) + 1
        assert answer.ids == expected.ids[:end]
        assert answer.finish is not None
        assert (answer.finish.kind, answer.finish.matched) == ("stop", expected.ids[10 + index])


# --- prefix hits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("options", [{}, {"overlap": True, "cuda_graph_bs": BUCKETS}, {"chunked_prefill_size": 7}])
def test_prefix_hits(page: int, options: dict[str, Any], model: Model) -> None:
    """Every token of a shared prefix that lies in a whole page is reused, and the text is that of a cold start."""
    rig = Rig(model.path, page_size=page, **options)
    (base,) = random_prompts(1, seed=5, longest=1)
    base = base + [(7 * index + 3) % 384 for index in range(63)]
    (first,) = rig.serve([base], max_new_tokens=24, logprobs=2)
    assert first.cached_tokens == 0
    tail = [5, 9, 200]
    cases = [
        (base, 63),
        (base[:37] + tail, 37),
        (base[:48] + tail, 48),
        (base[:48], 47),
        (base + first.ids[:9] + tail, 73),
        (base + first.ids, 87),
        (base + first.ids + tail, 88),
        ([383, *base], 0),
    ]
    follow = [rig.serve([prompt], max_new_tokens=12, logprobs=2)[0] for prompt, _ in cases]
    assert [answer.cached_tokens for answer in follow] == [shared // page * page for _, shared in cases]
    together = rig.serve([prompt for prompt, _ in cases], max_new_tokens=20, logprobs=2)
    assert all(answer.cached_tokens >= old.cached_tokens for answer, old in zip(together, follow))
    check(model.oracle, [first, *follow, *together])


def test_a_prefix_is_shared_while_its_first_owner_still_runs(model: Model) -> None:
    rig = Rig(model.path, page_size=4)
    base = [(11 * index + 5) % 384 for index in range(50)]
    first = rig.add(base, max_new_tokens=40)
    for _ in range(4):
        rig.step()
    second = rig.add([*base[:30], 1, 2], max_new_tokens=40)
    rig.step()
    assert first.finish is None
    rig.run()
    assert second.cached_tokens == 28
    check(model.oracle, [first, second])


def test_evicted_prefixes_are_computed_again(model: Model) -> None:
    """A pool that holds one conversation and a half, and four that take turns."""
    rig = Rig(model.path, page_size=4, max_total_tokens=90)
    prompts = [[(13 * index + 50 * talk) % 384 for index in range(60)] for talk in range(4)]
    answers: list[Answer] = []
    for turn in range(3):
        for talk in range(4):
            (answer,) = rig.serve([prompts[talk][: 40 + 8 * turn]], max_new_tokens=12)
            answers.append(answer)
    answers += [rig.serve([prompts[3]], max_new_tokens=12)[0]]
    assert answers[-1].cached_tokens > 0
    assert sum(answer.cached_tokens == 0 for answer in answers) > 4
    check(model.oracle, answers)
