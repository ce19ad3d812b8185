"""What a row of ``bench.ops`` is made of: a case of one op at one shape, and the geometry that cases are built for.

Sizes are those of the Qwen3-8B geometry, for the ops of Gated DeltaNet of Qwen3.5-27B, for experts of qwen4_exp; ``small`` ones let the same rows run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from freetoken.kernels.dispatch import Choice

Tensors = tuple[torch.Tensor, ...]


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


def choice(op: str, impl: str) -> Choice:
    """``impl`` of ``op`` as if the environment had asked for it."""
    return Choice(op, "", impl, "benchmark")


def random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal numbers, drawn in float32."""
    return torch.randn(shape, device=device).to(dtype)
