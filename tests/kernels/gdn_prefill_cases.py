"""The prefill kernels of Gated DeltaNet at the shapes of Qwen3.5-27B (16 key heads, 48 value heads of 128)."""

from __future__ import annotations

import torch
from compile_tool import ARCHITECTURES, KernelCase, main_case

from freetoken.kernels.gdn_prefill.config import block_of, pick_config

MODULE = "freetoken.kernels.gdn_prefill.triton"
KEY_HEADS, HEADS, WIDTH, CHUNK = 16, 48, 128, 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _cases(arch: int, element: str, dk: int = WIDTH, dv: int = WIDTH) -> list[KernelCase]:
    import triton.language as tl

    group = HEADS // KEY_HEADS
    config = pick_config(dk, dv, DTYPES[element], divmod(arch, 10))
    full = element == "fp32"
    values = {"HEADS": HEADS, "GROUP": group, "DK": dk, "BLOCK_K": block_of(dk), "CHUNK": CHUNK}
    channels = 2 * KEY_HEADS * dk + HEADS * dv
    strides = {"Q_STRIDE": channels, "K_STRIDE": channels}
    values |= strides
    values["PRECISION"] = "tf32x3" if full else "tf32"
    names = ("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "inverse_ptr", "scores_ptr", "out_ptr")
    types = {
        **dict.fromkeys(names, f"*{element}"),
        "scales_ptr": "*fp32",
        "gates_ptr": "*fp32",
        "state_ptr": "*fp32",
        "scale": "fp32",
    }
    types |= {"a_log_ptr": "*fp32", "dt_bias_ptr": "*fp32", "chunks_ptr": "*i32", "pieces_ptr": "*i32"}
    types |= {"slots_ptr": "*i64", "starts_ptr": "*i32", "state_stride": "i64"}
    only = {"first_arch": arch, "last_arch": arch}
    label = f"{element} {dk}/{dv}"
    return [
        KernelCase(
            f"gdn chunk {label}",
            f"{MODULE}:chunk_kernel",
            types,
            {**values, "HEADS_HERE": config.heads, "NARROW": tl.float32 if full else tl.float16},
            {"num_warps": config.chunk_warps, "num_stages": 1, "enable_fp_fusion": True},
            **only,
        ),
        KernelCase(
            f"gdn scan {label}",
            f"{MODULE}:scan_kernel",
            types,
            {**values, "V_STRIDE": channels, "DV": dv, "BLOCK_V": config.block_v},
            {"num_warps": config.scan_warps, "num_stages": config.scan_stages, "enable_fp_fusion": True},
            **only,
        ),
    ]


NORM = KernelCase(
    "gdn gated norm bf16",
    f"{MODULE}:gated_norm_kernel",
    {
        **dict.fromkeys(("o_ptr", "z_ptr", "weight_ptr", "out_ptr"), "*bf16"),
        "eps": "fp32",
        **dict.fromkeys(("rows", "z_stride"), "i32"),
    },
    {"HEADS": HEADS, "DV": WIDTH, "BLOCK_ROWS": 32, "BLOCK_V": WIDTH, "SIGMOID": False},
    {"num_warps": 4},
)
GATE = KernelCase(
    "gdn gate bf16",
    f"{MODULE}:gate_kernel",
    {
        **dict.fromkeys(("a_ptr", "b_ptr"), "*bf16"),
        **dict.fromkeys(("a_log_ptr", "dt_bias_ptr", "gates_ptr"), "*fp32"),
        "chunks_ptr": "*i32",
        **dict.fromkeys(("a_stride", "b_stride"), "i32"),
    },
    {"HEADS": HEADS, "BLOCK_HEADS": 16, "CHUNK": CHUNK},
    {"num_warps": 4},
)
CASES = [
    NORM,
    GATE,
    *(main_case(case) for arch in ARCHITECTURES for case in _cases(arch, "bf16")),
    *_cases(90, "fp32"),
    *_cases(80, "fp16", 256, 64),
]
