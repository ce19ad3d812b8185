"""Recording of op calls: arguments, what changed in place, and outputs, while a model or a benchmark's case runs.

Inside ``with recorder:`` the calls of the chosen ops are wrapped in their classes, so every instance of an op is seen, however it
is reached. Calls are kept between :meth:`Recorder.begin` and :meth:`Recorder.end` alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from freetoken.bench.replay_rows import ROWS
from freetoken.errors import StartupError
from freetoken.kernels import launch

Node = dict[str, Any]
"""A value as JSON: a tensor by its key (``t``), by parameter (``p``) or by another call's output (``l``), else plain data."""


@dataclass
class Call:
    """One recorded call: ``inputs`` by argument name, ``after`` those changed in place, ``output``; tensors lie in ``tensors``.

    ``layer`` is -1 outside the model's layers. ``op`` is the object that was called, in the recording process alone.
    """

    name: str
    op_name: str
    method: str
    step: str
    layer: int
    inputs: dict[str, Node]
    after: dict[str, Node] = field(default_factory=dict)
    output: Node = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    op: Any = None

    def public(self) -> dict[str, Any]:
        """What the capture's description says of it."""
        return {
            key: getattr(self, key)
            for key in ("name", "op_name", "method", "step", "layer", "inputs", "after", "output")
        }


def layout(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape and strides."""
    return {"shape": list(tensor.shape), "stride": list(tensor.stride())}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality in which a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


class Parameters:
    """Finds the parameter that a tensor is, or is a view of, by the address of its memory."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._by_address = {t.untyped_storage().data_ptr(): (name, t) for name, t in named.items() if t.numel()}

    def node(self, tensor: torch.Tensor) -> Node | None:
        """How to refer to it; ``None`` for what is no parameter."""
        found = self._by_address.get(tensor.untyped_storage().data_ptr())
        if found is None or found[1].dtype != tensor.dtype:
            return None
        return {"p": found[0], **layout(tensor), "offset": tensor.storage_offset()}


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    """Every weight of a model by the first checkpoint name of its module and its number there. Two weights of one memory are one."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for index, module in enumerate(model.modules()):
        stem = next(iter(module.slots), f"module {index}")
        for number, tensor in enumerate(module.tensors()):
            address = tensor.untyped_storage().data_ptr()
            if address not in seen:
                seen.add(address)
                found[f"{stem}:{number}"] = tensor
    return found


class Recorder:
    """Records calls of ``ops``.

    Tensors of ``parameters`` are recorded by name. ``layers`` are a model's, in order, so that calls know the layer they are made in;
    with ``only_layers`` calls in others, and outside of layers, are passed over. Without ``links`` inputs are kept that were outputs. :class:`StartupError` for an argument of a type that
    cannot be recorded.
    """

    def __init__(
        self,
        ops: Collection[str],
        *,
        parameters: Mapping[str, torch.Tensor] | None = None,
        layers: Iterable[Any] = (),
        only_layers: Collection[int] | None = None,
        links: bool = True,
    ) -> None:
        self.ops = tuple(ops)
        self._parameters = Parameters(parameters or {})
        self._layers = {id(layer): index for index, layer in enumerate(layers)}
        self._layer_classes = {type(layer) for layer in layers}
        self._only = only_layers
        self._links = links
        self._step: str | None = None
        self._layer = -1
        self._calls: list[Call] = []
        self._counts: dict[tuple[Any, ...], int] = {}
        self._live: dict[int, tuple[torch.Tensor, str, str, torch.Tensor]] = {}
        self._undo: list[tuple[Any, str, Any]] = []

    # --- wrapping ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        for name in self.ops:
            for owner, method in itertools.product(ROWS[name].load_recorded(), ROWS[name].methods):
                self._wrap(owner, method, functools.partial(self._wrapped_call, name, method, isinstance(owner, type)))
        for cls in self._layer_classes:
            self._wrap(cls, "forward", self._wrapped_layer)
        # Copies lie between recorded calls, so none may count on the kernel before it; and each is to be seen as a call of its own.
        self._wrap(launch, "EARLY_LAUNCH", lambda _: False)
        return self

    def __exit__(self, *error: object) -> None:
        for owner, attribute, original in reversed(self._undo):
            setattr(owner, attribute, original)
        self._undo.clear()

    def _wrap(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, attribute)
        self._undo.append((owner, attribute, original))
        setattr(owner, attribute, make(original))

    def _wrapped_layer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            self._layer = self._layers.get(id(layer), -1)
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._layer = -1

        return forward

    def _wrapped_call(
        self, name: str, method: str, is_method: bool, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._step is None or (self._only is not None and self._layer not in self._only):
                return original(*args, **kwargs)
            bound = dict(signature.bind(*args, **kwargs).arguments)
            op = bound.pop(next(iter(signature.parameters))) if is_method else None
            return self._record(name, method, op, bound, lambda: original(*args, **kwargs))

        return call

    # --- steps ---------------------------------------------------------------------------------------------------------

    def begin(self, step: str) -> None:
        """Keep the calls from now on, as those of ``step``."""
        self._step = step
        self._calls, self._counts, self._live = [], {}, {}

    def end(self) -> list[Call]:
        """The calls since :meth:`begin`, in the order in which they ended; outputs are let go."""
        calls, self._calls = self._calls, []
        self._step, self._live = None, {}
        return calls

    # --- a call --------------------------------------------------------------------------------------------------------

    def _record(self, name: str, method: str, op: Any, arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
        assert self._step is not None
        place = (self._layer, name, method)
        self._counts[place] = number = self._counts.get(place, -1) + 1
        where = f"layer {self._layer}" if self._layer >= 0 else "outside"
        label = f"{self._step}/{where}/{name}.{method}.{number}"
        call = Call(label, name, method, self._step, self._layer, {}, op=op)
        arguments = ROWS[name].view(op, method, arguments)
        call.inputs = {
            key: self._encode(call, f"in.{key}", value, link=self._links) for key, value in arguments.items()
        }
        result = run()
        for key in ROWS[name].methods[method]:
            if arguments.get(key) is not None:
                call.after[key] = self._encode(call, f"after.{key}", arguments[key])
        call.output = self._encode(call, "out", result)
        for path, tensor in tensors_of("out", result):
            if path not in call.tensors:
                continue  # a parameter, handed on
            self._live[tensor.untyped_storage().data_ptr()] = (tensor, label, path, call.tensors[path])
        self._calls.append(call)
        return result

    def _encode(self, call: Call, path: str, value: Any, *, link: bool = False) -> Node:
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(call, path, value, link)
        if isinstance(value, torch.dtype):
            return {"d": str(value).removeprefix("torch.")}
        if isinstance(value, (tuple, list)):
            items = [self._encode(call, f"{path}.{i}", item, link=link) for i, item in enumerate(value)]
            return {"s": items, "k": "list" if isinstance(value, list) else "tuple"}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value)]
            fields = {key: self._encode(call, f"{path}.{key}", getattr(value, key), link=link) for key in names}
            return {"c": f"{type(value).__module__}:{type(value).__qualname__}", "f": fields}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"v": value}
        raise StartupError(f"{call.name}: {path} is of type {type(value).__name__}, which cannot be recorded")

    def _encode_tensor(self, call: Call, path: str, tensor: torch.Tensor, link: bool) -> Node:
        if node := self._parameters.node(tensor):
            return node
        if link and (node := self._linked(tensor)):
            return node
        call.tensors[path] = tensor.detach().to("cpu", copy=True).contiguous()
        return {"t": path, **layout(tensor)}

    def _linked(self, tensor: torch.Tensor) -> Node | None:
        """The recorded output that ``tensor`` is or is a view of, where it still has the values it was recorded with."""
        found = self._live.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return None
        output, label, path, kept = found
        offset = int(tensor.storage_offset() - output.storage_offset())
        if output.dtype != tensor.dtype or not _inside(tensor, offset, output):
            return None
        held = placed(kept, layout(output), torch.device("cpu")).as_strided(tensor.shape, tensor.stride(), offset)
        return (
            {"l": label, "path": path, **layout(tensor), "offset": offset}
            if same_bits(held, tensor.detach().cpu())
            else None
        )


def tensors_of(path: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a value, with the paths under which :class:`Recorder` keeps them."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, (tuple, list)):
        return [pair for i, item in enumerate(value) for pair in tensors_of(f"{path}.{i}", item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return [pair for name in names for pair in tensors_of(f"{path}.{name}", getattr(value, name))]
    return []


def extent(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Elements from the first to the last of a tensor, both counted."""
    sizes = list(shape)
    return 0 if 0 in sizes else 1 + sum((size - 1) * step for size, step in zip(sizes, stride))


def _inside(tensor: torch.Tensor, offset: int, output: torch.Tensor) -> bool:
    return offset >= 0 and offset + extent(tensor.shape, tensor.stride()) <= extent(output.shape, output.stride())


def placed(values: torch.Tensor, where: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """A new tensor of ``values`` on ``device`` with the strides it had; gaps between its elements hold nothing."""
    shape, stride = where["shape"], where["stride"]
    memory = torch.zeros(extent(shape, stride), dtype=values.dtype, device=device)
    if values.numel():
        # Of expanded dimensions one element is there for all.
        ones = [1 if step == 0 else size for size, step in zip(shape, stride)]
        memory.as_strided(ones, stride).copy_(values.view(shape)[tuple(slice(0, size) for size in ones)])
    return memory.as_strided(shape, stride)
