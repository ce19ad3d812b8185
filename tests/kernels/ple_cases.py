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
CASES = [
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
