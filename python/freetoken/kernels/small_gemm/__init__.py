"""Dense products of few rows, with the SwiGLU activation as an optional epilogue."""

from __future__ import annotations

import torch

from freetoken import environ
from freetoken.kernels import checking, launch
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import reference
from freetoken.kernels.small_gemm.configs import MAX_TOKENS, NARROW, GemmConfig, candidates, max_tokens, pick_config
from freetoken.kernels.small_gemm.host import HostProduct

__all__ = ["MAX_TOKENS", "GemmConfig", "SmallGemm", "candidates", "max_tokens", "pick_config"]


class SmallGemm:
    """The op with its implementation bound once, shared by all linear layers of a model.

    Up to :func:`max_tokens` rows run the fused kernels (in float32 only one row does: the other kernel is for tensor
    cores); above that, torch's matmul and ``silu_mul``. On the CPU few rows go through :class:`HostProduct`. Inputs must be
    contiguous.
    """

    def __init__(self, choice: Choice, silu_mul: SiluMul) -> None:
        self.choice = choice
        self._silu_mul = silu_mul
        self._fused = choice.impl not in ("reference", "host")
        self._checked = choice.impl == "check"
        self._hiding = bool(environ.get("FREETOKEN_HIDE_SMALL_GEMM"))
        self._host = HostProduct() if choice.impl == "host" else None
        if self._fused:
            from freetoken.kernels.small_gemm import triton

            self._triton = triton
            self._scratch = triton.Scratch()

    def reserve(self, weight: torch.Tensor, *, silu: bool) -> None:
        """Prepare for products with this weight (scratch memory); called when a layer is built."""
        if self._fused:
            n, k = weight.shape
            self._triton.reserve(self._scratch, n, k, silu=silu, device=weight.device)
        elif self._host is not None:
            self._host.register(weight)

    def _fits(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return self._fused and x.shape[0] <= (1 if x.dtype == torch.float32 else max_tokens(weight.shape[0]))

    def hides(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether :meth:`linear_under` can take these and is not switched off.

        One token goes its own way: its kernel is so short that the later launch of what follows costs more than it takes.
        """
        return self._hiding and x.shape[0] > 1 and self._fits(x, weight) and launch.early(x)

    def joins(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the kernel that makes ``x`` may make this product, too: the weight is narrow, and the same switch says so."""
        return self._hiding and self._fused and not self._checked and x.shape[0] == 1 and weight.shape[0] <= NARROW

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``[M, N]``, as :func:`reference.linear`."""
        if not self._fits(x, weight):
            return self._plain(x, weight, bias, out_dtype)
        y = self._triton.linear(x, weight, bias, out_dtype, scratch=self._scratch)
        if self._checked:
            self._compare(y, reference.linear(x, weight, bias), x.dtype)
        return y

    def linear_under(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """:meth:`linear` at the same time as the kernel launched right before, where :meth:`hides` says so.

        That kernel must be ``LATE`` (:mod:`freetoken.kernels.launch`), be no product of this op, and come after what makes ``x``.
        """
        y = self._triton.linear(x, weight, bias, scratch=self._scratch, under=True)
        if self._checked:
            self._compare(y, reference.linear(x, weight, bias), x.dtype)
        return y

    def squashes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether :meth:`linear_squashed` is one kernel for these."""
        rows = x.shape[0]
        if rows == 0 or not self._fits(x, weight):
            return False
        return rows == 1 or pick_config(*weight.shape, rows, launch.capability(x.device)).kind == "fragments"

    def linear_squashed(self, x: torch.Tensor, weight: torch.Tensor, rows: int, divisor: int) -> torch.Tensor:
        """``[M, N]``, as :func:`reference.linear_squashed`."""
        if not self.squashes(x, weight):
            return reference.linear_squashed(x, weight, rows, divisor)
        y = self._triton.linear(x, weight, scratch=self._scratch, squash=(rows, divisor))
        if self._checked:
            self._compare(y, reference.linear_squashed(x, weight, rows, divisor), x.dtype)
        return y

    def linear_silu_mul(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[M, F]``, as :func:`reference.linear_silu_mul`."""
        if not self._fits(x, weight):
            return self._silu_mul(self._plain(x, weight, bias))
        y = self._triton.linear_silu_mul(x, weight, bias, scratch=self._scratch)
        if self._checked:
            self._compare(y, reference.linear_silu_mul(x, weight, bias), x.dtype)
        return y

    def _plain(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if self._host is not None:
            y = self._host.linear(x, weight, bias)
            return y if out_dtype is None else y.to(out_dtype)
        return reference.linear(x, weight, bias, out_dtype)

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor, storage: torch.dtype) -> None:
        checking.refuse_capture("small_gemm", self.choice.flag)
        checking.require_close("small_gemm", "the output", actual, expected, checking.RELATIVE_RMS[storage])
