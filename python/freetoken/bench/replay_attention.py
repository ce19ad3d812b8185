"""Recorded attention: the queries of a step and the pages of K and V that they look at, run by any backend again."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from freetoken.kernels.dispatch import Choice
from freetoken.runner.attention import AttentionBackend, build_attention
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.kv_pool import KVPool

BACKENDS = {"reference": "torch", "triton": "triton"}
"""The backend of each implementation."""


class PagedAttention:
    """Attention of one step in one layer by the backend of ``choice``."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    def prepare(self, q: torch.Tensor, fb: ForwardBatch, k: torch.Tensor, v: torch.Tensor, scale: float) -> Any:
        """A backend that has planned ``fb``, over a pool of the pages ``k`` and ``v [pages, kv_heads, page_size, head_dim]`` behind page 0.

        ``q [T, num_heads, head_dim]``; ``scale`` multiplies the scores.
        """
        count, kv_heads, page_size, head_dim = k.shape
        pool = KVPool(
            num_layers=1,
            num_pages=count + 1,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=k.dtype,
            device=k.device,
        )
        pool.k(0)[1:].copy_(k)
        pool.v(0)[1:].copy_(v)
        backend = build_attention(
            BACKENDS[self.choice.impl],
            num_heads=q.shape[1],
            kv=pool,
            max_rows=len(fb.rows),
            max_pages=fb.page_table.shape[1],
            device=q.device,
            dtype=q.dtype,
            scale=scale,
        )
        backend.plan(fb)
        return backend

    def forward(self, q: torch.Tensor, fb: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:
        """``[T, num_heads * head_dim]`` of what :meth:`prepare` has made ``backend`` from."""
        return backend.forward(0, q, fb)


def gathered(backend: AttentionBackend, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a call of a backend in an eager step: the arguments of :meth:`PagedAttention.prepare`, the pages of each request in
    turn and numbered anew from 1. The width of the page table stays, since kernels go by it."""
    layer, q, fb = (arguments[name] for name in ("layer", "q", "fb"))
    counts = [-(-length // backend.page_size) for length in fb.seq_lens_host]
    table = torch.zeros((len(counts), fb.page_table.shape[1]), dtype=fb.page_table.dtype, device=fb.page_table.device)
    used, first = [], 1
    for row, count in enumerate(counts):
        used.append(fb.page_table[fb.rows[row], :count].long())
        table[row, :count] = torch.arange(first, first + count, device=table.device)
        first += count
    pages = torch.cat(used)
    own = dataclasses.replace(fb, page_table=table, rows=torch.arange(len(counts), device=table.device))
    found = {"k": backend.kv.k(layer)[pages], "v": backend.kv.v(layer)[pages], "scale": backend.scale}
    return {"q": q, "fb": own, **found}


def ready(op: PagedAttention, method: str, arguments: dict[str, Any]) -> None:
    """Put the backend in the place of the pages."""
    backend = op.prepare(**arguments)
    for name in ("k", "v", "scale"):
        del arguments[name]
    arguments["backend"] = backend
