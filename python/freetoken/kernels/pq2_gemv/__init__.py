"""Products with two-bit weights (PQ2): the weight, the quantised activation, and the one public call for both."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from freetoken.kernels import checking, launch
from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.kernels.pq2_gemv import reference
from freetoken.kernels.pq2_gemv.activation import (
    ACTIVATION_GROUPS,
    Quantised,
    QuantisedActivation,
    TiledActivation,
    activation_group,
    quantise_reference,
)
from freetoken.kernels.pq2_gemv.configs import MAX_TOKENS, PQ2Config, candidates, default_config, pick_config
from freetoken.kernels.pq2_gemv.weight import BLOCK, WEIGHT_GROUPS, PQ2Weight

if TYPE_CHECKING:
    from freetoken.kernels.pq2_gemm import PQ2Gemm

__all__ = [
    "ACTIVATION_GROUPS",
    "BLOCK",
    "MAX_TOKENS",
    "WEIGHT_GROUPS",
    "PQ2Config",
    "PQ2Product",
    "PQ2Weight",
    "Quantised",
    "QuantisedActivation",
    "TiledActivation",
    "activation_group",
    "candidates",
    "default_config",
    "group_for",
    "leads",
    "pick_config",
    "pq2_linear",
    "quantise",
    "tiles_for",
]


class PQ2Product:
    """The op with its implementations bound once.

    ``choice`` decides for up to :data:`MAX_TOKENS` tokens, and ``single`` for one where ``choice`` is a fused kernel: by a kernel of
    its own, checked or not, or (``reference``) by the kernel of few tokens. ``many`` is the op for more tokens and for float
    activations; without it these go to the reference.
    """

    def __init__(self, choice: Choice, single: Choice, many: PQ2Gemm | None = None) -> None:
        self.choice = choice
        self.single = single
        self.many = many
        self._fused = choice.impl != "reference"
        if self._fused:
            from freetoken.kernels.pq2_gemv import triton

            self._triton = triton

    def quantise(self, x: torch.Tensor, group: int) -> Quantised:
        """Quantise ``x [M, K]`` as :mod:`freetoken.kernels.pq2_gemv.activation` states."""
        if not self._fused:
            return quantise_reference(x, group)
        from freetoken.kernels.pq2_gemv.quantiser import quantise as fused

        done = fused(x, group, tiles=self.takes_tiles(x.shape[0]))
        if self.choice.impl == "check":
            checking.refuse_capture("pq2_gemv", self.choice.flag)
            expected = quantise_reference(x, group)
            for what in ("values", "scales", "sums"):
                if not torch.equal(getattr(done.rows(), what), getattr(expected, what)):
                    raise checking.KernelCheckError(f"pq2_gemv: the {what} of an activation differ from the reference")
        return done

    def takes_tiles(self, tokens: int) -> bool:
        """Whether an activation of so many tokens is best made in tiles, as the kernel of several tokens wants it."""
        fewest = 1 if self.single.impl == "reference" else 2
        return self._fused and fewest <= tokens <= MAX_TOKENS

    def linear(
        self,
        activation: Quantised | torch.Tensor,
        weight: PQ2Weight,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
        *,
        late: bool = False,
    ) -> torch.Tensor:
        """As :func:`pq2_linear`."""
        floats = isinstance(activation, torch.Tensor)
        if self.many is not None and (floats or activation.tokens > MAX_TOKENS):
            return self.many.linear(activation, weight, out_dtype, out)
        if floats:
            return _into(out, reference.float_linear(activation, weight, out_dtype))
        if activation.width != weight.in_features:
            raise ValueError(f"an activation of width {activation.width} for a weight of {weight.in_features} columns")
        m, n, k = activation.tokens, weight.out_features, weight.in_features
        if not self._fused or m > MAX_TOKENS:
            return _into(out, reference.linear(activation, weight, out_dtype))
        checked, config = self.choice, None
        if m == 1 and self.single.impl == "reference":
            config = pick_config(n, k, 2, self._triton.launch.capability(weight.codes.device))
        elif m == 1 and checked.impl != "check":
            checked = self.single
        y = self._triton.linear(activation, weight, out_dtype, out, config=config, late=late)
        if checked.impl == "check":
            checking.refuse_capture(checked.op, checked.flag)
            checking.require_close(checked.op, "the output", y, reference.linear(activation, weight, out_dtype))
        return y

    def leads(self, activation: Quantised | torch.Tensor) -> bool:
        """Whether :meth:`linear` of ``activation`` is one kernel that can be launched ``late``: in the order that it takes."""
        if isinstance(activation, torch.Tensor) or not self._fused:
            return False
        if isinstance(activation, TiledActivation):
            return launch.early(activation.words)
        return activation.tokens == 1 and not self.takes_tiles(1) and launch.early(activation.values)


def _into(out: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    return y if out is None else out.copy_(y)


@functools.cache
def _product(device: str) -> PQ2Product:
    from freetoken.kernels.pq2_gemm import PQ2Gemm

    many = PQ2Gemm(choose_op("pq2_gemm", device))
    return PQ2Product(choose_op("pq2_gemv", device), choose_op("pq2_single", device), many)


def quantise(x: torch.Tensor, group: int) -> Quantised:
    """Quantise ``x [M, K]`` in groups of 32, 64 or 128 as :mod:`freetoken.kernels.pq2_gemv.activation` states."""
    return _product(x.device.type).quantise(x, group)


def group_for(tokens: int, group: int, device: torch.device) -> int:
    """What an activation of ``tokens`` tokens is best quantised in here, where ``group`` (32, 64, 128, or 0 for never) is set:
    ``group``, or 0 where so many tokens are multiplied faster, and no less exactly, as floats of the model's type."""
    many = _product(device.type).many
    return group if many is None or tokens <= MAX_TOKENS else many.activation_group(tokens, group, device)


def tiles_for(tokens: int, device: torch.device) -> bool:
    """Whether what makes an activation of ``tokens`` tokens is to make it in tiles here."""
    return _product(device.type).takes_tiles(tokens)


def pq2_linear(
    activation: Quantised | torch.Tensor,
    weight: PQ2Weight,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    *,
    late: bool = False,
) -> torch.Tensor:
    """``[M, N]`` in ``out_dtype``, into ``out`` where given (contiguous).

    With ``q``, ``d_x`` the integers and scales of the activation and ``code``, ``d_w`` those of the weight: ``sum over groups of
    d_w * d_x * (sum(code * q) - sum(q))``, integers exact, sums over groups in float32. A plain tensor ``[M, K]`` is multiplied as it
    is with the dequantised weight: in float32, where a fused kernel of half-precision activations rounds the weights to their type.
    Flags are read at the first call on a kind of device. ``late``, where :func:`leads` allows it, is for a product that hides under
    this one (:mod:`freetoken.kernels.launch`). ``ValueError`` for widths that differ.
    """
    return _product(weight.codes.device.type).linear(activation, weight, out_dtype, out, late=late)


def leads(activation: Quantised | torch.Tensor) -> bool:
    """Whether :func:`pq2_linear` of ``activation`` is one kernel that can be launched ``late``."""
    if isinstance(activation, torch.Tensor):
        return False
    device = activation.words.device if isinstance(activation, TiledActivation) else activation.values.device
    return _product(device.type).leads(activation)
