"""Row ids of hashed n-grams: one program a token walks its window once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import next_power_of_two


@launched
@triton.jit
def row_ids_kernel(
    ids_ptr,
    context_ptr,
    request_ptr,
    local_ptr,
    multipliers_ptr,
    sizes_ptr,
    offsets_ptr,
    out_ptr,
    EOS: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_NGRAM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DECODE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(T,)``. With ``DECODE`` token t is the only one of request t."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    inside = head < HEADS
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # The constants belong to the model; everything else may come from the kernel before.
    size = tl.load(sizes_ptr + head, mask=inside, other=1)
    offset = tl.load(offsets_ptr + head, mask=inside, other=0)
    factor = tl.load(multipliers_ptr)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if DECODE:
        request = token
        local = token * 0
    else:
        request = tl.load(request_ptr + token).to(tl.int64)
        local = tl.load(local_ptr + token).to(tl.int64)

    boundary = token * 0 + EOS
    mix = tl.load(ids_ptr + token).to(tl.int64) * factor
    whole = token >= 0
    mixed = tl.zeros((BLOCK_H,), tl.int64)
    for shift in tl.static_range(1, N):
        back = local - shift
        column = (N - 1) + back
        here = tl.load(ids_ptr + token - shift, mask=back >= 0, other=EOS).to(tl.int64)
        earlier = (back < 0) & (column >= 0)
        before = tl.load(context_ptr + request * (N - 1) + column, mask=earlier, other=EOS).to(tl.int64)
        word = tl.where(back >= 0, here, before)
        whole = whole & (word != boundary)
        mix = mix ^ (tl.where(whole, word, boundary) * tl.load(multipliers_ptr + shift))
        mixed = tl.where(head // HEADS_PER_NGRAM == shift - 1, mix, mixed)
    row = mixed % size
    row = tl.where(row < 0, row + size, row) + offset
    tl.store(out_ptr + token * HEADS + head, row, mask=inside)


def row_ids(
    input_ids: torch.Tensor,
    ngram_context: torch.Tensor,
    req_index: torch.Tensor | None,
    local_index: torch.Tensor | None,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    *,
    eos_token_id: int,
    heads_per_ngram: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`freetoken.kernels.ple_hash.row_ids_reference`; the geometry has been checked by the caller.

    One-dimensional tensors must be contiguous.
    """
    tokens, heads = input_ids.shape[0], vocab_sizes.shape[0]
    if out is None:
        out = torch.empty((tokens, heads), dtype=torch.int64, device=input_ids.device)
    if tokens == 0:
        return out
    decode = req_index is None
    early = launch.early(input_ids)
    row_ids_kernel[(tokens,)](
        input_ids,
        ngram_context,
        input_ids if req_index is None else req_index,
        input_ids if local_index is None else local_index,
        multipliers,
        vocab_sizes,
        offsets,
        out,
        EOS=eos_token_id,
        N=multipliers.shape[0],
        HEADS=heads,
        HEADS_PER_NGRAM=heads_per_ngram,
        BLOCK_H=next_power_of_two(heads),
        DECODE=decode,
        EARLY=early,
        launch_pdl=early,
        num_warps=1,
    )
    return out
