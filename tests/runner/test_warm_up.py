"""What runs before the first request: all that fits, nothing that shows afterwards, and on a GPU every kernel that a client needs."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runners import HYBRID, PACKED, generate, make_config, prompts_of

from freetoken.errors import StartupError
from freetoken.kernels.host_kernel import HostKernel
from freetoken.messages import AddRequest
from freetoken.runner.model_runner import ModelRunner
from freetoken.runner.warm_up import GREEDY, SAMPLINGS, batches, plan, powers, warm_up
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler.scheduler import Scheduler

FAMILIES = pytest.mark.parametrize(
    "geometry", [pytest.param({}, id="dense"), pytest.param(HYBRID, id="hybrid"), pytest.param(PACKED, id="packed")]
)


def quiet(phase: str, done: int, total: int, unit: str) -> None:
    assert phase == "warming up" and 0 <= done <= total


def test_powers() -> None:
    assert powers(0) == [] and powers(1) == [1] and powers(4) == [1, 2, 4] and powers(6) == [1, 2, 4, 6]


def test_a_plan_by_hand() -> None:
    steps = plan(prefill_tokens=12, chunk_tokens=11, context=40, page_size=4, num_pages=11, rows=3, largest_graph=2)
    lone = [step.prompts[0] for step in steps if step.rows == 1 and step.sampling == GREEDY]
    assert lone == [(0, n) for n in (1, 2, 3, 4, 5, 8, 9, 12)] + [(11, 5), (27, 5), (35, 5)]
    assert [step.sampling for step in steps if step.sampling != GREEDY] == list(SAMPLINGS)
    mixed = [(step.decodes, [length for _, length in step.prompts]) for step in steps if step.rows > 1]
    assert mixed == [*((1, [n]) for n in (1, 2, 4, 8, 11)), (0, [5, 5]), (1, [5, 5]), (2, [5]), (3, [])]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([1, 4, 16, 64]),
    st.integers(2, 700),
    st.integers(1, 70),
    st.integers(0, 70),
)
def test_steps_fit(prefill: int, context: int, page_size: int, pages: int, rows: int, graphs: int) -> None:
    sizes: dict[str, Any] = {"page_size": page_size, "num_pages": pages, "rows": rows, "largest_graph": graphs}
    steps = plan(prefill_tokens=prefill, chunk_tokens=prefill // 2 + 1, context=context, **sizes)
    assert min(prefill, context, (pages - 1) * page_size) in [s.prefill_tokens for s in steps]
    for step, batch in zip(steps, batches(steps, page_size=page_size, vocab=50)):
        reqs = [s.req for s in batch.slices]
        taken = [page for req in reqs for page in req.pages]
        assert len(set(taken)) == len(taken) and all(0 < page < pages for page in taken)
        assert sorted(req.row for req in reqs) == list(range(len(reqs))) and len(reqs) <= rows
        assert batch.num_tokens - step.decodes == step.prefill_tokens <= prefill
        for s in batch.slices:
            assert s.start + s.length <= min(context, len(s.req.pages) * page_size)
            assert all(0 <= token < 50 for token in s.req.ids)


@FAMILIES
def test_nobody_sees_it(geometry: dict[str, object], tmp_path: Path) -> None:
    """A runner says the same behind it as one without."""
    config = make_config(tmp_path, (1, 2, 4), geometry, max_prefill_tokens=256)
    prompts = prompts_of(6, 3)
    expected = generate(ModelRunner(config), config, prompts, 9)
    runner = ModelRunner(config)
    before = runner.graph_counts()
    warm_up(runner, quiet)
    assert runner.graph_counts() == before
    assert torch.isfinite(runner.kv.storage.float()).all()
    assert generate(runner, config, prompts, 9) == expected


@pytest.mark.parametrize("context", [2, 5, 6])
def test_short_contexts(context: int, tmp_path: Path) -> None:
    runner = ModelRunner(make_config(tmp_path, (), HYBRID, context_length=context, page_size=1))
    warm_up(runner, quiet)
    assert torch.isfinite(runner.kv.storage).all()


def test_memory_that_does_not_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(make_config(tmp_path, ()))

    def launch(batch: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setattr(runner, "launch", launch)
    with pytest.raises(StartupError, match=r"warming up with 1 requests, 1 tokens and a context of 1; lower --mem"):
        warm_up(runner, quiet)


@pytest.mark.gpu
@FAMILIES
def test_no_kernel_is_compiled_for_a_client(
    geometry: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    config = dataclasses.replace(
        make_config(tmp_path, (1, 2, 4, 8, 16, 24), geometry), max_prefill_tokens=1024, chunked_prefill_size=1024
    )
    runner = ModelRunner(config)
    # What other tests had compiled in this process would tell nothing.
    for kernel in gc.get_objects():
        if isinstance(kernel, HostKernel):
            kernel._known.clear()
            kernel.function.device_caches.clear()
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *_, fn, **__: compiled.append(fn.name))
    warm_up(runner, quiet)
    assert compiled
    compiled.clear()
    scheduler = Scheduler(config, runner, check_invariants=True)
    asked = [
        SamplingParams(max_new_tokens=5, ignore_eos=True, temperature=0.0),
        SamplingParams(max_new_tokens=9, ignore_eos=True, top_p=0.9),
        SamplingParams(max_new_tokens=7, ignore_eos=True, top_k=50, min_p=0.01, frequency_penalty=0.1),
        SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=2),
    ]
    for turn, many in enumerate((1, 3, 1, 9, 24, 40)):
        for index, ids in enumerate(prompts_of(many, turn)):
            length = (17 * turn + 3 * index) % 7 * len(ids) + 1
            scheduler.add(AddRequest(f"{turn} {index}", (ids * 8)[:length], asked[(turn + index) % len(asked)]))
            scheduler.step()
        while scheduler.has_work:
            scheduler.step()
    assert not compiled, compiled
