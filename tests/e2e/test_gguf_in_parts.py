"""Tiny GGUF models in parts give the tokens and log-probabilities of the whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import make_tiny_model
from rig import Rig
from ways import random_prompts

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("q4_0", {"arch": "llama"}),
    "packed": ("pq2_0", {"arch": "qwen3", "hidden_size": 128, "head_dim": 32, "hadamard": 64}),
    "experts": ("q8_0", {"arch": "qwen3_moe", "norm_topk": True, "expert_size": 32}),
    "n-grams": (
        "q8_0",
        {
            "arch": "qwen4_exp",
            "layer_pattern": "lf",
            "expert_size": 32,
            "shared_size": 64,
            "hyper_rank": 32,
            "ple_layers": "1",
            "ple_width": 128,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_say_what_the_whole_says(name: str, tmp_path: Path) -> None:
    quant, options = CASES[name]
    whole = make_tiny_model(tmp_path / "whole.gguf", format="gguf", quant=quant, **options)
    make_tiny_model(tmp_path / "set" / "parts.gguf", format="gguf", quant=quant, shards=3, **options)
    assert len(list((tmp_path / "set").iterdir())) == 3
    answers = []
    for path in (whole, tmp_path / "set" / "parts-00002-of-00003.gguf"):
        rig = Rig(path)
        assert rig.config.model.name == ("whole" if path == whole else "parts")
        answers.append(rig.serve(random_prompts(3), max_new_tokens=8, logprobs=0))
    whole_answers, part_answers = answers
    assert [answer.ids for answer in part_answers] == [answer.ids for answer in whole_answers]
    assert [answer.logprobs for answer in part_answers] == [answer.logprobs for answer in whole_answers]
