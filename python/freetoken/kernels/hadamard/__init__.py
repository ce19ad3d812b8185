"""Activations for weights that are stored rotated: norm or activation function, signs, Walsh-Hadamard rotation, quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.hadamard import reference
from freetoken.kernels.hadamard.config import LARGEST_BLOCK, RotateConfig, candidates, holds_row, pick_config, tile_of
from freetoken.kernels.hadamard.reference import Activation, Normed, Rotation, rotate, unrotate
from freetoken.kernels.pq2_gemv.weight import PQ2Weight

__all__ = [
    "Activation",
    "Hadamard",
    "Normed",
    "RotateConfig",
    "Rotation",
    "candidates",
    "pick_config",
    "rotate",
    "tile_of",
    "unrotate",
]

CHECK_BOUND = 2e-3
"""Largest relative RMS of quantised activations against the reference: sums in another order move a few integers by one."""


class Hadamard:
    """The op with its implementation bound once, shared by all layers of a model with two-bit weights.

    Every producer takes the :class:`Rotation` of the weights that its output goes to, and ``group``: 32, 64 or 128 for integers
    (:class:`freetoken.kernels.pq2_gemv.QuantisedActivation`, or the same in tiles), 0 for floats. Semantics and shapes are those of :mod:`reference`. ``config`` overrides the default
    settings of the kernels.
    """

    def __init__(self, choice: Choice, config: RotateConfig | None = None) -> None:
        self.choice = choice
        self._config = config
        self._checked = choice.impl == "check"
        self._fused: Any = None
        if choice.impl != "reference":
            from freetoken.kernels.hadamard import triton

            self._fused = triton

    def rotate(self, x: torch.Tensor, rotation: Rotation, group: int) -> Activation:
        """``x [T, width]``, rows of any stride, as it is."""
        how = (rotation.signs, rotation.block, group)
        return self._run(rotation, lambda: reference.produce(x, *how), lambda: self._launch(x, *how))

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rotation: Rotation,
        group: int,
        residual: torch.Tensor | None = None,
        *,
        plain: bool = False,
        beside: torch.Tensor | None = None,
    ) -> Normed:
        """RMSNorm of ``x [T, H]``, or of ``x + residual``; contiguous. With ``plain`` the normed input is returned, too, and with
        ``beside [N, H]`` the product of the two: one kernel where :meth:`joins` says so."""
        arguments = (x, weight, eps, rotation.signs, rotation.block, group, residual)
        if not self._fits(rotation) or (beside is not None and not self.joins(x, rotation)):
            return reference.norm(*arguments, plain=plain, beside=beside)
        actual: Normed = self._fused.norm(*arguments, plain=plain, beside=beside, config=self._config)
        if self._checked:
            expected = reference.norm(*arguments, plain=plain, beside=beside)
            self._compare(actual.activation, expected.activation)
            checking.require_close("hadamard", "the residual sum", actual.residual, expected.residual)
            if actual.plain is not None and expected.plain is not None:
                checking.require_close("hadamard", "the plain output", actual.plain, expected.plain)
            if actual.beside is not None and expected.beside is not None:
                bound = checking.RELATIVE_RMS[x.dtype]
                checking.require_close("hadamard", "the product beside", actual.beside, expected.beside, bound)
        return actual

    def joins(self, x: torch.Tensor, rotation: Rotation) -> bool:
        """Whether :meth:`norm` of ``x`` makes the product of a narrow weight and the normed input in the same kernel: for one token, whose
        separate product would be all latency."""
        if x.shape[0] != 1 or not self._fits(rotation):
            return False
        tile = tile_of(x.shape[1], rotation.block)
        return holds_row(x.shape[1], self._config or pick_config(1, x.shape[1], tile))

    def silu_mul(self, gate_up: torch.Tensor, rotation: Rotation, group: int) -> Activation:
        """``silu(gate) * up`` of ``gate_up [T, 2F]``, gate first."""
        how = (rotation.signs, rotation.block, group)
        gate, up = gate_up.chunk(2, 1)
        return self._run(
            rotation,
            lambda: reference.silu_mul(gate_up, *how),
            lambda: self._launch(gate, *how, kind="silu_mul", other=up),
        )

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor, rotation: Rotation, group: int) -> Activation:
        """``x * sigmoid(gate)`` of ``[T, width]`` each, rows of any stride."""
        how = (rotation.signs, rotation.block, group)
        return self._run(
            rotation,
            lambda: reference.sigmoid_mul(x, gate, *how),
            lambda: self._launch(x, *how, kind="sigmoid_mul", other=gate),
        )

    def gated_norm(
        self, o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, rotation: Rotation, group: int
    ) -> Activation:
        """RMSNorm of each head of ``o [T, Hv, Dv]`` (contiguous) times ``silu(z)``, ``z [T, Hv * Dv]`` with rows of any stride."""
        how = (rotation.signs, rotation.block, group)
        if weight.shape[0] & (weight.shape[0] - 1):
            return reference.gated_norm(o, z, weight, eps, *how)
        settings = {"kind": "gated_norm", "other": z, "weight": weight, "eps": eps}
        return self._run(
            rotation,
            lambda: reference.gated_norm(o, z, weight, eps, *how),
            lambda: self._launch(o.flatten(1), *how, **settings),
        )

    def unrotate(self, z: torch.Tensor, rotation: Rotation, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows ``z [T, width]`` of a folded table as the model means them, in ``out_dtype`` (by default their type)."""
        signs, block = rotation.signs, rotation.block
        found = self._run(
            rotation,
            lambda: reference.unrotate(z, signs, block, out_dtype),
            lambda: self._launch(z, signs, block, 0, inverse=True, out_dtype=out_dtype),
        )
        assert isinstance(found, torch.Tensor)
        return found

    def embed(self, ids: torch.Tensor, table: PQ2Weight, rotation: Rotation, out_dtype: torch.dtype) -> torch.Tensor:
        """Rows ``ids`` (int64 ``[T]``, each inside the table) of a folded table ``[V, K]``: ``[T, K]``."""
        arguments = (ids, table, rotation.signs, rotation.block, out_dtype)
        found = self._run(rotation, lambda: reference.embed(*arguments), lambda: self._fused.embed(*arguments))
        assert isinstance(found, torch.Tensor)
        return found

    def _launch(self, x: torch.Tensor, *how: Any, **settings: Any) -> Activation:
        made: Activation = self._fused.rotate(x, *how, config=self._config, **settings)
        return made

    def _fits(self, rotation: Rotation) -> bool:
        return self._fused is not None and rotation.block <= LARGEST_BLOCK

    def _run(self, rotation: Rotation, plain: Callable[[], Activation], fused: Callable[[], Activation]) -> Activation:
        if not self._fits(rotation):
            return plain()
        actual = fused()
        if self._checked:
            self._compare(actual, plain())
        return actual

    def _compare(self, actual: Activation, expected: Activation) -> None:
        checking.refuse_capture("hadamard", self.choice.flag)
        if not isinstance(actual, torch.Tensor) and not isinstance(expected, torch.Tensor):
            checking.require_close(
                "hadamard", "the activation", actual.dequantise(), expected.dequantise(), CHECK_BOUND
            )
        elif isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
            checking.require_close("hadamard", "the activation", actual, expected)
