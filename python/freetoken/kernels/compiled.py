"""The committed table of what every kernel compiles to, and what it says of an op (torch-free).

``compiled.json`` beside this file is written and checked by ``tests/kernels/compiled_table.py`` without a GPU.
"""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("compiled.json")


def triton_version() -> str:
    """Version of the installed Triton, ``none`` without it."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def read(path: Path = TABLE) -> dict[str, Any]:
    """``triton`` (the version that compiled it) and ``cases``: module of cases -> name -> ``kernel`` (``module:function``) and,
    for each architecture (``"90"``), registers a thread, bytes spilled, bytes of shared memory, and instructions found."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


@functools.cache
def _by_folder() -> dict[str, dict[str, set[int]]]:
    """Folder of an op -> kernel -> architectures some case of it was compiled for."""
    found: dict[str, dict[str, set[int]]] = {}
    for cases in read()["cases"].values():
        for row in cases.values():
            folder = row["kernel"].split(":")[0].split(".")[2]
            kernels = found.setdefault(folder, {})
            kernels.setdefault(row["kernel"], set()).update(int(key) for key in row if key != "kernel")
    return found


def architectures(folder: str) -> tuple[int, ...]:
    """The architectures, as ``90`` for sm_90, that every tabled kernel of ``freetoken.kernels.<folder>`` was compiled for."""
    kernels = _by_folder().get(folder, {})
    return tuple(sorted(set.intersection(*kernels.values()))) if kernels else ()
