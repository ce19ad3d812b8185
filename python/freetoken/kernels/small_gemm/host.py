"""Products of one row on the CPU.

BLAS libraries send one row to a matrix-vector routine and two to a matrix-matrix one. Where the first runs on one thread
only, computing the row twice takes 40 % of its time; where cores are busy or few, it takes twice as long. So both are timed
over the model's own weights, and the faster is kept.
"""

from __future__ import annotations

import time

import torch

PROBE_BYTES = 512 * 2**20
ROUNDS = 3


def doubled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [1, K] @ weight [N, K]^T + bias`` computed as two equal rows."""
    return torch.nn.functional.linear(x.expand(2, -1), weight, bias)[:1]


class HostRow:
    """Chooses between the two ways on its first call, over the weights that were registered until then."""

    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []
        self._doubling: bool | None = None

    def register(self, weight: torch.Tensor) -> None:
        """Count a weight among those the choice is timed on."""
        self._weights.append(weight)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[1, N]``, as :func:`reference.linear`."""
        if self._doubling is None:
            self._doubling = torch.get_num_threads() > 1 and self._doubling_pays()
            self._weights.clear()
        return doubled(x, weight, bias) if self._doubling else torch.nn.functional.linear(x, weight, bias)

    def _doubling_pays(self) -> bool:
        """Whether a pass over the weights is faster doubled; enough of them that caches do not hold them all."""
        chosen, total = [], 0
        for weight in self._weights:
            if total < PROBE_BYTES:
                chosen.append((weight.new_zeros(1, weight.shape[1]), weight))
                total += weight.nbytes
        best = {True: float("inf"), False: float("inf")}
        for _ in range(ROUNDS):
            for way in (True, False):
                start = time.perf_counter()
                for x, weight in chosen:
                    if way:
                        doubled(x, weight)
                    else:
                        torch.nn.functional.linear(x, weight)
                best[way] = min(best[way], time.perf_counter() - start)
        return best[True] < 0.9 * best[False]
