"""The kernels that draw ids, over a vocabulary of 151,936."""

from __future__ import annotations

from compile_tool import KernelCase

from freetoken.kernels.sample.triton import CAP, CHUNK, SELECT_WARPS, TILE

MODULE = "freetoken.kernels.sample.triton"
FLOATS = ("x_ptr", "inv_temperature_ptr", "floor_ptr", "top_ptr", "lse_ptr", "top_p_ptr", "log_min_p_ptr")
INTEGERS = ("last_ptr", "arg_ptr", "greedy_ptr", "key_ptr", "top_k_ptr", "scratch_ptr")
TYPES = {**dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(INTEGERS, "*i32"), "out_ptr": "*i64"}
TYPES |= dict.fromkeys(("x_stride", "vocab", "tiles", "rows"), "i32")


def _case(kernel: str, values: dict[str, object], warps: int = 4) -> KernelCase:
    switches = " ".join(key.lower() for key, value in values.items() if value is True) or "plain"
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return KernelCase(f"sample {kernel} {switches}", f"{MODULE}:{kernel}", TYPES, values, options)


TILES = {"TILE_": TILE, "TILES_": 256}
CASES = [
    _case("_tile_stats", {"SCALED": False, "FILTERED": False, "SUM": False, "TILE_": TILE}),
    _case("_tile_stats", {"SCALED": True, "FILTERED": True, "SUM": True, "TILE_": TILE}),
    _case("_pick", {"DRAW": False, "FILTERED": False, **TILES}),
    _case("_pick", {"DRAW": True, "FILTERED": True, **TILES}),
    _case("_select", {"HAS_K": True, "HAS_P": True, "CAP_": CAP, "CHUNK_": CHUNK, "TILES_": 256}, SELECT_WARPS),
]
