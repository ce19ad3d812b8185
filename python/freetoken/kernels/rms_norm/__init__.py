"""RMSNorm, with the residual add where there is one."""

from __future__ import annotations

from typing import cast

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.rms_norm import reference


class RmsNorm:
    """The op with its implementation bound once: ``norm(x, weight, eps)`` or ``norm(x, weight, eps, residual)``.

    Semantics and shapes are those of :func:`reference.rms_norm`. With ``sgl_kernel`` the tensors ``x`` and ``residual``
    are overwritten, so a caller must use only what is returned.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        if choice.impl == "reference":
            self._call = reference.rms_norm
        elif choice.impl == "sgl_kernel":
            from freetoken.kernels import sgl

            self._call = sgl.rms_norm
        else:
            from freetoken.kernels.rms_norm import triton

            self._fused = triton.rms_norm
            self._call = self._check if choice.impl == "check" else triton.rms_norm

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``[T, H]`` normalised."""
        return cast(torch.Tensor, self._call(x, weight, eps))

    def add(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(normalised, x + residual)``."""
        return cast("tuple[torch.Tensor, torch.Tensor]", self._call(x, weight, eps, residual))

    def _check(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        checking.refuse_capture("rms_norm", self.choice.flag)
        expected = reference.rms_norm(x, weight, eps, residual)
        actual = self._fused(x, weight, eps, residual)
        if isinstance(actual, tuple) and isinstance(expected, tuple):
            checking.require_close("rms_norm", "the residual sum", actual[1], expected[1])
            checking.require_close("rms_norm", "the output", actual[0], expected[0])
        else:
            checking.require_close("rms_norm", "the output", cast(torch.Tensor, actual), cast(torch.Tensor, expected))
        return actual
