"""Per-request state on the device, and copies of it in host memory for the prefix cache."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from freetoken.models.state import StateSpec
from freetoken.runner import host_memory
from freetoken.runner.memory import STAGED_STATES


class StatePool:
    """All state that a model declares, one slot a row of the runner and a last one for padding.

    A kind of state is ``[slots, layers, *shape]``, so that a slot of it is one contiguous piece and :meth:`layer` a view. Nothing in
    a slot is trusted when its request starts at position 0, so slots are never cleared.

    Host memory holds ``blocks`` copies of a slot. :meth:`restore` and :meth:`snapshot` only enqueue copies. On CUDA those between
    device and host run on a side stream, in the order of the calls, so a block may be named again at once. A snapshot passes
    through staging memory on the device: the slot may change as soon as the call returns. A slot to be restored must not be in
    use by a running step.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        *,
        rows: int,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.specs = tuple(specs)
        self.slots = rows + 1
        self.blocks = blocks
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        types = [dtype if spec.dtype is None else getattr(torch, spec.dtype) for spec in self.specs]
        self._pools = [
            torch.zeros((self.slots, spec.layers, *spec.shape), dtype=kind, device=self.device)
            for spec, kind in zip(self.specs, types)
        ]
        self._views = {
            spec.name: [pool[:, layer] for layer in range(spec.layers)] for spec, pool in zip(self.specs, self._pools)
        }
        self._host = [
            host_memory.allocate(
                (blocks, *pool.shape[1:]),
                pool.dtype,
                pinned=self.cuda,
                what="copies of states",
                advice="lower --state-cache-gb",
            )
            for pool in self._pools
        ]
        if self.cuda and blocks:
            self._staging = [pool.new_empty((min(STAGED_STATES, rows), *pool.shape[1:])) for pool in self._pools]
            self._side = torch.cuda.Stream(self.device)
            self._copied: list[torch.cuda.Event | None] = [None] * min(STAGED_STATES, rows)
            self._next = 0
            release = weakref.finalize(self, host_memory.release, self._side, [host.data_ptr() for host in self._host])
            release.atexit = False

    def layer(self, name: str, layer: int) -> torch.Tensor:
        """``[slots, *shape]`` of one layer; slots lie further apart than their elements fill."""
        return self._views[name][layer]

    def restore(self, pairs: Sequence[tuple[int, int]]) -> None:
        """``(slot, block)``: what the block holds goes to the slot, before anything that is enqueued on this stream later."""
        if not pairs:
            return
        if not self.cuda:
            for slot, block in pairs:
                for pool, host in zip(self._pools, self._host):
                    pool[slot].copy_(host[block])
            return
        with torch.cuda.stream(self._side):
            for slot, block in pairs:
                for pool, host in zip(self._pools, self._host):
                    pool[slot].copy_(host[block], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._side)

    def snapshot(self, pairs: Sequence[tuple[int, int]]) -> None:
        """``(slot, block)``: what the slot holds after all that was enqueued on this stream so far goes to the block."""
        for slot, block in pairs:
            if not self.cuda:
                for pool, host in zip(self._pools, self._host):
                    host[block].copy_(pool[slot])
                continue
            self._snapshot_on_side(slot, block)

    def _snapshot_on_side(self, slot: int, block: int) -> None:
        index = self._next
        self._next = (index + 1) % len(self._copied)
        main, copied = torch.cuda.current_stream(), self._copied[index]
        if copied is not None:
            main.wait_event(copied)
        for pool, staging in zip(self._pools, self._staging):
            staging[index].copy_(pool[slot])
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for staging, host in zip(self._staging, self._host):
                host[block].copy_(staging[index], non_blocking=True)
        self._copied[index] = self._side.record_event(copied)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request's state, in a slot or in a block."""
        return sum(pool[0].nbytes for pool in self._pools)

    def info(self) -> dict[str, Any]:
        """JSON-ready: the kinds of state, device and host bytes."""
        kinds = [
            {"name": spec.name, "layers": spec.layers, "shape": list(spec.shape), "dtype": str(pool.dtype)[6:]}
            for spec, pool in zip(self.specs, self._pools)
        ]
        return {
            "slots": self.slots,
            "slot_bytes": self.slot_bytes,
            "bytes": sum(pool.nbytes for pool in self._pools),
            "blocks": self.blocks,
            "host_bytes": sum(host.nbytes for host in self._host),
            "kinds": kinds,
        }
