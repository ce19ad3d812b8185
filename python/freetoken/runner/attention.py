"""Attention over paged KV behind one small interface, and the choice of the backend that computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from freetoken.errors import StartupError
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.kv_pool import KVPool

BACKENDS = ("torch", "triton", "flashinfer")


class AttentionBackend(ABC):
    """Causal attention of one step's queries over a :class:`KVPool`.

    K and V of the step must be in the pool before :meth:`forward`. A decode has one query, which sees its whole
    sequence; a prefill's queries are the last positions of its sequence, each seeing itself and what precedes it.

    Order of calls: an eager step calls :meth:`plan` once, then :meth:`forward` once a layer with ascending ``layer``.
    A captured decode batch calls :meth:`plan` once before capture; where :attr:`needs_replan` is true,
    :meth:`replan` must precede every replay.
    """

    name: ClassVar[str]
    needs_replan: ClassVar[bool] = False

    def __init__(
        self,
        *,
        num_heads: int,
        kv: KVPool,
        max_rows: int,
        max_pages: int,
        device: torch.device,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = kv.num_kv_heads
        self.group = num_heads // kv.num_kv_heads
        self.head_dim = kv.head_dim
        self.page_size = kv.page_size
        self.kv = kv
        self.max_rows = max_rows
        self.max_pages = max_pages
        self.device = device
        self.dtype = dtype
        self.scale = scale

    @abstractmethod
    def plan(self, fb: ForwardBatch) -> None:
        """Prepare what all layers of a step share. Reads nothing back from the device."""

    def replan(self, fb: ForwardBatch) -> None:  # noqa: B027 - optional step, needed by few backends
        """Refresh what a captured batch cannot compute inside its graph."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        """Attend ``q [T, num_heads, head_dim]``; returns ``[T, num_heads * head_dim]`` of the same dtype."""

    def info(self) -> dict[str, Any]:
        """What server info says about this backend."""
        return {"name": self.name, "page_size": self.page_size, "scale": self.scale}


def build_attention(
    name: str,
    *,
    num_heads: int,
    kv: KVPool,
    max_rows: int,
    max_pages: int,
    device: torch.device | str,
    dtype: torch.dtype,
    scale: float | None = None,
) -> AttentionBackend:
    """Make the backend called ``name`` (one of :data:`BACKENDS`).

    ``max_rows`` bounds the requests of a step, ``max_pages`` the width of the page table. ``scale`` multiplies the
    scores; the default is ``head_dim ** -0.5``. :class:`StartupError` for an unknown name, a head count that is no
    multiple of the pool's, or a backend that cannot run here.
    """
    if num_heads % kv.num_kv_heads:
        raise StartupError(f"{num_heads} attention heads cannot share {kv.num_kv_heads} KV heads evenly")
    cls: type[AttentionBackend]
    if name == "torch":
        from freetoken.runner.attention_torch import TorchAttention as cls
    elif name == "triton":
        from freetoken.runner.attention_triton import TritonAttention as cls
    elif name == "flashinfer":
        from freetoken.runner.attention_flashinfer import FlashInferAttention as cls
    else:
        raise StartupError(f"unknown attention backend {name!r}: use one of {', '.join(BACKENDS)}")
    return cls(
        num_heads=num_heads,
        kv=kv,
        max_rows=max_rows,
        max_pages=max_pages,
        device=torch.device(device),
        dtype=dtype,
        scale=kv.head_dim**-0.5 if scale is None else scale,
    )
