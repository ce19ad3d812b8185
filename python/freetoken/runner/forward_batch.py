"""``ForwardBatch``: the device tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ForwardBatch:
    """One step on the device. Requests are ordered decodes first, then prefills; tokens likewise.

    Shapes: T tokens = ``num_decodes`` + all prefill tokens; B = ``num_decodes`` + ``num_prefills`` requests.

    * ``input_ids [T] int64``, ``positions [T] int64``
    * ``out_slots [T] int64``: flat KV slot, ``page * page_size + offset``; padding writes into page 0, which no request
      owns
    * ``rows [B] int64``: row of each request in ``page_table``; padding uses the last row
    * ``seq_lens [B] int32``: KV length of each request including this step's tokens
    * ``q_starts [num_prefills + 1] int32``: prefill query offsets, counted from the first prefill token
    * ``starts [num_prefills] int32``: position of each prefill request's first token in this step
    * ``sample_index [S] int64``: rows of the hidden states to sample from
    * ``page_table [max_rows + 1, max_pages] int32``: the runner's table, shared by every step

    ``max_q_len`` and ``max_seq_len`` are host integers over the prefill requests (0 without any);
    ``decode_max_seq_len`` is the host maximum over decodes, or the table's limit when the batch is captured in a graph.
    ``seq_lens_host`` and ``q_lens_host`` list the lengths of all B requests where they are known on the host (empty in a
    captured batch).
    """

    num_decodes: int
    num_prefills: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    q_starts: torch.Tensor
    starts: torch.Tensor
    sample_index: torch.Tensor
    page_table: torch.Tensor
    max_q_len: int = 0
    max_seq_len: int = 0
    decode_max_seq_len: int = 0
    seq_lens_host: tuple[int, ...] = ()
    q_lens_host: tuple[int, ...] = ()
    captured: bool = False

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]
