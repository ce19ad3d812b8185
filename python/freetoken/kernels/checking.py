"""Comparing a fused kernel with its reference while serving (flag value ``check``)."""

from __future__ import annotations

import torch

from freetoken.errors import FreetokenError

RELATIVE_RMS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative RMS of fused against reference, by the type both round their output to."""


class KernelCheckError(FreetokenError):
    """A fused kernel and its reference disagree, or a check was asked for where it cannot run."""


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of ``actual - expected`` over the RMS of ``expected``, in float64; absolute where ``expected`` is all zero.

    Empty tensors give 0. Reads the result on the host.
    """
    if expected.numel() == 0:
        return 0.0
    wide = expected.double()
    error = (actual.double() - wide).square().mean().sqrt()
    scale = wide.square().mean().sqrt()
    return float(torch.where(scale > 0, error / scale, error))


def refuse_capture(op: str, flag: str) -> None:
    """Raise :class:`KernelCheckError` while a CUDA graph is being captured: a check reads its verdict on the host."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise KernelCheckError(f"{flag}=check cannot check {op} inside a CUDA graph; add --disable-cuda-graph")


def require_close(op: str, what: str, actual: torch.Tensor, expected: torch.Tensor, bound: float | None = None) -> None:
    """Raise :class:`KernelCheckError` unless both agree within ``bound`` (default: by the type of ``expected``)."""
    limit = RELATIVE_RMS[expected.dtype] if bound is None else bound
    error = relative_rms(actual, expected)
    if not error <= limit:
        raise KernelCheckError(
            f"{op}: {what} differs from the reference by relative RMS {error:.3g}, bound {limit:.3g}"
        )
