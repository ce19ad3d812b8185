"""The runner as a whole on random weights: replay against eager, and every way to run a step against the others."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runners import (
    GEOMETRY,
    GPU,
    HYBRID,
    MODEL_SIZES,
    PACKED,
    PACKED_27B_LAYERS,
    QWEN3_5_27B_LAYERS,
    QWEN3_8B_LAYERS,
    generate,
    generate_with,
    make_config,
    prompts_of,
)

from freetoken import environ
from freetoken.kernels.checking import relative_rms
from freetoken.models.registry import MODELS, find
from freetoken.runner.model_runner import ModelRunner
from freetoken.scheduler.scheduler import Scheduler

SIZES = [
    pytest.param({}, id="small"),
    pytest.param(HYBRID, id="hybrid"),
    pytest.param(QWEN3_8B_LAYERS, id="8b", marks=pytest.mark.gpu),
    pytest.param(QWEN3_5_27B_LAYERS, id="hybrid 27b", marks=pytest.mark.gpu),
    pytest.param(PACKED, id="packed", marks=pytest.mark.gpu),
    pytest.param(PACKED_27B_LAYERS, id="packed 27b", marks=pytest.mark.gpu),
]
FAMILIES = pytest.mark.parametrize("geometry", SIZES[:2])
WITH_TABLES = "Qwen4ExpModel"
"""Its n-gram tables want a checkpoint: ``tests/e2e/test_qwen4_exp.py`` serves it with graphs and without."""


def state_tensors(runner: ModelRunner) -> list[torch.Tensor]:
    """Every layer's states, all slots but the one for padding, which anything may be left in."""
    states = runner.states
    if states is None:
        return []
    return [states.layer(spec.name, layer)[:-1] for spec in states.specs for layer in range(spec.layers)]


def give_pages(runner: ModelRunner, count: int) -> None:
    """Six pages of its own for each of the first rows."""
    for row in range(count):
        pages = torch.arange(1 + 6 * row, 7 + 6 * row, dtype=torch.int32, device=runner.device)
        runner.page_table[row, :6] = pages


def fill(runner: ModelRunner) -> None:
    """Noise for all keys, values and states."""
    runner.kv.storage.normal_()
    for state in state_tensors(runner):
        state.normal_()


def replay_beside_eager(runner: ModelRunner, count: int, rng: np.random.Generator, other: ModelRunner | None) -> None:
    """One replay with fresh inputs against the same padded batch run eagerly from the same states, and against ``other``."""
    graphs = runner.graphs
    assert graphs is not None
    rows = rng.permutation(count)
    positions = rng.integers(0, 90, count)
    slots = (1 + 6 * rows + positions // 16) * 16 + positions % 16
    runner._last_ids.copy_(torch.from_numpy(rng.integers(0, 999, len(runner._last_ids))))
    before, keys = [state.clone() for state in state_tensors(runner)], runner.kv.storage.clone()
    replayed, _ = graphs.replay(rows, positions, slots, (positions + 1).astype(np.int32))
    replayed = replayed.clone()
    after = [state.clone() for state in state_tensors(runner)]
    for state, kept in zip(state_tensors(runner), before):
        state.copy_(kept)
    batch = graphs._batches[graphs.bucket(count)]
    runner.attention.plan(batch)
    eager = runner._decode_logits(batch)[:count]
    assert torch.isfinite(replayed).all()
    assert torch.equal(replayed, eager)
    assert all(map(torch.equal, after, state_tensors(runner)))
    assert not any(map(torch.equal, after, before))
    if other is not None:
        other.kv.storage.copy_(keys)
        other._last_ids.copy_(runner._last_ids)
        for state, kept in zip(state_tensors(other), before):
            state.copy_(kept)
        other.attention.plan(batch)
        error = relative_rms(replayed, other._decode_logits(batch)[:count])
        assert error < (0.05 if GPU else 1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 19])
@pytest.mark.parametrize("geometry", SIZES)
def test_replay_equals_eager_bit_for_bit(geometry: dict[str, object], count: int, tmp_path: Path) -> None:
    config = make_config(tmp_path, (1, 2, 4, 8, 16, 24), geometry)
    runner = ModelRunner(config)
    generate(runner, config, prompts_of(count, count), 2)
    rng = np.random.default_rng(count)
    with torch.inference_mode():
        fill(runner)
        give_pages(runner, count)
        for _ in range(3):
            replay_beside_eager(runner, count, rng, None)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gpu] if GPU else []) for name in sorted(MODEL_SIZES)]
)
def test_replays_of_every_model_do_not_need_what_is_kept_between_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between replays other prompts and batches pass through the model, so that tables, plans and scratch memory are evicted and
    made anew; the same model without fused kernels stands beside it."""
    config = make_config(tmp_path, (1, 4), MODEL_SIZES[name])
    runner = ModelRunner(config)
    for row in environ.TABLE:
        if row.kind == "kernel":
            monkeypatch.setenv(row.name, "0")
    plain = ModelRunner(dataclasses.replace(config, cuda_graph_bs=()))
    assert all(choice.impl == "reference" for choice in plain.model.kernel_choices())
    rng = np.random.default_rng(7)
    for turn in range(2):
        # Prompts beside decodes, eagerly, and batches that no bucket holds.
        generate(runner, config, prompts_of(5 + turn, turn), 2)
        gc.collect()
        with torch.inference_mode():
            fill(runner)
            give_pages(runner, 3)
            replay_beside_eager(runner, 3, rng, plain)


def test_every_architecture_has_a_size() -> None:
    served = {find(str({**GEOMETRY, **size}["architectures"][0])).class_name for size in MODEL_SIZES.values()}
    assert served | {WITH_TABLES} == {entry.class_name for entry in MODELS}


@FAMILIES
@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_overlap_and_page_layout_do_not_change_the_text(
    geometry: dict[str, object], overlap: bool, tmp_path: Path
) -> None:
    prompts = prompts_of(11, 1)
    plain = make_config(tmp_path, (), geometry, overlap=False)
    expected = generate(ModelRunner(plain), plain, prompts, 12)
    graphed = make_config(tmp_path, (1, 2, 4, 8, 16), geometry, overlap=overlap)
    runner = ModelRunner(graphed)
    found = generate(runner, graphed, prompts, 12)
    replays, misses = runner.graph_counts()
    assert sum(replays.values()) > 0 and misses == 0
    if GPU:
        # Other batch sizes choose other matrix kernels, so near ties may fall differently.
        same = sum(a == b for ours, theirs in zip(found, expected) for a, b in zip(ours, theirs))
        assert same >= 0.9 * 11 * 12
    else:
        assert found == expected


@FAMILIES
def test_a_prefix_hit_gives_the_text_of_a_cold_start(geometry: dict[str, object], tmp_path: Path) -> None:
    """Two prompts of 300 tokens, then both again with other ends; states of the hits were overwritten in between."""
    config = make_config(tmp_path, (1, 2, 4), geometry, overlap=True)
    runner = ModelRunner(config)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 999, 300).tolist() for _ in range(2)]
    longer = [[*prompt, index, 5, 7] for index, prompt in enumerate(prompts)]
    cold = [generate(runner, dataclasses.replace(config, radix_cache=False), [prompt], 16)[0] for prompt in longer]
    scheduler = Scheduler(config, runner, check_invariants=True)
    generate_with(scheduler, prompts, 4)
    generate_with(scheduler, prompts_of(5, 2), 4)
    warm = [generate_with(scheduler, [prompt], 16)[0] for prompt in longer]
    assert scheduler.stats().cached_tokens >= 2 * 288
    assert scheduler.stats().state_hits >= (2 if runner.has_state else 0)
    same = sum(a == b for ours, theirs in zip(warm, cold) for a, b in zip(ours, theirs))
    assert same >= 24 if GPU else warm == cold


@pytest.mark.parametrize("count", [1, 3])
def test_packed_weights_replay_as_eager(count: int, tmp_path: Path) -> None:
    """Without a GPU: the buckets and buffers of packed layers, of which each step makes quantised inputs anew."""
    test_replay_equals_eager_bit_for_bit(PACKED, count, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [*SIZES[:2], pytest.param(PACKED, id="packed")])
def test_a_step_never_waits_for_the_gpu(geometry: dict[str, object], tmp_path: Path) -> None:
    """Launching decode and prefill steps reads nothing back, not even off checkpoints: only collecting does."""
    config = make_config(tmp_path, (1, 2, 4), geometry, overlap=True)
    runner = ModelRunner(config)
    long = [np.random.default_rng(9).integers(0, 999, 300).tolist()]
    generate(runner, config, [*prompts_of(3, 0), *long], 4)
    launch, modes = runner.launch, []

    def watched(batch: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            modes.append(bool(batch.prefills))  # type: ignore[attr-defined]
            return launch(batch)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = watched  # type: ignore[method-assign,assignment]
    scheduler = Scheduler(config, runner, check_invariants=True)
    for prompts in (prompts_of(3, 7), long, long):
        generate_with(scheduler, prompts, 6)
    assert scheduler.stats().cached_tokens > 0
    assert True in modes and False in modes
