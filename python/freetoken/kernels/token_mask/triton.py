"""Token masks as one kernel: it reads the bits and writes what they close, and reads no logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv

BLOCK = 4096


@launched
@triton.jit(do_not_specialize=["words"])
def token_mask_kernel(logits_ptr, row_stride, places_ptr, masks_ptr, words, vocab, BLOCK: tl.constexpr):
    """Grid ``(G, ceil(vocab / BLOCK))``; ``masks [G, words]`` contiguous."""
    mask = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + mask)
    if place >= 0:
        word = ids >> 5
        bits = tl.load(masks_ptr + mask * words + word, mask=word < words, other=0)
        closed = (((bits >> (ids & 31)) & 1) == 0) & (ids < vocab)
        nothing = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(logits_ptr + place * row_stride + ids, nothing, mask=closed)


def token_mask(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """As :func:`freetoken.kernels.token_mask.reference.token_mask`; rows of ``logits`` contiguous, ``masks`` too."""
    count, vocab = masks.shape[0], logits.shape[1]
    if count == 0:
        return
    grid = (count, cdiv(vocab, BLOCK))
    token_mask_kernel[grid](logits, logits.stride(0), places, masks, masks.shape[1], vocab, BLOCK=BLOCK, num_warps=8)
