"""Rows of ``bench.ops`` for what only ``qwen4_exp`` has, in its published geometry: hyper-connections, decodes and pieces of prompts behind an
indexer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from freetoken.bench.op_cases import Case, Sizes, Tensors
from freetoken.kernels.dispatch import Choice
from freetoken.models.config import IndexerConfig

MODEL = "Qwen3.8-Flash-Next"
STREAMS, RANK, PAGE = 4, 320, 16
HEADS, KV_HEADS, HEAD_DIM = 24, 2, 256
PUBLISHED = IndexerConfig(num_heads=4, head_dim=128, budget=2048, ratio=4)
TINY = IndexerConfig(num_heads=2, head_dim=16, budget=16, ratio=4)


def hyper_cases(device: str, sizes: Sizes) -> list[Case]:
    """One read of the streams with the write-back of the block before it, without its products."""
    from freetoken.kernels.hyper_mix import HyperMix

    ops = [HyperMix(Choice("hyper_mix", "", impl, "benchmark")) for impl in ("triton", "reference")]
    hidden = sizes.moe_hidden
    weight = torch.rand(STREAMS, hidden, device=device) + 0.5
    cases = []
    for tokens in sizes.moe_tokens:
        streams, gate = (torch.randn(tokens, STREAMS * hidden, device=device).to(sizes.dtype) for _ in range(2))
        y = torch.randn(tokens, hidden, device=device).to(sizes.dtype)
        low = torch.randn(tokens, RANK + 16, device=device).to(sizes.dtype)

        def call(
            op: HyperMix, streams: Any = streams, gate: Any = gate, y: Any = y, low: Any = low
        ) -> Callable[[], Tensors]:
            def run() -> Tensors:
                # Added to in place: the same amount is taken off again, so that many calls stay in range.
                normed = op.norm(streams, (y, low[:, RANK : RANK + STREAMS]), weight, 1e-6)
                op.add(streams, (-y, low[:, RANK : RANK + STREAMS]))
                return normed, op.squash(low[:, :RANK], STREAMS), op.mix(normed, gate, STREAMS)

            return run

        moved = float(streams.element_size() * (8 * streams.numel() + 3 * y.numel()))
        cases.append(Case({"tokens": tokens}, call(ops[0]), call(ops[1]), moved, model=MODEL))
    return cases


def _halves(sizes: Sizes) -> torch.dtype:
    """A type of 16 bits: these kernels have no other."""
    return torch.float16 if sizes.dtype == torch.float32 else sizes.dtype


def squashed_cases(device: str, sizes: Sizes) -> list[Case]:
    """The product that hyper-connections begin with: low-rank gates, squashed, and the logits of the write-back."""
    from freetoken.kernels.silu_mul import SiluMul
    from freetoken.kernels.small_gemm import SmallGemm

    n, k, dtype = RANK + 16, STREAMS * (-(-sizes.moe_hidden // 16) * 16), _halves(sizes)
    weight = (torch.randn(n, k, device=device) * k**-0.5).to(dtype)
    cases = []
    for tokens in (tokens for tokens in sizes.moe_tokens if tokens <= 16):
        x = torch.randn(tokens, k, device=device).to(dtype)

        def call(impl: str, x: Any = x) -> Callable[[], Tensors]:
            op = SmallGemm(Choice("small_gemm", "", impl, "benchmark"), SiluMul(Choice("silu_mul", "", impl, "")))
            op.reserve(weight, silu=False)
            return lambda: (op.linear_squashed(x, weight, RANK, STREAMS),)

        moved = float((n * k + tokens * (n + k)) * weight.element_size())
        shape = {"tokens": tokens, "n": n, "k": k, "rank": RANK}
        cases.append(Case(shape, call("triton"), call("reference"), moved, 2.0 * tokens * n * k, model=MODEL))
    return cases


def gated_cases(device: str, sizes: Sizes) -> list[Case]:
    """The product that makes the gates of the mix, and the mix."""
    from freetoken.kernels.hyper_mix import HyperMix

    ops = [HyperMix(Choice("hyper_mix", "", impl, "benchmark")) for impl in ("triton", "reference")]
    width, dtype = STREAMS * (-(-sizes.moe_hidden // 16) * 16), _halves(sizes)
    weight = (torch.randn(width, RANK, device=device) * RANK**-0.5).to(dtype)
    cases = []
    for tokens in (tokens for tokens in sizes.moe_tokens if tokens <= 16):
        normed = torch.randn(tokens, width, device=device).to(dtype)
        low = torch.randn(tokens, RANK + 16, device=device).to(dtype)[:, :RANK]

        def call(op: HyperMix, normed: Any = normed, low: Any = low) -> Callable[[], Tensors]:
            return lambda: (op.gated_mix(normed, low, weight, STREAMS),)

        moved = float(weight.element_size() * (weight.numel() + 2 * normed.numel()))
        shape = {"tokens": tokens, "rank": RANK}
        cases.append(Case(shape, call(ops[0]), call(ops[1]), moved, 2.0 * tokens * weight.numel(), model=MODEL))
    return cases


def qsa_cases(device: str, sizes: Sizes) -> list[Case]:
    """Scores, selection and attention of decodes deep in their texts; outputs are compared over the kernels' own selection."""
    from freetoken.kernels.qsa import Pools, reference, triton

    small = device == "cpu"
    config, (heads, kv_heads, width) = (TINY, (4, 2, 16)) if small else (PUBLISHED, (HEADS, KV_HEADS, HEAD_DIM))
    num_sms = 16 if small else torch.cuda.get_device_properties(device).multi_processor_count
    cases = []
    for requests in sizes.ple_batches:
        for depth in (40,) if small else (4096, 16384, 131072):
            pages = requests * (depth // PAGE + 1)
            k, v = (torch.randn(pages, kv_heads, PAGE, width, device=device).to(sizes.dtype) for _ in range(2))
            pools = Pools(k, v, torch.randn(pages, PAGE, config.head_dim, device=device).to(sizes.dtype))
            table = torch.randperm(pages, device=device).int().view(requests, -1)
            rows = torch.arange(requests, device=device)
            lens = torch.full((requests,), depth, dtype=torch.int32, device=device)
            q = torch.randn(requests, heads, width, device=device).to(sizes.dtype)
            index_q = torch.randn(requests, config.num_heads, config.head_dim, device=device).to(sizes.dtype)
            best = triton.select(
                triton.score(index_q, pools, table, rows, lens, depth, config), table, rows, lens, PAGE, config
            )

            def fused(
                q: Any = q,
                index_q: Any = index_q,
                pools: Any = pools,
                where: Any = (table, rows, lens),
                depth: int = depth,
            ) -> Tensors:
                table, rows, lens = where
                scores = triton.score(index_q, pools, table, rows, lens, depth, config)
                chosen = triton.select(scores, table, rows, lens, PAGE, config)
                return (triton.attend(q, pools, *chosen, num_sms, width**-0.5),)

            def plain(q: Any = q, pools: Any = pools, best: Any = best) -> Tensors:
                listed = torch.arange(best[0].shape[1], device=q.device) < best[1][:, None]
                return (reference.attend_slots(q, pools, best[0].long().where(listed, 0), listed, width**-0.5),)

            element = q.element_size()
            seen = min(depth, config.visible) * 2 * kv_heads * width + depth // config.ratio * config.head_dim
            shape = {"requests": requests, "depth": depth}
            cases.append(Case(shape, fused, plain, float(requests * seen * element), model=MODEL))
    return cases


class Piece:
    """Inputs of attention over a piece of ``tokens`` at ``depth`` of a text: queries that choose independently of each other, or
    (``alike``) much as their neighbours do."""

    def __init__(self, device: str, dtype: Any, tokens: int, depth: int, alike: bool) -> None:
        from freetoken.kernels.qsa import Pools

        small = device == "cpu"
        self.config = config = TINY if small else PUBLISHED
        self.heads, self.kv_heads, self.width = (4, 2, 16) if small else (HEADS, KV_HEADS, HEAD_DIM)
        self.tokens, self.length = tokens, depth + tokens
        pages = self.length // PAGE + 2
        shape = (pages, self.kv_heads, PAGE, self.width)
        k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        self.pools = Pools(k, v, torch.randn(pages, PAGE, config.head_dim, device=device).to(dtype))
        self.where = (
            torch.randperm(pages, device=device).int().view(1, -1),
            torch.zeros(1, dtype=torch.int64).to(device),
        )
        self.positions = torch.arange(depth, self.length, device=device)
        self.q = torch.randn(tokens, self.heads, self.width, device=device).to(dtype)
        index_q = torch.randn(tokens, config.num_heads, config.head_dim, device=device)
        if alike:
            index_q = 0.3 * index_q + index_q[torch.arange(tokens, device=device) // 64 * 64]
        self.index_q = index_q.to(dtype)
        self.scale = self.width**-0.5

    @property
    def flops(self) -> float:
        """Of scores with all whole blocks, and of products with the tokens that are seen."""
        ends = range(self.length - self.tokens + 1, self.length + 1)
        seen = sum(min(end, self.config.visible) for end in ends)
        scored = sum(end // self.config.ratio for end in ends)
        index = self.config.num_heads * self.config.head_dim
        return 4.0 * seen * self.heads * self.width + 2.0 * scored * index

    @property
    def bytes(self) -> float:
        """Queries and outputs, and each key and value of the text once."""
        keys = self.length * 2 * self.kv_heads * self.width + self.length // self.config.ratio * self.config.head_dim
        return float(self.q.element_size() * (2 * self.q.numel() + self.index_q.numel() + keys))


def qsa_piece_cases(device: str, sizes: Sizes) -> list[Case]:
    """A piece of a prompt at several depths. The roof counts products with selected tokens alone, and each key and value once."""
    from freetoken.kernels.qsa import Qsa

    tokens, depths = (9, (0, 31)) if device == "cpu" else (2048, (0, 6144, 14336))
    cases = []
    for depth, alike in (*((depth, 0) for depth in depths), (depths[-1], 1)):
        piece = Piece(device, sizes.dtype, tokens, depth, bool(alike))
        rotary = torch.empty(0, 2, device=device)
        ops = [Qsa(Choice("qsa", "", impl, "benchmark"), rotary, piece.config) for impl in ("triton", "reference")]
        plan = ops[0].plan((tokens,), (piece.length,), 0, piece.pools.k, piece.heads)

        def call(op: Qsa, own: Piece = piece, plan: Any = plan) -> Callable[[], Tensors]:
            text = (own.pools, *own.where, own.positions, plan, own.scale)
            return lambda: (op.attend_pieces(own.q, own.index_q, *text),)

        shape = {"tokens": tokens, "depth": depth, "alike": alike}
        cases.append(Case(shape, call(ops[0]), call(ops[1]), piece.bytes, piece.flops, model=MODEL, calls=4))
    return cases
