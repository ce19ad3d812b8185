"""The table behind ``bench.ops``: for each fused op, how to build inputs and call the kernel and its reference.

Sizes are those of the Qwen3-8B geometry, for the ops of Gated DeltaNet of Qwen3.5-27B, for experts of qwen4_exp; ``small`` ones let the same rows run in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from freetoken.bench import op_rows_packed
from freetoken.kernels.dispatch import Choice

if TYPE_CHECKING:
    from freetoken.kernels.gdn_decode import DecodeConfig

Tensors = tuple[torch.Tensor, ...]
CONV_WIDTH = 4


@dataclass
class Case:
    """One op at one shape. ``fused`` and ``reference`` return the outputs to compare; ``exact`` asks for equality.

    ``bytes`` and ``flops`` are what the op must move and compute at least; 0 where that is not its limit. ``model`` names the
    geometry of the full sizes. With ``uncaptured`` both are also timed outside a graph, and their launches counted. ``calls`` are in
    a timed graph. ``compared`` makes of either side's outputs what is compared, where that is something else.
    """

    shape: dict[str, int]
    fused: Callable[[], Tensors]
    reference: Callable[[], Tensors]
    bytes: float
    flops: float = 0.0
    exact: bool = False
    model: str = "Qwen3-8B"
    uncaptured: bool = False
    calls: int = 20
    compared: Callable[[Tensors], Tensors] | None = None


@dataclass(frozen=True)
class Sizes:
    """Geometry of the inputs. ``tokens`` are the row counts of token-wise ops, ``depth`` the KV length of a decode,
    ``context`` the tokens that a sequence may have,
    ``prompt`` the length of a prefill; ``gated_*`` query heads, KV heads and width of attention between layers of linear attention, and
    depths and batches of its decode, whose layers hold ``uncached_bytes`` where 16 can; ``linear_*`` the heads of linear attention, the tokens of its prefill
    and the batches of its decode; ``moe_*`` the experts and the token counts they see; ``ple_*`` the batches and prompts whose
    n-grams are hashed; ``packed_*`` widths, ``(N, K)`` and token counts of two-bit projections, ``rotation`` their
    rotation block and ``rotated_head`` the head width of the gated norm before it."""

    hidden: int = 4096
    ffn: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    page: int = 16
    tokens: tuple[int, ...] = (1, 16, 64, 2048)
    depth: int = 1024
    context: int = 32768
    prompt: int = 2048
    gated_attention: tuple[int, int, int] = (24, 4, 256)
    gated_depths: tuple[int, ...] = (128, 8192)
    gated_batches: tuple[int, ...] = (1, 8, 32)
    uncached_bytes: int = 200 * 10**6
    linear_key_heads: int = 16
    linear_heads: int = 48
    linear_width: int = 128
    linear_prompt: int = 8192
    linear_batches: tuple[int, ...] = (1, 8, 64)
    experts: int = 512
    top_k: int = 10
    moe_hidden: int = 2560
    moe_width: int = 640
    moe_tokens: tuple[int, ...] = (1, 8, 64, 2048)
    ple_batches: tuple[int, ...] = (1, 4, 8)
    ple_prompts: tuple[int, ...] = (512, 2048, 16384)
    packed_shapes: tuple[tuple[int, int], ...] = (
        (34816, 5120),
        (5120, 17408),
        (16384, 5120),
        (14336, 5120),
        (5120, 6144),
        (248320, 5120),
    )
    packed_tokens: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32)
    packed_bytes: int = 450 * 10**6
    packed_hidden: int = 5120
    packed_ffn: int = 17408
    packed_prompts: tuple[int, ...] = (32, 64, 256, 1024, 4096)
    rotation: int = 1024
    rotated_head: int = 128
    dtype: torch.dtype = torch.bfloat16


SMALL = Sizes(
    hidden=96,
    ffn=80,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=700,
    page=4,
    tokens=(1, 3),
    depth=37,
    context=4096,
    prompt=19,
    gated_attention=(6, 2, 16),
    gated_depths=(9, 1600),
    gated_batches=(1, 3),
    uncached_bytes=10**6,
    linear_key_heads=1,
    linear_heads=2,
    linear_width=16,
    linear_prompt=68,
    linear_batches=(1, 3),
    experts=6,
    top_k=2,
    moe_hidden=20,
    moe_width=16,
    moe_tokens=(1, 3),
    ple_batches=(1, 3),
    ple_prompts=(5, 40),
    packed_shapes=((40, 256), (24, 384)),
    packed_tokens=(1, 3),
    packed_bytes=2**13,
    packed_hidden=384,
    packed_ffn=256,
    packed_prompts=(17,),
    rotation=64,
    rotated_head=64,
    dtype=torch.float32,
)


def _choice(op: str, impl: str) -> Choice:
    return Choice(op, "", impl, "benchmark")


def _random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def rms_norm(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.rms_norm import RmsNorm

    fused, reference = (RmsNorm(_choice("rms_norm", impl)) for impl in ("triton", "reference"))
    cases = []
    for tokens in sizes.tokens:
        x, residual = (_random(device, sizes.dtype, tokens, sizes.hidden) for _ in range(2))
        weight = _random(device, sizes.dtype, sizes.hidden)

        def call(op: Any, x: Any = x, weight: Any = weight, residual: Any = residual) -> Callable[[], Tensors]:
            return lambda: op.add(x, weight, 1e-6, residual)

        cases.append(Case({"tokens": tokens}, call(fused), call(reference), 4 * x.numel() * x.element_size()))
    return cases


def silu_mul(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.silu_mul import SiluMul

    fused, reference = (SiluMul(_choice("silu_mul", impl)) for impl in ("triton", "reference"))
    cases = []
    for tokens in sizes.tokens:
        x = _random(device, sizes.dtype, tokens, 2 * sizes.ffn)

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
        qkv = _random(device, sizes.dtype, tokens, width)
        norms = [_random(device, sizes.dtype, sizes.head_dim) for _ in range(2)]
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
            op = RopeKv(_choice("rope_kv", impl), table)
            step = op.prepare(positions, slots, sizes.page)
            return lambda: (op(qkv, k, v, step, norms[0], norms[1], 1e-6), k, v)

        cases.append(Case({"tokens": tokens}, call("triton"), call("reference"), 2 * qkv.numel() * qkv.element_size()))
    return cases


def small_gemm(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.qwen4_exp_rows import squashed_cases
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
        weight = _random(device, sizes.dtype, n, k) / math.sqrt(k)
        for tokens in sorted({1, 8, 16, max_tokens(n)}) if sizes.dtype != torch.float32 else (1,):
            x = _random(device, sizes.dtype, tokens, k)

            def call(impl: str, x: Any = x, weight: Any = weight) -> Callable[[], Tensors]:
                op = SmallGemm(_choice("small_gemm", impl), SiluMul(_choice("silu_mul", impl)))
                op.reserve(weight, silu=False)
                return lambda: (op.linear(x, weight),)

            moved = (n * k + tokens * (n + k)) * weight.element_size()
            shape = {"tokens": tokens, "n": n, "k": k}
            cases.append(Case(shape, call("triton"), call("reference"), moved, 2.0 * tokens * n * k))
    return [*cases, *squashed_cases(device, sizes)]


def attn_decode(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.attention_rows import decode_cases

    return decode_cases(device, sizes)


def attn_prefill(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.attention_rows import prefill_cases

    return prefill_cases(device, sizes)


def sample(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels import sample as op
    from freetoken.kernels.sample.hashing import row_keys
    from freetoken.kernels.sample.params import SampleParams

    cases = []
    for rows in [count for count in sizes.tokens if count <= 64]:
        logits = _random(device, torch.float32, rows, sizes.vocab) * 3
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

    fused, reference = (TokenMask(_choice("token_mask", impl)) for impl in ("triton", "reference"))
    cases = []
    for rows in [count for count in sizes.tokens if count <= 64]:
        logits = _random(device, torch.float32, rows, sizes.vocab)
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


def gdn_conv(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.kernels.gdn_conv import GdnConv, pack_weight

    channels, tokens = (2 * sizes.linear_key_heads + sizes.linear_heads) * sizes.linear_width, sizes.linear_prompt
    x = _random(device, sizes.dtype, tokens, channels)
    weight = pack_weight(_random(device, sizes.dtype, channels, CONV_WIDTH))
    cases = []
    for lengths in ([tokens], [tokens // 2, tokens // 4 + 1, tokens - tokens // 2 - tokens // 4 - 1]):
        pieces = len(lengths)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        slots = torch.arange(pieces, device=device)
        starts = torch.full((pieces,), 100, dtype=torch.int32, device=device)
        ring = _random(device, sizes.dtype, pieces, CONV_WIDTH, channels)

        def call(
            impl: str,
            arguments: tuple[Any, ...] = (bounds, slots, starts, max(lengths)),
            ring: Any = ring,
        ) -> Callable[[], Tensors]:
            op, state = GdnConv(_choice("gdn_conv", impl)), ring.clone()
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
    norm = _random(device, sizes.dtype, width)
    weight = pack_weight(_random(device, sizes.dtype, channels, CONV_WIDTH))
    ring = _random(device, sizes.dtype, slots, CONV_WIDTH, channels)
    state = torch.randn(slots, heads, width, width, device=device) / width
    cases = []
    for batch in sizes.linear_batches:
        qkv, z = (_random(device, sizes.dtype, batch, columns) for columns in (channels, heads * width))
        a, b = (_random(device, sizes.dtype, batch, heads) for _ in range(2))
        positions = torch.arange(batch, device=device) + sizes.depth
        windows = torch.arange(slots // batch * batch, device=device).view(-1, batch)

        def call(
            impl: str,
            inputs: tuple[Any, ...] = (qkv, z, a, b, weight, rates, bias, norm, 1e-6),
            windows: Any = windows,
            positions: Any = positions,
        ) -> Callable[[], Tensors]:
            op: Any = GdnDecode(_choice("gdn_decode", impl), config)
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
    conv = torch.nn.functional.silu(_random(device, sizes.dtype, tokens, sum(columns)))
    q, k, v = (x.reshape(tokens, -1, width) for x in torch.tensor_split(conv, (columns[0], columns[0] + columns[1]), 1))
    a, b = (_random(device, sizes.dtype, tokens, heads) for _ in range(2))
    rates, bias = torch.linspace(-4, 2, heads, device=device), torch.ones(heads, device=device)
    state = torch.zeros(len(lengths), heads, width, width, device=device)
    slots = torch.arange(len(lengths), device=device)
    fresh = torch.zeros(len(lengths), dtype=torch.int32, device=device)

    def call(impl: str) -> Callable[[], Tensors]:
        op = GdnPrefill(_choice("gdn_prefill", impl))
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

    fused, reference = (GdnPrefill(_choice("gdn_prefill", impl)) for impl in ("triton", "reference"))
    heads, width, tokens = sizes.linear_heads, sizes.linear_width, sizes.linear_prompt
    o, z = _random(device, sizes.dtype, tokens, heads, width), _random(device, sizes.dtype, tokens, heads * width)
    weight = _random(device, sizes.dtype, width)

    def call(op: Any) -> Callable[[], Tensors]:
        return lambda: (op.norm(o, z, weight, 1e-6),)

    moved = 3.0 * o.numel() * o.element_size()
    return [Case({"tokens": tokens}, call(fused), call(reference), moved, model="Qwen3.5-27B")]


def _moe(name: str) -> Callable[[str, Sizes], list[Case]]:
    """A row of :mod:`freetoken.bench.moe_rows`, which needs what is here."""

    def rows(device: str, sizes: Sizes) -> list[Case]:
        from freetoken.bench import moe_rows

        found: list[Case] = getattr(moe_rows, name)(device, sizes)
        return found

    return rows


def ple_hash(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.ple_rows import hash_cases

    return hash_cases(device, sizes)


def ple_gather(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.ple_rows import gather_cases

    return gather_cases(device, sizes)


def ple_mix(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.ple_rows import mix_cases

    return mix_cases(device, sizes)


def hyper_mix(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.qwen4_exp_rows import gated_cases, hyper_cases

    return [*hyper_cases(device, sizes), *gated_cases(device, sizes)]


def qsa(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.qwen4_exp_rows import qsa_cases

    return qsa_cases(device, sizes)


def qsa_pieces(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.qwen4_exp_rows import qsa_piece_cases

    return qsa_piece_cases(device, sizes)


def pq2_gemv(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.pq2_rows import product_cases

    return product_cases(device, sizes)


def pq2_quantise(device: str, sizes: Sizes) -> list[Case]:
    from freetoken.bench.pq2_rows import quantise_cases

    return quantise_cases(device, sizes)


OPS: dict[str, Callable[[str, Sizes], list[Case]]] = {
    "rms_norm": rms_norm,
    "rope_kv": rope_kv,
    "silu_mul": silu_mul,
    "small_gemm": small_gemm,
    "attn_decode": attn_decode,
    "attn_prefill": attn_prefill,
    "sample": sample,
    "token_mask": token_mask,
    "gdn_conv": gdn_conv,
    "gdn_decode": gdn_decode,
    "gdn_prefill": gdn_prefill,
    "gdn_norm": gdn_norm,
    "moe_route": _moe("moe_route"),
    "moe_gemm": _moe("moe_gemm"),
    "fp8_gemm": _moe("fp8_gemm"),
    "ple_hash": ple_hash,
    "ple_gather": ple_gather,
    "ple_mix": ple_mix,
    "hyper_mix": hyper_mix,
    "qsa": qsa,
    "qsa_pieces": qsa_pieces,
    "pq2_gemv": pq2_gemv,
    "pq2_quantise": pq2_quantise,
    **op_rows_packed.OPS,
}
