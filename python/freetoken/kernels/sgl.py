"""The ``sgl_kernel`` package (distribution ``sglang-kernel``) behind our own signatures, where it can be used.

A build of the package is compiled against one torch release, and loading it under another ends in undefined symbols, so
the pair is checked by version before anything is imported.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

import torch

PAIRS: tuple[tuple[str, str, str], ...] = (
    ("0.4.2.post2", "0.4.4", "2.11"),
    ("0.4.7", "0.4.7", "2.13"),
    ("0.4.10", "0.4.10", "2.14"),
)
"""First and last package version, and the torch release (major.minor) they are built against."""


def _key(version: str) -> tuple[int, int, int, int]:
    """Orders ``major.minor.patch[.postN]``; a local part after ``+`` is ignored. ``ValueError`` on anything else."""
    numbers, _, post = version.split("+")[0].partition(".post")
    major, minor, patch = (int(part) for part in numbers.split("."))
    return major, minor, patch, int(post or 0)


def pairs(package: str, torch_version: str) -> bool:
    """Whether this ``sgl_kernel`` version is known to work with this torch version."""
    try:
        version = _key(package)
    except ValueError:
        return False
    release = ".".join(torch_version.split(".")[:2])
    return any(_key(first) <= version <= _key(last) and release == wanted for first, last, wanted in PAIRS)


def installed_version() -> str | None:
    """Version of the installed package under either of its distribution names, or ``None``."""
    for name in ("sglang-kernel", "sgl-kernel"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def unusable(symbols: tuple[str, ...]) -> str:
    """One clause that says why ``symbols`` cannot come from ``sgl_kernel`` here; ``""`` when they can."""
    version = installed_version()
    if version is None:
        return "sgl_kernel is not installed"
    if not pairs(version, torch.__version__):
        return f"sgl_kernel {version} does not pair with torch {torch.__version__}"
    try:
        module = _module()
    except (ImportError, OSError, RuntimeError) as error:
        return f"sgl_kernel {version} does not load: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    missing = [symbol for symbol in symbols if not hasattr(module, symbol)]
    return f"sgl_kernel {version} lacks {missing[0]}" if missing else ""


def _module() -> ModuleType:
    return importlib.import_module("sgl_kernel")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As :func:`freetoken.kernels.rms_norm.reference.rms_norm`; with a residual it overwrites ``x`` and ``residual``."""
    if residual is None:
        normal: torch.Tensor = _module().rmsnorm(x, weight, eps)
        return normal
    _module().fused_add_rmsnorm(x, residual, weight, eps)
    return x, residual


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As :func:`freetoken.kernels.silu_mul.reference.silu_mul`."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _module().silu_and_mul(gate_up, out)
    return out
