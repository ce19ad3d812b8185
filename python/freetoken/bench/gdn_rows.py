"""Rows of ``bench.ops`` for Gated DeltaNet: its convolution, decode step, prefill and norm, at the sizes of Qwen3.5-27B."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from freetoken.bench.op_cases import Case, Sizes, Tensors, choice, random

if TYPE_CHECKING:
    from freetoken.kernels.gdn_decode import DecodeConfig

CONV_WIDTH = 4


def gdn_conv(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.gdn_conv import GdnConv, pack_weight

    channels, tokens = (2 * sizes.linear_key_heads + sizes.linear_heads) * sizes.linear_width, sizes.linear_prompt
    x = random(device, sizes.dtype, tokens, channels)
    weight = pack_weight(random(device, sizes.dtype, channels, CONV_WIDTH))
    cases = []
    for lengths in ([tokens], [tokens // 2, tokens // 4 + 1, tokens - tokens // 2 - tokens // 4 - 1]):
        pieces = len(lengths)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        slots = torch.arange(pieces, device=device)
        starts = torch.full((pieces,), 100, dtype=torch.int32, device=device)
        ring = random(device, sizes.dtype, pieces, CONV_WIDTH, channels)

        def call(
            impl: str,
            arguments: tuple[Any, ...] = (bounds, slots, starts, max(lengths)),
            ring: Any = ring,
        ) -> Callable[[], Tensors]:
            op, state = GdnConv(choice("gdn_conv", impl)), ring.clone()
            return lambda: (op.prefill(x, weight, None, state, *arguments), state)

        shape = {"pieces": pieces, "tokens": tokens, "channels": channels}
        moved = 2.0 * x.numel() * x.element_size()
        cases.append(Case(shape, call("triton"), call("reference"), moved, model="Qwen3.5-27B"))
    return cases


def gdn_decode(device: str, sizes: Sizes) -> list[Case]:
    """The decode step with its default settings."""
    return gdn_decode_cases(device, sizes)


def gdn_decode_cases(device: str, sizes: Sizes, config: DecodeConfig | None = None) -> list[Case]:
    """Calls take the slots of the pool in turn, so that small batches find no state of theirs in the cache."""
    from freetoken.kernels.gdn_conv import pack_weight
    from freetoken.kernels.gdn_decode import GdnDecode

    heads, width = sizes.linear_heads, sizes.linear_width
    channels = (2 * sizes.linear_key_heads + heads) * width
    # Four batches' worth: a call reads its states while those before it still write theirs, and none is of the same slots.
    slots = 4 * max(sizes.linear_batches)
    rates, bias = torch.linspace(-4, 2, heads, device=device), torch.ones(heads, device=device)
    norm = random(device, sizes.dtype, width)
    weight = pack_weight(random(device, sizes.dtype, channels, CONV_WIDTH))
    ring = random(device, sizes.dtype, slots, CONV_WIDTH, channels)
    state = torch.randn(slots, heads, width, width, device=device) / width
    cases = []
    for batch in sizes.linear_batches:
        qkv, z = (random(device, sizes.dtype, batch, columns) for columns in (channels, heads * width))
        a, b = (random(device, sizes.dtype, batch, heads) for _ in range(2))
        positions = torch.arange(batch, device=device) + sizes.depth
        windows = torch.arange(slots // batch * batch, device=device).view(-1, batch)

        def call(
            impl: str,
            inputs: tuple[Any, ...] = (qkv, z, a, b, weight, rates, bias, norm, 1e-6),
            windows: Any = windows,
            positions: Any = positions,
        ) -> Callable[[], Tensors]:
            op: Any = GdnDecode(choice("gdn_decode", impl), config)
            conv, rec = ring.clone(), state.clone()
            op.reserve(windows.shape[1], rec)
            turn = itertools.cycle(windows)
            return lambda: (
                op(*inputs, conv_state=conv, rec_state=rec, slots=next(turn), positions=positions, settled=True),
            )

        element = qkv.element_size()
        per_request = 2 * heads * width * width * 4 + ((CONV_WIDTH + 1) * channels + 2 * heads * (width + 1)) * element
        shape = {"requests": batch, "heads": heads}
        moved = float(batch * per_request)
        cases.append(Case(shape, call("triton"), call("reference"), moved, model="Qwen3.5-27B"))
    return cases


def _gdn_prefill(device: str, sizes: Sizes, lengths: list[int]) -> Case:
    from freetoken.kernels.gdn_prefill import GdnPrefill
    from freetoken.kernels.gdn_prefill.plan import CHUNK

    tokens, width = sum(lengths), sizes.linear_width
    key_heads, heads = sizes.linear_key_heads, sizes.linear_heads
    columns = [key_heads * width, key_heads * width, heads * width]
    conv = torch.nn.functional.silu(random(device, sizes.dtype, tokens, sum(columns)))
    q, k, v = (x.reshape(tokens, -1, width) for x in torch.tensor_split(conv, (columns[0], columns[0] + columns[1]), 1))
    a, b = (random(device, sizes.dtype, tokens, heads) for _ in range(2))
    rates, bias = torch.linspace(-4, 2, heads, device=device), torch.ones(heads, device=device)
    state = torch.zeros(len(lengths), heads, width, width, device=device)
    slots = torch.arange(len(lengths), device=device)
    fresh = torch.zeros(len(lengths), dtype=torch.int32, device=device)

    def call(impl: str) -> Callable[[], Tensors]:
        op = GdnPrefill(choice("gdn_prefill", impl))
        plan = op.plan(lengths, device)
        return lambda: (op(q, k, v, a, b, rates, bias, state, slots, fresh, plan),)

    element = v.element_size()
    moved = (conv.numel() + v.numel() + 2 * a.numel()) * element + state.numel() * 4
    per_chunk = heads * (6 * CHUNK * width * width + 4 * CHUNK * CHUNK * width) + key_heads * 4 * CHUNK * CHUNK * width
    flops = float(per_chunk * sum(-(-length // CHUNK) for length in lengths))
    shape = {"pieces": len(lengths), "tokens": tokens}
    return Case(shape, call("triton"), call("reference"), moved, flops, model="Qwen3.5-27B")


def gdn_prefill(device: str, sizes: Sizes) -> list[Case]:
    prompt = sizes.linear_prompt
    ragged = [prompt // 2, prompt // 4 + 1, prompt - prompt // 2 - prompt // 4 - 1]
    many = [64] * max(1, prompt // 256)
    return [_gdn_prefill(device, sizes, lengths) for lengths in ([prompt], [prompt // 4] * 4, ragged, many)]


def gdn_norm(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.gdn_prefill import GdnPrefill

    fused, reference = (GdnPrefill(choice("gdn_prefill", impl)) for impl in ("triton", "reference"))
    heads, width, tokens = sizes.linear_heads, sizes.linear_width, sizes.linear_prompt
    o, z = random(device, sizes.dtype, tokens, heads, width), random(device, sizes.dtype, tokens, heads * width)
    weight = random(device, sizes.dtype, width)

    def call(op: Any) -> Callable[[], Tensors]:
        return lambda: (op.norm(o, z, weight, 1e-6),)

    moved = 3.0 * o.numel() * o.element_size()
    return [Case({"tokens": tokens}, call(fused), call(reference), moved, model="Qwen3.5-27B")]
