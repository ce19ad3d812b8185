"""Log-probabilities of chosen and of most likely ids, on the device, and their conversion on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken.messages import TokenLogprob

LOWEST = -9999.0
"""Reported in place of a log-probability that is not finite, which JSON cannot carry."""
BLOCK_ROWS = 64


def _order_keys(values: torch.Tensor) -> torch.Tensor:
    """float32 ``[R, N]`` -> int64 keys that order as (value, lower id first), all distinct in a row; NaN counts as -inf."""
    # Adding zero turns -0.0 into 0.0, so that the two tie as they compare.
    bits = (values.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")) + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_ids = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (ordered.to(torch.int64) << 32) | reversed_ids


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, top: int, sample_vocab: int) -> list[torch.Tensor]:
    """Natural-log probabilities of the model's distribution, the softmax of the raw logits.

    ``logits [R, V] float32``, ``ids [R] int64`` -> ``[chosen [R] float32]``, and with ``top`` above 0 also ``[top values
    [R, top] float32, top ids [R, top] int64]``, best first, ties to the lower id. The distribution is that over ids below
    ``sample_vocab``; a given id may lie above and is measured against it. Worked in blocks of rows, so that a long prompt
    does not hold several copies of its logits.
    """
    top = min(top, sample_vocab)
    blocks = [
        _block_logprobs(logits[start : start + BLOCK_ROWS], ids[start : start + BLOCK_ROWS], top, sample_vocab)
        for start in range(0, max(1, logits.shape[0]), BLOCK_ROWS)
    ]
    return blocks[0] if len(blocks) == 1 else [torch.cat(parts) for parts in zip(*blocks)]


def _block_logprobs(logits: torch.Tensor, ids: torch.Tensor, top: int, sample_vocab: int) -> list[torch.Tensor]:
    logits = logits.float()
    known = logits[:, :sample_vocab]
    norm = known.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(1, ids[:, None]) - norm).squeeze(1)
    if top == 0:
        return [chosen]
    top_ids = sample_vocab - 1 - (_order_keys(known).topk(top, dim=-1).values & 0xFFFFFFFF)
    return [chosen, known.gather(1, top_ids) - norm, top_ids]


def _reportable(value: float) -> float:
    return value if value > LOWEST else LOWEST


def logprob_entries(ids: Sequence[int], pieces: Sequence[torch.Tensor], tops: Sequence[int]) -> list[TokenLogprob]:
    """Host copies of :func:`token_logprobs` to wire entries; ``tops[i]`` alternatives for the i-th id.

    Values below -9999 and NaN read -9999.
    """
    chosen = pieces[0].tolist()
    top_values, top_ids = (pieces[1].tolist(), pieces[2].tolist()) if len(pieces) > 1 else (None, None)
    entries = []
    for index, (token, top) in enumerate(zip(ids, tops)):
        entry = TokenLogprob(token, _reportable(chosen[index]))
        if top > 0 and top_values is not None and top_ids is not None:
            entry.top_ids = top_ids[index][:top]
            entry.top_logprobs = [_reportable(value) for value in top_values[index][:top]]
        entries.append(entry)
    return entries
