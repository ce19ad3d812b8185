"""The table behind ``bench.replay``: for each op, which calls are recorded, what they change in place, how to build it again.

A new op gets capture, replay and the graph tests by its row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from freetoken.bench import replay_attention
from freetoken.errors import StartupError
from freetoken.kernels.checking import RELATIVE_RMS
from freetoken.kernels.dispatch import OPS, Choice
from freetoken.kernels.silu_mul import SiluMul

Arguments = dict[str, Any]
COMMON = ("reference", "triton")


def _plain(owner: Any, choice: Choice, like: Any) -> Any:
    return owner(choice)


def _nothing(op: Any, method: str, arguments: Arguments) -> None:
    """Nothing has to be prepared."""


def _as_given(op: Any, method: str, arguments: Arguments) -> Arguments:
    return arguments


@dataclass(frozen=True)
class Row:
    """One op. ``owner`` is ``module:Class``, or a module whose functions take the implementation as ``impl``; ``methods`` the
    recorded calls with the names of the arguments each changes in place.

    ``build(owner, choice, like)`` makes an op with the implementation of ``choice``; ``like`` is another of the class, or ``None``.
    ``ready(op, method, arguments)`` prepares it for one call as its caller would: scratch memory, and tables in ``arguments`` that
    depend on the implementation, which it replaces. ``bounds`` are the largest relative RMS by the type of the inputs; ``like``
    names the attribute of ``model.ops`` that ``build`` needs.

    ``recorded`` names the classes whose calls are recorded where it is not the owner's; ``view(op, method, arguments)`` makes of such
    a call's arguments those that are kept, for ``ready``.
    """

    owner: str
    methods: Mapping[str, tuple[str, ...]]
    build: Callable[[Any, Choice, Any], Any] = _plain
    ready: Callable[[Any, str, Arguments], None] = _nothing
    more: tuple[str, ...] = ()
    bounds: Mapping[torch.dtype, float] = field(default_factory=lambda: RELATIVE_RMS)
    like: str | None = None
    recorded: tuple[str, ...] = ()
    view: Callable[[Any, str, Arguments], Arguments] = _as_given

    @property
    def implementations(self) -> tuple[str, ...]:
        return (*COMMON, *self.more)

    def load(self) -> Any:
        """The class or the module."""
        return _load(self.owner)

    def load_recorded(self) -> list[Any]:
        """The classes, or the module, whose calls are recorded."""
        return [_load(path) for path in self.recorded or (self.owner,)]


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _rope(owner: Any, choice: Choice, like: Any) -> Any:
    return owner(choice, like.table)


def _rope_step(op: Any, method: str, arguments: Arguments) -> None:
    step = arguments["step"]
    arguments["step"] = op.prepare(step.positions, step.slots, arguments["k_pool"].shape[2])


def _with_silu(owner: Any, choice: Choice, like: Any) -> Any:
    impl = "triton" if choice.impl == "triton" else "reference"
    return owner(choice, SiluMul(Choice("silu_mul", "", impl, choice.why)))


def _reserve_product(op: Any, method: str, arguments: Arguments) -> None:
    op.reserve(arguments["weight"], silu=method == "linear_silu_mul")


def _reserve_step(op: Any, method: str, arguments: Arguments) -> None:
    op.reserve(arguments["qkv"].shape[0], arguments["rec_state"])


def _plan_pieces(op: Any, method: str, arguments: Arguments) -> None:
    if method == "__call__":
        arguments["plan"] = op.plan(arguments["plan"].lengths, arguments["q"].device)


def _with_route(owner: Any, choice: Choice, like: Any) -> Any:
    from freetoken.kernels.moe_route import MoeRoute

    return owner(choice, MoeRoute(Choice("moe_route", "", choice.impl, choice.why)))


def _functions(owner: Any, choice: Choice, like: Any) -> Any:
    """An object whose methods are the module's functions with ``impl`` given."""

    def bound(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **arguments: function(**{**arguments, "impl": choice.impl})

    return SimpleNamespace(argmax_ids=bound(owner.argmax_ids), sample_ids=bound(owner.sample_ids))


def _packed(owner: Any, choice: Choice, like: Any) -> Any:
    from freetoken.kernels.pq2_gemm import PQ2Gemm

    single, many = (Choice(op, "", choice.impl, choice.why) for op in ("pq2_single", "pq2_gemm"))
    return owner(choice, single, PQ2Gemm(many))


def _reserve_packed(op: Any, method: str, arguments: Arguments) -> None:
    many = getattr(op, "many", op)
    if method == "linear" and many is not None:
        many.reserve(arguments["weight"].codes.device)


def _qsa(owner: Any, choice: Choice, like: Any) -> Any:
    return owner(choice, like.table, like.config)


_PACKED_BOUNDS = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 1e-2}
_ROTATED_BOUNDS = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_GDN_BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}

ROWS: dict[str, Row] = {
    "rms_norm": Row("freetoken.kernels.rms_norm:RmsNorm", {"__call__": (), "add": ()}, more=("sgl_kernel",)),
    "rope_kv": Row(
        "freetoken.kernels.rope_kv:RopeKv", {"__call__": ("k_pool", "v_pool")}, _rope, _rope_step, like="rope"
    ),
    "silu_mul": Row("freetoken.kernels.silu_mul:SiluMul", {"__call__": (), "sigmoid_mul": ()}, more=("sgl_kernel",)),
    "small_gemm": Row(
        "freetoken.kernels.small_gemm:SmallGemm",
        {"linear": (), "linear_squashed": (), "linear_silu_mul": ()},
        _with_silu,
        _reserve_product,
        more=("host",),
    ),
    "sample": Row("freetoken.kernels.sample", {"argmax_ids": (), "sample_ids": ()}, _functions),
    "token_mask": Row("freetoken.kernels.token_mask:TokenMask", {"__call__": ("logits",)}),
    "gdn_conv": Row("freetoken.kernels.gdn_conv:GdnConv", {"prefill": ("conv_state",), "decode": ("conv_state",)}),
    "gdn_decode": Row(
        "freetoken.kernels.gdn_decode:GdnDecode", {"__call__": ("conv_state", "rec_state")}, ready=_reserve_step
    ),
    "gdn_prefill": Row(
        "freetoken.kernels.gdn_prefill:GdnPrefill",
        {"__call__": ("rec_state",), "norm": ()},
        ready=_plan_pieces,
        more=("fla",),
        bounds=_GDN_BOUNDS,
    ),
    "pq2_gemv": Row(
        "freetoken.kernels.pq2_gemv:PQ2Product",
        {"quantise": (), "linear": ("out",)},
        _packed,
        _reserve_packed,
        bounds=_PACKED_BOUNDS,
    ),
    "pq2_gemm": Row(
        "freetoken.kernels.pq2_gemm:PQ2Gemm", {"linear": ("out",)}, ready=_reserve_packed, bounds=_PACKED_BOUNDS
    ),
    "hadamard": Row(
        "freetoken.kernels.hadamard:Hadamard",
        dict.fromkeys(("rotate", "norm", "silu_mul", "sigmoid_mul", "gated_norm", "unrotate", "embed"), ()),
        bounds=_ROTATED_BOUNDS,
    ),
    "moe_route": Row("freetoken.kernels.moe_route:MoeRoute", {"__call__": ()}),
    "moe_gemm": Row("freetoken.kernels.moe_gemm:MoeGemm", {"__call__": ()}, _with_route),
    "fp8_gemm": Row("freetoken.kernels.fp8_gemm:Fp8Gemm", {"linear": (), "linear_silu_mul": ()}, _with_silu),
    "ple_hash": Row("freetoken.kernels.ple_hash:PleHash", {"__call__": ("out",)}),
    "ple_mix": Row("freetoken.kernels.ple_mix:PleMix", {"gate": (), "decode": ("residual", "history")}),
    "hyper_mix": Row(
        "freetoken.kernels.hyper_mix:HyperMix",
        {"add": ("residual",), "norm": ("residual",), "squash": (), "mix": (), "gated_mix": ()},
    ),
    "qsa": Row("freetoken.kernels.qsa:Qsa", {"attend_decodes": ()}, _qsa, like="qsa"),
    # No row of the table of ops: its implementations are the backends of --attention-backend.
    "attention": Row(
        "freetoken.bench.replay_attention:PagedAttention",
        {"forward": ()},
        ready=replay_attention.ready,
        recorded=(
            "freetoken.runner.attention_torch:TorchAttention",
            "freetoken.runner.attention_triton:TritonAttention",
        ),
        view=replay_attention.gathered,
    ),
}


def unusable(name: str, impl: str, device: str) -> str | None:
    """Why ``impl`` cannot run op ``name`` on ``device``: one clause, or ``None``. A path ``module:Class`` is taken at its word."""
    row = ROWS[name]
    if ":" in impl:
        return None
    if impl not in row.implementations:
        return f"{name} has no implementation {impl}; it has {', '.join(row.implementations)}"
    if impl == "host" and device != "cpu":
        return f"the host form of {name} runs on the CPU alone"
    if impl in ("triton", "sgl_kernel", "fla") and device != "cuda":
        import triton

        if impl != "triton" or not triton.knobs.runtime.interpret:
            return f"{impl} needs an NVIDIA GPU"
    if impl == "sgl_kernel":
        from freetoken.kernels import sgl

        return sgl.unusable(next(op.sgl_symbols for op in OPS if op.name == name)) or None
    if impl == "fla":
        from freetoken.kernels.gdn_prefill import fla

        return fla.unusable() or None
    return None


def build(name: str, impl: str, device: str, like: Any = None) -> Any:
    """Op ``name`` with implementation ``impl``: a name of :attr:`Row.implementations`, or ``module:Class`` of a class that takes the
    same arguments as the op's own. :class:`StartupError` says why it cannot be had."""
    row = ROWS[name]
    if clause := unusable(name, impl, device):
        raise StartupError(clause)
    if ":" not in impl:
        return row.build(row.load(), Choice(name, "", impl, "replay"), like)
    module, _, attribute = impl.partition(":")
    try:
        owner = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise StartupError(f"no implementation {impl}: {error}") from None
    return row.build(owner, Choice(name, "", "reference", impl), like)
