from __future__ import annotations

import dataclasses

import pytest
import torch

from freetoken.errors import StartupError
from freetoken.runner import attention_torch
from freetoken.runner.attention import AttentionBackend
from runner.attention_batches import BOUND, Case, build, captured, load, make_case, relative_rms


def run(case: Case, backend: AttentionBackend) -> torch.Tensor:
    backend.plan(case.fb)
    return backend.forward(0, case.q, case.fb)


DECODES = [(1,), (15,), (16,), (17,), (1, 16, 33, 17, 64), (40, 40, 40), (7, 100, 7, 99)]
PREFILLS = [[(0, 1)], [(0, 16), (0, 17)], [(16, 5), (0, 33), (15, 1)], [(63, 40)]]


@pytest.mark.parametrize("decodes", DECODES)
def test_decode(decodes: tuple[int, ...]) -> None:
    case = make_case(decodes, heads=6, kv_heads=2)
    assert relative_rms(run(case, build(case)), case.expected()) < BOUND[torch.float32]


@pytest.mark.parametrize("prefills", PREFILLS)
def test_prefill(prefills: list[tuple[int, int]]) -> None:
    case = make_case((), prefills, heads=6, kv_heads=2)
    assert relative_rms(run(case, build(case)), case.expected()) < BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), [(3, 3, 64, 1), (9, 3, 64, 16), (8, 2, 80, 64), (14, 2, 128, 16), (8, 1, 16, 16)])  # fmt: skip
def test_mixed_shapes(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    case = make_case(
        (1, 70, 33),
        [(0, 20), (31, 18)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seed=heads,
    )
    got = run(case, build(case))
    assert got.dtype == dtype and got.shape == (case.fb.num_tokens, heads * head_dim)
    assert relative_rms(got, case.expected()) < BOUND[dtype]


def test_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers of few sequences and masks of few queries join into the same answer."""
    monkeypatch.setattr(attention_torch, "CPU_GATHER_BYTES", 40 * 2 * 2 * 16 * 4)
    monkeypatch.setattr(attention_torch, "MASK_ELEMENTS", 200)
    case = make_case((5, 40, 17, 3, 90, 16), [(30, 19), (0, 50)])
    assert relative_rms(run(case, build(case)), case.expected()) < BOUND[torch.float32]


def test_every_layer_reads_its_own_pages() -> None:
    case = make_case((20, 9), [(3, 6)], num_layers=3)
    backend = build(case)
    backend.plan(case.fb)
    for layer in range(3):
        got = backend.forward(layer, case.q, case.fb)
        assert relative_rms(got, case.expected(layer)) < BOUND[torch.float32]


def test_scale() -> None:
    case = make_case((20, 9), [(3, 6)])
    case = dataclasses.replace(case, scale=0.7)
    assert relative_rms(run(case, build(case, scale=0.7)), case.expected()) < BOUND[torch.float32]


def test_empty_batch() -> None:
    case = make_case((), [(0, 1)])
    fb = dataclasses.replace(case.fb, num_prefills=0, input_ids=case.fb.input_ids[:0])
    backend = build(case)
    backend.plan(fb)
    assert backend.forward(0, case.q[:0], fb).shape == (0, case.num_heads * 16)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_captured_batch_follows_its_tensors(on_cpu: bool) -> None:
    """One plan, then replays with other rows and lengths in the same buffers; ``False``: lengths are never read back."""
    held = captured(make_case((20, 9, 33), num_layers=2, max_pages=5, spare_pages=30))
    backend = build(held)
    backend._on_cpu = on_cpu
    backend.plan(held.fb)
    for seed, lens in enumerate([(20, 9, 33), (1, 70, 16), (5, 5, 5)]):
        case = make_case(lens, num_layers=2, max_pages=5, seed=seed)
        load(held, case)
        for layer in range(2):
            got = backend.forward(layer, held.q, held.fb)
            assert relative_rms(got, case.expected(layer)) < BOUND[torch.float32]


def test_captured_prefill_is_refused() -> None:
    case = captured(make_case((), [(0, 3)]))
    backend = build(case)
    backend.plan(case.fb)
    with pytest.raises(ValueError, match="decodes only"):
        backend.forward(0, case.q, case.fb)


@pytest.mark.parametrize(("name", "heads", "message"), [("fast", 4, "unknown attention backend"), ("torch", 3, "cannot share")])  # fmt: skip
def test_bad_arguments(name: str, heads: int, message: str) -> None:
    case = make_case((3,))
    with pytest.raises(StartupError, match=message):
        build(case, name, num_heads=heads)


def test_info() -> None:
    case = make_case((3,))
    assert build(case).info()["name"] == "torch"
