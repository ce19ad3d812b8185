"""The requests that wait, in the order in which they are looked at (torch-free).

Priority comes first, and is strict: while higher ones are there, lower ones wait, however long. Among equals those that were
running already are next, then all others by the policy of the server.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from freetoken.scheduler import policy
from freetoken.scheduler.request import Req


class WaitingQueue:
    """Requests by id, to be read like a dictionary. Its order is by priority, highest first, then by arrival, those put back before the rest.

    ``longest_prefix`` orders the next requests of a priority by ``usable_pages``, what each would find stored.
    ``tokens`` counts those of all that wait.
    """

    def __init__(self, longest_prefix: bool, usable_pages: Callable[[Req], int]) -> None:
        self.tokens = 0
        self._longest_prefix = longest_prefix
        self._usable_pages = usable_pages
        self._levels: dict[int, OrderedDict[str, Req]] = {}
        self._order: list[int] = []
        self._priority: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, rid: str) -> bool:
        return rid in self._priority

    def __getitem__(self, rid: str) -> Req:
        return self._levels[self._priority[rid]][rid]

    def __iter__(self) -> Iterator[str]:
        for negated in self._order:
            yield from self._levels[-negated]

    def values(self) -> Iterator[Req]:
        for negated in self._order:
            yield from self._levels[-negated].values()

    def add(self, req: Req, *, first: bool = False) -> None:
        """Behind all others of its priority, or with ``first`` before them, for a request that had to stop running."""
        level = self._levels.get(req.priority)
        if level is None:
            level = self._levels[req.priority] = OrderedDict()
            bisect.insort(self._order, -req.priority)
        level[req.rid] = req
        if first:
            level.move_to_end(req.rid, last=False)
        self._priority[req.rid] = req.priority
        self.tokens += len(req.ids)

    def remove(self, req: Req) -> None:
        level = self._levels[req.priority]
        del level[req.rid], self._priority[req.rid]
        if not level:
            del self._levels[req.priority]
            self._order.remove(-req.priority)
        self.tokens -= len(req.ids)

    def window(self) -> list[Req]:
        """The requests a step looks at."""
        return list(itertools.islice(self.values(), policy.QUEUE_WINDOW))

    def order(self) -> list[Req]:
        """The window, next first."""
        window = self.window()
        if not self._longest_prefix or len(window) < 2:
            return window
        facts = [
            policy.Waiting(r.arrival, r.retractions > 0, self._usable_pages(r), r.bypassed, r.priority) for r in window
        ]
        return [window[i] for i in policy.longest_prefix_order(facts)]

    def count_bypassed(self, admitted: list[Req]) -> None:
        """Requests have been admitted: note whom they passed."""
        if self._longest_prefix:
            for req in self.window():
                req.bypassed += sum(other.arrival > req.arrival for other in admitted)
