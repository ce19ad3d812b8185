"""Helpers of the kernel tests: outputs that start poisoned, and choices without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from freetoken import hardware
from freetoken.kernels.dispatch import Choice

DEVICE = "cuda" if hardware.probe().usable_gpu else "cpu"


@contextmanager
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, uninitialised float tensors hold NaN, so that a hole left by a kernel shows."""
    with monkeypatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, _poisoning(getattr(torch, name)))
        patch.setattr(torch.Tensor, "new_empty", _poisoning(torch.Tensor.new_empty))
        yield


def _poisoning(allocate: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return wrapped


def choice(op: str, impl: str) -> Choice:
    """A decision made by the test instead of by the machine."""
    return Choice(op, f"FREETOKEN_{op.upper()}", impl, "the test says so")
