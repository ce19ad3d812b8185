"""Rows of ``bench.ops`` for attention over paged KV: decodes and prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from freetoken.bench.op_cases import Case, Sizes, Tensors, random
from freetoken.runner.attention import build_attention
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.kv_pool import KVPool


def make_batch(
    device: str, sizes: Sizes, decodes: list[int], prefills: list[int], layers: int = 1
) -> tuple[KVPool, ForwardBatch, torch.Tensor]:
    """A pool of random K and V on shuffled pages, a batch over it with sequences of these lengths, and its queries
    ``[T, heads, head_dim]``."""
    lengths = decodes + prefills
    q_lens = [1] * len(decodes) + prefills
    need = [-(-length // sizes.page) for length in lengths]
    kv = KVPool(
        num_layers=layers,
        num_pages=sum(need) + 1,
        page_size=sizes.page,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        dtype=sizes.dtype,
        device=device,
    )
    kv.storage.normal_()
    table = torch.zeros(len(lengths) + 1, max(need), dtype=torch.int32, device=device)
    for row, (pages, count) in enumerate(zip(torch.split((torch.randperm(sum(need)) + 1).to(torch.int32), need), need)):
        table[row, :count] = pages.to(device)
    tokens = sum(q_lens)
    starts = torch.tensor([0, *prefills]).cumsum(0).to(device, torch.int32)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    fb = ForwardBatch(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        input_ids=zeros,
        positions=zeros,
        out_slots=zeros,
        rows=torch.arange(len(lengths), device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        q_starts=starts,
        starts=torch.zeros(len(prefills), dtype=torch.int32, device=device),
        sample_index=zeros[:0],
        page_table=table,
        max_q_len=max(prefills, default=0),
        max_seq_len=max(prefills, default=0),
        decode_max_seq_len=max(decodes, default=0),
        seq_lens_host=tuple(lengths),
        q_lens_host=tuple(q_lens),
    )
    return kv, fb, random(device, sizes.dtype, tokens, sizes.heads, sizes.head_dim)


def _case(device: str, sizes: Sizes, decodes: list[int], prefills: list[int], layers: int = 1) -> Case:
    """One batch; with ``layers`` calls take the layers of the pool in turn, so that K and V may be none that the cache still has."""
    kv, fb, q = make_batch(device, sizes, decodes, prefills, layers)
    lengths = decodes + prefills

    def call(name: str) -> Callable[[], Tensors]:
        backend = build_attention(
            name,
            num_heads=sizes.heads,
            kv=kv,
            max_rows=len(lengths),
            max_pages=max(fb.page_table.shape[1], sizes.context // sizes.page),
            device=torch.device(device),
            dtype=sizes.dtype,
        )
        backend.plan(fb)
        turn = itertools.cycle(range(layers))
        return lambda: (backend.forward(next(turn), q, fb),)

    element = kv.storage.element_size()
    moved = 2.0 * sum(lengths) * sizes.kv_heads * sizes.head_dim * element + 2 * q.numel() * element
    flops = 4.0 * sizes.heads * sizes.head_dim * (sum(decodes) + sum(n * (n + 1) / 2 for n in prefills))
    shape = {"requests": len(lengths), "depth" if decodes else "tokens": lengths[0]}
    return Case(shape, call("triton"), call("torch"), moved, flops)


def gated_sizes(sizes: Sizes) -> Sizes:
    """The geometry of attention between layers of linear attention."""
    heads, kv_heads, head_dim = sizes.gated_attention
    return replace(sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def uncached_layers(sizes: Sizes, count: int, depth: int) -> int:
    """Layers of a pool for ``count`` sequences that hold ``uncached_bytes``; 16 at the most."""
    token = 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
    return min(16, -(-sizes.uncached_bytes // (token * count * depth)))


def decode_cases(device: str, sizes: Sizes) -> list[Case]:
    """Decodes of both geometries."""
    cases = [_case(device, sizes, [sizes.depth] * count, []) for count in sizes.tokens if count <= 64]
    gated = gated_sizes(sizes)
    for depth, count in itertools.product(sizes.gated_depths, sizes.gated_batches):
        case = _case(device, gated, [depth] * count, [], uncached_layers(gated, count, depth))
        cases.append(replace(case, model="Qwen3.5-27B"))
    return cases


def prefill_cases(device: str, sizes: Sizes) -> list[Case]:
    """One prompt and four."""
    return [_case(device, sizes, [], [sizes.prompt] * count) for count in (1, 4)]
