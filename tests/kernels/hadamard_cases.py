"""The rotation kernels' specialisations of the 27B, for the offline compiler."""

from __future__ import annotations

from compile_tool import KernelCase

MODULE = "freetoken.kernels.hadamard.triton"
GEOMETRY = {"TILE": 1024, "STEPS": 10, "FACTOR": 1 / 32, "HAS_SIGNS": True}
ROWS = {"values_ptr": "*i32", "scales_ptr": "*fp32", "sums_ptr": "*i32"}
TILES = dict.fromkeys(ROWS, "*i32")
FLOATS = {"values_ptr": "*bf16", "scales_ptr": "*bf16", "sums_ptr": "*bf16"}


def rotate_case(
    name: str, kind: str, width: int, group: int, warps: int, *, inverse: bool = False, tiled: bool = False
) -> KernelCase:
    inputs = {"x_ptr": "*bf16", "other_ptr": "*bf16", "weight_ptr": "*fp32", "signs_ptr": "*i8"}
    if kind == "table":
        inputs |= {"x_ptr": "*i64", "other_ptr": "*u8", "weight_ptr": "*fp16"}
    scalars = {"eps": "fp32", "x_stride": "i32", "other_stride": "i32", "halves": "i32"}
    constexprs = {
        **GEOMETRY,
        "width": width,
        "KIND": kind,
        "HEAD": 128 if kind in ("gated_norm", "table") else 1,
        "GROUP": group,
        "INVERSE": inverse,
        "TILED": tiled,
        "EARLY": False,
    }
    return KernelCase(
        name,
        f"{MODULE}:rotate_kernel",
        {**inputs, **(TILES if tiled else ROWS if group else FLOATS), **scalars},
        constexprs,
        {"num_warps": warps, "enable_fp_fusion": False},
        divisible=("x_stride", "other_stride"),
    )


def norm_case(
    name: str, group: int, warps: int, tiles: int, *, early: bool = False, tiled: bool = False, beside: int = 0
) -> KernelCase:
    inputs = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*fp32", "signs_ptr": "*i8"}
    beside_types = {"beside_ptr": "*bf16", "beside_out_ptr": "*bf16"}
    after = {"sum_ptr": "*bf16", "plain_ptr": "*bf16", **beside_types, "eps": "fp32", "halves": "i32"}
    constexprs = {
        **GEOMETRY,
        "width": 5120,
        "TILES": tiles,
        "GROUP": group,
        "HAS_RESIDUAL": True,
        "PLAIN": not beside,
        "TILED": tiled,
        "BESIDE": beside,
        "EARLY": early,
    }
    return KernelCase(
        name,
        f"{MODULE}:norm_kernel",
        {**inputs, **(TILES if tiled else ROWS if group else FLOATS), **after},
        constexprs,
        {"num_warps": warps, "enable_fp_fusion": False},
        first_arch=90 if early else 0,
    )


CASES = [
    rotate_case("silu, one token", "silu_mul", 17408, 128, 4),
    rotate_case("silu, several tokens", "silu_mul", 17408, 128, 4, tiled=True),
    rotate_case("sigmoid, groups of 32", "sigmoid_mul", 6144, 32, 2),
    rotate_case("gated norm, many tokens", "gated_norm", 6144, 0, 2),
    rotate_case("rows of a table", "table", 5120, 0, 4, inverse=True),
    norm_case("norm, one token", 128, 4, 1),
    norm_case("norm, one token, early", 128, 4, 1, early=True),
    norm_case("norm, one token, a product beside", 128, 4, 1, beside=96),
    norm_case("norm, one token, a product beside, early", 128, 4, 1, early=True, beside=96),
    norm_case("norm, several tokens", 128, 4, 1, tiled=True),
    norm_case("norm, many tokens", 128, 2, 5),
]
