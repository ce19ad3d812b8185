"""Token masks of constrained output, laid over logits in place."""

from __future__ import annotations

import torch

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.token_mask import reference


class TokenMask:
    """The op with its implementation bound once: ``mask(logits [S, V], places [G], masks [G, W])``, as
    :func:`reference.token_mask`."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        if choice.impl == "reference":
            self._call = reference.token_mask
        else:
            from freetoken.kernels.token_mask import triton

            self._fused = triton.token_mask
            self._call = self._check if choice.impl == "check" else triton.token_mask

    def __call__(self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
        self._call(logits, places, masks)

    def _check(self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
        checking.refuse_capture("token_mask", self.choice.flag)
        expected = logits.clone()
        reference.token_mask(expected, places, masks)
        self._fused(logits, places, masks)
        # As integers, so that a NaN of the model equals itself.
        if not torch.equal(logits.view(torch.int32), expected.view(torch.int32)):
            raise KernelCheckError("token_mask: the logits differ from the reference")
