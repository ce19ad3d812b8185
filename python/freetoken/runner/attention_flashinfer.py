"""Attention by the FlashInfer package, whose paged wrappers take our page layout as ``HND``.

The calls follow FlashInfer's documentation of ``BatchDecodeWithPagedKVCacheWrapper`` and
``BatchPrefillWithPagedKVCacheWrapper`` (docs.flashinfer.ai).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from freetoken.errors import StartupError
from freetoken.runner.attention import AttentionBackend
from freetoken.runner.forward_batch import ForwardBatch

WORKSPACE_BYTES = 128 << 20
# From this many query heads a KV head on, FlashInfer's tensor-core decode is the quicker one.
TENSOR_CORE_GROUP = 4


def _import_flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise StartupError(
            f"the flashinfer attention backend cannot be used ({error}): install flashinfer-python or choose triton"
        ) from None


class FlashInferAttention(AttentionBackend):
    """Plans every step from the lengths on the host; captured batches own a wrapper with fixed buffers."""

    name = "flashinfer"
    needs_replan = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._module = _import_flashinfer()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._tensor_cores = self.group >= TENSOR_CORE_GROUP
        self._eager_decode = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._tensor_cores
        )
        self._prefill = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self._captured: dict[int, Any] = {}

    def plan(self, fb: ForwardBatch) -> None:
        if fb.captured:
            self.replan(fb)
            return
        n = fb.num_decodes
        if n:
            self._plan_decode(self._eager_decode, fb, fb.seq_lens_host[:n])
        if fb.num_prefills:
            indptr, indices, last = self._pages(fb, n, fb.seq_lens_host[n:])
            self._prefill.plan(
                _offsets(fb.q_lens_host[n:]),
                indptr,
                indices,
                last,
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.page_size,
                causal=True,
                sm_scale=self.scale,
                q_data_type=self.dtype,
                kv_data_type=self.kv.storage.dtype,
            )

    def replan(self, fb: ForwardBatch) -> None:
        """Plan the wrapper of a captured batch again.

        Lengths come from ``seq_lens_host`` where the batch has them (padding lanes, which hold one token, may be left
        out), and are read back from the device otherwise.
        """
        if fb.num_prefills:
            raise ValueError("a captured batch holds decodes only")
        lens = list(fb.seq_lens_host) or fb.seq_lens[: fb.num_decodes].tolist()
        lens += [1] * (fb.num_decodes - len(lens))
        self._plan_decode(self._captured_decode(fb.num_decodes), fb, lens)

    def forward(self, layer: int, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        n = fb.num_decodes
        cache = (self.kv.k(layer), self.kv.v(layer))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n:
            wrapper = self._captured[n] if fb.captured else self._eager_decode
            wrapper.run(q[:n].contiguous(), cache, out=out[:n])
        if fb.num_prefills:
            self._prefill.run(q[n:].contiguous(), cache, out=out[n:])
        return out.flatten(1)

    def info(self) -> dict[str, Any]:
        return {
            **super().info(),
            "version": getattr(self._module, "__version__", "unknown"),
            "tensor_core_decode": self._tensor_cores,
        }

    def _captured_decode(self, batch: int) -> Any:
        if batch not in self._captured:
            self._captured[batch] = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores,
                paged_kv_indptr_buffer=self._ints(batch + 1),
                paged_kv_indices_buffer=self._ints(batch * self.max_pages),
                paged_kv_last_page_len_buffer=self._ints(batch),
            )
        return self._captured[batch]

    def _ints(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    def _plan_decode(self, wrapper: Any, fb: ForwardBatch, lens: Sequence[int]) -> None:
        indptr, indices, last = self._pages(fb, 0, lens)
        wrapper.plan(
            indptr,
            indices,
            last,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
            sm_scale=self.scale,
            q_data_type=self.dtype,
            kv_data_type=self.kv.storage.dtype,
        )

    def _pages(self, fb: ForwardBatch, start: int, lens: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Page lists of the sequences from ``start`` on: offsets (host), page numbers (device), last page's fill (host)."""
        counts = [-(-n // self.page_size) for n in lens]
        indptr = _offsets(counts)
        total = sum(counts)
        facts = torch.tensor([counts, indptr[:-1].tolist()]).to(self.device, non_blocking=True)
        of = torch.arange(len(lens), device=self.device).repeat_interleave(facts[0], output_size=total)
        column = torch.arange(total, device=self.device) - facts[1][of]
        indices = fb.page_table[fb.rows[start : start + len(lens)][of], column]
        return indptr, indices, torch.tensor([(n - 1) % self.page_size + 1 for n in lens], dtype=torch.int32)


def _offsets(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
