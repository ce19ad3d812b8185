"""The kernels of per-layer embeddings with the published constants (16 heads, trigrams) and with more."""

from __future__ import annotations

from dataclasses import replace

from compile_tool import KernelCase

HASH = "freetoken.kernels.ple_hash.triton:row_ids_kernel"


def _hash(n: int, heads_per_ngram: int, *, decode: bool) -> KernelCase:
    heads = (n - 1) * heads_per_ngram
    pointers = ("ids_ptr", "context_ptr", "multipliers_ptr", "sizes_ptr", "offsets_ptr", "out_ptr")
    types = {**dict.fromkeys(pointers, "*i64"), **dict.fromkeys(("request_ptr", "local_ptr"), "*i32")}
    values = {"EOS": 248_044, "N": n, "HEADS": heads, "HEADS_PER_NGRAM": heads_per_ngram}
    values |= {"BLOCK_H": 1 << (heads - 1).bit_length(), "DECODE": decode, "EARLY": False}
    return KernelCase(f"ple hash {n} x {heads_per_ngram} decode {decode}", HASH, types, values, {"num_warps": 1})


DECODE = _hash(3, 8, decode=True)
GATHER = "freetoken.kernels.ple_gather.triton:gather_rows_kernel"


def _gather(kind: int, stored: str, width: int, row_bytes: int, *, direct: bool = False) -> KernelCase:
    types = {"ids_ptr": "*i64", "table_ptr": stored, "codebook_ptr": "*fp32", "out_ptr": "*bf16"}
    values = {"WIDTH": width, "ROW_BYTES": row_bytes, "BLOCK": 256, "FORMAT": kind, "Q_BLOCK": 32}
    values["Q_BYTES"] = row_bytes * 32 // width if kind > 1 else 1
    return KernelCase(
        f"ple gather {stored} format {kind} direct {direct}",
        GATHER,
        {**types, "rows": "i32", "scale": "fp32"},
        {**values, "DIRECT": direct},
        {"num_warps": 1},
    )


MIX = "freetoken.kernels.ple_mix.triton"


def _gate(element: str, streams: int, hidden: int, warps: int) -> KernelCase:
    names = ("projected_ptr", "residual_ptr", "gated_ptr", "normed_ptr")
    norms = ("key_norm_ptr", "query_norm_ptr", "conv_norm_ptr")
    types = {**dict.fromkeys(names, f"*{element}"), **dict.fromkeys(norms, "*fp32")}
    return KernelCase(
        f"ple gate {element} {streams} x {hidden}",
        f"{MIX}:gate_kernel",
        {**types, "projected_stride": "i32", "eps": "fp32"},
        {"STREAMS": streams, "HIDDEN": hidden, "BLOCK": 1 << (hidden - 1).bit_length()},
        {"num_warps": warps},
        divisible=("projected_stride",),
    )


def _conv(element: str) -> KernelCase:
    names = ("residual_ptr", "gated_ptr", "normed_ptr", "weight_ptr", "history_ptr")
    types = {**dict.fromkeys(names, f"*{element}"), **dict.fromkeys(("slots_ptr", "positions_ptr"), "*i64")}
    return KernelCase(
        f"ple conv decode {element}",
        f"{MIX}:conv_decode_kernel",
        {**types, "slot_stride": "i32"},
        {"C": 10240, "K": 4, "DILATION": 3, "BLOCK_": 512},
        {"num_warps": 2},
        divisible=("slot_stride",),
    )


CASES = [
    _gate("bf16", 4, 2560, 8),
    _gate("fp32", 4, 2560, 8),
    _gate("bf16", 2, 128, 1),
    _conv("bf16"),
    _conv("fp32"),
    _gather(0, "*bf16", 160, 320),
    _gather(1, "*u8", 160, 160),
    _gather(1, "*u8", 160, 160, direct=True),
    _gather(2, "*u8", 160, 90),
    _gather(3, "*u8", 160, 170),
    DECODE,
    _hash(3, 8, decode=False),
    _hash(5, 7, decode=False),
    replace(
        DECODE,
        name="ple hash early",
        constexprs={**DECODE.constexprs, "EARLY": True},
        options={**DECODE.options, "launch_pdl": True},
        first_arch=90,
    ),
]
