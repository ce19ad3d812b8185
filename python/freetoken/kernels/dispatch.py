"""Which implementation each fused op uses here, and why."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from freetoken import environ
from freetoken.environ import KernelMode
from freetoken.kernels import compiled


@dataclass(frozen=True)
class Choice:
    """The decision for one op: ``impl`` is ``reference``, ``host`` (a faster form for the CPU), ``triton``, ``sgl_kernel``,
    ``fla`` or ``check``; ``why`` one clause."""

    op: str
    flag: str
    impl: str
    why: str


@dataclass(frozen=True)
class Op:
    """One row of the table of ops. ``sgl_symbols`` are the ``sgl_kernel`` functions that can stand in for it,
    ``sgl_unfit`` says why none can, ``host`` what the op does on the CPU where it has a form of its own for it. ``fla`` is set where
    flash-linear-attention, if it can be used, is what the flag's value 0 selects on CUDA. ``folder`` is that of its kernels where it
    is a part of another op, switched by a flag of its own. ``configs`` is the module with settings measured card by card: it has ``measured(capability) -> int``, how
    many are for cards of that compute capability; ops without one follow rules of shape and element type."""

    name: str
    flag: str
    sgl_symbols: tuple[str, ...] = ()
    sgl_unfit: str | None = None
    host: str | None = None
    fla: bool = False
    folder: str | None = None
    configs: str | None = None


OPS: tuple[Op, ...] = (
    Op("rms_norm", "FREETOKEN_FUSED_NORM", sgl_symbols=("rmsnorm", "fused_add_rmsnorm")),
    Op(
        "rope_kv",
        "FREETOKEN_FUSED_ROPE",
        sgl_unfit="default on CUDA; sgl_kernel's rotary neither norms the heads nor writes these pages",
    ),
    Op("silu_mul", "FREETOKEN_FUSED_SILU_MUL", sgl_symbols=("silu_and_mul",)),
    Op(
        "small_gemm",
        "FREETOKEN_SMALL_GEMM",
        host="no CUDA device; few rows by slices of the weights where that is faster here",
        configs="freetoken.kernels.small_gemm.configs",
    ),
    Op("sample", "FREETOKEN_FUSED_SAMPLER"),
    Op(
        "token_mask",
        "FREETOKEN_FUSED_TOKEN_MASK",
        sgl_unfit="default on CUDA; sgl_kernel's masks come one for every row of the batch",
    ),
    Op(
        "gdn_conv",
        "FREETOKEN_GDN_FUSED_CONV",
        sgl_unfit="default on CUDA; sgl_kernel's convolution shifts a state that is here a ring of token rows",
    ),
    Op("gdn_decode", "FREETOKEN_GDN_FUSED_DECODE"),
    Op("gdn_prefill", "FREETOKEN_GDN_FUSED_PREFILL", fla=True),
    Op("pq2_gemv", "FREETOKEN_PQ2_FUSED_GEMV", configs="freetoken.kernels.pq2_gemv.configs"),
    Op(
        "pq2_single",
        "FREETOKEN_PQ2_SINGLE_GEMV",
        folder="pq2_gemv",
        configs="freetoken.kernels.pq2_gemv.configs",
    ),
    Op("pq2_gemm", "FREETOKEN_PQ2_FUSED_GEMM", configs="freetoken.kernels.pq2_gemm.config"),
    Op("hadamard", "FREETOKEN_FUSED_HADAMARD"),
    Op("moe_route", "FREETOKEN_MOE_FUSED_ROUTE"),
    Op("moe_gemm", "FREETOKEN_MOE_FUSED_GEMM"),
    Op("fp8_gemm", "FREETOKEN_FP8_FUSED_GEMM"),
    Op("ple_hash", "FREETOKEN_PLE_FUSED_HASH"),
    Op("ple_mix", "FREETOKEN_PLE_FUSED_MIX"),
    Op("hyper_mix", "FREETOKEN_HYPER_FUSED_MIX"),
    Op("qsa", "FREETOKEN_QSA_FUSED"),
)

_BY_NAME = {op.name: op for op in OPS}


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


def choose_op(name: str, device: str) -> Choice:
    """The decision for a row of :data:`OPS`; looks for ``sgl_kernel`` only where it could be used."""
    op = _BY_NAME[name]
    unusable = op.sgl_unfit
    if op.sgl_symbols and device == "cuda":
        from freetoken.kernels import sgl

        unusable = sgl.unusable(op.sgl_symbols)
    choice = choose(op.name, op.flag, device, sgl_kernel=unusable)
    if op.host is not None and device == "cpu" and environ.kernel_mode(op.flag) == "on":
        return Choice(op.name, op.flag, "host", op.host)
    if op.fla and device == "cuda" and choice.impl == "reference":
        from freetoken.kernels.gdn_prefill import fla

        unfit = fla.unusable()
        impl = "reference" if unfit else "fla"
        return Choice(op.name, op.flag, impl, f"{choice.why}; {unfit or 'fla-core is installed'}")
    return choice


def table(device: str) -> list[Choice]:
    """The decision for every op of a model on ``device``, in the order of :data:`OPS`."""
    return [choose_op(op.name, device) for op in OPS]


def tuned(op: Op, capability: tuple[int, int] | None) -> str:
    """Where the launch settings of an op come from on a card of this compute capability (``None``: no card)."""
    if op.configs is None:
        return "by rule"
    if capability is None:
        return "-"
    count: int = importlib.import_module(op.configs).measured(capability)
    return f"{count} shapes measured" if count else "not measured, by rule"


def tested(op: Op) -> str:
    """The architectures that every kernel of an op was compiled for, by the committed table."""
    return " ".join(f"sm_{arch}" for arch in compiled.architectures(op.folder or op.name)) or "none"
