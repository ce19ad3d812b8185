"""The attention kernels at the head shapes of served models, a padded width in float16 and float32 beside them."""

from __future__ import annotations

import torch
from compile_tool import ARCHITECTURES, KernelCase

from freetoken.kernels.attn_decode.config import SHARE_STEP, decode_config, join_config
from freetoken.kernels.attn_prefill.config import prefill_config
from freetoken.kernels.integers import next_power_of_two

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
    "scale": "fp32",
    **dict.fromkeys(("table_stride", "q_stride", "num_decodes", "whole", "min_share", "splits"), "i32"),
}


def _types(element: str) -> dict[str, str]:
    return {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{element}"), **TYPES}


def _limits(early: bool) -> dict[str, int]:
    return {"first_arch": FIRST_EARLY} if early else {"last_arch": FIRST_EARLY - 1}


def _options(early: bool) -> dict[str, bool]:
    return {"enable_fp_fusion": True} | ({"launch_pdl": True} if early else {})


def _decode(head_dim: int, heads: int, kv_heads: int, element: str, early: bool) -> KernelCase:
    size, group = DTYPES[element].itemsize, heads // kv_heads
    config = decode_config(head_dim, group, 64, 4096, 132, num_kv_heads=kv_heads, element_size=size)
    return KernelCase(
        f"attn split {heads}/{kv_heads} x {head_dim} {element}{' early' if early else ''}",
        f"{DECODE}:_split_kernel",
        _types(element),
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "D": head_dim,
            "PAGE": 16,
            "BLOCK_G": 16,
            "BLOCK_D": next_power_of_two(head_dim),
            "BLOCK_N": config.block_n,
            "SHARE_STEP": SHARE_STEP,
            "EARLY": early,
            "AHEAD": config.ahead if early else 0,
            "SLOTS": False,
        },
        {**_options(early), "num_warps": config.num_warps, "num_stages": config.num_stages},
        **_limits(early),
    )


def _join(head_dim: int, heads: int, kv_heads: int, element: str, batch: int, early: bool) -> KernelCase:
    size, group = DTYPES[element].itemsize, heads // kv_heads
    config = decode_config(head_dim, group, batch, 131072, 132, num_kv_heads=kv_heads, element_size=size)
    join = join_config(head_dim, config.splits)
    shape = {"HEADS": heads, "D": head_dim, "PARTS": join.parts, "WIDTH": join.width, "SHARE_STEP": SHARE_STEP}
    return KernelCase(
        f"attn join {join.parts} x {join.width} of {heads} x {head_dim} {element}{' early' if early else ''}",
        f"{DECODE}:_join_kernel",
        _types(element),
        {**shape, "EARLY": early, "SLOTS": False},
        {**_options(early), "num_warps": join.num_warps},
        **_limits(early),
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
    *(_decode(*shape, early) for shape in SHAPES for early in (False, True)),
    *(_join(*shape, batch, early) for shape in SHAPES[2:4] for batch in (1, 32) for early in (False, True)),
    *(_prefill(*shape, arch) for shape in SHAPES for arch in ARCHITECTURES),
]
