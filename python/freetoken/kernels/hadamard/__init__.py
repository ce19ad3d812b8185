"""Activations for weights that are stored rotated: norm or activation function, signs, Walsh-Hadamard rotation, quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.hadamard import reference
from freetoken.kernels.hadamard.config import LARGEST_BLOCK, RotateConfig, candidates, pick_config, tile_of
from freetoken.kernels.hadamard.reference import Activation, Normed, rotate, unrotate
from freetoken.kernels.pq2_gemv.activation import QuantisedActivation

__all__ = [
    "Activation",
    "Hadamard",
    "Normed",
    "RotateConfig",
    "candidates",
    "pick_config",
    "rotate",
    "tile_of",
    "unrotate",
]

CHECK_BOUND = 2e-3
"""Largest relative RMS of quantised activations against the reference: sums in another order move a few integers by one."""


class Hadamard:
    """The op with its implementation bound once, shared by all layers of a model whose weights are two-bit.

    ``block`` is the rotation block (1: no rotation) and ``signs`` the signs by input width; a width without signs has all 1.
    Every producer takes ``group``: 32, 64 or 128 for a :class:`QuantisedActivation`, 0 for floats. Semantics and shapes are those
    of :mod:`reference`.
    """

    def __init__(self, choice: Choice, block: int = 1, signs: dict[int, torch.Tensor] | None = None) -> None:
        self.choice = choice
        self.block = block
        self.signs = signs or {}
        self._checked = choice.impl == "check"
        self._fused: Any = None
        if choice.impl != "reference" and block <= LARGEST_BLOCK:
            from freetoken.kernels.hadamard import triton

            self._fused = triton

    def rotate(self, x: torch.Tensor, group: int) -> Activation:
        """``x [T, width]``, rows of any stride, as it is."""
        signs = self.signs.get(x.shape[1])
        return self._run(
            lambda: reference.produce(x, signs, self.block, group),
            lambda: self._fused.rotate(x, signs, self.block, group),
        )

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        group: int,
        residual: torch.Tensor | None = None,
        *,
        plain: bool = False,
    ) -> Normed:
        """RMSNorm of ``x [T, H]``, or of ``x + residual``; contiguous."""
        signs = self.signs.get(x.shape[1])
        arguments = (x, weight, eps, signs, self.block, group, residual)
        if self._fused is None:
            return reference.norm(*arguments, plain=plain)
        actual: Normed = self._fused.norm(*arguments, plain=plain)
        if self._checked:
            expected = reference.norm(*arguments, plain=plain)
            self._compare(actual.activation, expected.activation)
            checking.require_close("hadamard", "the residual sum", actual.residual, expected.residual)
            if actual.plain is not None and expected.plain is not None:
                checking.require_close("hadamard", "the plain output", actual.plain, expected.plain)
        return actual

    def silu_mul(self, gate_up: torch.Tensor, group: int) -> Activation:
        """``silu(gate) * up`` of ``gate_up [T, 2F]``, gate first."""
        width = gate_up.shape[1] // 2
        gate, up, signs = gate_up[:, :width], gate_up[:, width:], self.signs.get(width)
        return self._run(
            lambda: reference.silu_mul(gate_up, signs, self.block, group),
            lambda: self._fused.rotate(gate, signs, self.block, group, kind="silu_mul", other=up),
        )

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor, group: int) -> Activation:
        """``x * sigmoid(gate)`` of ``[T, width]`` each, rows of any stride."""
        signs = self.signs.get(x.shape[1])
        return self._run(
            lambda: reference.sigmoid_mul(x, gate, signs, self.block, group),
            lambda: self._fused.rotate(x, signs, self.block, group, kind="sigmoid_mul", other=gate),
        )

    def gated_norm(self, o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int) -> Activation:
        """RMSNorm of each head of ``o [T, Hv, Dv]`` (contiguous) times ``silu(z)``, ``z [T, Hv * Dv]`` with rows of any stride."""
        signs = self.signs.get(z.shape[1])
        if weight.shape[0] & (weight.shape[0] - 1):
            return reference.gated_norm(o, z, weight, eps, signs, self.block, group)
        return self._run(
            lambda: reference.gated_norm(o, z, weight, eps, signs, self.block, group),
            lambda: self._fused.rotate(
                o.flatten(1), signs, self.block, group, kind="gated_norm", other=z, weight=weight, eps=eps
            ),
        )

    def unrotate(self, z: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows ``z [T, width]`` of a folded table as the model means them, in ``out_dtype`` (by default their type)."""
        signs = self.signs.get(z.shape[1])
        found = self._run(
            lambda: reference.unrotate(z, signs, self.block, out_dtype),
            lambda: self._fused.rotate(z, signs, self.block, 0, inverse=True, out_dtype=out_dtype),
        )
        assert isinstance(found, torch.Tensor)
        return found

    def _run(self, plain: Callable[[], Activation], fused: Callable[[], Activation]) -> Activation:
        if self._fused is None:
            return plain()
        actual = fused()
        if self._checked:
            self._compare(actual, plain())
        return actual

    def _compare(self, actual: Activation, expected: Activation) -> None:
        checking.refuse_capture("hadamard", self.choice.flag)
        if isinstance(actual, QuantisedActivation) and isinstance(expected, QuantisedActivation):
            checking.require_close(
                "hadamard", "the activation", actual.dequantise(), expected.dequantise(), CHECK_BOUND
            )
        elif isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
            checking.require_close("hadamard", "the activation", actual, expected)
