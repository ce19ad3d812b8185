"""How kernels are launched: the hint about their memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from freetoken.kernels import launch


def test_a_large_cache_is_asked_for_once_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def set_attribute(handle: Any, attribute: int, percent: int) -> int:
        asked.append((handle.value, attribute, percent))
        return 0

    monkeypatch.setattr(launch.ctypes, "CDLL", lambda _: SimpleNamespace(cuFuncSetAttribute=set_attribute))
    monkeypatch.setattr(launch, "_hinted", set())
    for kernel in (SimpleNamespace(function=7), SimpleNamespace(function=7), None, SimpleNamespace(function=8)):
        launch.prefer_cache(kernel)
    assert asked == [(7, 9, launch.SHARED_PERCENT), (8, 9, launch.SHARED_PERCENT)]
