"""Blocks of host memory that hold recurrent state at positions of the prefix tree (torch-free).

The runner owns the memory and makes the copies; here are only the numbers of the blocks. A block is free, or named by a
launched step that writes it, or held by a request whose pages are not in the tree yet, or stored at a node of the tree.
Stored ones are given up least recently used first, whatever happens to the pages.
"""

from __future__ import annotations

from collections import OrderedDict

from freetoken.scheduler.allocator import IdAllocator
from freetoken.scheduler.radix import Node
from freetoken.scheduler.request import Req


class Checkpoints:
    """Blocks ``0 .. total - 1`` and where each one is.

    The runner carries out the copies of all steps in order, so a block may be written again as soon as no launched step is
    still to write it and the step that reads it has been launched.
    """

    def __init__(self, total: int) -> None:
        self.blocks = IdAllocator(0, total)
        self.stored: OrderedDict[int, Node] = OrderedDict()
        """Node of each block in the tree, least recently used first."""
        self.in_flight: dict[int, tuple[Req, int]] = {}
        """Request and position of each block that a launched step (or the one being planned) writes."""
        self.restoring: list[int] = []
        """Blocks read by the step being planned."""
        self.restored = 0
        self.evicted = 0

    @property
    def total(self) -> int:
        return self.blocks.total

    def take(self, req: Req, position: int) -> int | None:
        """A block for the state of ``req`` at ``position``, written by the step being planned; ``None`` if there is none.

        The least recently used checkpoint gives way when no block is free.
        """
        if not self.blocks.free_count:
            if not self.stored or next(iter(self.stored)) in self.restoring:
                # What the planned step restores was used last, so all others are gone.
                return None
            self._give_up_oldest()
        block = self.blocks.allocate(1)[0]
        self.in_flight[block] = (req, position)
        return block

    def restore(self, node: Node) -> int:
        """The block at ``node``, for the step being planned; marks it as used."""
        block = node.checkpoint
        assert block is not None
        self.stored.move_to_end(block)
        self.restoring.append(block)
        self.restored += 1
        return block

    def launched(self) -> None:
        """The planned step is on its way."""
        self.restoring.clear()

    def drained(self, block: int) -> None:
        """The step that wrote ``block`` has ended: its request holds it until :meth:`store`."""
        req, position = self.in_flight.pop(block)
        req.held.append((position, block))

    def store(self, node: Node, block: int) -> None:
        """Make a held block the checkpoint of ``node``, or free it where there is one already."""
        if node.checkpoint is not None:
            self.stored.move_to_end(node.checkpoint)
            self.blocks.free((block,))
            return
        node.checkpoint = block
        self.stored[block] = node

    def dropped(self, block: int) -> None:
        """The position of a stored block has left the tree."""
        del self.stored[block]
        self.blocks.free((block,))

    def pending(self, req: Req) -> list[int]:
        """Positions of ``req`` that launched steps are copying out."""
        return [position for owner, position in self.in_flight.values() if owner is req]

    def _give_up_oldest(self) -> None:
        block, node = self.stored.popitem(last=False)
        node.checkpoint = None
        self.blocks.free((block,))
        self.evicted += 1
