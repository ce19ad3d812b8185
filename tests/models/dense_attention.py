"""A slow, independent attention over the pages, and a driver of one-request forwards, for model tests."""

from __future__ import annotations

import torch

from freetoken.models.config import ModelConfig
from freetoken.models.decoder import DecoderModel
from freetoken.models.registry import find
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.kv_pool import KVPool
from freetoken.runner.state_pool import StatePool

PAGE_SIZE = 4


class DenseAttention:
    """Softmax over every stored position, one query and head at a time, for one request at row 0 of the page table."""

    def __init__(self, kv: KVPool) -> None:
        self.kv = kv

    def forward(self, layer: int, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        length = int(fb.positions[-1]) + 1
        pages = fb.page_table[int(fb.rows[0])].long()
        keys, values = self._lines(self.kv.k(layer), pages, length), self._lines(self.kv.v(layer), pages, length)
        tokens, heads, size = q.shape
        group = heads // keys.shape[1]
        out = torch.full((tokens, heads, size), float("nan"), dtype=q.dtype)
        for token, position in enumerate(fb.positions.tolist()):
            for head in range(heads):
                seen = keys[: position + 1, head // group]
                weights = torch.softmax((seen @ q[token, head]) * size**-0.5, dim=0)
                out[token, head] = weights @ values[: position + 1, head // group]
        return out.view(tokens, heads * size)

    @staticmethod
    def _lines(pool: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
        return pool[pages].transpose(1, 2).reshape(-1, pool.shape[1], pool.shape[3])[:length]


class OneRequest:
    """Feeds one request's tokens to a model, keeping its KV and states; pages are handed out in a shuffled order.

    The states lie in ``slot`` of three and hold NaN at first.
    """

    slot = 1

    def __init__(self, model: DecoderModel, capacity: int) -> None:
        config: ModelConfig = model.config
        pages = -(-capacity // PAGE_SIZE)
        self.model = model
        self.kv = KVPool(
            num_layers=config.num_attention_layers,
            num_pages=pages + 1,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            device="cpu",
        )
        specs = find(config.architecture).state_specs(config)
        self.states = StatePool(specs, rows=2, blocks=2, dtype=model.dtype, device="cpu")
        for spec in specs:
            for layer in range(spec.layers):
                self.states.layer(spec.name, layer).fill_(float("nan"))
        model.reserve(self.states)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1
        self.page_table = torch.zeros((3, pages), dtype=torch.int32)
        self.page_table[self.slot] = order.int()
        self.attention = DenseAttention(self.kv)
        self.length = 0

    def feed(self, ids: list[int], *, decode: bool = False) -> torch.Tensor:
        """Logits ``[len(ids), vocab]`` of every token fed, as a prompt piece or (one token) as a decode."""
        positions = torch.arange(self.length, self.length + len(ids))
        slots = self.page_table[self.slot, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        start, self.length = self.length, self.length + len(ids)
        pieces = [] if decode else [len(ids)]
        fb = ForwardBatch(
            num_decodes=1 if decode else 0,
            num_prefills=len(pieces),
            input_ids=torch.tensor(ids),
            positions=positions,
            out_slots=slots,
            rows=torch.tensor([self.slot]),
            seq_lens=torch.tensor([self.length], dtype=torch.int32),
            q_starts=torch.tensor([0, *pieces], dtype=torch.int32),
            starts=torch.tensor([start] * len(pieces), dtype=torch.int32),
            sample_index=torch.tensor([len(ids) - 1]),
            page_table=self.page_table,
            max_q_len=sum(pieces),
            seq_lens_host=(self.length,),
            q_lens_host=(len(ids),),
        )
        return self.model.logits(self.model.forward(fb, self.kv, self.attention, self.states))
