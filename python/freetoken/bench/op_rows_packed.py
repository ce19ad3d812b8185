"""Rows of ``bench.ops`` for models with two-bit weights: the producers of rotated activations, and products of many tokens.

Shapes are the projections of the 27B that have one input in common (``Sizes.packed_shapes``). Products take several copies of a
weight in turn, together larger than the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from freetoken.bench.op_cases import Case, Sizes, Tensors, choice
from freetoken.kernels.pq2_gemv import PQ2Weight, Quantised, QuantisedActivation, TiledActivation

MODEL = "Qwen3.5-27B"
GROUP, EPS = 128, 1e-6


def flat(activation: Quantised | torch.Tensor) -> Tensors:
    """The tensors of an activation as it lies in memory: floats, rows or tiles."""
    if isinstance(activation, torch.Tensor):
        return (activation,)
    if isinstance(activation, TiledActivation):
        return activation.words, activation.beside
    return activation.values, activation.scales, activation.sums


def unflat(outputs: Tensors, tokens: int, group: int) -> tuple[Quantised | torch.Tensor, Tensors]:
    """The activation of ``tokens`` tokens that :func:`flat` took apart, and the outputs after it."""
    if outputs[0].dtype == torch.int32:
        return TiledActivation(outputs[0], outputs[1], tokens, group), outputs[2:]
    if outputs[0].dtype == torch.int8:
        values, scales, sums = outputs[:3]
        return QuantisedActivation(values, scales, sums, group), outputs[3:]
    return outputs[0], outputs[1:]


def _wide(dtype: torch.dtype, tokens: int) -> Callable[[Tensors], Tensors]:
    """What is compared of a producer's outputs: a quantised activation as numbers, the rest as it is."""

    def view(outputs: Tensors) -> Tensors:
        activation, rest = unflat(outputs, tokens, GROUP)
        return (activation if isinstance(activation, torch.Tensor) else activation.dequantise().to(dtype), *rest)

    return view


def _producers(
    sizes: Sizes, width: int, moved: float, tokens: int, call: Callable[[Any, Any], Tensors], signs: torch.Tensor
) -> list[Case]:
    """Cases that call ``call(op, rotation)``: on a GPU one for each setting worth timing, the default first. ``moved`` are bytes of
    inputs and outputs beside the activation."""
    from freetoken.kernels.hadamard import Hadamard, Rotation, candidates, tile_of

    rotation, cases = Rotation(sizes.rotation, signs), []
    configs = candidates(tokens, width, tile_of(width, sizes.rotation, GROUP))
    reference = Hadamard(choice("hadamard", "reference"))
    for config in configs if signs.is_cuda else configs[:1]:
        fused = Hadamard(choice("hadamard", "triton"), config)
        shape = {"tokens": tokens, "width": width, "warps": config.num_warps, "tiles": config.tiles}
        total = moved + tokens * width * (1 + 8 / GROUP) + width
        cases.append(
            Case(
                shape,
                lambda fused=fused: call(fused, rotation),  # type: ignore[misc]
                lambda: call(reference, rotation),
                total,
                model=MODEL,
                compared=_wide(sizes.dtype, tokens),
            )
        )
    return cases


def _by_warps(cases: list[Case]) -> list[Case]:
    """Those that differ in warps: only the kernel that norms rows takes several tiles."""
    first: dict[int, Case] = {}
    for case in cases:
        first.setdefault(case.shape["warps"], case)
    return list(first.values())


def _signs(width: int, device: str) -> torch.Tensor:
    return (torch.randint(0, 2, (width,), device=device) * 2 - 1).to(torch.int8)


def rotated_norm(device: str, sizes: Sizes) -> list[Case]:
    """Residual add, RMSNorm, rotation, quantisation, with and without the plain output, and for one token with its product beside."""
    width = sizes.packed_hidden
    cases: list[Case] = []
    signs, weight = _signs(width, device), torch.rand(width, device=device) + 0.5
    gates = torch.randn(2 * sizes.linear_heads, width, device=device).to(sizes.dtype)
    for tokens, plain, beside in itertools.product(sizes.tokens, (False, True), (None, gates)):
        if beside is not None and (plain or tokens != 1):
            continue
        x, residual = (torch.randn(tokens, width, device=device).to(sizes.dtype) for _ in range(2))

        def call(
            op: Any, rotation: Any, x: Any = x, residual: Any = residual, plain: bool = plain, beside: Any = beside
        ) -> Tensors:
            made = op.norm(x, weight, EPS, rotation, GROUP, residual, plain=plain, beside=beside)
            more = [part for part in (made.plain, made.beside) if part is not None]
            return (*flat(made.activation), made.residual, *more)

        moved = (3 + plain) * x.numel() * x.element_size() + 4 * width + (0 if beside is None else beside.nbytes)
        made = _producers(sizes, width, moved, tokens, call, signs)
        for case in made if plain else made[:1]:
            case.shape |= {"plain": int(plain), "beside": 0 if beside is None else beside.shape[0]}
            cases.append(case)
    return cases


def rotated_silu(device: str, sizes: Sizes) -> list[Case]:
    """SwiGLU, rotation, quantisation."""
    width = sizes.packed_ffn
    cases: list[Case] = []
    signs = _signs(width, device)
    for tokens in sizes.tokens:
        pair = torch.randn(tokens, 2 * width, device=device).to(sizes.dtype)

        def call(op: Any, rotation: Any, pair: Any = pair) -> Tensors:
            return flat(op.silu_mul(pair, rotation, GROUP))

        cases += _by_warps(_producers(sizes, width, pair.numel() * pair.element_size(), tokens, call, signs))
    return cases


def rotated_gated_norm(device: str, sizes: Sizes) -> list[Case]:
    """The gated norm of Gated DeltaNet, rotation, quantisation."""
    heads, head = sizes.linear_heads, sizes.rotated_head
    width = heads * head
    cases: list[Case] = []
    signs, weight = _signs(width, device), torch.rand(head, device=device) + 0.5
    for tokens in sizes.tokens:
        o, z = (torch.randn(tokens, width, device=device).to(sizes.dtype) for _ in range(2))

        def call(op: Any, rotation: Any, o: Any = o, z: Any = z) -> Tensors:
            return flat(op.gated_norm(o.view(-1, heads, head), z, weight, EPS, rotation, GROUP))

        cases += _by_warps(_producers(sizes, width, 2 * o.numel() * o.element_size(), tokens, call, signs))
    return cases


def rotated(device: str, sizes: Sizes) -> list[Case]:
    """Rotation and quantisation alone."""
    width = sizes.linear_heads * sizes.rotated_head
    cases: list[Case] = []
    signs = _signs(width, device)
    for tokens in sizes.tokens:
        x = torch.randn(tokens, width, device=device).to(sizes.dtype)

        def call(op: Any, rotation: Any, x: Any = x) -> Tensors:
            return flat(op.rotate(x, rotation, GROUP))

        cases += _by_warps(_producers(sizes, width, x.numel() * x.element_size(), tokens, call, signs))
    return cases


HEAD_ROWS = 200_000
"""Weights with more rows are a head, which sees few tokens of a prompt."""


def products(form: str) -> Callable[[str, Sizes], list[Case]]:
    """The rows of one form of ``pq2_gemm``."""

    def rows(device: str, sizes: Sizes) -> list[Case]:
        from freetoken.bench.pq2 import random_weight

        cases = []
        for n, k in sizes.packed_shapes:
            if n < HEAD_ROWS:
                weights = [random_weight(n, k, device) for _ in range(-(-sizes.packed_bytes // (n * k // 4)))]
                cases += [_product(form, device, sizes, tokens, weights) for tokens in sizes.packed_prompts]
        return cases

    return rows


def _product(form: str, device: str, sizes: Sizes, tokens: int, weights: list[PQ2Weight]) -> Case:
    from freetoken.kernels.pq2_gemm import PQ2Gemm
    from freetoken.kernels.pq2_gemv.activation import quantise_reference

    n, k = weights[0].out_features, weights[0].in_features
    x = torch.randn(tokens, k, device=device).to(sizes.dtype if sizes.dtype != torch.float32 else torch.float16)
    activation: Any = quantise_reference(x, GROUP) if form == "int8" else x
    out_dtype = x.dtype if form == "dense" else sizes.dtype

    def call(impl: str) -> Callable[[], Tensors]:
        op, turn = PQ2Gemm(choice("pq2_gemm", impl), form), itertools.cycle(weights)
        op.reserve(torch.device(device))
        return lambda: (op.linear(activation, next(turn), out_dtype),)

    moved = weights[0].nbytes + x.numel() * (1 if form == "int8" else 2) + tokens * n * 2
    shape = {"tokens": tokens, "n": n, "k": k}
    calls = min(20, len(weights))
    return Case(shape, call("triton"), call("reference"), float(moved), 2.0 * tokens * n * k, model=MODEL, calls=calls)


OPS: dict[str, Callable[[str, Sizes], list[Case]]] = {
    "rotated_norm": rotated_norm,
    "rotated_silu": rotated_silu,
    "rotated_gated_norm": rotated_gated_norm,
    "rotated": rotated,
    "pq2_gemm_int8": products("int8"),
    "pq2_gemm_float": products("float"),
    "pq2_gemm_dense": products("dense"),
}
