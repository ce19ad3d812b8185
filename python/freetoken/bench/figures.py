"""Writer of committed figures: one JSON line a figure, with what is needed to read it later (torch-free).

Keys of every line: ``card``, ``model``, ``time`` (ISO 8601, UTC), ``commit``, ``versions``, ``what``; then the figure's
parameters as plain keys and its value under a key that names the unit (``tok_s``, ``ms``, ``us``, ``gb_s``, ...), with
``roof`` and ``share`` where there is one.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from freetoken import environ

CONTEXT = ("card", "model", "time", "commit", "versions", "what")
_PACKAGES = ("torch", "triton", "transformers", "numpy")


def gpu_name(index: int = 0) -> str | None:
    """Name of a CUDA device as the driver gives it; ``None`` without a driver or a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(128)
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    if driver.cuDeviceGetName(name, len(name), device) != 0:
        return None
    return name.value.decode(errors="replace")


def driver_version(file: str = "/proc/driver/nvidia/version") -> str | None:
    """Version of NVIDIA's kernel module, ``580.65.06`` say; ``None`` where there is none, or where the system does not tell."""
    try:
        text = Path(file).read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)", text)
    return found[1] if found else None


def cpu_name() -> str:
    """Model name of the processor, or the machine architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def card(device: str) -> str:
    """What a figure was measured on: the GPU's name for ``cuda``, the processor's for ``cpu``."""
    return (gpu_name() if device == "cuda" else None) or cpu_name()


def folder_name(card_name: str) -> str:
    """A card's folder under ``benchmarks/results``: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", card_name.lower()).strip("-") or "unknown"


def commit(root: Path | None = None) -> str:
    """The value of ``FREETOKEN_COMMIT``, for a copied tree whose history is another's; else the abbreviated commit of the checkout this
    file lies in, ``+`` appended when tracked files differ from it; else ``unknown``.
    """
    stated = str(environ.get("FREETOKEN_COMMIT"))
    if stated:
        return stated
    where = Path(__file__).resolve().parents[3] if root is None else root

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "")


def versions() -> dict[str, str]:
    """Versions that move a figure: Python's, those of the numeric packages that are installed, and of the GPU's driver."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = driver_version()
    return found if driver is None else found | {"driver": driver}


def figure(what: str, *, model: str, device: str, **values: Any) -> dict[str, Any]:
    """One figure with its context. ``values`` are parameters, the value under its unit's name, ``roof`` and ``share``.

    ``device`` is ``cpu`` or ``cuda`` of this machine, or the name of the hardware of another.
    """
    return {
        "card": card(device) if device in ("cpu", "cuda") else device,
        "model": model,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "what": what,
        **values,
    }


def _rounded(value: Any) -> Any:
    """Six significant digits: more is noise, and makes lines hard to read."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def write_check(
    path: str | Path,
    found: Iterable[dict[str, Any]],
    *,
    groups: Sequence[str],
    failed: Sequence[str],
    seconds: int | None = None,
) -> None:
    """One file of a whole check, replaced as a whole: ``card``, ``driver`` (``null`` where unknown), ``time``, ``commit``, ``versions``, the
    ``groups`` that were run, how many ``seconds`` that took (``null`` where unknown), the parts that ``failed``, and all ``figures``."""
    known = versions()
    document = {
        "card": gpu_name() or cpu_name(),
        "driver": known.pop("driver", None),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": known,
        "groups": list(groups),
        "seconds": seconds,
        "failed": list(failed),
        "figures": list(map(_rounded, found)),
    }
    target = Path(path)
    partial = target.with_name(target.name + ".part")
    partial.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    partial.replace(target)


def append(path: str | Path, figures: Iterable[dict[str, Any]]) -> None:
    """Append lines to ``path``, making its folder. Numbers are cut to six significant digits."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        for item in figures:
            file.write(json.dumps(_rounded(item), ensure_ascii=False) + "\n")


def read(path: str | Path) -> list[dict[str, Any]]:
    """All figures of a file; ``ValueError`` names the line that is not a JSON object."""
    result: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(item, dict):
            raise ValueError(f"{path}:{number}: not a JSON object")
        result.append(item)
    return result
