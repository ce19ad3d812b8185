"""Tiny random ``qwen4_exp`` checkpoints against transformers: token for token, in contexts where the indexer leaves most tokens out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model
from oracle import Oracle
from rig import Rig
from ways import BUCKETS, TIGHT, WAYS, Model, check, dequantised, random_prompts, serve_all_ways

from freetoken.kernels.dispatch import Choice
from freetoken.models import qsa, qwen4_exp

BOUNDARY = 2
GEOMETRIES: dict[str, dict[str, Any]] = {
    "two tables": {"layer_pattern": "lflf", "ple_layers": "1,3", "norm_topk": True, "seed": 1},
    "odd": {
        "layer_pattern": "lfl",
        "streams": 3,
        "hyper_rank": 5,
        "linear_key_heads": 1,
        "linear_value_heads": 3,
        "linear_key_dim": 12,
        "linear_value_dim": 20,
        "conv_width": 3,
        "num_kv_heads": 1,
        "extra_vocab": 5,
        "ple_layers": "3",
        "ngram_size": 4,
        "ngram_heads": 1,
        "ple_width": 33,
        "index_heads": 9,
        "index_dim": 20,
        "index_budget": 9,
        "index_ratio": 3,
        "seed": 2,
    },
    "SiLU gate, no n-grams, blocks of one": {
        "layer_pattern": "lf",
        "streams": 2,
        "ple_layers": "",
        "output_gate": None,
        "index_ratio": 1,
        "index_budget": 7,
        "shared_size": 24,
        "seed": 3,
    },
    "beside a vision tower": {"layer_pattern": "llf", "vision": True, "shards": 2, "stacked": True, "seed": 4},
    "FP8": {"layer_pattern": "lf", "fp8": True, "ple_layers": "1", "hidden_size": 144, "norm_topk": True, "seed": 5},
    "dense throughout": {"layer_pattern": "fl", "index_budget": 2048, "ple_layers": "2", "tied": True, "seed": 6},
}


@pytest.fixture(scope="session")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A checkpoint of :data:`GEOMETRIES` and its oracle, made on first use. The oracle of FP8 is the dequantised model."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            options = GEOMETRIES[name]
            folder = tmp_path_factory.mktemp("qwen4_exp")
            layers = len(options["layer_pattern"])
            path = make_tiny_model(folder / "tiny", arch="qwen4_exp", num_layers=layers, **options)
            plain = dequantised(path, folder / "plain") if options.get("fp8") else path
            made[name] = Model(path, Oracle(plain, 384))
        return made[name]

    return get


@pytest.fixture
def model(open_model: Callable[[str], Model]) -> Model:
    """For what does not depend on the geometry."""
    return open_model("two tables")


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    """Some ids are the boundary that n-grams do not reach over."""
    return [
        [BOUNDARY if i % 11 == 4 else token for i, token in enumerate(p)] for p in random_prompts(count, 3, longest)
    ]


def poison(rig: Rig) -> Rig:
    """NaN in every float state and every index key: whoever reads what it has not written is found out."""
    states = rig.runner.states
    assert states is not None
    with torch.inference_mode():
        for spec in states.specs:
            for layer in range(spec.layers):
                held = states.layer(spec.name, layer)
                held.fill_(float("nan") if held.is_floating_point() else 5)
        if not rig.scheduler.tree.total_pages:
            rig.runner.kv.index_storage.fill_(float("nan"))
    return rig


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometry(name: str, open_model: Callable[[str], Model]) -> None:
    """Each checkpoint through mixed steps of short pieces, then again off the checkpoints of the prefix cache."""
    model = open_model(name)
    rig = serve_all_ways(model.path, prompts(5), count=12, chunked_prefill_size=16)
    assert any(shape.mixed for shape in rig.shapes)
    base = [(7 * index + 3) % 384 for index in range(90)]
    (alone,) = rig.serve([base], max_new_tokens=8)
    poison(rig)
    follow = rig.serve([base + alone.ids, [*base, 5, 9]], max_new_tokens=8, logprobs=1)
    assert all(answer.cached_tokens >= 88 for answer in follow)
    check(model.oracle, list(rig.answers.values()))


CHOSEN = (
    "one by one",
    "chunks of 1",
    "chunks of 7",
    "pages of 1",
    "retraction, small chunks",
    "graphs, overlap, retraction",
)


@pytest.mark.parametrize("way", CHOSEN)
def test_greedy_is_the_same_in_every_way(way: str, model: Model) -> None:
    chosen = WAYS[way]
    rig = serve_all_ways(model.path, prompts(12, 60 if "retraction" in way else 40), chosen.every, **chosen.options)
    assert chosen.happened(rig)
    check(model.oracle, list(rig.answers.values()))


def test_of_equal_scores_the_earlier_block_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one index head half of the scores are zero. transformers leaves the order of equals to ``topk``, which here is made to
    take the first."""

    def first_of_equals(scores: torch.Tensor, count: int, dim: int = -1, **options: Any) -> Any:
        if scores.dim() > 1:
            return topk(scores, count, dim, **options)
        values, order = scores.sort(descending=True, stable=True)
        return torch.return_types.topk((values[:count], order[:count]))

    options = {**GEOMETRIES["odd"], "index_heads": 1, "index_ratio": 2, "index_budget": 12}
    path = make_tiny_model(tmp_path / "tiny", arch="qwen4_exp", num_layers=3, **options)
    rig = serve_all_ways(path, prompts(5), count=12, chunked_prefill_size=16)
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", first_of_equals)
    check(Oracle(path, 384), list(rig.answers.values()))


def test_padded_lanes(model: Model) -> None:
    """Three requests in a graph for four, on fresh memory that holds NaN: nothing of the lane that pads shows."""
    rig = poison(Rig(model.path, cuda_graph_bs=BUCKETS, **TIGHT))
    answers = rig.serve(prompts(3), max_new_tokens=12, logprobs=2)
    assert any(shape.decodes == 3 and not shape.pieces for shape in rig.shapes)
    check(model.oracle, answers)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_prefix_hits(page: int, model: Model) -> None:
    """Hits that end inside a block of the indexer, and behind one, by requests that part there."""
    rig = Rig(model.path, page_size=page, cuda_graph_bs=BUCKETS)
    base = [(7 * index + 3) % 384 for index in range(100)]
    answers = rig.serve([base], max_new_tokens=8)
    cases = [
        (base + answers[0].ids, 99),
        ([*base, 5, 9, 200], 99),
        ([*base[:78], 1, 2], 0),
        ([*base[:78], 8, 8, 8], 78),
    ]
    for prompt, kept in cases:
        poison(rig)
        (answer,) = rig.serve([prompt], max_new_tokens=8, logprobs=1)
        assert answer.cached_tokens == kept // page * page
        answers.append(answer)
    check(model.oracle, answers)


def test_with_the_kernels(open_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hyper-connections and the indexer by their kernels, whatever the device, each call compared: pieces, decodes, a lane that pads."""
    for module, op in ((qwen4_exp, "hyper_mix"), (qsa, "qsa")):
        monkeypatch.setattr(
            module, "choose_op", lambda name, device, op=op: Choice(op, "", "check", "the test says so")
        )
    model = open_model("odd")
    rig = poison(Rig(model.path, cuda_graph_bs=(4,)))
    short = [prompt[:length] for prompt, length in zip(prompts(3), (13, 4, 10))]
    answers = rig.serve(short, max_new_tokens=4, logprobs=1)
    assert sum(rig.runner.graph_counts()[0].values()) > 0
    check(model.oracle, answers)


@pytest.mark.parametrize("kind", ["pinned", "mmap"])
def test_tables_elsewhere(kind: str, model: Model) -> None:
    rig = Rig(model.path, ple_table=kind, cuda_graph_bs=BUCKETS, chunked_prefill_size=16)
    answers = rig.serve(prompts(4), every=2, max_new_tokens=10, logprobs=1)
    assert rig.runner.info()["ple_table"]["kind"] == kind
    check(model.oracle, answers)


def test_sampled_rows_are_selected_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head sees one row for each token that is drawn, however long the pieces, and those rows are the right ones."""
    rig = Rig(model.path, chunked_prefill_size=16)
    rows: list[int] = []
    head = rig.runner.model.head

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return head(hidden)

    monkeypatch.setattr(rig.runner.model, "head", counted)
    answers = rig.serve(prompts(4, 50), every=1, max_new_tokens=6)
    assert sum(rows) == sum(len(answer.ids) for answer in answers)
    assert any(sum(shape.pieces) > 1 for shape in rig.shapes)
    check(model.oracle, answers)


@pytest.mark.parametrize("name", ["odd", "FP8"])
def test_random_weights_from_a_configuration_alone(name: str, open_model: Callable[[str], Model]) -> None:
    rig = Rig(open_model(name).path, load_format="dummy", ple_table="pinned")
    (answer,) = rig.serve([list(range(40))], max_new_tokens=8)
    assert len(answer.ids) == 8 and len(set(answer.ids)) > 1
    held = [slot.target.dtype for slot in rig.runner.model.slots.values()]
    assert (torch.float8_e4m3fn in held) == (name == "FP8")


def test_memory_counts_what_is_held(open_model: Callable[[str], Model]) -> None:
    """The bytes asked for before anything is allocated are those of the model that is then there, and of its pages."""
    from freetoken.loader.names import weight_bytes

    for name in ("two tables", "FP8"):
        rig = Rig(open_model(name).path)
        model = rig.config.model
        counted, held = weight_bytes(model, 4), rig.runner.model.weight_bytes
        # Routers and hyper-connections are filled up, and scales are held for smaller groups of rows than stored.
        assert 0 <= held - counted < 0.1 * counted
        kv = rig.runner.kv
        assert kv.bytes == kv.num_pages * kv.page_size * model.kv_bytes_per_token(4) == rig.runner.memory.kv_bytes
