"""Large host tensors that the GPU reads or copies from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from freetoken.errors import StartupError
from freetoken.runner.memory import gib

MAPPED = 2
"""Flag of ``cudaHostRegister``: the GPU can address the memory itself."""


def allocate(
    shape: Sequence[int], dtype: torch.dtype, *, pinned: bool, what: str, advice: str, flags: int = 0
) -> torch.Tensor:
    """An uninitialised host tensor; :class:`StartupError` says for ``what`` there is no memory, and gives ``advice``.

    Page-locked by registration (with its ``flags``) where ``pinned``, as torch's own pinned memory is rounded up to a power of two bytes: give the locks
    up with :func:`release` before the tensor goes.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        host = torch.empty(tuple(shape), dtype=dtype)
    except RuntimeError:
        raise StartupError(f"the host has no {gib(nbytes)} for {what}; {advice}") from None
    if pinned and nbytes:
        code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, flags))
        if code:
            raise StartupError(f"the host cannot page-lock {gib(nbytes)} for {what} (CUDA error {code}); {advice}")
    return host


def release(side: torch.cuda.Stream, pointers: list[int]) -> None:
    """Give up page locks before the memory is freed, which another pool may be given; ``side`` is the stream that used it."""
    side.synchronize()
    for pointer in pointers:
        torch.cuda.cudart().cudaHostUnregister(pointer)
