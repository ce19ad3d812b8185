"""Which running requests make way for one of higher priority that waits (torch-free).

Nothing is taken from anybody in vain: the victims are the fewest, lowest and youngest first, whose memory and rows let the next
request in the queue run now; if even all of a lower priority would not do, none is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.scheduler import policy
from freetoken.scheduler.request import Req, Status

if TYPE_CHECKING:
    from freetoken.scheduler.scheduler import Scheduler


def victims(scheduler: Scheduler) -> list[Req]:
    """The residents to retract for the request that is next in the queue; empty where that would not help, or need not."""
    residents = [r for r in scheduler.resident.values() if r.status is Status.RUNNING]
    if not residents or not scheduler.waiting:
        return []
    lowest = min(r.priority for r in residents)
    head = _next(scheduler, lowest)
    if head is None:
        return []
    standings = [policy.Standing(r.priority, r.arrival) for r in residents]
    order = [residents[i] for i in policy.victims(standings, head.priority)]
    return _fewest(scheduler, head, residents, order)


def _next(scheduler: Scheduler, lowest: int) -> Req | None:
    """The next waiting request that could run, if its priority is above ``lowest``."""
    for req in scheduler.waiting.order():
        if req.priority <= lowest:
            return None
        compiled = req.constraint is None or (scheduler.grammars is not None and scheduler.grammars.ready(req))
        if compiled and not scheduler.prefix.waits(req):
            return req
    return None


def _fewest(scheduler: Scheduler, head: Req, residents: list[Req], order: list[Req]) -> list[Req]:
    """The shortest beginning of ``order`` without which ``head`` fits; empty if it fits as it is, or without none of them."""
    tree, size = scheduler.tree, scheduler.config.page_size
    match = scheduler.prefix.match(head)
    tree.lock(match.node)
    needed = policy.pages_for(len(head.ids), size) - len(match.pages)
    left, free, chosen = list(residents), scheduler.pages.free_count, list[Req]()
    fits = False
    for victim in [None, *order]:
        if victim is not None:
            # As a retraction would: its pages in the tree are anybody's again, its own are free.
            assert victim.node is not None
            tree.unlock(victim.node)
            free += len(victim.pages) - victim.shared_pages
            left = [r for r in left if r is not victim]
            chosen.append(victim)
        room = free + tree.evictable_pages - scheduler.growth.beside(left, head)
        fits = needed <= room and scheduler.rows.free_count + len(chosen) > 0
        if fits:
            break
    for victim in chosen:
        assert victim.node is not None
        tree.lock(victim.node)
    tree.unlock(match.node)
    return chosen if fits else []
