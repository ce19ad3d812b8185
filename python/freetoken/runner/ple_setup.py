"""The tables of a model's n-gram embeddings: where they go, loading them, and staging the rows of those on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from freetoken.kernels.ple_gather import FORMATS
from freetoken.loader.ple_table import TableSource
from freetoken.models.ple import PerLayerEmbeddings, RowTable
from freetoken.runner.memory import TablePlan, plan_tables
from freetoken.runner.ple_mmap import MmapTable, StepIds
from freetoken.runner.ple_table import load_table, random_table
from freetoken.scheduler.request import ScheduleBatch
from freetoken.server_args import Config

logger = logging.getLogger("freetoken.runner")

RANDOM_FORMAT = "f8_e4m3"
"""Row format of tables with random weights: that of the published fp8 checkpoint."""

Progress = Callable[[str, int, int, str], None]


class PleTables:
    """Tables attached to ``ple``, ``sources`` naming one for each of its layers; ``None`` asks for random ones.

    ``memory`` is free and total bytes of the device, its weights loaded. :meth:`stage` comes before each step.
    """

    def __init__(
        self,
        config: Config,
        ple: PerLayerEmbeddings,
        sources: Sequence[TableSource] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: tuple[int, int],
        progress: Progress,
    ) -> None:
        geometry = ple.config
        row_bytes = FORMATS[RANDOM_FORMAT].row_bytes(geometry.row_width)
        rows = [geometry.table_rows(index) for index in range(len(geometry.layers))]
        self.nbytes = row_bytes * sum(rows) if sources is None else sum(source.nbytes for source in sources)
        self.plan: TablePlan = plan_tables(
            config.ple_table,
            self.nbytes,
            on_disk=sources is not None,
            device=device.type,
            free_bytes=memory[0],
            total_bytes=memory[1],
            fraction=config.mem_fraction_static,
            host_bytes=psutil.virtual_memory().available,
        )
        logger.info("n-gram tables: %s (%s)", self.plan.kind, self.plan.reason)
        tables: list[Any] = []
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress("loading n-gram tables", done, self.nbytes, "bytes")

        for index, count in enumerate(rows):
            if sources is None:
                seed = config.random_seed + index
                width = geometry.row_width
                tables.append(
                    random_table(RANDOM_FORMAT, self.plan.kind, count, width, dtype=dtype, device=device, seed=seed)
                )
            elif self.plan.kind == "mmap":
                captured = max(config.cuda_graph_bs, default=0)
                tables.append(
                    MmapTable(sources[index], geometry, index, dtype=dtype, device=device, max_captured=captured)
                )
            else:
                tables.append(load_table(sources[index], self.plan.kind, dtype=dtype, device=device, progress=report))
        attached: list[RowTable] = tables
        ple.attach(attached)
        self._staged: list[MmapTable] = [table for table in tables if isinstance(table, MmapTable)]

    def stage(self, batch: ScheduleBatch, last_ids: torch.Tensor, *, captured: bool) -> dict[str, str]:
        """Fetch what the step needs from disk; request id to message for those whose rows could not be read.

        ``last_ids [rows + 1]`` is the runner's last sampled id of each row. Where a decode's id has not reached the host yet, this
        waits for the step that draws it.
        """
        if not self._staged:
            return {}
        step = _step_ids(batch, last_ids, self._staged[0])
        failed: dict[str, str] = {}
        for table in self._staged:
            for number in table.stage(step, captured=captured):
                failed[batch.slices[number].req.rid] = "the n-gram table could not be read from disk for this request"
        for rid, message in failed.items():
            logger.error("request %s: %s", rid, message)
        return failed

    def info(self) -> dict[str, Any]:
        """JSON-ready: where the tables are, and why."""
        return {"kind": self.plan.kind, "reason": self.plan.reason, "bytes": self.nbytes}


def _step_ids(batch: ScheduleBatch, last_ids: torch.Tensor, table: MmapTable) -> StepIds:
    """The ids of a step and those before them, from the requests' own lists but for ids that only the device has."""
    unknown = [s.req.row for s in batch.decodes if s.start >= len(s.req.ids)]
    drawn: dict[int, int] = {}
    if unknown:
        rows = torch.tensor(unknown, dtype=torch.int64, device=last_ids.device)
        drawn = dict(zip(unknown, last_ids.index_select(0, rows).tolist()))
    ids: list[int] = []
    contexts = []
    for s in batch.slices:
        assert s.start <= len(s.req.ids)
        contexts.append(table.hash.context(s.req.ids, s.start))
        known = s.req.ids[s.start : s.start + s.length]
        ids += known or [drawn[s.req.row]]
    lengths = tuple(s.length for s in batch.slices)
    return StepIds(np.array(ids, dtype=np.int64), np.array(contexts, dtype=np.int64), lengths)
