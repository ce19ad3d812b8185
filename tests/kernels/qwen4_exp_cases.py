"""Kernels that only ``qwen4_exp`` has, in its published geometry: hyper-connections, attention behind an indexer, sigmoid gates."""

from __future__ import annotations

from dataclasses import replace

from attn_cases import DTYPES
from compile_tool import ARCHITECTURES, KernelCase
from gdn_prefill_cases import NORM
from gdn_step_cases import WHOLE, _step

from freetoken.kernels.attn_decode.config import SHARE_STEP, decode_config
from freetoken.kernels.hyper_mix.triton import GATED_RANK
from freetoken.kernels.integers import next_power_of_two
from freetoken.kernels.qsa.plan import piece_config
from freetoken.kernels.small_gemm.configs import HOPPER, pick_config

HYPER, QSA = "freetoken.kernels.hyper_mix.triton", "freetoken.kernels.qsa.triton"
PIECES = "freetoken.kernels.qsa.pieces"
STREAMS, HIDDEN, RANK = 4, 2560, 320


def _add_norm(element: str, *, add: bool, norm: bool) -> KernelCase:
    pointers = dict.fromkeys(("residual_ptr", "y_ptr", "inject_ptr", "normed_ptr"), f"*{element}")
    values = {"STREAMS": STREAMS, "HIDDEN": HIDDEN, "BLOCK": 4096, "ADD": add, "NORM": norm, "EARLY": False}
    strides = ("y_stride", "inject_stride")
    return KernelCase(
        f"hyper add {add} norm {norm} {element}",
        f"{HYPER}:add_norm_kernel",
        {**pointers, "weight_ptr": "*fp32", **dict.fromkeys(strides, "i32"), "eps": "fp32"},
        values,
        {"num_warps": 8},
        divisible=strides,
    )


def _gated_mix(element: str, m: int, rank: int = RANK) -> KernelCase:
    types = {
        **dict.fromkeys(("low_ptr", "weight_ptr"), "*i32"),
        **dict.fromkeys(("normed_ptr", "out_ptr"), f"*{element}"),
    }
    values = {"STREAMS": STREAMS, "HIDDEN": HIDDEN, "RANK": rank, "HALVES": 1 if m <= 8 else 2}
    return KernelCase(
        f"hyper gated mix {rank} m={m} {element}",
        f"{HYPER}:gated_mix_kernel",
        {**types, "m": "i32", "low_stride": "i32"},
        {**values, "BF16": element == "bf16", "EARLY": False, "ON_GPU": True},
        {"num_warps": STREAMS},
    )


PRODUCTS = {
    "hyper down": (336, 10240, RANK),
    "router": (528, 2560, 0),
    "index": (640, 2560, 0),
    "gdn gates": (96, 2560, 0),
}
"""Rows, columns and squashed rows of the float products of a step."""


def _product(name: str, m: int) -> KernelCase:
    """With the settings measured on Hopper."""
    n, k, squashed = PRODUCTS[name]
    config = pick_config(n, k, m, HOPPER)
    values = {"N": n, "K": k, "SPLIT_K": config.split_k, "UNROLL": config.unroll, "HAS_BIAS": False}
    values |= {"SQUASHED": squashed, "DIVISOR": STREAMS, "EARLY": True, "UNDER": False}
    types = {"bias_ptr": "*bf16", "out_ptr": "*bf16", "parts_ptr": "*fp32", "arrivals_ptr": "*i32"}
    if config.kind == "fragments":
        values |= {"WARPS": config.num_warps, "HALVES": 1 if m <= 8 else 2, "BF16": True, "ON_GPU": True}
        types |= {**dict.fromkeys(("x_ptr", "weight_ptr"), "*i32"), "m": "i32"}
        kernel = "freetoken.kernels.small_gemm.narrow:narrow_kernel"
    else:
        values |= {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "AHEAD": config.ahead, "SILU": False}
        types |= dict.fromkeys(("x_ptr", "weight_ptr"), "*bf16")
        kernel = "freetoken.kernels.small_gemm.triton:gemv_kernel"
    options = {"num_warps": config.num_warps, "launch_pdl": True}
    return KernelCase(f"product {name} m={m} early", kernel, types, values, options, first_arch=90, last_arch=90)


def _early(case: KernelCase) -> KernelCase:
    """The same kernel for programmatic dependent launch."""
    constexprs, options = {**case.constexprs, "EARLY": True}, {**case.options, "launch_pdl": True}
    return replace(case, name=f"{case.name} early", constexprs=constexprs, options=options, first_arch=90)


_TABLES = {"page_table_ptr": "*i32", "rows_ptr": "*i64"}
_HEADS = {"HEADS": 4, "D": 128, "BLOCK_D": 128, "RATIO": 4, "PAGE": 16}


def _index(element: str, pieces: bool) -> KernelCase:
    pointers = dict.fromkeys(("projected_ptr", "pool_ptr", "out_ptr"), f"*{element}")
    floats = dict.fromkeys(("rope_ptr", "q_weight_ptr", "k_weight_ptr"), "*fp32")
    places = {"positions_ptr": "*i64", "slots_ptr": "*i64", "projected_stride": "i32", "table_stride": "i32"}
    types = {**pointers, **floats, **_TABLES, **places, "before_ptr": "*i64", "eps": "fp32"}
    values = {**_HEADS, "R": 64, "PIECES": pieces, "EARLY": False}
    name = f"qsa index {'pieces ' if pieces else ''}{element}"
    return KernelCase(name, f"{QSA}:index_kernel", types, values, {"num_warps": 1})


def _score(element: str) -> KernelCase:
    pointers = {**dict.fromkeys(("q_ptr", "pool_ptr"), f"*{element}"), **_TABLES, "seq_lens_ptr": "*i32"}
    numbers = {"scores_ptr": "*fp32", "table_stride": "i32", "scores_stride": "i32", "scale": "fp32"}
    return KernelCase(
        f"qsa score {element}",
        f"{QSA}:score_kernel",
        {**pointers, **numbers},
        {**_HEADS, "BLOCKS": 64, "EARLY": False},
        {"num_warps": 4},
    )


def _select(chunk: int, warps: int, split: int) -> KernelCase:
    floats, words = ("scores_ptr", "best_ptr"), ("blocks_ptr", "seq_lens_ptr", "chosen_ptr", "counts_ptr")
    pointers = {**dict.fromkeys(floats, "*fp32"), **_TABLES, **dict.fromkeys(words, "*i32")}
    strides = dict.fromkeys(("table_stride", "scores_stride", "best_stride", "chosen_stride"), "i32")
    values = {"RATIO": 4, "TAIL": 4, "PAGE": 16, "KEPT": 512, "SPLIT": split, "CHUNK": chunk, "EARLY": False}
    name = f"qsa select {chunk}{' of candidates' if split else ''}"
    return KernelCase(name, f"{QSA}:select_kernel", {**pointers, **strides}, values, {"num_warps": warps})


def _candidates() -> KernelCase:
    types = {
        **dict.fromkeys(("scores_ptr", "best_ptr"), "*fp32"),
        **dict.fromkeys(("blocks_ptr", "seq_lens_ptr"), "*i32"),
    }
    types |= dict.fromkeys(("scores_stride", "best_stride"), "i32")
    values = {"RATIO": 4, "KEPT": 512, "SPLIT": 4096, "CHUNK": 4096, "EARLY": False}
    return KernelCase("qsa candidates", f"{QSA}:candidates_kernel", types, values, {"num_warps": 16})


def _attend(element: str, early: bool = False) -> KernelCase:
    size = 4 if element == "fp32" else 2
    config = decode_config(256, 12, 8, 2064, 132, num_kv_heads=2, element_size=size)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{element}")
    tables = {"table_ptr": "*i32", "rows_ptr": "*i64", "seq_lens_ptr": "*i32"}
    scratch = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32"}
    numbers = dict.fromkeys(("table_stride", "q_stride", "whole", "min_share", "splits"), "i32")
    values = {"HEADS": 24, "KV_HEADS": 2, "D": 256, "PAGE": 16, "BLOCK_G": 16, "BLOCK_D": 256}
    values |= {"SHARE_STEP": SHARE_STEP, "BLOCK_N": config.block_n}
    values |= {"EARLY": early, "AHEAD": 0, "SLOTS": True}
    return KernelCase(
        f"qsa attend {element}{' early' if early else ''}",
        "freetoken.kernels.attn_decode.triton:_split_kernel",
        {**pointers, **tables, **scratch, **numbers},
        values,
        {"num_warps": config.num_warps, "num_stages": config.num_stages, **({"launch_pdl": True} if early else {})},
        **({"first_arch": 90} if early else {"last_arch": 89}),
    )


_PIECE = {"table_ptr": "*i32", "rows_ptr": "*i64", "tiles_ptr": "*i32", "scores_ptr": "*fp32", "bounds_ptr": "*i32"}
_LISTS = dict.fromkeys(("slots_ptr", "bits_ptr", "counts_ptr"), "*i32")
_STRIDES = dict.fromkeys(("table_stride", "scores_stride", "list_stride", "begin"), "i32")


def _piece_score(element: str) -> KernelCase:
    piece = piece_config(256, 12, 128, DTYPES[element], (9, 0))
    pointers = dict.fromkeys(("q_ptr", "pool_ptr"), f"*{element}")
    values = {**_HEADS, "KEPT": 512, "BLOCK_M": piece.score_m, "BLOCK_N": piece.score_n, "STAGES": 2}
    types = {**pointers, **_PIECE, **_STRIDES, "scale": "fp32"}
    return KernelCase(
        f"qsa piece score {element}", f"{PIECES}:piece_score_kernel", types, values, {"num_warps": 8}, main=True
    )


def _piece_bounds(chunk: int, warps: int) -> KernelCase:
    types = {**_PIECE, "positions_ptr": "*i64", **_STRIDES}
    values = {"RATIO": 4, "KEPT": 512, "CHUNK": chunk}
    return KernelCase(f"qsa piece bounds {chunk}", f"{PIECES}:piece_bounds_kernel", types, values, {"num_warps": warps})


def _piece_list(chunk: int) -> KernelCase:
    values = {"RATIO": 4, "PAGE": 16, "UNROLL": 4, "CHUNK": chunk}
    return KernelCase(
        f"qsa piece list {chunk}",
        f"{PIECES}:piece_list_kernel",
        {**_PIECE, **_LISTS, **_STRIDES},
        values,
        {"num_warps": chunk // 128},
    )


def _piece_attend(head_dim: int, heads: int, kv_heads: int, element: str, arch: int) -> KernelCase:
    piece = piece_config(head_dim, heads // kv_heads, 128, DTYPES[element], divmod(arch, 10))
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{element}")
    values = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "PAGE": 16, "BLOCK_D": next_power_of_two(head_dim)}
    values |= {"QUERIES": piece.queries, "BLOCK_M": piece.block_m, "BLOCK_N": piece.block_n}
    return KernelCase(
        f"qsa piece attend {heads}/{kv_heads} x {head_dim} {element}",
        f"{PIECES}:piece_attend_kernel",
        {**pointers, **_PIECE, **_LISTS, **_STRIDES, "scale": "fp32"},
        values,
        {"num_warps": piece.num_warps, "num_stages": piece.num_stages, "enable_fp_fusion": True},
        first_arch=arch,
        last_arch=arch,
        main=True,
    )


def _sigmoid(case: KernelCase) -> KernelCase:
    return replace(case, name=f"{case.name} sigmoid", constexprs={**case.constexprs, "SIGMOID": True})


CASES = [
    _add_norm("bf16", add=True, norm=True),
    _add_norm("bf16", add=False, norm=True),
    _add_norm("bf16", add=True, norm=False),
    _add_norm("fp32", add=True, norm=True),
    KernelCase(
        "hyper squash",
        f"{HYPER}:squash_kernel",
        {"low_ptr": "*bf16", "out_ptr": "*bf16", "low_stride": "i32"},
        {"STREAMS": STREAMS, "RANK": RANK, "BLOCK": 512, "EARLY": False},
        {"num_warps": 2},
    ),
    KernelCase(
        "hyper mix",
        f"{HYPER}:mix_kernel",
        dict.fromkeys(("normed_ptr", "gate_ptr", "out_ptr"), "*bf16"),
        {"STREAMS": STREAMS, "HIDDEN": HIDDEN, "BLOCK": 512, "EARLY": False},
        {"num_warps": 2},
    ),
    *(_gated_mix("bf16", m) for m in (1, 16)),
    _gated_mix("fp16", 16),
    *(_gated_mix("bf16", m, GATED_RANK) for m in (8, 16)),
    _early(_gated_mix("bf16", 1)),
    _early(_gated_mix("bf16", 16)),
    _early(_add_norm("bf16", add=True, norm=True)),
    *(_product(name, m) for name in PRODUCTS for m in (1, 16) if (m, name) != (16, "gdn gates")),
    *(_index(element, pieces) for element in ("bf16", "fp32") for pieces in (False, True)),
    *(_score(element) for element in ("bf16", "fp32")),
    _select(4096, 16, 0),
    _select(4096, 16, 4096),
    _select(64, 1, 0),
    _candidates(),
    *(_early(case) for case in (_index("bf16", False), _score("bf16"), _select(4096, 16, 4096), _candidates())),
    *(_attend("bf16", early) for early in (False, True)),
    *(_piece_score(element) for element in ("bf16", "fp32")),
    _piece_bounds(2048, 4),
    _piece_list(1024),
    _piece_list(128),
    *(_piece_attend(256, 24, 2, "bf16", arch) for arch in ARCHITECTURES),
    *(_piece_attend(256, 24, 2, "fp32", arch) for arch in ARCHITECTURES),
    *(_piece_attend(128, 16, 16, "bf16", arch) for arch in ARCHITECTURES),
    _sigmoid(NORM),
    _sigmoid(_step("bf16", WHOLE)),
]
