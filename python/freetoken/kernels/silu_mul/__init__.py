"""The SwiGLU activation ``silu(gate) * up``, and ``x * sigmoid(gate)`` of gated attention."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.silu_mul import reference


class SiluMul:
    """The op with its implementation bound once: ``act(gate_up [T, 2F]) -> [T, F]``, as :func:`reference.silu_mul`.

    sgl-kernel has no :meth:`sigmoid_mul`: the kernel here stands in.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._sigmoid = reference.sigmoid_mul
        if choice.impl == "reference":
            self._call = reference.silu_mul
        elif choice.impl == "sgl_kernel":
            from freetoken.kernels import sgl
            from freetoken.kernels.silu_mul import triton

            self._call, self._sigmoid = sgl.silu_mul, triton.sigmoid_mul
        else:
            from freetoken.kernels.silu_mul import triton

            self._sigmoid = triton.sigmoid_mul
            self._fused = triton.silu_mul
            self._call = self._check if choice.impl == "check" else triton.silu_mul

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._call(gate_up)

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``[T, F]``, as :func:`reference.sigmoid_mul`; rows of any stride."""
        out = self._sigmoid(x, gate)
        if self.choice.impl == "check":
            checking.refuse_capture("silu_mul", self.choice.flag)
            checking.require_close("silu_mul", "the gated output", out, reference.sigmoid_mul(x, gate))
        return out

    def _check(self, gate_up: torch.Tensor) -> torch.Tensor:
        checking.refuse_capture("silu_mul", self.choice.flag)
        actual = self._fused(gate_up)
        checking.require_close("silu_mul", "the output", actual, reference.silu_mul(gate_up))
        return actual
