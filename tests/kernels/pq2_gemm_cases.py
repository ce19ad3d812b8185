"""Products of many tokens with two-bit weights at the shapes of the 27B, for the offline compiler."""

from __future__ import annotations

from math import gcd

from compile_tool import KernelCase

from freetoken.kernels.pq2_gemm import GemmConfig, pick_config

MODULE = "freetoken.kernels.pq2_gemm.triton"
WEIGHT = {"codes_ptr": "*u8", "w_scales_ptr": "*fp16"}
OUTPUT = {"out_ptr": "*bf16", "parts_ptr": "*fp32", "arrivals_ptr": "*i32", "m": "i32", "n": "i32"}


def case(form: str, n: int, k: int, m: int, group: int = 128, early: bool = False) -> KernelCase:
    """What the default settings of ``m`` tokens launch."""
    config: GemmConfig = pick_config(form, n, k, m)
    inputs = (
        {"values_ptr": "*i8", "x_scales_ptr": "*fp32", "sums_ptr": "*i32"} if form == "int8" else {"x_ptr": "*bf16"}
    )
    shape = {"GROUP_X": group, "GROUP": gcd(group, 128), "SIGNED": config.signed} if form == "int8" else {"BLOCK_K": 64}
    constexprs = {
        **shape,
        "K": k,
        "GROUP_W": 128,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "SPLIT_K": config.split_k,
        "STAGES": config.num_stages,
        "INTERLEAVED": True,
        "ON_GPU": True,
        "EARLY": early,
    }
    return KernelCase(
        f"{form} {n}x{k}, {m} tokens, group {group}",
        f"{MODULE}:{form}_kernel",
        {**inputs, **WEIGHT, **OUTPUT},
        constexprs,
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        first_arch=90 if early else 0,
        divisible=("n",),
    )


CASES = [
    case("int8", 34816, 5120, 32),
    case("int8", 5120, 17408, 32, early=True),
    case("int8", 34816, 5120, 256),
    case("int8", 34816, 5120, 256, group=32),
    case("float", 34816, 5120, 256),
    KernelCase(
        "decoder of rows",
        f"{MODULE}:decode_kernel",
        {"codes_ptr": "*u8", "scales_ptr": "*fp16", "out_ptr": "*bf16", "begin": "i32", "rows": "i32"},
        {"K": 5120, "GROUP_W": 128, "ROWS": 8, "WIDTH": 512, "INTERLEAVED": True, "ON_GPU": True, "EARLY": False},
    ),
]
