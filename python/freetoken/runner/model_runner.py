"""Loads a model, sizes memory, and turns one ``ScheduleBatch`` after another into sampled ids."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from freetoken import environ
from freetoken.errors import StartupError
from freetoken.loader.ple_table import TableSource
from freetoken.models.registry import build_model, find
from freetoken.runner.attention import build_attention
from freetoken.runner.cuda_graph import CapturePrimitive, CudaGraphCapture, DecodeGraphs, RerunCapture
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.kv_pool import KVPool
from freetoken.runner.memory import (
    MemoryPlan,
    StatePlan,
    check_model_fits,
    gib,
    plan_memory,
    plan_states,
    step_bytes,
)
from freetoken.runner.ple_setup import PleTables
from freetoken.runner.sampler import SampleOutput, SamplePlan, Sampler
from freetoken.runner.staging import HostRing
from freetoken.runner.state_pool import StatePool
from freetoken.scheduler.request import ScheduleBatch, Slice, StepResult
from freetoken.server_args import Config

logger = logging.getLogger("freetoken.runner")

Progress = Callable[[str, int, int, str], None]
# Rows of prompt logits computed at once: bounds the memory of prompt log-probabilities, not their number.
PROMPT_LOGPROB_ROWS = 256
# Without this cap a CPU server would take half of the machine's memory for a small model.
CPU_CONTEXTS = 8


# One chunk of prompt log-probabilities: request id, target ids, alternatives a position, tensors.
_PromptPiece = tuple[str, list[int], int, list[torch.Tensor]]


@dataclass
class _Pending:
    """A launched step: what its draw needs, then where its host copies land and the event that says they have."""

    plan: SamplePlan
    drawn_from: tuple[torch.Tensor, torch.Tensor] | None
    """Logits ``[S, vocab_size]`` and request rows ``[S]``; let go with the draw, as they are large."""
    prompts: list[_PromptPiece]
    failed: dict[str, str]
    copies: _Copies | None = None


@dataclass(frozen=True)
class _Copies:
    ids: np.ndarray
    pieces: list[torch.Tensor]
    prompts: list[_PromptPiece]
    event: torch.cuda.Event | None


def _quiet(phase: str, done: int, total: int, unit: str) -> None:
    """Progress nobody listens to."""


class ModelRunner:
    """Model, KV pool, graphs and sampler of one GPU (or the CPU).

    ``launch`` enqueues a step and returns at once on CUDA; ``collect`` waits for its ids. Steps run in launch order, and
    step N + 1 may be launched before step N is collected: its decode inputs are the ids that step N leaves on the device.
    Of a step with token masks ``launch`` enqueues the forward pass alone, and ``draw``, before the next launch, the rest.
    """

    def __init__(
        self, config: Config, progress: Progress | None = None, *, capture: CapturePrimitive | None = None
    ) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.cuda = self.device.type == "cuda"
        self.page_size = config.page_size
        self.max_rows = config.max_running_requests
        self.state_specs = find(config.model.architecture).state_specs(config.model)
        self.has_state = bool(self.state_specs)
        self._progress = progress or _quiet
        threads = environ.get("FREETOKEN_NUM_THREADS")
        if threads:
            torch.set_num_threads(int(threads))
        with torch.inference_mode():
            self._start(capture)

    def _start(self, capture: CapturePrimitive | None) -> None:
        config = self.config
        self.dtype = getattr(torch, config.dtype)
        started = time.monotonic()
        self._host_bytes = psutil.virtual_memory().available
        self.max_pages = -(-config.context_length // self.page_size)
        free, total = self._device_memory()
        check_model_fits(
            config.model,
            dtype=config.dtype,
            rows=self.max_rows,
            page_table_entries=(self.max_rows + 1) * self.max_pages,
            free_bytes=free,
            total_bytes=total,
            positions=config.context_length,
        )
        self.model = build_model(
            config.model, dtype=self.dtype, device=self.device, max_positions=config.context_length
        )
        tables = self._load_weights()
        self.tables = self._open_tables(tables)
        self._load_seconds = time.monotonic() - started
        self.state_plan = self._plan_states()
        self.max_rows = self.state_plan.rows
        self.sampler = Sampler(
            max_rows=self.max_rows,
            vocab_size=config.model.vocab_size,
            sample_vocab=config.sample_vocab,
            device=self.device,
            default_seed=config.random_seed,
        )
        self.memory = self._plan_memory()
        self.num_pages = self.memory.num_pages
        model = config.model
        self.states = self._make_states()
        self.state_blocks = self.states.blocks if self.states is not None else 0
        self.state_block_bytes = self.states.slot_bytes if self.states is not None else 0
        self.kv = KVPool(
            num_layers=model.num_attention_layers,
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=getattr(torch, config.kv_cache_dtype),
            device=self.device,
            index_dim=0 if model.indexer is None else model.indexer.head_dim,
        )
        self.page_table = torch.zeros((self.max_rows + 1, self.max_pages), dtype=torch.int32, device=self.device)
        self._table_flat = self.page_table.view(-1)
        self._last_ids = torch.zeros(self.max_rows + 1, dtype=torch.int64, device=self.device)
        self._uploaded_pages = [0] * self.max_rows
        self._ring = HostRing(self.device)
        self._results = HostRing(self.device)
        self.attention = build_attention(
            config.attention_backend,
            num_heads=model.num_heads,
            kv=self.kv,
            max_rows=self.max_rows,
            max_pages=self.max_pages,
            device=self.device,
            dtype=self.dtype,
        )
        self.graphs = self._capture_graphs(capture)

    # --- start ---------------------------------------------------------------------------------------------------

    def _load_weights(self) -> list[TableSource] | None:
        """Fill the model; returns where its n-gram tables lie. ``loaded_bytes`` is then what is held on the GPU, kernels' scratch memory included."""
        config = self.config
        tables = None
        if config.load_format == "dummy":
            self._progress("making random weights", 0, self.model.weight_bytes, "bytes")
            self.model.random_weights(config.random_seed)
        else:
            from freetoken.loader.checkpoint import open_checkpoint
            from freetoken.loader.stream import stream_tensors

            checkpoint = open_checkpoint(config.model_path, config.load_format, config.model_overrides)
            for part, tensors in checkpoint.aside.items():
                logger.info("%d tensors of the checkpoint's %s are left aside", len(tensors), part)
            report = lambda done, total: self._progress("loading weights", done, total, "bytes")  # noqa: E731
            self.model.load_weights(stream_tensors(checkpoint, self.dtype, report, self.device))
            tables = checkpoint.tables
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.loaded_bytes = torch.cuda.memory_reserved() if self.cuda else self.model.weight_bytes
        return tables

    def _open_tables(self, sources: list[TableSource] | None) -> PleTables | None:
        if self.model.ple is None:
            return None
        return PleTables(
            self.config,
            self.model.ple,
            sources,
            dtype=self.dtype,
            device=self.device,
            memory=self._device_memory(),
            progress=self._progress,
        )

    def _device_memory(self) -> tuple[int, int]:
        """Free and total bytes where the model runs; of the host's memory only what was free at the start counts, since what others
        hold is not ours to share out."""
        if self.cuda:
            free, total = torch.cuda.mem_get_info()
            return free, total
        return min(psutil.virtual_memory().available, self._host_bytes), self._host_bytes

    def _step_bytes(self) -> int:
        config = self.config
        return step_bytes(
            config.model,
            dtype=config.dtype,
            prefill_tokens=config.max_prefill_tokens,
            rows=self.max_rows,
            page_table_entries=(self.max_rows + 1) * self.max_pages,
        )

    def _plan_states(self) -> StatePlan:
        config = self.config
        free, total = self._device_memory()
        plan = plan_states(
            self.state_specs,
            dtype=config.dtype,
            rows=self.max_rows,
            staged=self.cuda and self._state_cache_bytes > 0,
            total_bytes=total,
            free_bytes=free,
            fraction=config.mem_fraction_static,
            step_bytes=self._step_bytes(),
        )
        if plan.limited:
            logger.warning("%d requests can run at once, not %d: %s", plan.rows, self.max_rows, plan.reason)
        return plan

    @property
    def _state_cache_bytes(self) -> int:
        return self.config.state_cache_bytes if self.config.radix_cache else 0

    def _make_states(self) -> StatePool | None:
        if not self.has_state:
            return None
        states = StatePool(
            self.state_specs,
            rows=self.max_rows,
            blocks=self.state_plan.blocks(self._state_cache_bytes, self.num_pages),
            dtype=self.dtype,
            device=self.device,
        )
        self.model.reserve(states)
        return states

    def _plan_memory(self) -> MemoryPlan:
        config = self.config
        free, total = self._device_memory()
        cap = None if self.cuda else min(CPU_CONTEXTS, self.max_rows) * config.context_length
        return plan_memory(
            config.model,
            kv_dtype=config.kv_cache_dtype,
            page_size=self.page_size,
            context_length=config.context_length,
            max_total_tokens=config.max_total_tokens,
            total_bytes=total,
            free_bytes=free,
            fraction=config.mem_fraction_static,
            weight_bytes=self.model.weight_bytes,
            step_bytes=self._step_bytes(),
            state_bytes=self.state_plan.device_bytes,
            cap_tokens=min(cap, self.max_rows * config.context_length)
            if cap
            else self.max_rows * config.context_length,
        )

    def _capture_graphs(self, capture: CapturePrimitive | None) -> DecodeGraphs | None:
        buckets = [size for size in self.config.cuda_graph_bs if size <= self.max_rows]
        if not buckets:
            return None
        if capture is None:
            capture = CudaGraphCapture() if self.cuda else RerunCapture()
        try:
            return DecodeGraphs(
                buckets,
                run=self._decode_logits,
                replan=self.attention.replan,
                capture=capture,
                ring=self._ring,
                page_table=self.page_table,
                page_size=self.page_size,
                progress=lambda done, total: self._progress("capturing decode graphs", done, total, "graphs"),
            )
        except torch.cuda.OutOfMemoryError:
            raise StartupError(
                "out of GPU memory while capturing decode graphs; lower --mem-fraction-static or --cuda-graph-max-bs"
            ) from None

    def _decode_logits(self, fb: ForwardBatch) -> torch.Tensor:
        torch.index_select(self._last_ids, 0, fb.rows, out=fb.input_ids)
        return self.model.logits(self.model.forward(fb, self.kv, self.attention, self.states))

    # --- steps -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch) -> _Pending:
        """Enqueue one step. Every page the step writes must be in ``req.pages`` already."""
        for req in batch.new_rows:
            self._uploaded_pages[req.row] = 0
        self.sampler.register(batch.new_rows)
        if self.states is not None:
            self.states.restore([(req.row, block) for req, block in batch.restores])
        prompts: list[_PromptPiece] = []
        graphs = None if batch.prefills else self.graphs
        captured = graphs is not None and graphs.bucket(len(batch.decodes)) is not None
        failed = {} if self.tables is None else self.tables.stage(batch, self._last_ids, captured=captured)
        if captured:
            sampled = batch.decodes
            logits, rows = self._replay(sampled)
        else:
            sampled = batch.sampled
            logits, rows, prompts = self._eager(batch, sampled)
            if not batch.prefills and self.graphs is not None:
                self.graphs.misses += 1
        if self.states is not None:
            self.states.snapshot([(req.row, block) for req, block in batch.snapshots])
        pending = _Pending(self.sampler.plan(batch), (logits, rows), prompts, failed)
        if not batch.masked:
            self._draw(pending, None)
        return pending

    @torch.inference_mode()
    def draw(self, pending: _Pending, masks: np.ndarray) -> None:
        """Enqueue the draw of a step whose batch is ``masked``: ``masks [len(batch.masked), words] int32``."""
        assert pending.copies is None and pending.plan.masked is not None
        self._draw(pending, self.sampler.send_masks(masks))

    def _draw(self, pending: _Pending, masks: torch.Tensor | None) -> None:
        assert pending.drawn_from is not None
        (logits, rows), pending.drawn_from = pending.drawn_from, None
        out = self.sampler.sample(logits, pending.plan, masks) if pending.plan.size else None
        if out is not None:
            self._last_ids.index_copy_(0, rows, out.ids)
        pending.copies = self._copy_back(out, pending.prompts)

    def _replay(self, decodes: list[Slice]) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.graphs is not None
        self._update_page_table(decodes)
        count, size = len(decodes), self.page_size
        rows = np.fromiter((s.req.row for s in decodes), np.int64, count)
        positions = np.fromiter((s.start for s in decodes), np.int64, count)
        pages = np.fromiter((s.req.pages[s.start // size] for s in decodes), np.int64, count)
        lengths = (positions + 1).astype(np.int32)
        return self.graphs.replay(rows, positions, pages * size + positions % size, lengths)

    def _eager(
        self, batch: ScheduleBatch, sampled: list[Slice]
    ) -> tuple[torch.Tensor, torch.Tensor, list[_PromptPiece]]:
        self._update_page_table(batch.slices)
        fb, sampled_rows = self._forward_batch(batch)
        self.attention.plan(fb)
        hidden = self.model.forward(fb, self.kv, self.attention, self.states)
        prompts = self._prompt_logprobs(batch, hidden)
        rows = hidden if len(sampled) == fb.num_tokens else hidden.index_select(0, fb.sample_index)
        return self.model.logits(rows), sampled_rows, prompts

    def _update_page_table(self, slices: list[Slice]) -> None:
        """Send the pages that requests gained since their rows were last uploaded."""
        indices: list[np.ndarray] = []
        values: list[int] = []
        for s in slices:
            req = s.req
            known, count = self._uploaded_pages[req.row], len(req.pages)
            if known < count:
                indices.append(np.arange(known, count) + req.row * self.max_pages)
                values.extend(req.pages[known:])
                self._uploaded_pages[req.row] = count
        if not values:
            return
        where, pages = self._ring.send([np.concatenate(indices), np.array(values, dtype=np.int32)])
        self._table_flat.index_copy_(0, where, pages)

    def _forward_batch(self, batch: ScheduleBatch) -> tuple[ForwardBatch, torch.Tensor]:
        """The device batch, and the rows its sampled ids belong to."""
        slices = batch.slices
        decodes, prefills = len(batch.decodes), batch.prefills
        ids: list[int] = [0] * decodes
        for s in prefills:
            ids.extend(s.req.ids[s.start : s.start + s.length])
        q_lens = np.fromiter((s.length for s in slices), np.int64, len(slices))
        ends = np.fromiter((s.start + s.length for s in slices), np.int64, len(slices))
        rows = np.fromiter((s.req.row for s in slices), np.int64, len(slices))
        positions = np.concatenate([np.arange(s.start, s.start + s.length) for s in slices])
        slots = np.concatenate([self._slots(s) for s in slices])
        lasts = np.cumsum(q_lens) - 1
        drawn = np.fromiter((s.sample for s in slices), bool, len(slices))
        q_starts_host = np.concatenate(([0], np.cumsum(q_lens[decodes:])))
        arrays = [np.array(ids, dtype=np.int64), positions, slots, rows, lasts[drawn], rows[drawn]]
        arrays += [part.astype(np.int32) for part in (ends, q_starts_host, (ends - q_lens)[decodes:])]
        sent = self._ring.send(arrays)
        input_ids, pos, out_slots, row_ids, sample_index, sampled_rows, seq_lens, q_starts, starts = sent
        if decodes:
            torch.index_select(self._last_ids, 0, row_ids[:decodes], out=input_ids[:decodes])
        fb = ForwardBatch(
            num_decodes=decodes,
            num_prefills=len(prefills),
            input_ids=input_ids,
            positions=pos,
            out_slots=out_slots,
            rows=row_ids,
            seq_lens=seq_lens,
            q_starts=q_starts,
            starts=starts,
            sample_index=sample_index,
            page_table=self.page_table,
            max_q_len=int(q_lens[decodes:].max()) if prefills else 0,
            max_seq_len=int(ends[decodes:].max()) if prefills else 0,
            decode_max_seq_len=int(ends[:decodes].max()) if decodes else 0,
            seq_lens_host=tuple(ends.tolist()),
            q_lens_host=tuple(q_lens.tolist()),
        )
        return fb, sampled_rows

    def _slots(self, s: Slice) -> np.ndarray:
        size = self.page_size
        first, last = s.start // size, (s.start + s.length - 1) // size
        pages = np.array(s.req.pages[first : last + 1], dtype=np.int64)
        positions = np.arange(s.start, s.start + s.length)
        return pages[positions // size - first] * size + positions % size

    def _prompt_logprobs(self, batch: ScheduleBatch, hidden: torch.Tensor) -> list[_PromptPiece]:
        pieces: list[_PromptPiece] = []
        offset = len(batch.decodes)
        for s in batch.prefills:
            count = min(s.length, s.req.prompt_len - 1 - s.start) if s.prompt_logprobs else 0
            top = s.req.sampling.prompt_logprobs or 0
            for done in range(0, max(count, 0), PROMPT_LOGPROB_ROWS):
                size = min(PROMPT_LOGPROB_ROWS, count - done)
                first = s.start + done + 1
                ids = s.req.ids[first : first + size]
                (targets,) = self._ring.send([np.array(ids, dtype=np.int64)])
                logits = self.model.logits(hidden[offset + done : offset + done + size])
                pieces.append((s.req.rid, ids, top, self.sampler.prompt_logprobs(logits, targets, top)))
            offset += s.length
        return pieces

    def _copy_back(self, out: SampleOutput | None, prompts: list[_PromptPiece]) -> _Copies:
        device: list[torch.Tensor] = []
        if out is not None:
            device = out.device_tensors()
        tensors = [*device, *(t for piece in prompts for t in piece[3])]
        if not self.cuda:
            host = [t.clone() for t in tensors]
            event = None
        else:
            sizes = [-(-t.numel() * t.element_size() // 16) * 16 for t in tensors]
            index, buffer = self._results.take(max(sum(sizes), 16))
            host, offset = [], 0
            for t, size in zip(tensors, sizes):
                view = buffer[offset : offset + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
                view.copy_(t, non_blocking=True)
                host.append(view)
                offset += size
            event = self._results.mark(index)
        split = iter(host[len(device) :])
        moved = [(rid, ids, top, [next(split) for _ in tensors]) for rid, ids, top, tensors in prompts]
        drawn = host[0].numpy() if device else np.zeros(0, dtype=np.int64)
        return _Copies(drawn, host[: len(device)], moved, event)

    @torch.inference_mode()
    def collect(self, pending: _Pending) -> StepResult:
        """Wait for a launched step and return its ids and log-probabilities."""
        copies = pending.copies
        assert copies is not None, "a step is collected that was not drawn"
        if copies.event is not None:
            copies.event.synchronize()
        result = StepResult(ids=copies.ids.tolist(), failed=pending.failed)
        if copies.pieces:
            result.logprobs = pending.plan.entries(copies.pieces)
        for rid, targets, top, tensors in copies.prompts:
            entries = self.sampler.prompt_entries(targets, tensors, top)
            result.prompt_logprobs.setdefault(rid, []).extend(entries)
        return result

    # --- facts -----------------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """JSON-ready: device, memory, kernels and why, graph buckets."""
        name = torch.cuda.get_device_name() if self.cuda else "CPU"
        choices = [*self.model.kernel_choices(), *self.sampler.kernel_choices()]
        return {
            "device": name,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "weights": gib(self.model.weight_bytes),
            "after_loading": gib(self.loaded_bytes),
            "load_seconds": round(self._load_seconds, 2),
            "memory": self.memory.public(),
            "max_total_tokens": self.memory.num_tokens,
            "max_running_requests": self.max_rows,
            "states": None if self.states is None else {**self.states.info(), "rows_limit": self.state_plan.reason},
            "ple_table": None if self.tables is None else self.tables.info(),
            "kernels": [{"op": c.op, "flag": c.flag, "impl": c.impl, "why": c.why} for c in choices],
            "attention": self.attention.info(),
            "cuda_graph_bs": list(self.graphs.buckets) if self.graphs else [],
        }

    def graph_counts(self) -> tuple[dict[str, int], int]:
        """``({bucket: replays}, decode steps that no bucket held)``."""
        if self.graphs is None:
            return {}, 0
        return {str(size): count for size, count in self.graphs.replays.items()}, self.graphs.misses
