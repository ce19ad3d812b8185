"""Random paged batches for attention tests: shuffled pages, shared prefixes, poison wherever nothing may be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freetoken.kernels.attn_decode.reference import attn_decode_reference
from freetoken.kernels.attn_prefill.reference import attn_prefill_reference
from freetoken.runner.attention import AttentionBackend, build_attention
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.kv_pool import KVPool

# Kernels run where there is a GPU, else in Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest relative RMS of a backend's output against the reference.
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}


@dataclass
class Case:
    """A pool, a batch over it and its queries ``[T, heads, head_dim]``."""

    kv: KVPool
    fb: ForwardBatch
    q: torch.Tensor
    scale: float
    max_pages: int

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    def expected(self, layer: int = 0) -> torch.Tensor:
        """The reference's answer ``[T, heads * head_dim]``."""
        fb, n = self.fb, self.fb.num_decodes
        k, v = self.kv.k(layer), self.kv.v(layer)
        parts = [attn_decode_reference(self.q[:n], k, v, fb.page_table, fb.rows, fb.seq_lens, self.scale)]
        if fb.num_prefills:
            lens = fb.seq_lens[n:]
            parts.append(
                attn_prefill_reference(self.q[n:], k, v, fb.page_table, fb.rows[n:], lens, fb.q_starts, self.scale)
            )
        return torch.cat(parts).flatten(1)


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of the difference over RMS of ``want``; NaN in ``got`` stays NaN, which fails every bound."""
    got, want = got.double(), want.double()
    return ((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()).item()


def make_case(
    decodes: Sequence[int] = (),
    prefills: Sequence[tuple[int, int]] = (),
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_layers: int = 1,
    max_pages: int | None = None,
    spare_pages: int = 5,
    seed: int = 0,
) -> Case:
    """``decodes`` are sequence lengths, ``prefills`` are ``(prefix, q_len)``.

    Each row's first page is the first page of the row before, where both have more than one page. Pages
    nobody owns, page 0, slots past a sequence's end and table entries past its last page hold poison: NaN, or page
    numbers out of range.
    """
    g = torch.Generator().manual_seed(seed)
    lens = [*decodes, *(p + n for p, n in prefills)]
    counts = [-(-n // page_size) for n in lens]
    max_pages = max(counts) + 2 if max_pages is None else max_pages
    num_pages = sum(counts) + spare_pages
    kv = KVPool(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    kv.storage.copy_(torch.randn(kv.storage.shape, generator=g).to(dtype))
    free = (torch.randperm(num_pages - 1, generator=g) + 1).tolist()
    order = torch.randperm(len(lens) + 2, generator=g).tolist()
    table = torch.full((len(lens) + 3, max_pages), 2**30, dtype=torch.int32)
    owned: dict[int, int] = {}
    for i, (length, count) in enumerate(zip(lens, counts, strict=True)):
        pages = [free.pop() for _ in range(count)]
        if i and count > 1 and counts[i - 1] > 1:
            pages[0] = int(table[order[i - 1], 0])
        table[order[i], :count] = torch.tensor(pages, dtype=torch.int32)
        for j, page in enumerate(pages):
            owned[page] = max(owned.get(page, 0), min(page_size, length - j * page_size))
    for page in range(num_pages):
        kv.storage[:, :, page, :, owned.get(page, 0) :] = float("nan")
    q_lens = [1] * len(decodes) + [n for _, n in prefills]
    total = sum(q_lens)
    q = torch.randn(total, heads, head_dim, generator=g).to(device=device, dtype=dtype)
    starts = torch.tensor([0, *(n for _, n in prefills)]).cumsum(0)
    empty = torch.zeros(total, dtype=torch.int64, device=device)
    fb = ForwardBatch(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        input_ids=empty,
        positions=empty,
        out_slots=empty,
        rows=torch.tensor(order[: len(lens)], dtype=torch.int64, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        q_starts=starts.to(torch.int32).to(device),
        starts=torch.tensor([p for p, _ in prefills], dtype=torch.int32, device=device),
        sample_index=empty[:0],
        page_table=table.to(device),
        max_q_len=max((n for _, n in prefills), default=0),
        max_seq_len=max((p + n for p, n in prefills), default=0),
        decode_max_seq_len=max(decodes, default=0),
        seq_lens_host=tuple(lens),
        q_lens_host=tuple(q_lens),
    )
    return Case(kv, fb, q, head_dim**-0.5, max_pages)


def build(case: Case, name: str = "torch", **changes: object) -> AttentionBackend:
    """The backend called ``name`` for ``case``."""
    arguments = {
        "num_heads": case.num_heads,
        "kv": case.kv,
        "max_rows": max(8, case.fb.num_decodes),
        "max_pages": case.max_pages,
        "device": case.q.device,
        "dtype": case.q.dtype,
    }
    return build_attention(name, **{**arguments, **changes})


def captured(case: Case) -> Case:
    """``case`` as a graph holds it: no lengths on the host, and the table's limit for the longest."""
    limit = case.max_pages * case.kv.page_size
    fb = dataclasses.replace(case.fb, captured=True, seq_lens_host=(), q_lens_host=(), decode_max_seq_len=limit)
    return dataclasses.replace(case, fb=fb)


def load(held: Case, case: Case) -> None:
    """Copy ``case`` into the tensors of ``held``, as a runner fills a graph's static buffers."""
    held.kv.storage[:, :, : case.kv.num_pages].copy_(case.kv.storage)
    held.q.copy_(case.q)
    for name in ("rows", "seq_lens", "page_table"):
        getattr(held.fb, name).copy_(getattr(case.fb, name))
