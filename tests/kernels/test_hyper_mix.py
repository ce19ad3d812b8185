"""Hyper-connections: the reference against scalar Python, and the kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.hyper_mix import HyperMix, reference

triton = pytest.importorskip("freetoken.kernels.hyper_mix.triton", exc_type=ImportError)

EPS = 1e-6
SHAPES = [(3, 4, 40), (1, 2, 1), (2, 3, 257), (5, 2, 64), (0, 4, 8)]


def inputs(tokens: int, streams: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Output and weights of the write-back as views into wider matrices."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(DEVICE, dtype)

    return {
        "residual": 2 * draw(tokens, streams * hidden),
        "pending": (draw(tokens, hidden + 3)[:, :hidden], 4 * draw(tokens, streams + 5)[:, 2 : 2 + streams]),
        "weight": (torch.rand(streams, hidden) + 0.5).to(DEVICE),
        "gate": draw(tokens, streams * hidden),
        "low": 3 * draw(tokens, hidden + 2)[:, :hidden],
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_reference_is_the_scalar_rule() -> None:
    given = inputs(2, 3, 5, torch.float32)
    y, inject = given["pending"]
    added = given["residual"].clone()
    reference.add(added, y, inject)
    normed = reference.norm(added, given["weight"], EPS)
    mixed, squashed = reference.mix(normed, given["gate"], 3), reference.squash(given["low"], 3)
    for t in range(2):
        total = [0.0] * 5
        for s in range(3):
            row = [
                float(given["residual"][t, 5 * s + j]) + 2 * sigmoid(float(inject[t, s]) / 3) * float(y[t, j])
                for j in range(5)
            ]
            root = math.sqrt(sum(x * x for x in row) / 5 + EPS)
            for j in range(5):
                assert float(added[t, 5 * s + j]) == pytest.approx(row[j], rel=1e-5, abs=1e-6)
                normal = row[j] / root * float(given["weight"][s, j])
                assert float(normed[t, 5 * s + j]) == pytest.approx(normal, rel=1e-5, abs=1e-6)
                total[j] += sigmoid(float(given["gate"][t, 5 * s + j])) * normal / 3
        assert mixed[t].tolist() == pytest.approx(total, rel=1e-5, abs=1e-6)
        low = [float(x) / 3 for x in given["low"][t]]
        assert squashed[t].tolist() == pytest.approx([x * sigmoid(x) for x in low], rel=1e-5, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_on_a_gpu_in_the_published_size(tokens: int) -> None:
    op = HyperMix(choice("hyper_mix", "check"))
    given = inputs(tokens, 4, 2560, torch.bfloat16)
    normed = op.norm(given["residual"], given["pending"], given["weight"], EPS)
    op.add(given["residual"], given["pending"])
    op.mix(normed, given["gate"], 4)
    op.squash(given["low"][:, :320], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "streams", "hidden"), SHAPES)
def test_kernels(tokens: int, streams: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(tokens, streams, hidden, dtype)
    results = []
    for impl in ("triton", "reference"):
        op = HyperMix(choice("hyper_mix", impl))
        alone, residual = given["residual"].clone(), given["residual"].clone()
        with poisoned_outputs(monkeypatch):
            first = op.norm(residual, None, given["weight"], EPS)
            assert torch.equal(residual, given["residual"])
            normed = op.norm(residual, given["pending"], given["weight"], EPS)
            op.add(alone, given["pending"])
            mixed, squashed = op.mix(first, given["gate"], streams), op.squash(given["low"], streams)
        assert torch.equal(alone, residual)
        results.append((first, residual, normed, mixed, squashed))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == dtype and actual.shape == expected.shape and actual.is_contiguous()
        assert relative_rms(actual, expected) <= checking.RELATIVE_RMS[dtype]


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op = HyperMix(choice("hyper_mix", "check"))
    given = inputs(2, 2, 8, torch.float32)
    calls = {
        "add": lambda: op.add(given["residual"].clone(), given["pending"]),
        "norm": lambda: op.norm(given["residual"].clone(), given["pending"], given["weight"], EPS),
        "mix": lambda: op.mix(given["residual"], given["gate"], 2),
        "squash": lambda: op.squash(given["low"], 2),
    }
    wrong = {
        "add": lambda x, *_: x.add_(5),
        "norm": lambda x, *_: x + 5,
        "mix": lambda x, *_: x[:, :8] + 5,
        "squash": lambda x, *_: x + 5,
    }
    for name, call in calls.items():
        call()
        with monkeypatch.context() as patch:
            patch.setattr(reference, name, wrong[name])
            with pytest.raises(KernelCheckError):
                call()
