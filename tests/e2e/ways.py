"""Ways to serve a dozen requests, and what they are checked against, for tests of whole models."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle import Oracle
from rig import Answer, Rig
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Model:
    path: Path
    oracle: Oracle


def random_prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(384) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def dequantised(path: Path, target: Path) -> Path:
    """The same checkpoint as plain floats: each FP8 value times the scale of its block."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, owner = tensors.pop(name), name.removesuffix("_scale_inv")
        values = tensors[owner].float()
        for row in range(scale.shape[-2]):
            for column in range(scale.shape[-1]):
                block = (..., slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
                values[block] *= scale[..., row, column, None, None]
        tensors[owner] = values
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in path.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def serve_all_ways(path: Path, prompts: list[list[int]], every: int = 2, count: int = 24, **options: Any) -> Rig:
    """Serve ``prompts`` one after every few steps: plain, with log-probabilities, and with those of the prompt."""
    rig = Rig(path, **options)
    wishes: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 2}]
    for index, prompt in enumerate(prompts):
        rig.add(prompt, max_new_tokens=count, **wishes[index % 3])
        for _ in range(every):
            rig.step()
    rig.run()
    return rig


def check(oracle: Oracle, answers: list[Answer]) -> None:
    """All ended by length, all equal to transformers but for at most one tie in a thousand tokens."""
    assert {answer.finish.kind for answer in answers if answer.finish} == {"length"}
    tokens = sum(len(answer.ids) for answer in answers)
    assert oracle.check(answers) <= 1 + tokens // 1000


@dataclass(frozen=True)
class Way:
    """How twelve requests are served, and what must have happened for the case to mean anything."""

    options: dict[str, Any]
    happened: Callable[[Rig], bool]
    every: int = 2


def pieces(rig: Rig) -> list[int]:
    return [length for shape in rig.shapes for length in shape.pieces]


def is_mixed(rig: Rig) -> bool:
    return any(shape.mixed for shape in rig.shapes)


def chunked(size: int) -> Way:
    """Steps of at most ``size`` tokens, but for the one prompt token granted beside any number of streams."""

    def happened(rig: Rig) -> bool:
        whole = [shape.decodes + sum(shape.pieces) for shape in rig.shapes if sum(shape.pieces) > 1]
        return is_mixed(rig) and max(pieces(rig)) <= size and max(whole, default=0) <= size

    return Way({"chunked_prefill_size": size, "max_prefill_tokens": size}, happened)


def retracts(rig: Rig) -> bool:
    return rig.retractions > 0


def pads(rig: Rig) -> bool:
    """Every bucket was replayed, one of them with padding lanes, and a step was too large for all of them."""
    replays, misses = rig.runner.graph_counts()
    alone = {shape.decodes for shape in rig.shapes if not shape.pieces}
    return all(replays.values()) and misses > 0 and bool(alone & {3, 5, 6, 7})


BUCKETS = (1, 2, 4, 8)
TIGHT = {"max_total_tokens": 240}

WAYS = {
    "one batch": Way({}, lambda rig: max(shape.decodes for shape in rig.shapes) == 12, every=0),
    "one by one": Way({"max_running_requests": 1}, lambda rig: max(s.decodes for s in rig.shapes) == 1, every=0),
    "arrivals": Way({}, is_mixed, every=3),
    "chunks of 1": chunked(1),
    "chunks of 7": chunked(7),
    "chunks of 64": chunked(64),
    "pages of 1": Way({"page_size": 1}, is_mixed),
    "pages of 16": Way({"page_size": 16}, is_mixed),
    "no prefix cache": Way({"disable_radix_cache": True}, lambda rig: rig.scheduler.tree.total_pages == 0),
    "longest prefix first": Way(
        {"schedule_policy": "lpm", "max_running_requests": 3}, lambda rig: max(s.decodes for s in rig.shapes) == 3
    ),
    "retraction": Way(TIGHT, retracts, every=0),
    "retraction, small chunks": Way({"max_total_tokens": 150, "chunked_prefill_size": 7, "page_size": 1}, retracts),
    "overlap": Way({"overlap": True}, is_mixed),
    "overlap, chunks of 7": Way({"overlap": True, "chunked_prefill_size": 7}, is_mixed),
    "overlap, retraction": Way({"overlap": True, **TIGHT}, retracts, every=0),
    "graphs": Way({"cuda_graph_bs": BUCKETS}, pads, every=1),
    "graphs, overlap": Way({"cuda_graph_bs": BUCKETS, "overlap": True}, pads, every=1),
    "graphs, overlap, retraction": Way(
        {"cuda_graph_bs": BUCKETS, "overlap": True, "page_size": 1, **TIGHT}, retracts, every=0
    ),
}
