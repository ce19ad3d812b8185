"""The pages that the output of running requests is expected to take (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable

from freetoken.scheduler import policy
from freetoken.scheduler.request import Req, Status


class Growth:
    """Expects of each request a share of the output that its limit still allows; ``ratio`` is that share, learnt from decodes and retractions."""

    def __init__(self, page_size: int) -> None:
        self.ratio = policy.NewTokenRatio()
        self._page_size = page_size

    def pages(self, req: Req, held: int, more: int = 0) -> int:
        """Pages beyond ``held`` that a request is expected to take, once ``more`` tokens of it have been scheduled."""
        total = req.total_len + more
        left = req.max_new_tokens - (total - req.prompt_len)
        return policy.expected_pages(total, left, held, self.ratio.value, self._page_size)

    def of_waiting(self, req: Req) -> int:
        """The same beyond the pages of all it has to compute, for a request that holds none."""
        return self.pages(req, policy.pages_for(len(req.ids), self._page_size))

    def of_running(self, residents: Iterable[Req]) -> int:
        """The same of all of ``residents`` that run."""
        return sum(self.pages(r, len(r.pages)) for r in residents if r.status is Status.RUNNING)

    def beside(self, residents: Iterable[Req], req: Req) -> int:
        """Pages that the output of ``residents`` is expected to take, and that of ``req`` if it is admitted beside them.

        As the next step will see it when it comes to admissions, with one more token of each stream.
        """
        running = [r for r in residents if r.status is Status.RUNNING]
        draws = [r.computed == r.total_len - 1 and r.num_output < r.max_new_tokens for r in running]
        expected = sum(self.pages(r, len(r.pages), int(more)) for r, more in zip(running, draws))
        # Alone a request always fits: its limit was cut to the pool.
        return expected + self.of_waiting(req) if running else 0
