"""Compiles Triton kernels for GPUs that are not here, and reads registers and spills from the result.

Kernels are listed as :class:`KernelCase` rows in the modules ``*_cases.py``: in ``CASES`` what the tests compile, in ``MORE`` what
only the command ``python tests/kernels/compiled_table.py`` does beside it. The work happens in another process without
``TRITON_INTERPRET``, so a row names its kernel instead of holding it.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

ARCHITECTURES = (80, 86, 89, 90, 120)
INSTRUCTIONS = {"async16": "cp.async.cg.shared.global", "mma": "mma.sync", "wgmma": "wgmma.mma_async"}
"""What is looked for in a kernel's PTX: copies of 16 bytes past the registers, and the two forms of tensor-core products."""


@dataclass(frozen=True)
class KernelCase:
    """One specialisation of one kernel.

    ``kernel`` is ``module:function``. ``signature`` gives the types of the run-time arguments in Triton's notation (``*bf16``,
    ``*i64``, ``i32``, ``fp32``), ``constexprs`` the values of the others, ``options`` those of the launch (``num_warps``,
    ``num_stages``). Pointers count as divisible by 16, and so do the integers named in ``divisible``. Architectures below
    ``first_arch`` and above ``last_arch`` are left out. With ``main`` the tests compile it for all architectures, else for some.
    """

    name: str
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    first_arch: int = 0
    last_arch: int = 999
    divisible: tuple[str, ...] = ()
    main: bool = False


def main_case(case: KernelCase) -> KernelCase:
    """The same row, compiled by the tests for all architectures."""
    return replace(case, main=True)


@dataclass(frozen=True)
class Compiled:
    """What the assembler made: registers a thread, bytes spilled to local memory a thread, shared memory of a program; and which
    of :data:`INSTRUCTIONS` the PTX has."""

    name: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: list[str] = field(default_factory=list)


def compile_cases(
    module: str,
    attribute: str = "CASES",
    architectures: tuple[int, ...] = ARCHITECTURES,
    only: Collection[tuple[str, int]] | None = None,
) -> list[Compiled]:
    """Compile every row for every architecture, or of these the pairs in ``only`` (name, architecture); raises with the compiler's
    output when one does not compile."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, __file__, module, attribute, *map(str, architectures)]
    pairs = json.dumps(None if only is None else [list(pair) for pair in only])
    result = subprocess.run(command, env=environ, input=pairs, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"offline compile failed:\n{result.stderr[-4000:]}")
    return [Compiled(**json.loads(line)) for line in result.stdout.splitlines()]


def _compile(case: KernelCase, arch: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = case.kernel.partition(":")
    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "function", function)  # what a kernel of the host launches
    types = {argument: case.signature.get(argument, "constexpr") for argument in function.arg_names}
    missing = [argument for argument, kind in types.items() if kind == "constexpr" and argument not in case.constexprs]
    if missing:
        raise ValueError(f"{case.name}: no type or value for {missing}")
    aligned = [
        index for index, (key, kind) in enumerate(types.items()) if kind.startswith("*") or key in case.divisible
    ]
    source = ASTSource(
        function, types, case.constexprs, attrs={(index,): [["tt.divisibility", 16]] for index in aligned}
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)
    usage, ptx = _resource_usage(kernel.asm["cubin"]), kernel.asm["ptx"]
    # "wgmma.mma_async.sync" holds no "mma.sync".
    found = [name for name, text in INSTRUCTIONS.items() if text in ptx]
    return Compiled(case.name, arch, usage["REG"], usage["STACK"] + usage["LOCAL"], kernel.metadata.shared, found)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def _main(module: str, attribute: str, *architectures: str) -> None:
    pairs = json.load(sys.stdin)
    wanted = None if pairs is None else {tuple(pair) for pair in pairs}
    # Rows are made by the importable copy of this module, whose class is not that of ``__main__``.
    for case in getattr(importlib.import_module(module), attribute):
        for arch in map(int, architectures):
            if case.first_arch <= arch <= case.last_arch and (wanted is None or (case.name, arch) in wanted):
                print(json.dumps(asdict(_compile(case, arch))), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
