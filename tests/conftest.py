"""Shared set-up: kernels run in Triton's interpreter where there is no GPU; tests that need one are skipped."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator

from freetoken import hardware

HAS_GPU = hardware.probe().usable_gpu
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    try:
        import torch
    except ImportError:
        return
    threads = int(os.environ.get("OMP_NUM_THREADS", "2"))
    torch.set_num_threads(max(1, threads // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(scope="session", autouse=True)
def _hang_up() -> None:
    """As where the tests were not started with nohup: processes that they start inherit it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A start inside a test sets the level of all logging; the next test has its own again."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what is red: a run that is cut short has no summary. Reports reach the process that prints, and workers' own not."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nred: {report.nodeid}", file=sys.__stderr__, flush=True)
