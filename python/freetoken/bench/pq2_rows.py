"""Rows of the operator bench for two-bit weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from freetoken.bench.op_cases import Case, Sizes, Tensors, choice, random
from freetoken.bench.op_rows_packed import flat, unflat
from freetoken.bench.pq2 import random_weight
from freetoken.kernels.pq2_gemv import PQ2Product, quantise


def product_cases(device: str, sizes: Sizes) -> list[Case]:
    """Rows of ``pq2_gemv``: calls take distinct weights in turn, so that none is found in a cache."""
    cases = []
    for n, k in sizes.packed_shapes:
        weights = [random_weight(n, k, device) for _ in range(-(-sizes.packed_bytes // (n * k // 4)))]
        for tokens in sizes.packed_tokens:
            activation = quantise(random(device, sizes.dtype, tokens, k), 128)

            def call(impl: str, activation: Any = activation, weights: Any = weights) -> Callable[[], Tensors]:
                op = PQ2Product(choice("pq2_gemv", impl), choice("pq2_single", impl))
                turn = itertools.cycle(weights)
                return lambda: (op.linear(activation, next(turn), sizes.dtype),)

            moved = weights[0].nbytes + tokens * (k + n * sizes.dtype.itemsize)
            shape = {"tokens": tokens, "n": n, "k": k}
            case = Case(shape, call("triton"), call("reference"), moved, model="Qwen3.5-27B", calls=len(weights))
            cases.append(case)
    return cases


def quantise_cases(device: str, sizes: Sizes) -> list[Case]:
    """Rows of ``pq2_quantise``: one token and the most."""
    fused, reference = (
        PQ2Product(choice("pq2_gemv", impl), choice("pq2_single", impl)) for impl in ("triton", "reference")
    )
    cases = []
    for k in sorted({k for _, k in sizes.packed_shapes}):
        for tokens in (1, max(sizes.packed_tokens)):
            x = random(device, sizes.dtype, tokens, k)

            def call(op: Any, x: Any = x) -> Callable[[], Tensors]:
                def outputs() -> Tensors:
                    return flat(op.quantise(x, 128))

                return outputs

            moved = float(x.nbytes + x.numel() + x.numel() // 16)
            shape = {"tokens": tokens, "k": k}

            def rows(outputs: Tensors, tokens: int = tokens) -> Tensors:
                done = unflat(outputs, tokens, 128)[0]
                return (done,) if isinstance(done, torch.Tensor) else flat(done.rows())

            case = Case(shape, call(fused), call(reference), moved, exact=True, model="Qwen3.5-27B", compared=rows)
            cases.append(case)
    return cases
