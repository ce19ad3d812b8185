"""N-gram embeddings in a served model: the scheduler over the runner, tables in every place, rows that cannot be read.

The model is a tiny Qwen3.5 whose residual passes through the embeddings before two of its layers. Serving one request at a time, whole
prompts, tables in memory, is what all else is held against.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model
from rig import Answer, Rig
from safetensors.torch import load_file

from freetoken.loader import checkpoint as checkpoint_module
from freetoken.loader.names import expected_tensors
from freetoken.models import registry
from freetoken.models.config import ModelConfig
from freetoken.models.decoder import Pass
from freetoken.models.layers import Placement
from freetoken.models.ple import PerLayerEmbeddings
from freetoken.models.ple_config import PleConfig
from freetoken.models.qwen3_5 import Qwen35Model
from freetoken.models.state import linear_attention_states, ple_states
from freetoken.runner import model_runner
from ple_checkpoint import table_tensors, write_safetensors

BOUNDARY = 7
BUCKETS = (1, 2, 4)
COUNT = 8
PAGE, LOST_PAGES = 4096, 7


class EmbeddedModel(Qwen35Model):
    """One residual stream, and n-gram embeddings at the entry of the layers that the configuration names."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, **options)
        assert config.ple is not None
        place = Placement(self.dtype, self.device)
        with torch.inference_mode():
            self.ple: PerLayerEmbeddings = PerLayerEmbeddings(config.ple, self.ops.gemm, place, eps=config.rms_norm_eps)

    def modules(self) -> Any:
        yield from super().modules()
        yield from self.ple.modules()

    @torch.inference_mode()
    def forward(self, fb: Any, kv: Any, backend: Any, states: Any = None) -> torch.Tensor:
        rope = self.ops.rope.prepare(fb.positions, fb.out_slots, kv.page_size)
        step = Pass(fb, kv, rope, backend, states, self.prepare(fb))
        embedded = self.ple.begin(fb, states)
        x, residual = self.embedding(fb.input_ids), None
        for index, layer in enumerate(self.layers):
            if index in self.ple.layers:
                x, residual = self.ple.forward(index, x if residual is None else x + residual, embedded), None
            x, residual = layer.forward(x, residual, step)
        assert residual is not None
        return self.norm.add(x, residual)[0]


def geometry(model: ModelConfig) -> PleConfig:
    return PleConfig(
        layers=(0, 2),
        streams=1,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        boundary_id=BOUNDARY,
        embed_dim=128,
        heads_per_ngram=2,
        vocab_base=3000,
        divisible_by=8,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a tiny hybrid model, and beside them those of the embeddings with their tables."""
    path = make_tiny_model(
        tmp_path_factory.mktemp("ple") / "tiny", arch="qwen3_5", layer_pattern="lfl", num_layers=3, seed=11
    )
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    model = checkpoint_module.parse_hf_config(config, None, "tiny")
    with_ple = dataclasses.replace(model, ple=geometry(model))
    torch.manual_seed(5)
    for name, shape in expected_tensors(with_ple).items():
        if ".ple." in name:
            tensors[name] = torch.randn(shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
    for ordinal in range(2):
        table = torch.randn(with_ple.ple.table_rows(ordinal), with_ple.ple.row_width)
        tensors |= table_tensors(with_ple.ple, table, 4, ordinal=ordinal)
    (path / "model.safetensors").unlink()
    names = {name: "table.safetensors" if "ngram_embedding" in name else "rest.safetensors" for name in tensors}
    for file in set(names.values()):
        write_safetensors(path / file, {name: tensors[name] for name in tensors if names[name] == file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The architecture of the files means the model of this test."""
    parse = checkpoint_module.parse_hf_config

    def parse_with_ple(*arguments: Any, **options: Any) -> ModelConfig:
        model = parse(*arguments, **options)
        return dataclasses.replace(model, ple=geometry(model))

    entry = registry.find("Qwen3_5ForCausalLM")
    found = dataclasses.replace(
        entry,
        module=__name__,
        class_name="EmbeddedModel",
        state_specs=lambda model: (*linear_attention_states(model), *ple_states(model)),
    )
    monkeypatch.setattr(checkpoint_module, "parse_hf_config", parse_with_ple)
    for module in (registry, model_runner):
        monkeypatch.setattr(module, "find", lambda _: found)


def ids(count: int, seed: int) -> list[int]:
    """Ids of which one in six is the boundary."""
    draw = random.Random(seed)
    return [BOUNDARY if draw.random() < 1 / 6 else draw.randrange(384) for _ in range(count)]


def prompts() -> list[list[int]]:
    return [ids(count, seed) for seed, count in enumerate((9, 15, 1, 12))]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[Path], list[Answer]]:
    made: list[Answer] = []

    def get(path: Path) -> list[Answer]:
        if not made:
            rig = Rig(path, max_running_requests=1, disable_radix_cache=True, ple_table="gpu")
            made.extend(rig.serve(prompts(), max_new_tokens=COUNT, logprobs=0))
        return made

    return get


def same(answers: list[Answer], wanted: list[Answer]) -> None:
    for answer, right in zip(answers, wanted, strict=True):
        assert answer.finish is not None and answer.finish.kind == "length"
        assert answer.ids == right.ids
        assert answer.logprobs is not None and right.logprobs is not None
        for ours, theirs in zip(answer.logprobs, right.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpu, chunks of 2": (1, {"chunked_prefill_size": 2, "max_prefill_tokens": 2}),
    "pinned, chunks of 7, graphs": (2, {"ple_table": "pinned", "chunked_prefill_size": 7, "cuda_graph_bs": BUCKETS}),
    "mmap, graphs, overlap": (2, {"ple_table": "mmap", "cuda_graph_bs": BUCKETS, "overlap": True}),
    "mmap, retraction, pages of 1": (0, {"max_total_tokens": 42, "ple_table": "mmap", "page_size": 1, "overlap": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_do_not_depend_on_the_way(way: str, folder: Path, expected: Callable[[Path], list[Answer]]) -> None:
    wanted = expected(folder)
    every, options = WAYS[way]
    rig = Rig(folder, **options)
    assert rig.runner.info()["ple_table"]["kind"] == options.get("ple_table", "gpu")
    states = rig.runner.states
    assert states is not None
    with torch.inference_mode():
        states.layer("ple_history", 0).fill_(float("nan"))
        states.layer("ple_context", 0).fill_(BOUNDARY + 1)
    same(rig.serve(prompts(), every, max_new_tokens=COUNT, logprobs=0), wanted)
    if "retraction" in way:
        assert rig.retractions > 0


def test_prefix_hits_restore_ids_and_history(folder: Path) -> None:
    """Served again off the state at the end of the prompt, and off that of another prompt it parts from."""
    rig = Rig(folder, ple_table="mmap")
    prompt = ids(74, 9)
    (first,) = rig.serve([prompt], max_new_tokens=COUNT, logprobs=0)
    (again,) = rig.serve([prompt], max_new_tokens=COUNT, logprobs=0)
    assert (first.cached_tokens, again.cached_tokens) == (0, 72)
    same([again], [first])
    longer = [*prompt, 3, BOUNDARY, 5]
    (follow,) = rig.serve([longer], max_new_tokens=COUNT, logprobs=0)
    (plain,) = Rig(folder, disable_radix_cache=True).serve([longer], max_new_tokens=COUNT, logprobs=0)
    assert follow.cached_tokens == 72
    same([follow], [plain])


def test_a_failed_read_ends_its_request_alone(
    folder: Path, expected: Callable[[Path], list[Answer]], tmp_path: Path
) -> None:
    """The end of a table is cut off under a running server: who needs it gets one error, all others their text; nothing of the failed
    ones is in the prefix cache when the file is whole again."""
    long = ids(74, 9)
    wanted = [*Rig(folder).serve([long], max_new_tokens=COUNT, logprobs=0), *expected(folder)]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    table = copy / "table.safetensors"
    whole = table.read_bytes()
    rig = Rig(copy, ple_table="mmap", overlap=True, cuda_graph_bs=BUCKETS)
    for prompt in (long, *prompts()):
        rig.add(prompt, max_new_tokens=COUNT, logprobs=0)
    os.truncate(table, (len(whole) - 1) // PAGE * PAGE - LOST_PAGES * PAGE)
    rig.run()
    table.write_bytes(whole)
    answers = list(rig.answers.values())
    failed = [answer for answer in answers if answer.finish is not None and answer.finish.kind == "error"]
    assert answers[0] in failed and len(failed) < len(answers)
    assert any(answer.ids for answer in failed), "one failed while it was decoding"
    for answer, right in zip(answers, wanted, strict=True):
        if answer in failed:
            assert answer.finish is not None and (answer.finish.status, answer.finish.code) == (500, "step_failed")
            assert "n-gram table could not be read" in (answer.finish.message or "")
            assert answer.ids == right.ids[: len(answer.ids)]
        else:
            same([answer], [right])
    assert rig.scheduler.prefix.checkpoints.blocks.used_count == 0
    same(rig.serve([long, *prompts()], max_new_tokens=COUNT, logprobs=0), wanted)
