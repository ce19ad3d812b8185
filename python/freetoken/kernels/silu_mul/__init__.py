"""The SwiGLU activation: ``silu(gate) * up``."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.silu_mul import reference


class SiluMul:
    """The op with its implementation bound once: ``act(gate_up [T, 2F]) -> [T, F]``, as :func:`reference.silu_mul`."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        if choice.impl == "reference":
            self._call = reference.silu_mul
        elif choice.impl == "sgl_kernel":
            from freetoken.kernels import sgl

            self._call = sgl.silu_mul
        else:
            from freetoken.kernels.silu_mul import triton

            self._fused = triton.silu_mul
            self._call = self._check if choice.impl == "check" else triton.silu_mul

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._call(gate_up)

    def _check(self, gate_up: torch.Tensor) -> torch.Tensor:
        checking.refuse_capture("silu_mul", self.choice.flag)
        actual = self._fused(gate_up)
        checking.require_close("silu_mul", "the output", actual, reference.silu_mul(gate_up))
        return actual
