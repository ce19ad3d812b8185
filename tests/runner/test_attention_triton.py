"""The Triton backend as the runner calls it (in Triton's interpreter where there is no GPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from freetoken.errors import StartupError
from runner.attention_batches import BOUND, DEVICE, build, captured, load, make_case, relative_rms

MIXED = [((), [(5, 20), (0, 3)]), ((33, 1), []), ((17, 90, 16), [(31, 18), (0, 7)])]


@pytest.mark.parametrize(("decodes", "prefills"), MIXED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed(decodes: tuple[int, ...], prefills: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = make_case(decodes, prefills, heads=6, kv_heads=2, head_dim=64, dtype=dtype, device=DEVICE, num_layers=2)
    backend = build(case, "triton")
    backend.plan(case.fb)
    for layer in range(2):
        got = backend.forward(layer, case.q, case.fb)
        assert got.dtype == dtype and got.shape == (case.fb.num_tokens, 6 * 64)
        assert relative_rms(got, case.expected(layer)) < BOUND[dtype]


def test_awkward_query_strides() -> None:
    case = make_case((9,), [(0, 6)], device=DEVICE)
    backend = build(case, "triton")
    backend.plan(case.fb)
    wide = torch.full((7, 4, 17), float("nan"), device=DEVICE)
    wide[..., :16] = case.q
    assert relative_rms(backend.forward(0, wide[..., :16], case.fb), case.expected()) < BOUND[torch.float32]


def test_eager_and_captured_agree_bit_for_bit() -> None:
    """The launch of a decode depends on the batch size and the table's width, not on the lengths at hand."""
    case = make_case((20, 9, 70), max_pages=8, device=DEVICE)
    backend = build(case, "triton")
    backend.plan(case.fb)
    eager = backend.forward(0, case.q, case.fb)
    graph = captured(case)
    backend.plan(graph.fb)
    assert torch.equal(eager, backend.forward(0, graph.q, graph.fb))


def test_refusals() -> None:
    case = captured(make_case((), [(0, 3)], device=DEVICE))
    with pytest.raises(ValueError, match="decodes only"):
        build(case, "triton").plan(case.fb)
    with pytest.raises(StartupError, match="multiple of 8"):
        build(make_case((3,), head_dim=12, device=DEVICE), "triton")


def test_info() -> None:
    info = build(make_case((3,), device=DEVICE), "triton").info()
    assert info["name"] == "triton" and info["decode_splits"] >= 1 and info["workspace_bytes"] >= 0


def _capture(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
    """The output of ``step`` and what renews it: a CUDA graph's replay, or the same Python again without a GPU."""
    out = step()
    if DEVICE == "cpu":
        return out, lambda: out.copy_(step())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return out, graph.replay


def test_replay_follows_its_buffers() -> None:
    """Captured once, replayed with other lengths, rows, pages and queries: each time the bits of the eager call."""
    size: dict[str, Any] = {"head_dim": 16, "dtype": torch.float32}
    if DEVICE == "cuda":
        size = {"head_dim": 128, "dtype": torch.bfloat16}
    size.update(heads=8, kv_heads=2, device=DEVICE, max_pages=6)
    batches = [(20, 90, 70, 1), (1, 1, 1, 1), (96, 64, 65, 95)]
    held = captured(make_case(batches[0], spare_pages=60, **size))
    backend = build(held, "triton")
    backend.plan(held.fb)
    out, replay = _capture(lambda: backend.forward(0, held.q, held.fb))
    for seed, lens in enumerate(batches):
        case = make_case(lens, seed=seed, **size)
        load(held, case)
        out.fill_(float("nan"))
        replay()
        backend.plan(case.fb)
        assert torch.equal(out, backend.forward(0, case.q, case.fb))
        assert relative_rms(out, case.expected()) < BOUND[size["dtype"]]
