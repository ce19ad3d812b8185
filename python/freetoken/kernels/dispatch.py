"""Which implementation each fused op uses here, and why."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken import environ
from freetoken.environ import KernelMode


@dataclass(frozen=True)
class Choice:
    """The decision for one op: ``impl`` is ``reference``, ``triton``, ``sgl_kernel`` or ``check``; ``why`` one clause."""

    op: str
    flag: str
    impl: str
    why: str


def choose(op: str, flag: str, device: str, *, sgl_kernel: str | None = None) -> Choice:
    """Decide once, when a model is built.

    ``device`` is ``cuda`` or ``cpu``. ``sgl_kernel`` is ``None`` when this op has no such implementation or the package
    is usable, else the clause that says why it is not; pass ``""`` when it may be used.
    """
    mode: KernelMode = environ.kernel_mode(flag)
    if mode == "off":
        return Choice(op, flag, "reference", f"{flag}=0")
    if device != "cuda":
        return Choice(op, flag, "reference", "no CUDA device")
    if mode == "check":
        return Choice(op, flag, "check", f"{flag}=check")
    if sgl_kernel == "":
        return Choice(op, flag, "sgl_kernel", "sgl_kernel is installed and pairs with this torch")
    return Choice(op, flag, "triton", sgl_kernel or "default on CUDA")
