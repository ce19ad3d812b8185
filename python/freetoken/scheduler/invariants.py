"""What must hold between any two steps of the scheduler (torch-free)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from freetoken.scheduler.policy import pages_for
from freetoken.scheduler.radix import RadixCache
from freetoken.scheduler.request import Status

if TYPE_CHECKING:
    from freetoken.scheduler.scheduler import Scheduler


class InvariantError(RuntimeError):
    """The scheduler's books do not add up: a fault of ours, never of a request."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def check_idle(scheduler: Scheduler) -> None:
    """With nothing to do, everything is free or evictable. Constant time, so that it can run in production."""
    tree, pages, rows = scheduler.tree, scheduler.pages, scheduler.rows
    _require(not scheduler.resident and not scheduler.waiting, "idle with requests waiting or resident")
    _require(not scheduler.decoding and not scheduler.prefilling, "idle with requests to plan")
    _require(scheduler.waiting.tokens == 0, f"idle with {scheduler.waiting.tokens} queued tokens")
    _require(tree.evictable_pages == tree.total_pages, "idle with locked pages")
    _require(
        pages.used_count == tree.total_pages, f"idle with {pages.used_count} pages out, {tree.total_pages} in the tree"
    )
    _require(rows.used_count == 0, f"idle with {rows.used_count} rows out")
    states = scheduler.prefix.checkpoints
    _require(
        states.blocks.used_count == len(states.stored),
        f"idle with {states.blocks.used_count} state blocks out, {len(states.stored)} in the tree",
    )


def check(scheduler: Scheduler) -> None:
    """The whole battery: pages, rows, locks, lengths, queues. Linear in the pool."""
    check_tree(scheduler.tree)
    _check_pages(scheduler)
    _check_rows(scheduler)
    _check_locks(scheduler)
    _check_lengths(scheduler)
    _check_queues(scheduler)
    _check_states(scheduler)
    if not scheduler.live and not scheduler.flights:
        check_idle(scheduler)


def check_tree(tree: RadixCache) -> None:
    """Structure and counts of a prefix tree."""
    total = evictable = 0
    seen: set[int] = set()
    for node in tree.nodes():
        _require(bool(node.pages), "a tree node is empty")
        _require(len(node.key) == len(node.pages) * tree.page_size, "a tree node's key does not fill its pages")
        for edge, child in node.children.items():
            _require(child.parent is node, "a tree node's parent is wrong")
            _require(edge == child.key[: tree.page_size].tobytes(), "a tree node hangs under a wrong edge")
        below = sum(child.locks for child in node.children.values())
        _require(node.locks >= below, "a tree node has fewer locks than its children")
        _require(node.last_access >= max((c.last_access for c in node.children.values()), default=0), "LRU order")
        _require(bool(node.children) or node.locks > 0 or node.queued, "an evictable leaf is not in the heap")
        _require(seen.isdisjoint(node.pages), "a page is in the tree twice")
        seen.update(node.pages)
        total += len(node.pages)
        evictable += len(node.pages) if node.locks == 0 else 0
    _require(len(seen) == total, "a page is in the tree twice")
    _require(total == tree.total_pages, f"the tree counts {tree.total_pages} pages and holds {total}")
    _require(evictable == tree.evictable_pages, f"the tree counts {tree.evictable_pages} evictable, has {evictable}")


def _check_pages(scheduler: Scheduler) -> None:
    owners: Counter[int] = Counter(scheduler.pages.free_ids())
    for node in scheduler.tree.nodes():
        owners.update(node.pages)
    for req in scheduler.resident.values():
        owners.update(req.pages[req.shared_pages :])
        _require(req.node is not None, f"{req.rid} is resident without a node")
        assert req.node is not None
        path = scheduler.tree.path_pages(req.node)
        _require(path == req.pages[: req.shared_pages], f"{req.rid}: shared pages are not those of its node")
    everything = range(1, scheduler.runner.num_pages)
    twice = [page for page, count in owners.items() if count > 1]
    _require(not twice, f"pages {twice[:8]} have more than one owner")
    _require(len(owners) == len(everything) and all(p in owners for p in everything), "pages are lost")


def _check_rows(scheduler: Scheduler) -> None:
    rows = scheduler.rows.free_ids() + [req.row for req in scheduler.resident.values()]
    _require(sorted(rows) == list(range(scheduler.runner.max_rows)), "rows are lost or have two owners")


def _check_locks(scheduler: Scheduler) -> None:
    locks: Counter[int] = Counter()
    for req in scheduler.resident.values():
        node = req.node
        while node is not None:
            locks[id(node)] += 1
            node = node.parent
    for node in (scheduler.tree.root, *scheduler.tree.nodes()):
        _require(node.locks == locks[id(node)], "a tree node's locks are not those of the resident requests")


def _check_lengths(scheduler: Scheduler) -> None:
    size = scheduler.config.page_size
    pending: Counter[int] = Counter()
    in_flight: Counter[int] = Counter()
    for flight in scheduler.flights:
        for piece in flight.batch.slices:
            pending[piece.req.arrival] += 1
            in_flight[piece.req.arrival] += piece.sample
    _require(set(pending) <= set(scheduler.resident), "a step in flight names a request that is not resident")
    for arrival, req in scheduler.resident.items():
        _require(req.pending == pending[arrival], f"{req.rid}: {req.pending} pending steps, not {pending[arrival]}")
        _require(req.in_flight == in_flight[arrival], f"{req.rid}: {req.in_flight} tokens in flight is wrong")
        _require(req.status is Status.RUNNING or req.pending > 0, f"{req.rid} ended and holds memory for no step")
        held = len(req.pages)
        low, high = pages_for(req.computed, size), pages_for(req.total_len, size)
        _require(low <= held <= high, f"{req.rid}: {held} pages, expected {low} to {high}")
        _require(req.num_output <= req.max_new_tokens, f"{req.rid}: more output scheduled than allowed")
    for req in scheduler.decoding:
        _require(req.status is Status.RUNNING, f"{req.rid} decodes after its end")
        _require(
            req.computed == req.total_len - 1, f"{req.rid} decodes with {req.computed} of {req.total_len} computed"
        )


def _check_queues(scheduler: Scheduler) -> None:
    waiting, resident = scheduler.waiting, scheduler.resident
    order = [req.priority for req in waiting.values()]
    _require(order == sorted(order, reverse=True) and len(order) == len(waiting), "the queue is out of order")
    for req in waiting.values():
        rid = req.rid
        _require(rid in waiting and waiting[rid] is req, f"{rid} waits under another name")
        _require(req.status is Status.WAITING, f"{rid} waits with status {req.status}")
        _require(not req.pages and req.row == -1 and req.node is None, f"{rid} waits and holds memory")
        _require(req.pending == 0 and req.in_flight == 0, f"{rid} waits with a step in flight")
        _require(req.computed == 0, f"{rid} waits with {req.computed} tokens computed")
        _require(not req.cuts and not req.held, f"{rid} waits with state to keep")
    queued = sum(len(req.ids) for req in waiting.values())
    _require(queued == waiting.tokens, f"{waiting.tokens} queued tokens counted, {queued} there")
    running = [req for req in resident.values() if req.status is Status.RUNNING]
    expected = set(waiting) | {req.rid for req in running}
    _require(set(scheduler.live) == expected and len(expected) == len(waiting) + len(running), "live requests differ")
    held = [id(r) for r in (*scheduler.decoding, *scheduler.prefilling)]
    _require(len(held) == len(set(held)), "a request is planned twice")
    for req in running:
        planned = id(req) in held or req.num_output == req.max_new_tokens
        _require(planned, f"{req.rid} runs but no step will take it up")


def _check_states(scheduler: Scheduler) -> None:
    states, size = scheduler.prefix.checkpoints, scheduler.config.page_size
    _require(not states.restoring, "a block is marked for a step that was never launched")
    owners: Counter[int] = Counter(states.blocks.free_ids())
    at_nodes = {}
    for node in scheduler.tree.nodes():
        if node.checkpoint is not None:
            owners[node.checkpoint] += 1
            at_nodes[node.checkpoint] = node
    _require(at_nodes == dict(states.stored), "the checkpoints in the tree are not those that are listed")
    launched = [(block, req) for flight in scheduler.flights for req, block in flight.batch.snapshots]
    _require(launched == [(block, req) for block, (req, _) in states.in_flight.items()], "blocks in flight differ")
    owners.update(block for block, _ in launched)
    for req in scheduler.resident.values():
        owners.update(block for _, block in req.held)
        borders = [*req.cuts, *(position for position, _ in req.held)]
        _require(all(0 < p <= len(req.key) and p % size == 0 for p in borders), f"{req.rid}: state at no page border")
        _require(
            req.cuts == sorted(req.cuts) and all(p > req.computed for p in req.cuts), f"{req.rid}: cuts are passed"
        )
        _require(scheduler.prefix.has_state or not borders, f"{req.rid} keeps state it does not have")
    _require(owners == Counter(range(states.total)), "state blocks are lost or have two owners")
