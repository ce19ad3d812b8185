"""Programmatic dependent launch: a kernel may start while the one before it still drains.

A kernel compiled with ``EARLY`` lets the next one start at once (``gdc_launch_dependents``), and itself waits for the
kernels before it (``gdc_wait``) ahead of its first read of an activation and its first write; until then it may only read
weights. Kernels of others, launched in the ordinary way between ours, start when everything before them has ended.

A small product can run *under* a large one of the same input: the large kernel, compiled ``LATE``, lets the next start only after its
own wait, and the small one, compiled ``UNDER``, reads its input at once and waits ahead of its first write of the output. That is
right because a wait returns when all kernels before have ended and their writes have reached memory. Every program of the large kernel
is past its wait when the small one starts, so what the small one reads, past the L1 cache, is there. It cannot end before the large
kernel has, because the programs that write its output wait for that; so the next kernel's wait for it is one for both, and nothing is
overwritten that the large kernel, or one before it, still reads.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

EARLY_LAUNCH = True
"""Whether kernels start early where the GPU can do it."""

FIRST_CAPABILITY = (9, 0)


@functools.cache
def _cuda_capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; ``None`` for any other."""
    return _cuda_capability(device.index) if device.type == "cuda" else None


def early(tensor: torch.Tensor) -> bool:
    """Whether a kernel on this tensor's device is to be launched early."""
    return EARLY_LAUNCH and tensor.is_cuda and _cuda_capability(tensor.device.index) >= FIRST_CAPABILITY


SHARED_PERCENT = 25
"""How much of an SM's memory is to be shared memory where the rest is wanted as cache: room for many programs of few KB."""
_SHARED_MEMORY_CARVEOUT = 9
_hinted: set[int] = set()


def prefer_cache(compiled: Any) -> None:
    """Ask for a large L1 cache whenever a compiled kernel runs; once for each, and nothing for ``None`` (the interpreter).

    Without, an SM keeps the split that the last kernel with much shared memory needed (the driver's API calls it the preferred
    shared memory carveout).
    """
    handle = getattr(compiled, "function", None)
    if handle is None or handle in _hinted:
        return
    _hinted.add(handle)
    # A hint: an error would change nothing but the time.
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(handle), _SHARED_MEMORY_CARVEOUT, SHARED_PERCENT)
