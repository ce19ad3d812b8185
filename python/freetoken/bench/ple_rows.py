"""Rows of ``bench.ops`` for per-layer embeddings, with the constants of the published checkpoint (16 heads of trigrams)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from freetoken.bench.op_cases import Case, Sizes, Tensors
from freetoken.kernels.dispatch import Choice
from freetoken.models.ple_config import PleConfig

MODEL = "Qwen3.8-Flash-Next"
PUBLISHED = PleConfig(layers=(1,), streams=4, hidden_size=2560, vocab_size=248_320, boundary_id=248_044, embed_dim=2560)


GATHER_ROWS = 2**22
"""Rows of the table that is read: 0.67 GB in fp8, more than any cache."""


def gather_cases(device: str, sizes: Sizes) -> list[Case]:
    """The rows of random ids from an fp8 table in GPU memory, then in page-locked host memory (``pinned`` 1)."""
    from freetoken.kernels.ple_gather import reference
    from freetoken.runner.ple_table import random_table

    where, width = torch.device(device), PUBLISHED.row_width
    rows = GATHER_ROWS if device == "cuda" else 1000
    tables = {
        kind: random_table("f8_e4m3", kind, rows, width, dtype=sizes.dtype, device=where, seed=1)
        for kind in ("gpu", "pinned")
    }
    cases = []
    for kind, tokens in itertools.product(tables, (*sizes.ple_batches, *sizes.ple_prompts)):
        table, resident = tables[kind], tables["gpu"]
        ids = torch.randint(0, rows, (tokens * PUBLISHED.heads,), device=device)
        out = torch.empty((len(ids), width), dtype=sizes.dtype, device=device)
        # The table itself is held, which keeps its memory page-locked.
        fused = functools.partial(_gather, table, ids, out)
        plain = functools.partial(
            reference.gather_rows, resident.stored, ids, table.format, width, table.scale, sizes.dtype
        )
        moved = float(len(ids) * (8 + width + out.element_size() * width))
        shape = {"tokens": tokens, "pinned": int(kind == "pinned")}
        cases.append(Case(shape, _tuple(fused), _tuple(plain), moved, exact=True, model=MODEL))
    return cases


def mix_cases(device: str, sizes: Sizes) -> list[Case]:
    """Gates of decodes and prompts, then (``conv`` 1) the convolution of decodes deep in their texts."""
    from freetoken.kernels.ple_mix import PleMix

    ops = [PleMix(Choice("ple_mix", "", impl, "benchmark")) for impl in ("triton", "reference")]
    c = PUBLISHED
    key, query, conv = (torch.rand(c.streams, c.hidden_size, device=device) + 0.5 for _ in range(3))
    weight = torch.randn(c.conv_width, c.channels, device=device).to(sizes.dtype)
    cases = []
    for tokens in (*sizes.ple_batches, *sizes.ple_prompts[:2]):
        projected = torch.randn(tokens, c.channels + c.hidden_size, device=device).to(sizes.dtype)
        residual = torch.randn(tokens, c.channels, device=device).to(sizes.dtype)
        fused, plain = (functools.partial(op.gate, projected, residual, key, query, conv, 1e-6) for op in ops)
        moved = (projected.numel() + 3.0 * residual.numel()) * residual.element_size()
        cases.append(Case({"tokens": tokens, "conv": 0}, fused, plain, moved, model=MODEL))
    for tokens in sizes.ple_batches:
        gated, normed = (torch.randn(tokens, c.channels, device=device).to(sizes.dtype) for _ in range(2))
        ring = torch.randn(tokens, c.history, c.channels, device=device).to(sizes.dtype)
        slots, positions = torch.arange(tokens, device=device), torch.arange(tokens, device=device) + sizes.depth

        def call(
            op: Any, rows: Any = (gated, normed, weight), ring: Any = ring, where: Any = (slots, positions)
        ) -> Callable[[], Tensors]:
            residual, history = torch.zeros_like(rows[0]), ring.clone()

            def run() -> Tensors:
                op.decode(residual, *rows, history, *where, c.dilation)
                return residual, history

            return run

        moved = (8.0 * gated.numel() + weight.numel()) * gated.element_size()
        cases.append(Case({"tokens": tokens, "conv": 1}, call(ops[0]), call(ops[1]), moved, model=MODEL))
    return cases


def _gather(table: Any, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    from freetoken.kernels.ple_gather import gather_rows

    return gather_rows(table.stored, ids, table.format, table.width, table.scale, table.dtype, out)


def _tuple(call: Callable[[], torch.Tensor]) -> Callable[[], Tensors]:
    return lambda: (call(),)


def hash_cases(device: str, sizes: Sizes) -> list[Case]:
    """Decodes of one token a request, then prefills of one request; one id in eight is the boundary."""
    from freetoken.kernels.ple_hash import PleHash, TokenIndexMemo

    constants = PUBLISHED.constants(0)
    parts = (constants.multipliers, constants.vocab_sizes, constants.offsets)
    tensors = [torch.tensor(part, dtype=torch.int64, device=device) for part in parts]
    memo = TokenIndexMemo()
    cases = []
    for lengths in [[1] * count for count in sizes.ple_batches] + [[count] for count in sizes.ple_prompts]:
        tokens, requests, decode = sum(lengths), len(lengths), lengths[0] == 1
        ids, context = (
            torch.randint(0, PUBLISHED.vocab_size, shape, device=device) for shape in ((tokens,), (requests, 2))
        )
        for part in (ids, context):
            part[torch.rand(part.shape, device=device) < 1 / 8] = PUBLISHED.boundary_id
        where = memo.get(lengths, device, is_decode=decode)
        arguments = (ids, context, where.request, where.local, *tensors)

        def call(impl: str, arguments: Any = arguments, longest: int = where.max_len) -> Callable[[], Tensors]:
            op = PleHash(Choice("ple_hash", "", impl, "benchmark"))
            named: dict[str, Any] = {
                "eos_token_id": PUBLISHED.boundary_id,
                "heads_per_ngram": PUBLISHED.heads_per_ngram,
            }
            out = torch.full((arguments[0].shape[0], PUBLISHED.heads), -1, device=device)
            return lambda: (op(*arguments, **named, max_len=longest, out=out),)

        shape = {"requests": requests, "tokens": tokens}
        moved = 8.0 * (tokens * (1 + PUBLISHED.heads) + context.numel()) + (0 if decode else 8 * tokens)
        cases.append(Case(shape, call("triton"), call("reference"), moved, exact=True, model=MODEL, uncaptured=True))
    return cases
