"""Rows of ``bench.ops`` for layers of experts and FP8 products, at the sizes of qwen4_exp: 512 experts, 10 a token, and a shared one.

Calls take several routings in turn, so that few tokens find no expert of theirs in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from freetoken.bench.op_cases import Case, Sizes, Tensors, choice, random
from freetoken.kernels.block_fp8 import BLOCK, Fp8Weight, Weight, empty, group_rows

MODEL = "qwen4_exp"
ROUTINGS = 8


def _fp8(device: str, *shape: int, parts: tuple[int, ...] = ()) -> Fp8Weight:
    """Normal values with the variance of one over the inputs, filled one of the first dimension at a time."""
    n, k = shape[-2:]
    weight = empty(shape, group_rows(*(parts or (n,))), torch.device(device))
    weight.scale.uniform_(0.5, 1.5).mul_(k**-0.5 / 64)
    for part in torch.split(weight.data, max(1, 2**24 // weight.data[0].numel())):
        part.copy_((torch.randn(part.shape, device=device) * 64).clamp_(-448, 448))
    return weight


def _float(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, shape[-1] ** -0.5)


def _bytes(weight: Weight) -> int:
    return weight.data.nbytes + weight.scale.nbytes if isinstance(weight, Fp8Weight) else weight.nbytes


def _routings(device: str, sizes: Sizes, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights ``[ROUTINGS, T, K + 1]``: experts by chance, as for tokens that have nothing in common, and the shared one."""
    draw = torch.rand(ROUTINGS, tokens, sizes.experts, device=device)
    ids = draw.topk(sizes.top_k, dim=2).indices.to(torch.int32)
    ids = torch.cat((ids, torch.full_like(ids[..., :1], sizes.experts)), 2)
    weights = torch.rand(ids.shape, device=device)
    return ids, weights / weights.sum(2, keepdim=True)


def moe_route(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.moe_gemm.config import block_m
    from freetoken.kernels.moe_route import MoeRoute

    ops = {impl: MoeRoute(choice("moe_route", impl)) for impl in ("triton", "reference")}
    cases = []
    for tokens in sizes.moe_tokens:
        logits = random(device, sizes.dtype, tokens, sizes.experts + 1)
        ids, _ = _routings(device, sizes, tokens)
        routes = ids[0].numel()
        block = block_m(routes, sizes.experts + 1)

        def choose(impl: str, logits: torch.Tensor = logits) -> Callable[[], Tensors]:
            return lambda: (ops[impl](logits, sizes.experts, sizes.top_k, True, True)[1],)

        def group(impl: str, ids: torch.Tensor = ids[0], block: int = block) -> Callable[[], Tensors]:
            return lambda: (ops[impl].group(ids, sizes.experts + 1, block)[1],)

        moved = logits.numel() * logits.element_size() + 8.0 * routes
        cases.append(Case({"tokens": tokens}, choose("triton"), choose("reference"), moved, model=MODEL))
        shape = {"tokens": tokens, "block": block}
        cases.append(Case(shape, group("triton"), group("reference"), 8.0 * routes, exact=True, model=MODEL))
    return cases


def _experts(device: str, sizes: Sizes, bits: int) -> list[Case]:
    from freetoken.kernels.moe_gemm import MoeGemm
    from freetoken.kernels.moe_route import MoeRoute

    count, hidden, width = sizes.experts + 1, sizes.moe_hidden, sizes.moe_width
    gate_up: Weight
    down: Weight
    if bits == 8:
        gate_up = _fp8(device, count, 2 * width, hidden, parts=(width,))
        down = _fp8(device, count, hidden, width)
    else:
        gate_up = _float(device, sizes.dtype, count, 2 * width, hidden)
        down = _float(device, sizes.dtype, count, hidden, width)
    cases = []
    for tokens in sizes.moe_tokens:
        x = random(device, sizes.dtype, tokens, hidden)
        ids, weights = _routings(device, sizes, tokens)

        def call(impl: str, inputs: tuple[Any, ...] = (x, ids, weights)) -> Callable[[], Tensors]:
            op = MoeGemm(choice("moe_gemm", impl), MoeRoute(choice("moe_route", impl)))
            turn = itertools.cycle(zip(inputs[1], inputs[2]))
            return lambda: (op(inputs[0], *next(turn), gate_up, down),)

        used = sum(chosen.unique().numel() for chosen in ids) / ROUTINGS
        moved = used / count * (_bytes(gate_up) + _bytes(down)) + 2.0 * x.numel() * x.element_size()
        flops = 6.0 * ids[0].numel() * hidden * width
        shape = {"tokens": tokens, "bits": bits}
        cases.append(Case(shape, call("triton"), call("reference"), moved, flops, model=MODEL))
    return cases


def moe_gemm(device: str, sizes: Sizes) -> list[Case]:
    return [*_experts(device, sizes, 16), *_experts(device, sizes, 8)]


def fp8_gemm(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.fp8_gemm import Fp8Gemm
    from freetoken.kernels.silu_mul import SiluMul

    hidden, width = sizes.moe_hidden, sizes.moe_width
    shapes = [(hidden * 6, hidden, False), (hidden, hidden * 2, False), (2 * width, hidden, True)]
    ops = {
        impl: Fp8Gemm(choice("fp8_gemm", impl), SiluMul(choice("silu_mul", impl))) for impl in ("triton", "reference")
    }
    cases = []
    for n, k, silu in shapes:
        copies = [_fp8(device, n, k, parts=(n // 2,) if silu else ()) for _ in range(ROUTINGS)]
        for tokens in sizes.moe_tokens:
            x = random(device, sizes.dtype, tokens, k)

            def call(
                impl: str, x: torch.Tensor = x, copies: list[Fp8Weight] = copies, silu: bool = silu
            ) -> Callable[[], Tensors]:
                product = ops[impl].linear_silu_mul if silu else ops[impl].linear
                turn = itertools.cycle(copies)
                return lambda: (product(x, next(turn)),)

            moved = n * k + 4.0 * n * k / BLOCK**2 + tokens * (n + k) * x.element_size()
            shape = {"tokens": tokens, "n": n, "k": k}
            cases.append(Case(shape, call("triton"), call("reference"), moved, 2.0 * tokens * n * k, model=MODEL))
    return cases
