"""The attention kernels compiled for three GPU generations without one: no spills, wide asynchronous loads.

Run as a program, this file compiles for the architecture given and prints one JSON line a kernel; the tests do that in
another process, because Triton's interpreter and its compiler exclude each other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

# Shared memory a program may use, in bytes (CUDA C++ Programming Guide, technical specifications per capability).
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
# head_dim, heads, kv_heads, element type; a padded head_dim and float32 on one generation each, to spare time
SHAPES = [(64, 9, 3, "bf16"), (128, 32, 8, "bf16"), (256, 16, 2, "bf16")]
MORE_SHAPES = {80: [(80, 8, 2, "fp16")], 90: [(128, 8, 2, "fp32")], 120: []}
POINTERS = {
    "table_ptr": "*i32",
    "rows_ptr": "*i64",
    "seq_lens_ptr": "*i32",
    "q_starts_ptr": "*i32",
    "tiles_ptr": "*i32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
}
SCALARS = {"scale": "fp32", **dict.fromkeys(("table_stride", "q_stride", "num_decodes", "min_share", "splits"), "i32")}


def compile_kernel(kernel: Any, element: str, constants: dict[str, int], arch: int, config: Any) -> dict[str, Any]:
    """Resources of one kernel: registers, bytes of stack and shared memory, and what its PTX uses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{element}"), **POINTERS, **SCALARS}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if constants.get("EARLY"):
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = usage.stdout + usage.stderr
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "stack": int(re.search(r"STACK:(\d+)", text)[1]) + int(re.search(r"LOCAL:(\d+)", text)[1]),
        "shared": compiled.metadata.shared,
        "async16": "cp.async.cg.shared.global" in compiled.asm["ptx"],
        "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
    }


def main(arch: int) -> None:
    import torch

    from freetoken.kernels.attn_decode import triton as decode
    from freetoken.kernels.attn_decode.config import decode_config, join_config, next_power_of_two
    from freetoken.kernels.attn_prefill import triton as prefill
    from freetoken.kernels.attn_prefill.config import prefill_config

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for head_dim, heads, kv_heads, element in SHAPES + MORE_SHAPES[arch]:
        size = dtypes[element].itemsize
        block_d = next_power_of_two(head_dim)
        shape = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "PAGE": 16, "BLOCK_D": block_d}
        d = decode_config(head_dim, heads // kv_heads, 64, 4096, 132, num_kv_heads=kv_heads, element_size=size)
        p = prefill_config(head_dim, dtypes[element], divmod(arch, 10))
        j = join_config(head_dim)
        early = {"EARLY": arch >= 90}
        join = {**early, "HEADS": heads, "D": head_dim, "BLOCK_D": block_d, "BLOCK_N": d.block_n, "BLOCK_S": 64}
        jobs = {
            "split": (decode._split_kernel, {**shape, **early, "BLOCK_G": 16, "BLOCK_N": d.block_n, "SLOTS": False}, d),
            "join": (decode._join_kernel, {**join, "STEP": j.step}, j),
            "prefill": (prefill._prefill_kernel, {**shape, "BLOCK_M": p.block_m, "BLOCK_N": p.block_n}, p),
        }
        for name, (kernel, constants, config) in jobs.items():
            if name != "join" or element == "bf16":
                result = compile_kernel(kernel, element, constants, arch, config)
                print(json.dumps({"kernel": name, "head_dim": head_dim, "element": element, **result}))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_resources(arch: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, __file__, str(arch)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 3 * len(SHAPES) + 2 * len(MORE_SHAPES[arch])
    for result in results:
        assert result["stack"] == 0, result
        assert result["shared"] <= SHARED_MEMORY[arch], result
        if result["element"] == "bf16" and result["kernel"] != "join":
            assert result["async16"], result
            assert result["wgmma"] == (arch == 90 and result["kernel"] == "prefill"), result


if __name__ == "__main__":
    main(int(sys.argv[1]))
