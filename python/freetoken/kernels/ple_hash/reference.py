"""Row ids of hashed n-grams in plain torch: the specification of the fused kernel."""

from __future__ import annotations

import torch


def _windows(
    input_ids: torch.Tensor,
    context: torch.Tensor,
    request: torch.Tensor,
    local: torch.Tensor,
    max_len: int,
    eos: int,
) -> list[torch.Tensor]:
    """``w[s] [T]`` for s = 0 to n - 1: the id s places to the left of each token, ``eos`` from the first ``eos`` there on.

    Requests are packed into one matrix, context first; a running maximum of the columns that hold ``eos`` says how far each
    token may look back.
    """
    width = context.shape[1]
    packed = torch.full((context.shape[0], width + max_len), eos, dtype=torch.int64, device=input_ids.device)
    packed[:, :width] = context
    packed[request, width + local] = input_ids
    columns = torch.arange(width + max_len, device=input_ids.device)
    last = torch.where(packed == eos, columns, -1).cummax(1).values
    column = width + local
    before = last[request, column - 1]
    shifted = [input_ids]
    for shift in range(1, width + 1):
        shifted.append(torch.where(before < column - shift, packed[request, column - shift], eos))
    return shifted


def row_ids_reference(
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
    max_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row ids ``[T, H] int64``; shapes as for :func:`freetoken.kernels.ple_hash.ple_row_ids`, tensors on any devices.

    Window: ``w[0]`` is the token, ``w[s]`` the id s places to its left (in this call, else in its request's context) unless one of
    the s ids to its left is ``eos_token_id``; then it is ``eos_token_id``. The token's own id does not cut its window.

    Hash of order k (2 to n): ``mix_k = w[0] m[0] xor ... xor w[k - 1] m[k - 1]``, in int64 with wrap-around. Head h belongs to
    order ``2 + h // heads_per_ngram``; its row is the floored remainder of ``mix`` by ``vocab_sizes[h]``, plus ``offsets[h]``.
    """
    device, tokens = input_ids.device, input_ids.shape[0]
    heads = vocab_sizes.shape[0]
    result = torch.empty((tokens, heads), dtype=torch.int64, device=device) if out is None else out
    if tokens == 0:
        return result
    ids, context = input_ids.long(), ngram_context.to(device, torch.int64)
    if req_index is None or local_index is None:
        request, local, max_len = torch.arange(tokens, device=device), torch.zeros_like(ids), 1
    else:
        request, local = req_index.to(device).long(), local_index.to(device).long()
    longest = int(local.max()) + 1 if max_len is None else max_len
    factors, sizes, starts = (part.to(device) for part in (multipliers, vocab_sizes, offsets))

    shifted = _windows(ids, context, request, local, longest, eos_token_id)
    mix = shifted[0] * factors[0]
    for order, word in enumerate(shifted[1:]):
        mix = mix ^ (word * factors[order + 1])
        part = slice(order * heads_per_ngram, (order + 1) * heads_per_ngram)
        result[:, part] = (torch.remainder(mix[:, None], sizes[part]) + starts[part]).to(result.device)
    return result
