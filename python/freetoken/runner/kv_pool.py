"""Paged KV storage on the device."""

from __future__ import annotations

import torch


class KVPool:
    """K and V of every layer, in pages.

    ``k(layer)`` and ``v(layer)`` are ``[num_pages, num_kv_heads, page_size, head_dim]``. Page 0 belongs to no request:
    padded lanes of a captured batch write there. A flat slot is ``page * page_size + offset``. With an ``index_dim`` there is a key of
    the indexer a token, too: ``index(layer)`` is ``[num_pages, page_size, index_dim]``.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        index_dim: int = 0,
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.storage = torch.zeros(
            (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim), dtype=dtype, device=device
        )
        self.index_storage = torch.zeros((num_layers, num_pages, page_size, index_dim), dtype=dtype, device=device)
        self._k = [self.storage[layer, 0] for layer in range(num_layers)]
        self._v = [self.storage[layer, 1] for layer in range(num_layers)]

    def k(self, layer: int) -> torch.Tensor:
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v[layer]

    def index(self, layer: int) -> torch.Tensor:
        return self.index_storage[layer]

    @property
    def num_tokens(self) -> int:
        """Tokens that requests can hold (page 0 not counted)."""
        return (self.num_pages - 1) * self.page_size

    @property
    def bytes(self) -> int:
        return self.storage.nbytes + self.index_storage.nbytes
