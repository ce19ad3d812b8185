"""The attention kernels at the head shapes of served models, a padded width in float16 and float32 beside them."""

from __future__ import annotations

import torch
from compile_tool import ARCHITECTURES, KernelCase

from freetoken.kernels.attn_decode.config import SHARE_STEP, decode_config, join_step, next_power_of_two
from freetoken.kernels.attn_decode.triton import PREFETCHED
from freetoken.kernels.attn_prefill.config import prefill_config

DECODE, PREFILL = "freetoken.kernels.attn_decode.triton", "freetoken.kernels.attn_prefill.triton"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# head_dim, heads, kv_heads, element type
SHAPES = [(64, 9, 3, "bf16"), (128, 32, 8, "bf16"), (256, 24, 4, "bf16"), (80, 8, 2, "fp16"), (128, 8, 2, "fp32")]
FIRST_EARLY = 90
TYPES = {
    "table_ptr": "*i32",
    "rows_ptr": "*i64",
    "seq_lens_ptr": "*i32",
    "q_starts_ptr": "*i32",
    "tiles_ptr": "*i32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "arrivals_ptr": "*i32",
    "scale": "fp32",
    **dict.fromkeys(("table_stride", "q_stride", "num_decodes", "whole", "min_share", "splits"), "i32"),
}


def _types(element: str) -> dict[str, str]:
    return {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{element}"), **TYPES}


def _decode(head_dim: int, heads: int, kv_heads: int, element: str, early: bool, large: bool) -> KernelCase:
    size, group = DTYPES[element].itemsize, heads // kv_heads
    batch = 1 if large else 64
    config = decode_config(
        head_dim, group, batch, 4096, 132, num_kv_heads=kv_heads, element_size=size, large_tiles=large
    )
    block_h, block_d = next_power_of_two(group), next_power_of_two(head_dim)
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "PAGE": 16, "BLOCK_G": 16, "BLOCK_H": block_h}
    steps = {"SHARE_STEP": SHARE_STEP, "JOIN_STEP": join_step(head_dim, group, config.num_warps, config.splits)}
    pdl = {"enable_fp_fusion": True} | ({"launch_pdl": True} if early else {})
    # Large tiles are those of accelerators of the data centre: 8.0 and 9.0 here.
    arch = FIRST_EARLY if early else 80
    limits = {"first_arch": arch, "last_arch": arch}
    if not large:
        limits = {"first_arch": FIRST_EARLY} if early else {"last_arch": FIRST_EARLY - 1}
    return KernelCase(
        f"attn split {heads}/{kv_heads} x {head_dim} {element}{' large' if large else ''}{' early' if early else ''}",
        f"{DECODE}:_split_kernel",
        _types(element),
        {
            **shape,
            **steps,
            "BLOCK_D": block_d,
            "BLOCK_N": config.block_n,
            "EARLY": early,
            "PREFETCH": early and head_dim * size in PREFETCHED,
            "SLOTS": False,
        },
        {**pdl, "num_warps": config.num_warps, "num_stages": config.num_stages},
        **limits,
    )


def _prefill(head_dim: int, heads: int, kv_heads: int, element: str, arch: int) -> KernelCase:
    config = prefill_config(head_dim, DTYPES[element], divmod(arch, 10))
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "PAGE": 16, "BLOCK_D": next_power_of_two(head_dim)}
    return KernelCase(
        f"attn prefill {heads}/{kv_heads} x {head_dim} {element}",
        f"{PREFILL}:_prefill_kernel",
        _types(element),
        {**shape, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n},
        {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True},
        first_arch=arch,
        last_arch=arch,
    )


CASES = [
    *(_decode(*shape, early, False) for shape in SHAPES for early in (False, True)),
    *(_decode(*shape, early, True) for shape in SHAPES if shape[3] == "bf16" for early in (False, True)),
    *(_prefill(*shape, arch) for shape in SHAPES for arch in ARCHITECTURES),
]
