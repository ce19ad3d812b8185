"""The decoder's kernels at the shapes of Qwen3-8B in bfloat16 (hidden 4096, 32/8 heads of 128, ffn 12288)."""

from __future__ import annotations

from dataclasses import replace

from compile_tool import KernelCase, main_case

from freetoken.kernels.small_gemm.configs import HOPPER, m_class, pick_config

HIDDEN, FFN, VOCAB, QKV = 4096, 12288, 151936, 6144
GEMM = "freetoken.kernels.small_gemm.triton"
PRODUCTS = {
    "qkv": (QKV, HIDDEN, False),
    "o": (HIDDEN, HIDDEN, False),
    "gate_up": (2 * FFN, HIDDEN, True),
    "down": (HIDDEN, FFN, False),
    "head": (VOCAB, HIDDEN, False),
}
GATES = "gates"
"""The gates of Gated DeltaNet beside packed projections of Qwen3.5-27B."""
SIZES = {**PRODUCTS, GATES: (96, 5120, False)}


def _norm(residual: bool, weight: str = "*bf16") -> KernelCase:
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "y_ptr", "sum_ptr"), "*bf16")
    return KernelCase(
        f"rms_norm residual={residual} weight={weight}",
        "freetoken.kernels.rms_norm.triton:rms_norm_kernel",
        {**pointers, "weight_ptr": weight, "eps": "fp32"},
        {"width": HIDDEN, "BLOCK": HIDDEN, "HAS_RESIDUAL": residual, "EARLY": False},
        {"num_warps": 16},
    )


def _rope(heads: int, norm: bool, hybrid: bool = False) -> KernelCase:
    """``hybrid`` has Qwen3.5's wider heads, a quarter of them rotated, and float32 norms."""
    names = ("qkv_ptr", "q_ptr", "k_pool_ptr", "v_pool_ptr")
    signature = {**dict.fromkeys(names, "*bf16"), "table_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i64"}
    signature |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr"), "*fp32" if hybrid else "*bf16")
    return KernelCase(
        f"rope_kv heads={heads} norm={norm} hybrid={hybrid}",
        "freetoken.kernels.rope_kv.triton:rope_kv_kernel",
        {**signature, "row_stride": "i32", "eps": "fp32"},
        {
            "Q_HEADS": 24 if hybrid else 32,
            "KV_HEADS": 4 if hybrid else 8,
            "HEAD_DIM": 256 if hybrid else 128,
            "ROTARY_DIM": 64 if hybrid else 128,
            "PAGE_SIZE": 16,
            "HEADS": heads,
            "BLOCK_HALF": 32 if hybrid else 64,
            "BLOCK_REST": 256 if hybrid else 1,
            "HAS_NORM": norm,
            "EARLY": False,
        },
        {"num_warps": 1 if heads < 4 else 4},
        divisible=("row_stride",),
    )


def _product(name: str, m: int, hopper: bool = False) -> KernelCase:
    rows, k, silu = SIZES[name]
    config = pick_config(rows, k, m, HOPPER if hopper else None)
    limits = {"first_arch": 90, "last_arch": 90} if hopper else {}
    suffix = " measured" if hopper else ""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), "*bf16")
    signature = {
        **pointers,
        "out_ptr": "*fp32" if name == "head" else "*bf16",
        "parts_ptr": "*fp32",
        "arrivals_ptr": "*i32",
    }
    values = {
        "N": rows // 2 if silu else rows,
        "K": k,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "HAS_BIAS": False,
        "SILU": silu,
        "SQUASHED": 0,
        "DIVISOR": 1,
        "EARLY": False,
        "UNDER": False,
    }
    if m == 1:
        options = {"num_warps": config.num_warps}
        return KernelCase(
            f"gemv {name}{suffix}",
            f"{GEMM}:gemv_kernel",
            signature,
            {**values, "UNROLL": config.unroll, "AHEAD": config.ahead},
            options,
            **limits,
        )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel = f"{GEMM}:gemm_kernel"
    if config.kind == "fragments":
        values = {
            key: values[key] for key in ("N", "K", "SPLIT_K", "HAS_BIAS", "SQUASHED", "DIVISOR", "EARLY", "UNDER")
        }
        values |= {
            "WARPS": config.num_warps,
            "UNROLL": config.unroll,
            "HALVES": 1 if m <= 8 else 2,
            "BF16": True,
            "ON_GPU": True,
        }
        signature |= dict.fromkeys(("x_ptr", "weight_ptr"), "*i32")
        kernel = "freetoken.kernels.small_gemm.narrow:narrow_kernel"
    else:
        values = {key: value for key, value in values.items() if key not in ("SQUASHED", "DIVISOR")}
        values["M"] = m_class(m)
    return KernelCase(f"gemm {name} m={m}{suffix}", kernel, {**signature, "m": "i32"}, values, options, **limits)


def _early(case: KernelCase, how: str = "early", **values: bool) -> KernelCase:
    """The same kernel for programmatic dependent launch."""
    constexprs, options = {**case.constexprs, "EARLY": True, **values}, {**case.options, "launch_pdl": True}
    return replace(case, name=f"{case.name} {how}", constexprs=constexprs, options=options, first_arch=90)


CASES = [
    _norm(False),
    main_case(_norm(True)),
    _norm(True, "*fp32"),
    main_case(_rope(1, True)),
    _rope(8, True),
    _rope(1, True, hybrid=True),
    _rope(4, True, hybrid=True),
    _rope(1, False),
    KernelCase(
        "silu_mul",
        "freetoken.kernels.silu_mul.triton:silu_mul_kernel",
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        {"width": FFN, "BLOCK": 1024, "EARLY": False},
        {"num_warps": 4},
    ),
    KernelCase(
        "sigmoid_mul",
        "freetoken.kernels.silu_mul.triton:sigmoid_mul_kernel",
        {
            **dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("x_stride", "gate_stride"), "i32"),
        },
        {"width": 6144, "BLOCK": 1024, "EARLY": False},
        {"num_warps": 4},
        divisible=("x_stride", "gate_stride"),
    ),
    KernelCase(
        "token_mask",
        "freetoken.kernels.token_mask.triton:token_mask_kernel",
        {"logits_ptr": "*fp32", "places_ptr": "*i64", "masks_ptr": "*i32"}
        | dict.fromkeys(("row_stride", "words", "vocab"), "i32"),
        {"BLOCK": 4096},
        {"num_warps": 8},
        divisible=("row_stride", "vocab"),
    ),
    *(main_case(_product(name, 1)) if name == "gate_up" else _product(name, 1) for name in PRODUCTS),
    *(_product(name, 16) for name in PRODUCTS),
    *(_product(name, m, hopper=True) for name in PRODUCTS for m in (1, 16)),
    *(_product(GATES, m) for m in (1, 8, 16)),
    *(_early(_product(GATES, m), "under", UNDER=True) for m in (1, 8, 16)),
    *(_early(case) for case in (_norm(True), _rope(1, True), _product("gate_up", 1), _product("down", 16))),
]
