"""Per-row parameters of one batch's draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOP_K_OFF = 2**31 - 1


@dataclass(frozen=True)
class SampleParams:
    """Device tensors of S rows, and what the host knows about all of them.

    * ``inv_temperature [S] float32``: 1 / temperature; 1 for a greedy row
    * ``top_k [S] int32``: at least 1; ``TOP_K_OFF`` keeps every id
    * ``top_p [S] float32``: in (0, 1]; 1 keeps every id
    * ``log_min_p [S] float32``: log of min-p; ``-inf`` keeps every id
    * ``greedy [S] int32``: 1 where the row takes its argmax
    * ``key [2, S] int32``: from :func:`freetoken.kernels.sample.hashing.row_keys`

    ``max_top_k`` is the largest limit in use (0 without any); ``all_top_k`` says that every row that is not greedy has one.
    """

    inv_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    greedy: torch.Tensor
    key: torch.Tensor
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    has_greedy: bool
    max_top_k: int
    all_top_k: bool
