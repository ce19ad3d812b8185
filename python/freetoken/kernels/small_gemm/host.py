"""Products of few rows on the CPU.

BLAS libraries give one row to a matrix-vector routine that may run on one thread, and a few rows to a matrix product
that is cut for large ones. A batched product over slices of the weight rows keeps every core reading a slice of its own,
for one row computed twice as well. Which way is faster depends on the library, the cores and what else they do, so both
are timed over the model's own weights and the faster is kept.
"""

from __future__ import annotations

import time

import torch

MAX_ROWS = 8
"""Rows of x up to which slicing is considered: beyond that the matrix product keeps all cores busy by itself."""
SLICES = 4
PROBE_BYTES = 256 * 2**20
ROUNDS = 3


def sliced(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [M, K] @ weight [N, K]^T + bias`` as products with slices of the weight's rows; N must be a multiple of
    :data:`SLICES`."""
    m, (n, k) = x.shape[0], weight.shape
    # One row is doubled: two columns are a matrix product, one would be the matrix-vector routine again.
    columns = x.repeat(2, 1).t() if m == 1 else x.t()
    y = torch.matmul(weight.view(SLICES, n // SLICES, k), columns).view(n, -1)[:, :m].t().contiguous()
    return y if bias is None else y + bias


def rows_class(rows: int) -> int:
    """Row counts are timed in three classes: 1, up to 4, up to :data:`MAX_ROWS`."""
    return 1 if rows == 1 else 4 if rows <= 4 else MAX_ROWS


class HostProduct:
    """Chooses between the two ways at the first call of each class of row counts, over the weights registered by then."""

    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []
        self._slicing: dict[int, bool] = {}

    def register(self, weight: torch.Tensor) -> None:
        """Count a weight among those the choice is timed on."""
        self._weights.append(weight)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[M, N]``, as :func:`reference.linear` without ``out_dtype``."""
        rows = x.shape[0]
        if not 0 < rows <= MAX_ROWS or weight.shape[0] % SLICES or not weight.is_contiguous():
            return torch.nn.functional.linear(x, weight, bias)
        kind = rows_class(rows)
        if kind not in self._slicing:
            self._slicing[kind] = self._slicing_pays(kind)
        return sliced(x, weight, bias) if self._slicing[kind] else torch.nn.functional.linear(x, weight, bias)

    def _slicing_pays(self, rows: int) -> bool:
        """Whether a pass over the weights is clearly faster sliced; enough of them that caches do not hold them all."""
        chosen, total = [], 0
        for weight in self._weights:
            if total < PROBE_BYTES and weight.shape[0] % SLICES == 0:
                chosen.append((torch.ones(rows, weight.shape[1], dtype=weight.dtype), weight))
                total += weight.nbytes
        best = {True: float("inf"), False: float("inf")}
        for _ in range(ROUNDS):
            for way in (True, False):
                start = time.perf_counter()
                for x, weight in chosen:
                    if way:
                        sliced(x, weight)
                    else:
                        torch.nn.functional.linear(x, weight)
                best[way] = min(best[way], time.perf_counter() - start)
        return best[True] < 0.9 * best[False]
