"""Compiles the sampler's kernels for GPUs that are not there and prints ``name arch spilled-bytes registers`` lines.

Run in a process of its own: the interpreter that the tests use replaces ``triton.jit`` when triton is first imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from freetoken.kernels.sample import triton as kernels

POINTERS = {
    "x_ptr": "*fp32", "inv_temperature_ptr": "*fp32", "floor_ptr": "*fp32", "last_ptr": "*i32", "top_ptr": "*fp32",
    "arg_ptr": "*i32", "lse_ptr": "*fp32", "greedy_ptr": "*i32", "key_ptr": "*i32", "out_ptr": "*i64",
    "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "log_min_p_ptr": "*fp32", "scratch_ptr": "*i32",
}  # fmt: skip
TILES = {"TILE_": kernels.TILE, "TILES_": 256}
VARIANTS = [
    ("_tile_stats", {"SCALED": False, "FILTERED": False, "SUM": False, "TILE_": kernels.TILE}, 4),
    ("_tile_stats", {"SCALED": True, "FILTERED": True, "SUM": True, "TILE_": kernels.TILE}, 4),
    ("_pick", {"DRAW": False, "FILTERED": False, **TILES}, 4),
    ("_pick", {"DRAW": True, "FILTERED": True, **TILES}, 4),
    (
        "_select",
        {"HAS_K": True, "HAS_P": True, "CAP_": kernels.CAP, "CHUNK_": kernels.CHUNK, "TILES_": 256},
        kernels.SELECT_WARPS,
    ),
]


def spill_bytes(ptx: str, arch: int) -> str:
    """What ptxas says of one kernel: ``spilled bytes, registers``."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        suffix = "a" if arch >= 90 else ""
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name=sm_{arch}{suffix}",
            str(source),
            "-o",
            f"{folder}/kernel.cubin",
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    registers = re.findall(r"Used (\d+) registers", said)[0]
    return f"{spills} {registers}"


def main(archs: list[int]) -> None:
    for arch in archs:
        for name, constants, warps in VARIANTS:
            function = getattr(kernels, name)
            signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in function.arg_names}
            source = ASTSource(
                function, signature, constexprs={(function.arg_names.index(n),): v for n, v in constants.items()}
            )
            options = {"num_warps": warps, "enable_fp_fusion": False}
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            print(name, arch, spill_bytes(compiled.asm["ptx"], arch), flush=True)


if __name__ == "__main__":
    main([int(arch) for arch in sys.argv[1:]])
