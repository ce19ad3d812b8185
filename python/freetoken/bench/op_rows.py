"""The table behind ``bench.ops``: for each fused op, how to build inputs and call the kernel and its reference.

Rows of the ops that every model has are here, those of others in the modules of their kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from freetoken.bench import attention_rows, gdn_rows, moe_rows, op_rows_packed, ple_rows, pq2_rows, qwen4_exp_rows
from freetoken.bench.op_cases import Case, Sizes, Tensors, choice, random


def rms_norm(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.rms_norm import RmsNorm

    fused, reference = (RmsNorm(choice("rms_norm", impl)) for impl in ("triton", "reference"))
    cases = []
    for tokens in sizes.tokens:
        x, residual = (random(device, sizes.dtype, tokens, sizes.hidden) for _ in range(2))
        weight = random(device, sizes.dtype, sizes.hidden)

        def call(op: Any, x: Any = x, weight: Any = weight, residual: Any = residual) -> Callable[[], Tensors]:
            return lambda: op.add(x, weight, 1e-6, residual)

        cases.append(Case({"tokens": tokens}, call(fused), call(reference), 4 * x.numel() * x.element_size()))
    return cases


def silu_mul(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.silu_mul import SiluMul

    fused, reference = (SiluMul(choice("silu_mul", impl)) for impl in ("triton", "reference"))
    cases = []
    for tokens in sizes.tokens:
        x = random(device, sizes.dtype, tokens, 2 * sizes.ffn)

        def call(op: Any, x: Any = x) -> Callable[[], Tensors]:
            return lambda: (op(x),)

        def gated(op: Any, x: Any = x) -> Callable[[], Tensors]:
            return lambda: (op.sigmoid_mul(x[:, : sizes.ffn], x[:, sizes.ffn :]),)

        moved, shape = 1.5 * x.numel() * x.element_size(), {"tokens": tokens}
        cases.append(Case(shape, call(fused), call(reference), moved))
        cases.append(Case({**shape, "sigmoid": 1}, gated(fused), gated(reference), moved))
    return cases


def rope_kv(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.rope_kv import RopeKv

    limit = max(sizes.tokens) + sizes.depth
    half = sizes.head_dim // 2
    angles = torch.arange(limit, device=device)[:, None] * 1e4 ** (-torch.arange(half, device=device) / half)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    cases = []
    for tokens in sizes.tokens:
        width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        qkv = random(device, sizes.dtype, tokens, width)
        norms = [random(device, sizes.dtype, sizes.head_dim) for _ in range(2)]
        pages = -(-tokens // sizes.page) + 1
        positions = torch.arange(tokens, device=device) + sizes.depth
        slots = torch.randperm((pages - 1) * sizes.page, device=device)[:tokens] + sizes.page

        def call(
            impl: str,
            qkv: Any = qkv,
            norms: Any = norms,
            pages: int = pages,
            positions: Any = positions,
            slots: Any = slots,
        ) -> Callable[[], Tensors]:
            shape = (pages, sizes.kv_heads, sizes.page, sizes.head_dim)
            k, v = (torch.zeros(shape, dtype=sizes.dtype, device=device) for _ in range(2))
            op = RopeKv(choice("rope_kv", impl), table)
            step = op.prepare(positions, slots, sizes.page)
            return lambda: (op(qkv, k, v, step, norms[0], norms[1], 1e-6), k, v)

        cases.append(Case({"tokens": tokens}, call("triton"), call("reference"), 2 * qkv.numel() * qkv.element_size()))
    return cases


def small_gemm(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.silu_mul import SiluMul
    from freetoken.kernels.small_gemm import SmallGemm, max_tokens

    shapes = [
        (sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim),
        (sizes.ffn, sizes.hidden),
        (sizes.hidden, sizes.vocab),
        (sizes.packed_hidden, 2 * sizes.linear_heads),
    ]
    cases = []
    for k, n in shapes:
        weight = random(device, sizes.dtype, n, k) / math.sqrt(k)
        for tokens in sorted({1, 8, 16, max_tokens(n)}) if sizes.dtype != torch.float32 else (1,):
            x = random(device, sizes.dtype, tokens, k)

            def call(impl: str, x: Any = x, weight: Any = weight) -> Callable[[], Tensors]:
                op = SmallGemm(choice("small_gemm", impl), SiluMul(choice("silu_mul", impl)))
                op.reserve(weight, silu=False)
                return lambda: (op.linear(x, weight),)

            moved = (n * k + tokens * (n + k)) * weight.element_size()
            shape = {"tokens": tokens, "n": n, "k": k}
            cases.append(Case(shape, call("triton"), call("reference"), moved, 2.0 * tokens * n * k))
    return [*cases, *qwen4_exp_rows.squashed_cases(device, sizes)]


def sample(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels import sample as op
    from freetoken.kernels.sample.hashing import row_keys
    from freetoken.kernels.sample.params import SampleParams

    cases = []
    for rows in [count for count in sizes.tokens if count <= 64]:
        logits = random(device, torch.float32, rows, sizes.vocab) * 3
        keys = row_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64))
        params = SampleParams(
            inv_temperature=torch.full((rows,), 1.25, device=device),
            top_k=torch.full((rows,), 50, dtype=torch.int32, device=device),
            top_p=torch.full((rows,), 0.9, device=device),
            log_min_p=torch.full((rows,), -math.inf, device=device),
            greedy=torch.zeros(rows, dtype=torch.int32, device=device),
            key=torch.from_numpy(keys).to(device),
            has_top_k=True,
            has_top_p=True,
            has_min_p=False,
            has_greedy=False,
            max_top_k=50,
            all_top_k=True,
        )

        def call(impl: str, logits: Any = logits, params: Any = params) -> Callable[[], Tensors]:
            return lambda: (op.sample_ids(logits, params, sizes.vocab, impl),)

        shape = {"rows": rows, "vocab": sizes.vocab}
        cases.append(Case(shape, call("triton"), call("reference"), logits.numel() * 4, exact=True))
    return cases


def token_mask(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.token_mask import TokenMask

    fused, reference = (TokenMask(choice("token_mask", impl)) for impl in ("triton", "reference"))
    cases = []
    for rows in [count for count in sizes.tokens if count <= 64]:
        logits = random(device, torch.float32, rows, sizes.vocab)
        places = torch.randperm(rows, device=device)
        words = -(-sizes.vocab // 32)
        # Most of a vocabulary is closed at any place of a grammar: about one id in sixteen is open here.
        bits = [torch.randint(-(2**31), 2**31, (rows, words), device=device) for _ in range(4)]
        masks = (bits[0] & bits[1] & bits[2] & bits[3]).to(torch.int32)

        def call(op: Any, logits: Any = logits, places: Any = places, masks: Any = masks) -> Callable[[], Tensors]:
            # In place, so each implementation has a copy of its own to be compared.
            own = logits.clone()

            def run() -> Tensors:
                op(own, places, masks)
                return (own,)

            return run

        moved = masks.numel() * 4 + 15 / 16 * logits.numel() * 4
        shape = {"rows": rows, "vocab": sizes.vocab}
        cases.append(Case(shape, call(fused), call(reference), moved, exact=True))
    return cases


OPS: dict[str, Callable[[str, Sizes], list[Case]]] = {
    "rms_norm": rms_norm,
    "rope_kv": rope_kv,
    "silu_mul": silu_mul,
    "small_gemm": small_gemm,
    "attn_decode": attention_rows.decode_cases,
    "attn_prefill": attention_rows.prefill_cases,
    "sample": sample,
    "token_mask": token_mask,
    "gdn_conv": gdn_rows.gdn_conv,
    "gdn_decode": gdn_rows.gdn_decode,
    "gdn_prefill": gdn_rows.gdn_prefill,
    "gdn_norm": gdn_rows.gdn_norm,
    "moe_route": moe_rows.moe_route,
    "moe_gemm": moe_rows.moe_gemm,
    "fp8_gemm": moe_rows.fp8_gemm,
    "ple_hash": ple_rows.hash_cases,
    "ple_gather": ple_rows.gather_cases,
    "ple_mix": ple_rows.mix_cases,
    "hyper_mix": lambda *how: [*qwen4_exp_rows.hyper_cases(*how), *qwen4_exp_rows.gated_cases(*how)],
    "qsa": qwen4_exp_rows.qsa_cases,
    "qsa_pieces": qwen4_exp_rows.qsa_piece_cases,
    "pq2_gemv": pq2_rows.product_cases,
    "pq2_quantise": pq2_rows.quantise_cases,
    **op_rows_packed.OPS,
}
