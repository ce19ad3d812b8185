"""Gates and single-token convolution of n-gram embeddings: kernels against references, which ``tests/models/test_ple.py`` holds
against scalar Python and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.ple_mix import PleMix, reference

triton = pytest.importorskip("freetoken.kernels.ple_mix.triton", exc_type=ImportError)

EPS = 1e-6


def gate_inputs(tokens: int, streams: int, hidden: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Projections in a wider matrix; one stream in four is small, so that gates lie near a half."""
    wide = torch.randn(tokens, (streams + 1) * hidden + 3).to(DEVICE, dtype)
    residual = (
        torch.randn(tokens, streams, hidden)
        * torch.tensor([1e-3, 1.0, 3.0, 0.1])[torch.randint(4, (tokens, streams, 1))]
    )
    norms = [(torch.rand(streams, hidden) + 0.5).to(DEVICE) for _ in range(3)]
    return (wide[:, : (streams + 1) * hidden], residual.flatten(1).to(DEVICE, dtype), *norms, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "streams", "hidden"), [(3, 4, 40), (1, 1, 1), (2, 3, 257), (5, 2, 64), (0, 2, 8)])
def test_gates(tokens: int, streams: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = gate_inputs(tokens, streams, hidden, dtype)
    with poisoned_outputs(monkeypatch):
        found = triton.gate(*arguments)
    for actual, expected in zip(found, reference.gate(*arguments), strict=True):
        assert actual.dtype == dtype and actual.shape == (tokens, streams * hidden)
        assert relative_rms(actual, expected) <= checking.RELATIVE_RMS[dtype]


def test_a_product_of_nothing_opens_half() -> None:
    projected, residual, *norms = gate_inputs(2, 2, 8, torch.float32)
    gated, _ = triton.gate(projected, torch.zeros_like(residual), *norms)
    torch.testing.assert_close(gated, 0.5 * projected[:, 16:].repeat(1, 2))


def decode_inputs(channels: int, width: int, dilation: int, dtype: torch.dtype) -> dict[str, Any]:
    """Positions before, at and past every tap; a pool with another layer beside, its unwritten entries NaN."""
    positions = torch.tensor([0, 1, dilation, (width - 1) * dilation - 1, (width - 1) * dilation, 100], device=DEVICE)
    slots = torch.tensor([4, 0, 6, 2, 1, 5], device=DEVICE)
    size = (width - 1) * dilation
    pool = torch.randn(8, 2, size, channels).to(DEVICE, dtype)
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        for entry in range(min(position, size), size):
            pool[slot, 1, entry] = float("nan")
    rows = [torch.randn(6, channels).to(DEVICE, dtype) for _ in range(3)]
    weight = torch.randn(width, channels).to(DEVICE, dtype)
    return {"rows": rows, "weight": weight, "pool": pool, "rest": (slots, positions, dilation)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("channels", "width", "dilation"), [(5, 4, 3), (600, 2, 2), (1024, 3, 4), (33, 4, 1)])
def test_decodes(channels: int, width: int, dilation: int, dtype: torch.dtype) -> None:
    given = decode_inputs(channels, width, dilation, dtype)
    results = []
    for call in (triton.decode, reference.decode):
        residual, gated, normed = (row.clone() for row in given["rows"])
        pool = given["pool"].clone()
        call(residual, gated, normed, given["weight"], pool[:, 1], *given["rest"])
        results.append((residual, pool))
    (actual, pool), (expected, wanted) = results
    assert actual.isfinite().all() and relative_rms(actual, expected) <= checking.RELATIVE_RMS[dtype]
    assert torch.equal(pool.nan_to_num(7), wanted.nan_to_num(7))
    assert torch.equal(pool[:, 0], given["pool"][:, 0]) and torch.equal(pool[[3, 7]], given["pool"][[3, 7]])


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op = PleMix(choice("ple_mix", "check"))
    gates, given = gate_inputs(2, 2, 8, torch.float32), decode_inputs(8, 4, 3, torch.float32)

    def decode() -> None:
        residual, gated, normed = (row.clone() for row in given["rows"])
        op.decode(residual, gated, normed, given["weight"], given["pool"].nan_to_num(0)[:, 1], *given["rest"])

    op.gate(*gates)
    decode()
    right = reference.gate
    monkeypatch.setattr(reference, "gate", lambda *a: tuple(part + 1 for part in right(*a)))
    with pytest.raises(KernelCheckError, match="the gated values"):
        op.gate(*gates)
    monkeypatch.setattr(reference, "decode", lambda residual, *_: residual.add_(5))
    with pytest.raises(KernelCheckError, match="the residual"):
        decode()
