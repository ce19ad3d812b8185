"""Attention by the Triton kernels of ``kernels/attn_decode`` and ``kernels/attn_prefill``."""

from __future__ import annotations

from typing import Any

import torch

from freetoken.errors import StartupError
from freetoken.kernels.attn_decode.config import DecodeConfig, decode_config
from freetoken.kernels.attn_decode.triton import attn_decode_triton, workspace_size
from freetoken.kernels.attn_prefill.config import prefill_config, prefill_tiles
from freetoken.kernels.attn_prefill.triton import attn_prefill_triton
from freetoken.kernels.integers import next_power_of_two
from freetoken.runner.attention import AttentionBackend
from freetoken.runner.forward_batch import ForwardBatch


class TritonAttention(AttentionBackend):
    """Split-KV decode and ragged prefill. A decode's launch depends on the batch size alone, so any can be captured."""

    name = "triton"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.head_dim % 8:
            raise StartupError(
                f"the triton attention backend needs a head_dim that is a multiple of 8, not {self.head_dim}"
            )
        self._num_sms, capability = 16, (8, 0)
        if self.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
            capability = torch.cuda.get_device_capability(self.device)
        self._prefill_config = prefill_config(self.head_dim, self.dtype, capability)
        # A graph's bucket may exceed the rows it serves.
        largest = next_power_of_two(self.max_rows)
        self._decode_configs = [self._decode_config(batch) for batch in range(1, largest + 1)]
        needed = (
            workspace_size(batch, self.num_heads, self.head_dim, config.splits)
            for batch, config in enumerate(self._decode_configs, 1)
        )
        self._workspace = torch.empty(max(needed, default=0), dtype=torch.float32, device=self.device)
        self._tiles = torch.empty((0, 2), dtype=torch.int32, device=self.device)

    def _decode_config(self, batch: int) -> DecodeConfig:
        return decode_config(
            self.head_dim,
            self.group,
            batch,
            self.max_pages * self.page_size,
            self._num_sms,
            num_kv_heads=self.num_kv_heads,
            element_size=self.kv.storage.element_size(),
        )

    def plan(self, fb: ForwardBatch) -> None:
        if fb.num_prefills == 0:
            return
        if fb.captured:
            raise ValueError("a captured batch holds decodes only")
        n = fb.num_decodes
        tiles = torch.tensor(prefill_tiles(fb.q_lens_host[n:], fb.seq_lens_host[n:], self._prefill_config.block_m))
        tiles = tiles.to(torch.int32)
        if self.device.type == "cuda":
            tiles = tiles.pin_memory()
        self._tiles = tiles.to(self.device, non_blocking=True)

    def forward(self, layer: int, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        if q.stride(0) % 8 or q.stride(1) != self.head_dim or q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k, v, n = self.kv.k(layer), self.kv.v(layer), fb.num_decodes
        if n:
            where = (fb.page_table, fb.rows, fb.seq_lens)
            attn_decode_triton(q[:n], k, v, *where, out, self.scale, self._decode_configs[n - 1], self._workspace)
        if fb.num_prefills:
            attn_prefill_triton(
                q,
                k,
                v,
                fb.page_table,
                fb.rows,
                fb.seq_lens,
                fb.q_starts,
                self._tiles,
                out,
                self.scale,
                self._prefill_config,
                num_decodes=n,
            )
        return out.flatten(1)

    def info(self) -> dict[str, Any]:
        one = self._decode_configs[0]
        return {
            **super().info(),
            "decode_block": one.block_n,
            "decode_splits": one.splits,
            "prefill_block": [self._prefill_config.block_m, self._prefill_config.block_n],
            "workspace_bytes": self._workspace.numel() * self._workspace.element_size(),
        }
