"""What requests take from the prefix tree, give to it, and wait for (torch-free).

For a model with recurrent state a stored prefix is of use only up to a position whose state was kept: KV pages and state
are taken together or not at all. The state of a running request moves on with every token, so it is copied out while its
prompt is computed, at the ends of pieces; what a request generates is stored as pages alone, and the next turn starts from
the state at the end of the prompt before it, or from one not far before that end.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from freetoken.scheduler import policy
from freetoken.scheduler.allocator import IdAllocator
from freetoken.scheduler.checkpoints import Checkpoints
from freetoken.scheduler.radix import Node, RadixCache, as_key, common_pages
from freetoken.scheduler.request import Req, ScheduleBatch, Slice
from freetoken.server_args import Config


class Match(NamedTuple):
    """Stored ``pages`` a request can take and the ``node`` they end at; the root for none.

    ``junction`` is the position where the prompt parts from a stored path, 0 where none goes on beside it.
    """

    pages: list[int]
    node: Node
    junction: int


class PrefixCache:
    """The tree of KV pages with the checkpoints on it, and the requests that are filling it.

    ``pages`` is the allocator that pages are freed to. ``has_state`` says that the model has recurrent state;
    ``state_blocks`` bounds the checkpoints (with 0 nothing is ever a hit for such a model).
    """

    def __init__(self, config: Config, pages: IdAllocator, *, has_state: bool, state_blocks: int) -> None:
        self.enabled = config.radix_cache
        self.has_state = has_state
        self.checkpoints = Checkpoints(state_blocks if has_state and config.radix_cache else 0)
        self.tree = RadixCache(config.page_size, self.checkpoints.dropped)
        self.computing: list[Req] = []
        """Resident requests whose prompt is on its way into the tree."""
        self._pages = pages
        self._page_size = config.page_size
        self._interval = config.state_checkpoint_interval
        self._end_tokens = policy.END_TOKENS if config.device == "cuda" else 0

    # --- waiting requests --------------------------------------------------------------------------------------------

    def usable_pages(self, req: Req) -> int:
        """Pages the request would take from the tree if it were admitted now."""
        return self._measure(req)[1] if self._matches(req) else 0

    def waits(self, req: Req) -> bool:
        """Whether a resident request is computing a long part of this prompt that will be usable and is not yet."""
        if not self.computing or not self._matches(req):
            return False
        stored, usable = self._measure(req)
        start = usable * self._page_size
        end = start + policy.SHARED_PREFIX_TOKENS
        if end > self._matchable(req):
            return False
        if self.has_state:
            return any(self._awaited(other, req, start, stored * self._page_size) >= end for other in self.computing)
        return any(
            other.key[start:end] == req.key[start:end] and other.key[:start] == req.key[:start]
            for other in self.computing
        )

    def plan_junctions(self, req: Req, waiting: Iterable[Req]) -> None:
        """Have a request just admitted keep its state where those behind it in the queue will part from it."""
        if not req.cuts or req.computed + policy.SHARED_PREFIX_TOKENS > len(req.key):
            return
        for other in waiting:
            if other is not req and self._matches(other):
                self._awaited(req, other, req.computed, 0)

    def _awaited(self, other: Req, req: Req, start: int, stored: int) -> int:
        """The last position, usable by ``req``, whose state ``other`` is going to keep; 0 for none that pays.

        ``start`` tokens of ``req`` are usable now, and ``stored`` are in the tree. Where the two part gets a cut if
        ``other`` has not passed it and no cut that pays lies near before it.
        """
        if not self.checkpoints.total:
            return 0
        limit = self._common(other, req, start)
        if other.keep_private:
            # Its pages enter the tree when it ends. State it copies out is of use earlier only where there are others'.
            limit = min(limit, stored)
        if limit - start < policy.SHARED_PREFIX_TOKENS:
            return 0
        positions = (*other.cuts, *self.checkpoints.pending(other))
        last = max((position for position in positions if position <= limit), default=0)
        useless = last < start + policy.SHARED_PREFIX_TOKENS and limit - last >= policy.CHECKPOINT_TOKENS
        if limit > other.computed and (useless or limit - max(last, start) >= policy.SHARED_PREFIX_TOKENS):
            index = bisect.bisect(other.cuts, limit)
            near = index < len(other.cuts) and other.cuts[index] - limit < policy.CHECKPOINT_TOKENS
            other.cuts[index : index + near] = [limit]
            return limit
        return last

    def _common(self, other: Req, req: Req, start: int) -> int:
        """Tokens in whole pages that both begin with and ``req`` may match; 0 unless they go on together at ``start``."""
        known = req.commons.get(other.arrival)
        if known is None:
            end = start + policy.SHARED_PREFIX_TOKENS
            if other.key[start:end] != req.key[start:end]:
                return 0
            size = self._page_size
            most = min(self._matchable(req), len(other.key)) // size
            known = req.commons[other.arrival] = common_pages(other.key, req.key, size, most) * size
        return known

    def _matches(self, req: Req) -> bool:
        """Whether the request may take pages from the tree: log-probabilities of the prompt need it computed."""
        return self.enabled and not req.wants_prompt_logprobs

    def _matchable(self, req: Req) -> int:
        """Tokens a prefix hit may cover: whole pages that leave at least the last token to compute."""
        return (len(req.ids) - 1) // self._page_size * self._page_size

    def _measure(self, req: Req) -> tuple[int, int]:
        """Pages of the prompt that are stored, and those that are usable."""
        stored, restorable = self.tree.measure(req.key[: self._matchable(req)])
        return stored, restorable if self.has_state else stored

    # --- admission ---------------------------------------------------------------------------------------------------

    def match(self, req: Req) -> Match:
        """What a request can take from the tree. The caller locks the node before anything is evicted."""
        if not self._matches(req):
            return Match([], self.tree.root, 0)
        pages, node = self.tree.match(req.key[: self._matchable(req)])
        if not self.has_state:
            return Match(pages, node, 0)
        # At a leaf the prompt goes on where the stored path ends: nothing parts there.
        junction = len(pages) * self._page_size if node.children else 0
        while node.parent is not None and node.checkpoint is None:
            del pages[len(pages) - len(node.pages) :]
            node = node.parent
        return Match(pages, node, junction)

    def admitted(self, req: Req, match: Match, batch: ScheduleBatch) -> None:
        """The request has been given ``match`` and is in ``batch``: plan where its state comes from and is to be kept.

        Others may wait for its prompt from now on.
        """
        req.node = match.node
        req.shared_pages = len(match.pages)
        req.computed = req.shared_pages * self._page_size
        req.commons = {}
        req.keep_private = not self.enabled
        if self.enabled:
            self.computing.append(req)
        if not self.has_state:
            return
        if req.shared_pages:
            batch.restores.append((req, self.checkpoints.restore(match.node)))
        if self._matches(req):
            end, blocks = self._matchable(req), self.checkpoints.total
            req.cuts = policy.checkpoint_positions(
                req.computed, end, match.junction, self._interval, blocks, self._end_tokens
            )

    # --- pieces ------------------------------------------------------------------------------------------------------

    def piece_length(self, req: Req, most: int) -> int:
        """Tokens of the next piece of at most ``most``: it ends where the state is to be kept."""
        return min(most, req.cuts[0] - req.computed) if req.cuts else most

    def keep_state(self, req: Req, batch: ScheduleBatch) -> None:
        """A piece up to ``req.computed`` has been planned: copy the state out if it is to be kept there."""
        if req.cuts and req.cuts[0] == req.computed:
            block = self.checkpoints.take(req, req.cuts.pop(0))
            if block is not None:
                batch.snapshots.append((req, block))

    def share(self, piece: Slice) -> None:
        """Put the pages a drained prefill piece has completed into the tree, for others to match while this one runs.

        Pages that the tree already holds for them, as when the prompt had to be computed again to have its state, give
        way. Where those are in use ours stay private until the request ends: a running step may be using ours too.
        """
        req = piece.req
        end = piece.start + piece.length
        full = end // self._page_size
        if not req.keep_private and full > req.shared_pages:
            assert req.node is not None
            key = req.key[: full * self._page_size]
            replaced = self.tree.replace(req.node, key, req.pages)
            if replaced is None:
                req.keep_private = True
            else:
                self._pages.free(replaced)
                node, _ = self.tree.insert(key, req.pages[:full])
                self.tree.lock(node)
                self.tree.unlock(req.node)
                req.node = node
                req.shared_pages = full
        if end == len(req.key) or (req.keep_private and not self.has_state):
            self._stop_computing(req)

    def take_states(self, batch: ScheduleBatch) -> None:
        """A step has been drained and its pages shared: its checkpoints enter the tree where their pages are."""
        for req, block in batch.snapshots:
            self.checkpoints.drained(block)
            self._store_held(req)

    def release(self, req: Req) -> list[int]:
        """Take the full pages and the states of a request that ended or was retracted; returns the pages not taken."""
        assert req.node is not None
        if req.spoiled:
            unused = req.pages[req.shared_pages :]
            self._store_held(req)
        elif self.enabled:
            full = min(req.computed, len(req.ids)) // self._page_size
            _, unused = self.tree.insert(as_key(req.ids[: full * self._page_size]), req.pages[:full])
            unused.extend(req.pages[full:])
            self._store_held(req)
        else:
            unused = req.pages
        self.tree.unlock(req.node)
        self._stop_computing(req)
        req.cuts = []
        return unused

    def _store_held(self, req: Req) -> None:
        if req.spoiled:
            self.checkpoints.blocks.free(tuple(block for _, block in req.held))
            req.held = []
            return
        left = []
        for position, block in req.held:
            pages, node = self.tree.match(req.key[:position])
            if len(pages) * self._page_size == position:
                self.checkpoints.store(node, block)
            else:
                left.append((position, block))
        req.held = left

    def _stop_computing(self, req: Req) -> None:
        self.computing = [r for r in self.computing if r is not req]
