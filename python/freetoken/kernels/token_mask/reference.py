"""Token masks in plain torch: the specification of the fused kernel."""

from __future__ import annotations

import torch


def token_mask(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits of ids that may not be drawn to ``-inf``, in place.

    ``logits [S, V] float32``; ``places [G] int64`` are distinct rows of it, -1 for none; ``masks [G, W] int32`` are bits: id
    ``i`` stays as it is where bit ``i % 32`` of word ``i // 32`` is set. Ids from ``32 * W`` on may not be drawn.
    """
    vocab, words = logits.shape[1], masks.shape[1]
    real = places >= 0
    ids = torch.arange(vocab, device=logits.device)
    bits = (masks[real][:, (ids // 32).clamp(max=words - 1)] >> (ids % 32).to(torch.int32)) & 1
    closed = (bits == 0) | (ids >= 32 * words)
    rows = places[real]
    logits[rows] = logits[rows].masked_fill(closed, float("-inf"))
