"""The one table of ``FREETOKEN_*`` environment names.

Every name is typed and documented here; ``docs/env.md`` is generated from this table. Nothing else in the package reads
``os.environ``. Values are read when asked for, so a caller that must not change its path later (a captured graph, say)
reads once and keeps the answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KernelMode = Literal["off", "on", "check"]


class EnvironmentValueError(ValueError):
    """A ``FREETOKEN_*`` variable holds a value outside its documented set."""


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One row of the table: ``name``, ``kind`` (``kernel``, ``bool``, ``int``, ``float`` or ``str``), default, meaning.

    ``choices``, where given, are the only values of an ``int`` or a ``str``.
    """

    name: str
    kind: Literal["kernel", "bool", "int", "float", "str"]
    default: str
    help: str
    choices: tuple[int | str, ...] = ()


_KERNEL_HELP = "`1` fused kernel on CUDA and reference elsewhere, `0` reference, `check` both, compared on every call"

_FAULT = "Fault switch for tests, logged as a warning, 0 for none:"

TABLE: tuple[EnvVar, ...] = (
    EnvVar("FREETOKEN_FUSED_NORM", "kernel", "1", f"RMSNorm with the residual add: {_KERNEL_HELP}."),
    EnvVar("FREETOKEN_FUSED_ROPE", "kernel", "1", f"q/k norm, rotary embedding and KV write: {_KERNEL_HELP}."),
    EnvVar("FREETOKEN_FUSED_SILU_MUL", "kernel", "1", f"SwiGLU activation: {_KERNEL_HELP}."),
    EnvVar(
        "FREETOKEN_SMALL_GEMM",
        "kernel",
        "1",
        "Dense products of few tokens: `1` fused kernel on CUDA and a form for the CPU (`host`) there, `0` reference, `check` "
        "both on CUDA, compared on every call.",
    ),
    EnvVar(
        "FREETOKEN_HIDE_SMALL_GEMM",
        "bool",
        "1",
        "Run a small dense product beside a two-bit product of the same input: for one token in the kernel of the norm before both, for "
        "more under the two-bit product, where both are kernels of a GPU that starts kernels early (compute capability 9.0 on); `0` runs "
        "one after the other.",
    ),
    EnvVar(
        "FREETOKEN_FAST_LAUNCH",
        "bool",
        "1",
        "Remember what each kind of kernel launch was compiled to; `0` lets Triton find it anew at every launch, for which short prompts "
        "wait (docs/kernels.md).",
    ),
    EnvVar("FREETOKEN_FUSED_SAMPLER", "kernel", "1", f"Filtering and drawing of sampled ids: {_KERNEL_HELP}."),
    EnvVar("FREETOKEN_FUSED_TOKEN_MASK", "kernel", "1", f"Token masks of structured output: {_KERNEL_HELP}."),
    EnvVar("FREETOKEN_GDN_FUSED_CONV", "kernel", "1", f"Convolution of Gated DeltaNet: {_KERNEL_HELP}."),
    EnvVar(
        "FREETOKEN_GDN_FUSED_DECODE",
        "kernel",
        "1",
        f"Decode step of Gated DeltaNet, from the convolution to the gated norm: {_KERNEL_HELP}.",
    ),
    EnvVar(
        "FREETOKEN_GDN_FUSED_PREFILL",
        "kernel",
        "1",
        "Gated DeltaNet over prompts and the gated norm after it: `1` fused kernels on CUDA and reference elsewhere, `0` "
        "flash-linear-attention on CUDA where `fla-core` is installed and reference elsewhere, `check` fused and reference, "
        "compared on every call.",
    ),
    EnvVar(
        "FREETOKEN_FUSED_HADAMARD",
        "kernel",
        "1",
        f"Inputs of rotated weights: norm or activation, signs, Walsh-Hadamard rotation, quantisation: {_KERNEL_HELP}.",
    ),
    EnvVar("FREETOKEN_PQ2_FUSED_GEMV", "kernel", "1", f"Products of few tokens with two-bit weights: {_KERNEL_HELP}."),
    EnvVar(
        "FREETOKEN_PQ2_SINGLE_GEMV",
        "kernel",
        "1",
        "Products of one token with two-bit weights, where `FREETOKEN_PQ2_FUSED_GEMV` is on: `1` a kernel of its own, `0` the "
        "kernel of few tokens, `check` its own, compared with the reference on every call.",
    ),
    EnvVar("FREETOKEN_PQ2_FUSED_GEMM", "kernel", "1", f"Products of many tokens with two-bit weights: {_KERNEL_HELP}."),
    EnvVar(
        "FREETOKEN_PQ2_GEMM_FORM",
        "str",
        "auto",
        "How many tokens are multiplied with two-bit weights: `int8` with integer tensor cores, `float` with tiles of weights decoded "
        "to the model's type, `dense` with slices of weights decoded ahead, `auto` as is fastest for their number.",
        choices=("auto", "int8", "float", "dense"),
    ),
    EnvVar(
        "FREETOKEN_PQ2_ACTIVATION_GROUP",
        "int",
        "128",
        "Neighbours that share a scale when an input of two-bit weights is quantised to eight bits: `128`, `64` or `32`; `0` "
        "leaves inputs in floating point and multiplies with dequantised weights, slowly, for comparisons of accuracy.",
        (0, 32, 64, 128),
    ),
    EnvVar("FREETOKEN_MOE_FUSED_ROUTE", "kernel", "1", f"Choice of experts and grouping of routes: {_KERNEL_HELP}."),
    EnvVar("FREETOKEN_MOE_FUSED_GEMM", "kernel", "1", f"Products of mixture-of-experts layers: {_KERNEL_HELP}."),
    EnvVar("FREETOKEN_FP8_FUSED_GEMM", "kernel", "1", f"Dense products with FP8 weights: {_KERNEL_HELP}."),
    EnvVar("FREETOKEN_PLE_FUSED_HASH", "kernel", "1", f"Row ids of hashed n-grams (PLE): {_KERNEL_HELP}."),
    EnvVar(
        "FREETOKEN_PLE_FUSED_MIX",
        "kernel",
        "1",
        f"Gates of n-gram embeddings (PLE) and their convolution in decode steps: {_KERNEL_HELP}.",
    ),
    EnvVar(
        "FREETOKEN_HYPER_FUSED_MIX",
        "kernel",
        "1",
        f"Norms, gates and write-back of hyper-connections: {_KERNEL_HELP}.",
    ),
    EnvVar(
        "FREETOKEN_QSA_FUSED",
        "kernel",
        "1",
        f"Index keys, selection and sparse attention behind an indexer: {_KERNEL_HELP}.",
    ),
    EnvVar("FREETOKEN_LAUNCH_TIMEOUT", "float", "1800", "Seconds the server waits for the scheduler to become ready."),
    EnvVar(
        "FREETOKEN_CHECK_INVARIANTS", "bool", "0", "Check page and row accounts after every step, not only when idle."
    ),
    EnvVar("FREETOKEN_FAULT_STUCK_STEP", "int", "0", f"{_FAULT} the step of this number never ends."),
    EnvVar("FREETOKEN_FAULT_FAILING_KERNEL", "int", "0", f"{_FAULT} the step of this number raises an error."),
    EnvVar(
        "FREETOKEN_FAULT_RETRACT_EVERY", "int", "0", f"{_FAULT} the youngest request is retracted every so many steps."
    ),
    EnvVar(
        "FREETOKEN_FAULT_SLOW_CLIENT",
        "float",
        "0",
        f"{_FAULT} seconds each piece of an answer waits before it is sent.",
    ),
    EnvVar(
        "FREETOKEN_COMMIT",
        "str",
        "",
        "Commit to write into benchmark figures, of a copied tree; default: that of the checkout.",
    ),
    EnvVar("FREETOKEN_NUM_THREADS", "int", "0", "CPU threads of the runner; 0 leaves torch's own choice."),
)

_ROWS = {row.name: row for row in TABLE}
_BOOL = {"1": True, "true": True, "0": False, "false": False}
_MODES: dict[str, KernelMode] = {"1": "on", "true": "on", "0": "off", "false": "off", "check": "check"}


def raw(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The text of ``name``, or its default. ``KeyError`` for a name that is not in the table."""
    row = _ROWS[name]
    value = (os.environ if environ is None else environ).get(name)
    return row.default if value is None or value.strip() == "" else value.strip()


def kernel_mode(name: str, environ: Mapping[str, str] | None = None) -> KernelMode:
    """``on``, ``off`` or ``check`` for a kernel flag; :class:`EnvironmentValueError` for anything else."""
    value = raw(name, environ)
    try:
        return _MODES[value.lower()]
    except KeyError:
        raise EnvironmentValueError(f"{name}={value!r}: use 1, 0 or check (true and false mean 1 and 0)") from None


def get(name: str, environ: Mapping[str, str] | None = None) -> bool | int | float | str:
    """The typed value of a name; :class:`EnvironmentValueError` when it does not parse."""
    row, value = _ROWS[name], raw(name, environ)
    if row.kind == "kernel":
        return kernel_mode(name, environ)
    try:
        if row.kind == "bool":
            return _BOOL[value.lower()]
        if row.kind == "str":
            if row.choices and value not in row.choices:
                raise ValueError(value)
            return value
        number = int(value) if row.kind == "int" else float(value)
        if not 0 <= number < float("inf") or (row.choices and number not in row.choices):
            raise ValueError(value)
        return number
    except (KeyError, ValueError):
        if row.choices:
            raise EnvironmentValueError(f"{name}={value!r}: one of {', '.join(map(str, row.choices))}") from None
        raise EnvironmentValueError(
            f"{name}={value!r}: not a valid {row.kind}{'' if row.kind == 'bool' else ' of at least 0'}"
        ) from None


def validate(environ: Mapping[str, str] | None = None) -> dict[str, bool | int | float | str]:
    """Read every row, so that a bad value stops the start; also refuses ``FREETOKEN_*`` names that do not exist."""
    source = os.environ if environ is None else environ
    unknown = sorted(name for name in source if name.startswith("FREETOKEN_") and name not in _ROWS)
    if unknown:
        raise EnvironmentValueError(f"{unknown[0]} is not a freetoken setting; docs/env.md lists them all")
    return {row.name: get(row.name, source) for row in TABLE}


def for_child(changes: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of this process with ``changes``, for a process that it starts."""
    return {**os.environ, **changes}


def keep_profiler_tools() -> None:
    """Tell the profiler to keep its tracing tools in place between profiles: taking them down loses the events of a profile that
    follows soon, and before CUDA 12.6 crashes graphs."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")


def profiler_tools_stay() -> bool:
    """Whether they are kept in place here, as :func:`keep_profiler_tools` asks."""
    return os.environ.get("TEARDOWN_CUPTI") == "0"
