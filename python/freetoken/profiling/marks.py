"""Named ranges around the parts of a running model, put on while a profile is taken and taken off after it.

No code of the model knows of them: an object that is marked changes its class to a subclass of its own whose methods open a
``torch.profiler`` range, and gets its class back. Ranges are named

* ``step:<decode|prefill|mixed> requests=R tokens=T sampled=S read=K pairs=P chained=C bucket=B`` around ``ModelRunner.launch``: ``read`` tokens
  of KV are read, ``pairs`` of query and key looked at; ``chained`` is 1 when another step was under way, ``bucket`` the size of the
  graph that is replayed, left out when none is;
* ``draw:`` around ``ModelRunner.draw``;
* ``role:<role>`` around what plays a role (:data:`~freetoken.profiling.roles.ROLES`);
* ``reference:B`` around a run of bucket B outside its graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from freetoken.loader.names import is_scale
from freetoken.profiling.roles import OTHER, role_of_weight
from freetoken.profiling.trace import DRAW, REFERENCE, ROLE, STEP
from freetoken.profiling.traffic import Facts
from freetoken.runner.memory import ELEMENT_BYTES, state_slot_bytes
from freetoken.scheduler.request import ScheduleBatch

CONVOLUTION = "conv1d.weight"
CODES_A_BYTE = 4

Method = Callable[..., Any]


def _ranged(method: Method, name: str) -> Method:
    """``method`` inside a range called ``name``."""

    @functools.wraps(method)
    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return method(self, *args, **kwargs)

    return inside


def step_name(batch: ScheduleBatch, *, chained: bool, bucket: int | None) -> str:
    """Name of the range of a step."""
    kind = "mixed" if batch.prefills and batch.decodes else "prefill" if batch.prefills else "decode"
    slices = batch.slices
    pairs = sum(s.length * s.start + s.length * (s.length + 1) // 2 for s in slices)
    values = {
        "requests": len(slices),
        "tokens": batch.num_tokens,
        "sampled": len(batch.sampled),
        "read": sum(s.start + s.length for s in slices),
        "pairs": pairs,
        "chained": int(chained),
    }
    if bucket is not None:
        values["bucket"] = bucket
    return f"{STEP}{kind} " + " ".join(f"{key}={value}" for key, value in values.items())


def role_of(module: Any) -> str:
    """Role of a part that owns weights, by the first tensor it takes from a checkpoint."""
    return role_of_weight(next(iter(module.slots), ""))


class Marks:
    """Ranges around the parts of ``runner``. A runner without a model (in tests) has ranges of steps alone."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._changed: list[tuple[Any, type]] = []
        self._under_way = 0
        self._buckets: set[int] = set()

    def put_on(self) -> None:
        """Open the ranges from now on."""
        try:
            self._mark_runner()
            if getattr(self._runner, "model", None) is not None:
                self._mark_model()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give every object its class back."""
        while self._changed:
            target, kind = self._changed.pop()
            target.__class__ = kind

    def references(self) -> None:
        """Run every bucket that was replayed since the marks were put on once outside its graph, so that its kernels have roles.

        One that does not fit into memory is left out: its kernels then get their roles by name.
        """
        graphs = getattr(self._runner, "graphs", None)
        if graphs is None or not self._runner.cuda:
            return
        with torch.inference_mode():
            for size in sorted(self._buckets):
                try:
                    graphs.rerun(size, record_function(f"{REFERENCE}{size}"))
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
        torch.cuda.synchronize()

    # --- putting on ----------------------------------------------------------------------------------------------------

    def _change(self, target: Any, methods: dict[str, Method]) -> None:
        kind = type(target)
        target.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})
        self._changed.append((target, kind))

    def _mark(self, target: Any, role: str, *names: str) -> None:
        """Range ``role`` around those of the methods ``names`` that ``target`` has."""
        found = {n: _ranged(getattr(type(target), n), ROLE + role) for n in names if hasattr(type(target), n)}
        if found:
            self._change(target, found)

    def _mark_runner(self) -> None:
        kind = type(self._runner)
        launch, collect, draw = kind.launch, kind.collect, kind.draw
        marks = self

        def launch_inside(runner: Any, batch: ScheduleBatch) -> Any:
            bucket = marks._bucket(batch)
            with record_function(step_name(batch, chained=marks._under_way > 0, bucket=bucket)):
                result = launch(runner, batch)
            marks._under_way += 1
            return result

        def collect_inside(runner: Any, handle: Any) -> Any:
            # A step that was launched before the marks were put on was not counted.
            marks._under_way = max(0, marks._under_way - 1)
            return collect(runner, handle)

        self._change(
            self._runner, {"launch": launch_inside, "collect": collect_inside, "draw": _ranged(draw, f"{DRAW}masked")}
        )

    def _bucket(self, batch: ScheduleBatch) -> int | None:
        graphs = None if batch.prefills else getattr(self._runner, "graphs", None)
        size: int | None = None if graphs is None else graphs.bucket(len(batch.decodes))
        if size is not None:
            self._buckets.add(size)
        return size

    def _mark_model(self) -> None:
        runner, model = self._runner, self._runner.model
        for module in model.modules():
            role = "head" if module is model.head else role_of(module)
            if role != OTHER:
                self._mark(module, role, "__call__", "add", "read", "beside")
        for layer in model.layers:
            # What a block does between its parts is of its main part.
            linear = any(role_of(part).startswith("gdn") for part in layer.mixer.modules())
            self._mark(layer.mixer, "gdn step" if linear else "attn", "forward")
            if any(role_of(part) == "experts" for part in layer.mlp.modules()):
                self._mark(layer.mlp, "experts", "__call__")
        self._mark(model.ops.rope, "rotation", "__call__", "prepare")
        if hasattr(model.ops, "hyper"):
            self._mark(model.ops.hyper, "hyper-connections", "add")
        if model.ops.moe is not None:
            self._mark(model.ops.moe.route, "router", "__call__")
        if model.ple is not None:
            self._mark(model.ple, "n-grams", "begin", "forward")
        if runner.tables is not None:
            self._mark(runner.tables, "n-grams", "stage")
        self._mark(runner.attention, "attn", "forward", "plan", "replan")
        self._mark(runner.sampler, "sampler", "register", "plan", "send_masks", "sample")


# --- facts ---------------------------------------------------------------------------------------------------------------


def _elements(module: Any) -> int:
    """Elements of the matrices of ``module`` that multiply tokens; a byte of codes holds four."""
    return sum(
        math.prod(slot.shape) * (CODES_A_BYTE if name.endswith(".codes") else 1)
        for name, slot in module.slots.items()
        if len(slot.shape) >= 2 and not name.endswith((CONVOLUTION, ".scales")) and not is_scale(name)
    )


def facts_of(runner: Any, roofs: tuple[float, float] | None = None) -> Facts:
    """What :mod:`freetoken.profiling.traffic` needs to know of the model of ``runner``; ``roofs`` as of :func:`freetoken.bench.roof.measure`."""
    model, config = runner.model, runner.config.model
    weights: dict[str, int] = {}
    matrices: dict[str, int] = {}
    joined = 0
    for module in model.modules():
        role = "head" if module is model.head else role_of(module)
        tied = role == "head" and not module.slots
        held = model.embedding if tied else module
        elements = _elements(held)
        weights[role] = weights.get(role, 0) + sum(tensor.nbytes for tensor in held.tensors())
        matrices[role] = matrices.get(role, 0) + elements
        joined = joined or int(role == "experts" and module.joins_shared)
    rule = 0
    if config.linear_attention is not None:
        linear = config.linear_attention
        rule = 6 * config.num_linear_layers * linear.value_size * linear.key_head_dim
    bandwidth, rate = roofs or (0.0, 0.0)
    return Facts(
        device=runner.device.type,
        card=torch.cuda.get_device_name() if runner.cuda else "",
        weights={role: count for role, count in weights.items() if count},
        matrices={role: count for role, count in matrices.items() if count},
        embedding_row=weights["embedding"] // config.vocab_size,
        kv_token=config.kv_bytes_per_token(ELEMENT_BYTES[runner.config.kv_cache_dtype]),
        state_request=state_slot_bytes(runner.state_specs, runner.config.dtype),
        pair_ops=4 * config.q_size * config.num_attention_layers,
        rule_ops=rule,
        experts=config.moe.num_experts if config.moe else 0,
        top_k=config.moe.top_k if config.moe else 0,
        joined=joined,
        bandwidth=bandwidth,
        rate=rate,
    )
