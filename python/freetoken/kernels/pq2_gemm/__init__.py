"""Products of more than 16 tokens with two-bit weights (PQ2): prompts and large batches."""

from __future__ import annotations

import torch

from freetoken import environ
from freetoken.environ import EnvironmentValueError
from freetoken.kernels import checking, launch
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.pq2_gemm.config import (
    FORMS,
    DenseConfig,
    Form,
    GemmConfig,
    candidates,
    default_config,
    m_class,
    pick_config,
    pick_form,
    pick_slice,
    slice_candidates,
)
from freetoken.kernels.pq2_gemv import reference
from freetoken.kernels.pq2_gemv.activation import Quantised
from freetoken.kernels.pq2_gemv.weight import PQ2Weight

__all__ = [
    "FORMS",
    "FORM_NAME",
    "DenseConfig",
    "Form",
    "GemmConfig",
    "PQ2Gemm",
    "candidates",
    "default_config",
    "m_class",
    "pick_config",
    "pick_form",
    "pick_slice",
    "slice_candidates",
]

FORM_NAME = "FREETOKEN_PQ2_GEMM_FORM"
STORAGE = (torch.float16, torch.bfloat16)
CHECK_BOUNDS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative RMS against the reference by the type of the output, where the activations are integers."""
FLOAT_BOUND = 1e-2
"""The same for float activations, whose products round weights to the type of the activations."""


class PQ2Gemm:
    """The op with its implementation bound once.

    Three forms: ``int8`` multiplies a quantised activation on integer tensor cores, groups exact; ``float`` multiplies float
    activations with tiles decoded to their type; ``dense`` decodes slices of the weight to that type and leaves the product to torch.
    ``auto`` takes the form that is fastest for the number of tokens on this GPU. Where the form and the activation do not match, the
    activation decides: integers are never made floats, nor floats integers.
    """

    def __init__(self, choice: Choice, form: str | None = None) -> None:
        self.choice = choice
        self.form = str(environ.get(FORM_NAME)) if form is None else form
        if self.form not in ("auto", *FORMS):
            raise EnvironmentValueError(f"{FORM_NAME}={self.form!r}: use auto, {', '.join(FORMS)}")
        self._fused = choice.impl != "reference"
        if self._fused:
            from freetoken.kernels.pq2_gemm import triton

            self._triton = triton

    def reserve(self, device: torch.device) -> None:
        """Make the scratch memory of a device; before a graph is captured."""
        if self._fused:
            self._triton.scratch_of(device)

    def form_of(self, tokens: int, device: torch.device) -> Form:
        """The form that ``tokens`` tokens are multiplied in where the activation can be chosen."""
        if self.form == "auto":
            return pick_form(tokens, launch.capability(device))
        return next(form for form in FORMS if form == self.form)

    def activation_group(self, tokens: int, group: int, device: torch.device) -> int:
        """What the producer of an activation of ``tokens`` tokens is to quantise in, where ``group`` is set: ``group``, or 0 for
        floats in the model's type."""
        return group if not self._fused or self.form_of(tokens, device) == "int8" else 0

    def linear(
        self,
        activation: Quantised | torch.Tensor,
        weight: PQ2Weight,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[M, N]`` in ``out_dtype``, into ``out`` where given: as :func:`freetoken.kernels.pq2_gemv.reference.linear` for integers,
        as ``float_linear`` there for floats (whose weights are rounded to the activations' type, if that has two bytes)."""
        floats = isinstance(activation, torch.Tensor)
        tokens, width = activation.shape if floats else (activation.tokens, activation.width)
        if width != weight.in_features:
            raise ValueError(f"an activation of width {width} for a weight of {weight.in_features} columns")
        if not self._fused or tokens == 0 or (floats and activation.dtype not in STORAGE):
            y = self._reference(activation, weight, out_dtype)
            return y if out is None else out.copy_(y)
        if out is None:
            out = torch.empty((tokens, weight.out_features), dtype=out_dtype, device=weight.codes.device)
        if not isinstance(activation, torch.Tensor):
            self._triton.int8_linear(activation.rows(), weight, out)
        elif self.form_of(tokens, weight.codes.device) == "dense" and out.dtype == activation.dtype:
            self._triton.dense_linear(activation, weight, out)
        else:
            self._triton.float_linear(activation.contiguous(), weight, out)
        if self.choice.impl == "check":
            checking.refuse_capture("pq2_gemm", self.choice.flag)
            bound = FLOAT_BOUND if floats else CHECK_BOUNDS[out_dtype]
            checking.require_close("pq2_gemm", "the output", out, self._reference(activation, weight, out_dtype), bound)
        return out

    @staticmethod
    def _reference(activation: Quantised | torch.Tensor, weight: PQ2Weight, out_dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(activation, torch.Tensor):
            return reference.linear(activation, weight, out_dtype)
        return reference.float_linear(activation, weight, out_dtype)
