"""Running recorded calls through an implementation: comparison with what was recorded, and timing of two in turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freetoken.bench.ab_stats import Pair
from freetoken.bench.recorder import Call, Node, placed, same_bits, tensors_of
from freetoken.bench.replay_rows import ROWS, Arguments, build
from freetoken.bench.replay_store import Capture, Fetch, decode, node_at
from freetoken.kernels.checking import relative_rms

Thunk = Callable[[], Any]
PASSES = 10
"""Passes over all calls in one timed stretch."""


@dataclass(frozen=True)
class Outcome:
    """One replayed call: the largest relative RMS of its outputs, and what is wrong with them, if anything."""

    call: Call
    error: float
    wrong: str | None


class Arm:
    """One implementation (as :func:`replay_rows.build` takes it) of the ops ``names``, with the parameters of the loaded model.

    ``like`` gives, by the name of an op, an op of the same class or ``None``.
    """

    def __init__(
        self,
        impl: str,
        names: Iterable[str],
        device: torch.device,
        parameters: Mapping[str, torch.Tensor],
        like: Callable[[str], Any],
    ) -> None:
        self.impl = impl
        self.device = device
        self._parameters = parameters
        self._ops = {name: build(name, impl, device.type, like(name)) for name in names}

    def arguments(self, call: Call, fetch: Fetch) -> Arguments:
        """New values of the call's arguments, ready for this implementation."""
        found = {key: decode(call, node, self.device, self._parameters, fetch) for key, node in call.inputs.items()}
        ROWS[call.op_name].ready(self._ops[call.op_name], call.method, found)
        return found

    def value(self, call: Call, node: Node, fetch: Fetch) -> Any:
        """A recorded value on the device."""
        return decode(call, node, self.device, self._parameters, fetch)

    def bind(self, call: Call, arguments: Arguments) -> Thunk:
        """The call, to be made as often as wanted."""
        method = getattr(self._ops[call.op_name], call.method)
        return lambda: method(**arguments)


def difference(what: str, actual: Any, expected: torch.Tensor, limit: float | None) -> tuple[float, str | None]:
    """Relative RMS, and a clause when it is above ``limit``; ``None`` asks for equal bits, which integers must have in any case.

    Values that are not finite must be equal.
    """
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        got = f"{actual.dtype} {list(actual.shape)}" if isinstance(actual, torch.Tensor) else type(actual).__name__
        return float("inf"), f"{what} is {got}, recorded was {expected.dtype} {list(expected.shape)}"
    if not expected.is_floating_point() or limit is None:
        if same_bits(actual, expected):
            return 0.0, None
        return float("inf"), f"{what} differs in {int((actual != expected).sum())} of {expected.numel()} values"
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()) or not same_bits(
        actual[~finite].nan_to_num(), expected[~finite].nan_to_num()
    ):
        return float("inf"), f"{what} is not finite in other places than the recorded one"
    error = relative_rms(actual[finite], expected[finite])
    return error, None if error <= limit else f"{what} differs by relative RMS {error:.3g}, bound {limit:.3g}"


def _changed(before: torch.Tensor, *afters: torch.Tensor) -> torch.Tensor:
    """Where any of ``afters`` is not what was there before."""
    marks = [(after != before) & ~((after != after) & (before != before)) for after in afters]
    return torch.stack(marks).any(0)


def limit_of(call: Call, arguments: Arguments, bound: float | None, exact: bool) -> float | None:
    """The bound of a call: ``bound`` if given, else by the coarsest type among its inputs; ``None`` asks for equality."""
    if exact:
        return None
    if bound is not None:
        return bound
    bounds = ROWS[call.op_name].bounds
    kinds = [tensor.dtype for value in arguments.values() for _, tensor in tensors_of("", value)]
    return max((bounds[kind] for kind in kinds if kind in bounds), default=max(bounds.values()))


def compare(
    call: Call, arm: Arm, arguments: Arguments, result: Any, fetch: Fetch, *, exact: bool, bound: float | None
) -> Outcome:
    """``result`` and what the call left in ``arguments`` against the record. Of what was changed in place, the places count that
    either of both changed."""
    limit = limit_of(call, arguments, bound, exact)
    expected = tensors_of("the output", comparable(arm.value(call, call.output, fetch)))
    actual = dict(tensors_of("the output", comparable(result)))
    pairs = [(path, actual.get(path), tensor) for path, tensor in expected]
    for key, node in call.after.items():
        before, after = arm.value(call, call.inputs[key], fetch), arm.value(call, node, fetch)
        where = _changed(before, after, arguments[key])
        pairs.append((key, arguments[key][where], after[where]))
    found = [difference(*pair, limit) for pair in pairs]
    wrong = next((f"{call.name}: {clause}" for _, clause in found if clause), None)
    return Outcome(call, max((error for error, _ in found), default=0.0), wrong)


def comparable(value: Any) -> Any:
    """``value`` with quantised activations as the floats they stand for: two of them may differ by a step in few places."""
    from freetoken.kernels.pq2_gemv import QuantisedActivation, TiledActivation

    if isinstance(value, (QuantisedActivation, TiledActivation)):
        return value.dequantise()
    if isinstance(value, (tuple, list)):
        return tuple(comparable(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(comparable(getattr(value, f.name)) for f in dataclasses.fields(value))
    return value


def check(
    arm: Arm,
    capture: Capture,
    calls: Iterable[Call],
    *,
    linked: bool = False,
    exact: bool = False,
    bound: float | None = None,
) -> list[Outcome]:
    """Every call once. ``linked`` feeds an input that was another call's output with what this replay made of that one."""
    made: dict[tuple[str, str], torch.Tensor] = {}
    outcomes: list[Outcome] = []
    step = None

    def recorded(name: str, path: str) -> torch.Tensor:
        return capture.output(name, path)

    def replayed(name: str, path: str) -> torch.Tensor:
        return made[name, path] if (name, path) in made else capture.output(name, path)

    for call in calls:
        if call.step != step:
            capture.forget()
            made.clear()
            step = call.step
        capture.fill(call)
        arguments = arm.arguments(call, replayed if linked else recorded)
        result = arm.bind(call, arguments)()
        outcomes.append(compare(call, arm, arguments, result, recorded, exact=exact, bound=bound))
        if linked:
            for path, tensor in tensors_of("out", result):
                node = node_at(call.output, path)
                if node is not None and node.get("shape") == list(tensor.shape):
                    made[call.name, path] = placed(tensor.contiguous(), node, arm.device)
    return outcomes


# --- timing --------------------------------------------------------------------------------------------------------------


def thunks(arm: Arm, capture: Capture, calls: Iterable[Call]) -> list[Thunk]:
    """The calls with recorded inputs, each of its own memory."""
    return [arm.bind(call, arm.arguments(capture.fill(call), capture.output)) for call in calls]


def graph_of(calls: Sequence[Thunk]) -> Thunk:
    """The calls one after another in a CUDA graph: its replay."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def replay(kept: list[Any] = kept) -> None:
        graph.replay()

    return replay


def passes(a: Sequence[Thunk], b: Sequence[Thunk], device: torch.device) -> tuple[Thunk, Thunk, bool]:
    """One pass over the calls of each arm, and whether both are graphs: where one cannot be captured, both run eagerly."""

    def eager(calls: Sequence[Thunk]) -> Thunk:
        def run() -> None:
            for call in calls:
                call()

        return run

    if device.type == "cuda":
        try:
            return graph_of(a), graph_of(b), True
        except RuntimeError:  # a call that reads on the host
            torch.cuda.synchronize()
    return eager(a), eager(b), False


def _seconds(run: Thunk, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(PASSES):
            run()
        end.record()
        torch.cuda.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000 / PASSES
    start = time.perf_counter()
    for _ in range(PASSES):
        run()
    return (time.perf_counter() - start) / PASSES


def pairs(a: Thunk, b: Thunk, count: int, device: torch.device) -> list[Pair]:
    """``count`` pairs of seconds of a pass, the two in alternating order; both are run once before."""
    for run in (a, b):
        run()
    found = []
    for index in range(count):
        # The two may be one: a control.
        seconds = [_seconds(run, device) for run in ((b, a) if index % 2 else (a, b))]
        first, second = reversed(seconds) if index % 2 else seconds
        found.append(Pair.of([first], [second]))
    return found
