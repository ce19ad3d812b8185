"""The kernels of the two-bit products with the default settings at the projection shapes of Qwen3.5-27B."""

from __future__ import annotations

from compile_tool import KernelCase

from freetoken.kernels.pq2_gemv.configs import PQ2Config, default_config

FOLDER = "freetoken.kernels.pq2_gemv"
ACTIVATION = {"single": ("values_ptr", "x_scales_ptr", "sums_ptr"), "fragments": ("words_ptr", "beside_ptr")}


def _product(
    k: int, m: int, config: PQ2Config, early: bool, groups: tuple[int, int] = (128, 128), late: bool = False
) -> KernelCase:
    kernel = {"single": "single:single_kernel", "fragments": "fragments:fragment_kernel"}
    own = {"HALVES": -(-m // 8)} if config.kind == "fragments" else {}
    own |= {"TILES": config.tiles, "ROW_WARPS": config.row_warps, "K_WARPS": config.k_warps, "WHOLE": True}
    return KernelCase(
        f"pq2 {config} k={k} m={m} groups={groups}{' late' if late else ''}",
        f"{FOLDER}.{kernel[config.kind]}",
        {
            **dict.fromkeys((*ACTIVATION[config.kind], "codes_ptr"), "*i32"),
            "scales_ptr": "*fp16",
            "out_ptr": "*bf16",
            **({"n": "i32"} if config.kind == "single" else {"m": "i32", "n": "i32"}),
        },
        own
        | {"K": k, "GROUP_W": groups[0], "GROUP_X": groups[1], "AHEAD": config.ahead, "EARLY": early}
        | {"LATE": late, "INTERLEAVED": True, "ON_GPU": True},
        {"num_warps": config.num_warps, "num_stages": 1},
        first_arch=90 if early else 0,
        last_arch=999 if early else 89,
    )


QUANTISER = KernelCase(
    "pq2 quantiser",
    f"{FOLDER}.quantiser:quantise_kernel",
    {
        "x_ptr": "*bf16",
        "values_ptr": "*i8",
        "scales_ptr": "*i32",
        "sums_ptr": "*i32",
        "x_stride": "i32",
        "halves": "i32",
    },
    {"K": 17408, "GROUP": 128, "STRETCH": 1024, "SMALLEST": 2.0**-100, "TILED": True, "EARLY": False},
    {"num_warps": 4},
    divisible=("x_stride",),
)
CASES = [
    *(
        _product(k, m, default_config(n, k, m), early)
        for n, k in ((34816, 5120), (5120, 17408))
        for m in (1, 8, 16, 32)
        for early in ((False, True) if k == 5120 and m < 16 else (True,))
    ),
    _product(5120, 1, default_config(5120, 5120, 1), True, (64, 32)),
    _product(5120, 8, default_config(5120, 5120, 8), True, (64, 32)),
    *(_product(5120, m, default_config(16384, 5120, m), True, late=True) for m in (1, 8, 32)),
    QUANTISER,
]
