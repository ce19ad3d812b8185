"""Tiny GGUF files of ``qwen4exp`` and of the other architectures with experts, served whole: token for token against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import TinyModel, make_tiny_model
from oracle import Oracle
from rig import Answer, Rig
from ways import BUCKETS, Model, check, random_prompts, serve_all_ways

from freetoken import Engine
from gguf_oracle_moe import write_published

BOUNDARY = 2
QWEN4_EXP: dict[str, Any] = {
    "arch": "qwen4_exp",
    "layer_pattern": "lfl",
    "num_layers": 3,
    "linear_value_heads": 6,
    "expert_size": 32,
    "shared_size": 64,
    "hyper_rank": 32,
    "ple_layers": "3",
    "ple_width": 128,
    "norm_topk": True,
    "seed": 21,
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen4_exp f32": (QWEN4_EXP, "f32"),
    "qwen4_exp q8_0": ({**QWEN4_EXP, "table_quant": "iq4_nl", "fused_experts": True, "mtp": 1}, "q8_0"),
    "qwen4_exp without n-grams, tied": ({**QWEN4_EXP, "ple_layers": "", "tied": True, "stacked": True}, "bf16"),
    "qwen35moe": ({"arch": "qwen3_5_moe", "num_layers": 4, "expert_size": 32, "shared_size": 64, "seed": 23}, "q8_0"),
    "qwen3moe": ({"arch": "qwen3_moe", "norm_topk": True, "expert_size": 32, "seed": 22}, "q8_0"),
}


@pytest.fixture(scope="module")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A file of :data:`CASES` and its oracle, made on first use: in float32 a folder made of the same numbers, else one of what is left
    of them in the file."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            options, quant = CASES[name]
            folder = tmp_path_factory.mktemp("gguf")
            path = make_tiny_model(folder / "tiny.gguf", format="gguf", quant=quant, **options)
            if quant == "f32":
                published = make_tiny_model(folder / "published", **options)
            else:
                published = write_published(path, TinyModel(**options), folder / "published")
            made[name] = Model(path, Oracle(published, 384))
        return made[name]

    return get


def prompts(count: int, longest: int = 50) -> list[list[int]]:
    """Some ids are the boundary that n-grams do not reach over."""
    drawn = random_prompts(count, 4, longest)
    return [[BOUNDARY if i % 11 == 4 else token for i, token in enumerate(prompt)] for prompt in drawn]


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_that_of_transformers(name: str, open_model: Callable[[str], Model]) -> None:
    """In mixed steps of short pieces, in contexts where an indexer leaves most tokens out."""
    model = open_model(name)
    rig = serve_all_ways(model.path, prompts(5), count=12, chunked_prefill_size=16)
    assert any(shape.mixed for shape in rig.shapes)
    check(model.oracle, list(rig.answers.values()))


@pytest.mark.parametrize("kind", ["gpu", "pinned", "mmap"])
def test_a_packed_table_in_every_place(kind: str, open_model: Callable[[str], Model]) -> None:
    """Rows of IQ4_NL, against transformers with every code of theirs decoded by itself."""
    model = open_model("qwen4_exp q8_0")
    rig = Rig(model.path, ple_table=kind, overlap=True, cuda_graph_bs=BUCKETS)
    info = rig.runner.info()["ple_table"]
    assert info["kind"] == kind
    answers: list[Answer] = rig.serve(prompts(3), 1, max_new_tokens=10, logprobs=2)
    check(model.oracle, answers)


def test_q8_0_stays_near_the_floats(open_model: Callable[[str], Model], tmp_path: Path) -> None:
    """Relative RMS of all logits, of the weights in the file against those it was made of; the table is the same here."""
    options = {**QWEN4_EXP, "table_quant": "f32"}
    path = make_tiny_model(tmp_path / "tiny.gguf", format="gguf", quant="q8_0", **options)
    quantised = Oracle(write_published(path, TinyModel(**options), tmp_path / "published"), 384)
    answers = Rig(path).serve(prompts(3), max_new_tokens=8, logprobs=0)
    check(quantised, answers)
    texts = [answer.all_ids for answer in answers]
    ours, floats = (torch.cat(list(oracle.logits(texts))) for oracle in (quantised, open_model("qwen4_exp f32").oracle))
    error = float((ours - floats).square().mean().sqrt() / floats.square().mean().sqrt())
    assert 0 < error < 0.05


def test_an_engine_on_a_file(open_model: Callable[[str], Model]) -> None:
    """Text in and text out, twice the same, with the tokenizer of the file."""
    path = open_model("qwen4_exp q8_0").path
    with Engine(path, device="cpu", max_total_tokens=512, context_length=300, random_seed=1) as engine:
        wishes = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
        first, second = (engine.generate(["The quick brown fox jumps over"], wishes) for _ in range(2))
        assert first[0]["output_ids"] == second[0]["output_ids"] and first[0]["text"]
