"""The kernels of mixture-of-experts layers and FP8 products at the shapes of qwen4_exp: 512 experts, top 10, hidden 2560, width 640."""

from __future__ import annotations

from dataclasses import replace

from compile_tool import KernelCase

from freetoken.kernels.moe_gemm.config import (
    FragmentConfig,
    RouteConfig,
    TileConfig,
    pick_dense_route,
    pick_down_fragments,
    pick_down_route,
    pick_fragments,
    pick_gate_up_route,
    pick_tile,
)
from freetoken.kernels.moe_gemm.triton import FIRST_FP8_CAPABILITY
from freetoken.kernels.moe_route.triton import SCAN

ROUTE, GEMM, FP8 = (f"freetoken.kernels.{op}.triton" for op in ("moe_route", "moe_gemm", "fp8_gemm"))
EXPERTS, TOP_K, HIDDEN, WIDTH = 512, 10, 2560, 640
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
NATIVE_ARCH = 10 * FIRST_FP8_CAPABILITY[0] + FIRST_FP8_CAPABILITY[1]


def _choose(element: str, renormalise: bool) -> KernelCase:
    return KernelCase(
        f"choose {element} {renormalise}",
        f"{ROUTE}:choose_kernel",
        {"logits_ptr": f"*{element}", "ids_ptr": "*i32", "weights_ptr": "*fp32", "logits_stride": "i32"},
        {
            "EXPERTS": EXPERTS,
            "TOP_K": TOP_K,
            "BLOCK_E": 512,
            "BLOCK_K": 16,
            "RENORMALISE": renormalise,
            "SHARED": renormalise,
            "EARLY": False,
        },
        {"num_warps": 1},
    )


def _count() -> KernelCase:
    types = {"ids_ptr": "*i32", "counts_ptr": "*i32", "routes": "i32"}
    return KernelCase("count", f"{ROUTE}:count_kernel", types, {"SCAN": SCAN, "EARLY": False}, {"num_warps": 4})


def _place(block: int) -> KernelCase:
    types = dict.fromkeys(("ids_ptr", "counts_ptr", "order_ptr", "experts_ptr"), "*i32")
    return KernelCase(
        f"place {block}",
        f"{ROUTE}:place_kernel",
        {**types, "routes": "i32", "blocks": "i32"},
        {"EXPERTS": EXPERTS, "BLOCK_E": 512, "BLOCK_M": block, "SCAN": SCAN, "EARLY": False},
        {"num_warps": 4},
    )


def _weights(kind: str, element: str) -> tuple[dict[str, str], dict[str, object], dict[str, int]]:
    """Types and settings of a weight that is plain, FP8 as a type (``native``) or FP8 as bytes (``bits``)."""
    stored = {"plain": element, "native": "fp8e4nv", "bits": "u8"}[kind]
    types = {"weight_ptr": f"*{stored}", "scale_ptr": "*fp32" if kind != "plain" else f"*{element}"}
    limits = {"plain": {}, "native": {"first_arch": NATIVE_ARCH}, "bits": {"last_arch": NATIVE_ARCH - 1}}[kind]
    return types, {"ROWS": 0 if kind == "plain" else 128, "NATIVE": kind != "bits"}, limits


def _gate_up(kind: str, element: str, config: RouteConfig) -> KernelCase:
    types, values, limits = _weights(kind, element)
    return KernelCase(
        f"gate and up by route {kind} {element} {config}",
        f"{GEMM}:route_gate_up_kernel",
        {**dict.fromkeys(("x_ptr", "out_ptr"), f"*{element}"), "ids_ptr": "*i32", **types},
        {
            **values,
            "TOP_K": TOP_K,
            "N": WIDTH,
            "K": HIDDEN,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "UNROLL": config.unroll,
            "ROUTED": True,
            "EARLY": False,
        },
        {"num_warps": config.num_warps},
        **limits,
    )


def _down(kind: str, element: str, config: RouteConfig, dense: tuple[int, int] | None = None) -> KernelCase:
    types, values, limits = _weights(kind, element)
    pointers = dict.fromkeys(("hidden_ptr", "shared_ptr", "gate_ptr", "out_ptr"), f"*{element}")
    n, k = dense or (HIDDEN, WIDTH)
    return KernelCase(
        f"down by route {kind} {element} {dense} {config}",
        f"{GEMM}:route_down_kernel",
        {**pointers, "ids_ptr": "*i32", "route_weights_ptr": "*fp32", "gate_stride": "i32", **types},
        {
            **values,
            "TOP_K": 1 if dense else TOP_K,
            "N": n,
            "K": k,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "UNROLL": config.unroll,
            "ROUTED": not dense,
            "SHARED": not dense,
            "EARLY": False,
        },
        {"num_warps": config.num_warps},
        **limits,
    )


def _tile(kind: str, element: str, config: TileConfig, silu: bool, grouped: bool = True) -> KernelCase:
    types, values, limits = _weights(kind, element)
    return KernelCase(
        f"tile {kind} {element} silu={silu} grouped={grouped} {config}",
        f"{GEMM}:tile_kernel",
        {
            **dict.fromkeys(("x_ptr", "out_ptr"), f"*{element}"),
            **dict.fromkeys(("order_ptr", "experts_ptr"), "*i32"),
            "routes": "i32",
            **types,
        },
        {
            **values,
            "DIVISOR": TOP_K if silu and grouped else 1,
            "N": WIDTH if silu else HIDDEN,
            "K": HIDDEN if silu else WIDTH,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "SILU": silu,
            "GROUPED": grouped,
            "EARLY": False,
        },
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        **limits,
    )


def _picked(kind: str, element: str, m: int, silu: bool, grouped: bool = True) -> KernelCase:
    alone = None if grouped else WIDTH if silu else HIDDEN
    config = pick_tile(m, HIDDEN if silu else WIDTH, BYTES[element], gated=silu, alone=alone)
    return _tile(kind, element, config, silu, grouped)


FRAGMENTS = "freetoken.kernels.moe_gemm.fragments"


def _rows(n: int, k: int, m: int, *, silu: bool, element: str = "bf16", routes: int = 0) -> KernelCase:
    """``m`` rows and one weight, or ``routes`` of experts."""
    config = pick_fragments(n, k, max(1, routes), gated=silu)
    types = dict.fromkeys(("x_ptr", "weight_ptr", "ids_ptr"), "*i32") | {"scale_ptr": "*fp32", "out_ptr": f"*{element}"}
    values = {"TOP_K": TOP_K if routes else 1, "N": n, "K": k, **_fragment_values(config, element)}
    values |= {"HALVES": 1 if m <= 8 else 2, "SILU": silu, "ROUTED": routes > 0}
    return KernelCase(
        f"fragments {n}x{k} silu={silu} {f'routes={routes}' if routes else f'm={m}'} {element}",
        f"{FRAGMENTS}:rows_kernel",
        {**types, "m": "i32"},
        values,
        {"num_warps": config.num_warps},
    )


def _fragment_values(config: FragmentConfig, element: str) -> dict[str, object]:
    values = {"ROWS": 128, "WARPS": config.num_warps, "UNROLL": config.unroll, "BF16": element == "bf16"}
    return values | {"EARLY": False, "ON_GPU": True}


def _fragments_down(element: str, shared: bool) -> KernelCase:
    config = pick_down_fragments(WIDTH, TOP_K + 1)
    words, halves = ("hidden_ptr", "ids_ptr", "weight_ptr"), ("shared_ptr", "gate_ptr", "out_ptr")
    types = {**dict.fromkeys(words, "*i32"), **dict.fromkeys(halves, f"*{element}")}
    types |= {**dict.fromkeys(("route_weights_ptr", "scale_ptr"), "*fp32"), "gate_stride": "i32"}
    values = {"TOP_K": TOP_K + 1, "N": HIDDEN, "K": WIDTH, "SHARED": shared, **_fragment_values(config, element)}
    return KernelCase(
        f"fragments down shared={shared} {element}",
        f"{FRAGMENTS}:routes_down_kernel",
        types,
        values,
        {"num_warps": config.num_warps},
    )


def _combine(shared: bool) -> KernelCase:
    pointers = dict.fromkeys(("parts_ptr", "shared_ptr", "gate_ptr", "out_ptr"), "*bf16")
    return KernelCase(
        f"combine {shared}",
        f"{GEMM}:combine_kernel",
        {**pointers, "ids_ptr": "*i32", "route_weights_ptr": "*fp32", "gate_stride": "i32"},
        {"TOP_K": TOP_K, "N": HIDDEN, "BLOCK_N": 1024, "SHARED": shared, "EARLY": False},
        {"num_warps": 4},
    )


def _dequantise(kind: str) -> KernelCase:
    types, values, limits = _weights(kind, "bf16")
    return KernelCase(
        f"dequantise {kind}",
        f"{FP8}:dequantise_kernel",
        {**types, "out_ptr": "*bf16"},
        {**values, "N": 16384, "K": HIDDEN, "BLOCK_N": 32, "EARLY": False},
        {"num_warps": 4},
        **limits,
    )


def _early(case: KernelCase) -> KernelCase:
    """The same kernel for programmatic dependent launch."""
    constexprs, options = {**case.constexprs, "EARLY": True}, {**case.options, "launch_pdl": True}
    return replace(case, name=f"{case.name} early", constexprs=constexprs, options=options, first_arch=90)


KINDS = ("plain", "native", "bits")
SIZES = (16, 32, 64, 128)
CASES = [
    _choose("bf16", True),
    _place(16),
    *(_gate_up(kind, "bf16", pick_gate_up_route(HIDDEN, 1)) for kind in KINDS[1:]),
    *(_down(kind, "bf16", pick_down_route(WIDTH, 1)) for kind in KINDS[1:]),
    _picked("plain", "bf16", 64, True),
    _picked("native", "bf16", 16, True),
    *(_picked(kind, "bf16", 128, False) for kind in KINDS[1:]),
    _picked("plain", "fp32", 128, True),
    _combine(True),
    _early(_down("native", "bf16", pick_down_route(WIDTH, 1))),
    _rows(WIDTH, HIDDEN, 1, silu=True, routes=11),
    _rows(16384, HIDDEN, 16, silu=False),
    _rows(HIDDEN, 6144, 16, silu=False),
    _fragments_down("bf16", shared=False),
]
"""Those with the most registers and shared memory; the rest is left to the command."""
MORE = [
    _choose("fp32", False),
    _choose("fp16", False),
    _count(),
    _place(128),
    _gate_up("plain", "bf16", pick_gate_up_route(HIDDEN, 2)),
    _down("plain", "bf16", pick_down_route(WIDTH, 2)),
    *(_down(kind, "bf16", pick_dense_route(16384, HIDDEN), (16384, HIDDEN)) for kind in KINDS[1:]),
    *(_picked(kind, "bf16", m, silu) for kind in KINDS for m in SIZES for silu in (True, False)),
    *(_picked("bits", "fp16", 64, silu, grouped=False) for silu in (True, False)),
    *(_picked("native", "bf16", m, silu, grouped=False) for m in (16, 32) for silu in (True, False)),
    _picked("plain", "fp32", 64, True),
    _combine(False),
    *(_dequantise(kind) for kind in KINDS[1:]),
    *(_rows(WIDTH, HIDDEN, 1, silu=True, routes=routes, element=e) for routes in (44, 88) for e in ("bf16", "fp16")),
    *(_rows(WIDTH, HIDDEN, m, silu=True) for m in (1, 16)),
    *(_rows(13312, HIDDEN, m, silu=False, element=element) for m in (1, 16) for element in ("bf16", "fp16")),
    _rows(HIDDEN, 6144, 16, silu=False, element="fp16"),
    *(_rows(6144, HIDDEN, m, silu=silu) for m in (1, 16) for silu in (True, False)),
    *(_fragments_down(element, shared=True) for element in ("bf16", "fp16")),
    *(
        _early(case)
        for case in (
            _rows(WIDTH, HIDDEN, 1, silu=True, routes=11),
            _rows(16384, HIDDEN, 1, silu=False),
            _rows(HIDDEN, 6144, 16, silu=False),
            _fragments_down("bf16", shared=False),
        )
    ),
    *(_early(case) for case in (_choose("bf16", True), _picked("native", "bf16", 16, True), _combine(True))),
]
