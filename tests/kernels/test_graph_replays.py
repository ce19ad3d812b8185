"""Every op in a replayed graph: changing inputs through the same buffers, against eager calls and against the reference.

A new op gets these tests by its rows in ``bench/op_rows.py`` (inputs) and ``bench/replay_rows.py`` (how to call it). Between replays
the same op object takes a call of another shape, so that what it keeps from call to call is made anew; nothing of that may be part
of a graph. Without a GPU a replay runs the call again on the same buffers, in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from poison import DEVICE

from freetoken.bench import op_cases, op_rows, replay_arm, replay_rows
from freetoken.bench.recorder import Call, Recorder, same_bits, tensors_of
from freetoken.bench.replay_store import decode
from freetoken.kernels import dispatch, launch
from freetoken.kernels.pq2_gemv import TiledActivation
from freetoken.runner.cuda_graph import CudaGraphCapture, RerunCapture

pytest.importorskip("triton")
# Where there is a GPU these are tests of it.
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

SIZES = dataclasses.replace(op_cases.SMALL, dtype=torch.bfloat16) if DEVICE == "cuda" else op_cases.SMALL
SEEDS = (0, 1, 2) if DEVICE == "cuda" else (0, 1)
CALLS = 2 if DEVICE == "cuda" else 1
"""Calls of a method that are looked at, of those that its row makes: the first, and on a GPU the last."""
OTHERS = {"attn_decode", "attn_prefill", "ple_gather", "qsa", "qsa_pieces"}
"""Rows that call kernels without an op of ``dispatch.OPS``: their own tests replay them, or those of whole models."""
OP_OF_ROW = (
    {
        row: next(op for op in sorted(replay_rows.ROWS, key=len, reverse=True) if row.startswith(op))
        for row in op_rows.OPS
        if row not in OTHERS and row.startswith(tuple(replay_rows.ROWS))
    }
    | {row: "hadamard" for row in op_rows.OPS if row.startswith("rotated")}
    | {"gdn_norm": "gdn_prefill", "pq2_quantise": "pq2_gemv"}
)


def no_outputs(name: str, path: str) -> torch.Tensor:
    raise AssertionError(f"{name} is linked to {path}")


def record(row: str, seed: int) -> list[Call]:
    """The calls that the reference of each of the row's cases makes; inputs differ from seed to seed, shapes do not."""
    name = OP_OF_ROW[row]
    torch.manual_seed(seed)
    found: list[Call] = []
    with torch.inference_mode(), Recorder([name], links=False) as recorder:
        cases = op_rows.OPS[row](DEVICE, SIZES)
        for index, case in enumerate(cases):
            recorder.begin(f"case-{index}")
            case.reference()
            found += recorder.end()
    return found


def refill(target: Any, source: Any) -> None:
    """Copy tensors into the places of others; what is known on the host must be the same."""
    if isinstance(target, torch.Tensor):
        assert target.shape == source.shape and target.stride() == source.stride()
        if target.numel():
            target.copy_(source)
    elif isinstance(target, (tuple, list)):
        for pair in zip(target, source, strict=True):
            refill(*pair)
    elif dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            refill(getattr(target, field.name), getattr(source, field.name))
    elif isinstance(target, dict):
        for key, value in target.items():
            refill(value, source[key])
    else:
        assert target == source


def value_of(call: Call, node: dict[str, Any]) -> Any:
    return decode(call, node, torch.device(DEVICE), {}, no_outputs)


class Replayed:
    """One call captured with the inputs of ``first``."""

    def __init__(self, arm: replay_arm.Arm, first: Call) -> None:
        self.arm = arm
        self.arguments = arm.arguments(first, no_outputs)
        run = arm.bind(first, self.arguments)
        self._result: list[Any] = []
        marker = torch.zeros(1, device=DEVICE)

        def function() -> torch.Tensor:
            self._result[:] = [run()]
            return marker

        self._captured = (CudaGraphCapture() if DEVICE == "cuda" else RerunCapture())(function)

    def __call__(self, call: Call) -> Any:
        refill(self.arguments, self.arm.arguments(call, no_outputs))
        self._captured.replay()
        return self._result[0]


def rebuild_memos(arm: replay_arm.Arm, other: Call) -> None:
    """An eager call of another shape through the same op, and caches of facts emptied."""
    arm.bind(other, arm.arguments(other, no_outputs))()
    launch._cuda_capability.cache_clear()
    gc.collect()


def pick(calls: list[Call]) -> list[int]:
    """Places of the calls of each method that are looked at."""
    by_method: dict[str, list[int]] = {}
    for place, call in enumerate(calls):
        by_method.setdefault(call.method, []).append(place)
    return sorted({place for places in by_method.values() for place in (places[0], places[-1])[:CALLS]})


def rope_like(calls: list[Call]) -> Any:
    return calls[0].op


def in_rows(value: Any) -> Any:
    """``value`` with tiles as rows: a part of the tiles may be undefined."""
    if isinstance(value, TiledActivation):
        return value.rows()
    if isinstance(value, (tuple, list)):
        return tuple(in_rows(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: in_rows(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    return value


@pytest.mark.parametrize("row", sorted(OP_OF_ROW))
@torch.inference_mode()
def test_replays_equal_eager_calls_and_the_reference(row: str) -> None:
    recorded = [record(row, seed) for seed in SEEDS]
    name = OP_OF_ROW[row]
    assert recorded[0], f"the reference of {row} does not call {name}"
    for place in pick(recorded[0]):
        arms = [
            replay_arm.Arm("triton", [name], torch.device(DEVICE), {}, lambda _: rope_like(recorded[0]))
            for _ in range(2)
        ]
        replay = Replayed(arms[0], recorded[0][place])
        for calls in (*recorded[1:], recorded[0]):
            call = calls[place]
            arguments = arms[1].arguments(call, no_outputs)
            eager = arms[1].bind(call, arguments)()
            result = replay(call)
            pairs = zip(tensors_of("out", in_rows(result)), tensors_of("out", in_rows(eager)), strict=True)
            for (path, ours), (_, theirs) in pairs:
                assert same_bits(ours, theirs), f"{call.name}: {path} of a replay is not that of an eager call"
            for key in call.after:
                assert same_bits(replay.arguments[key], arguments[key]), f"{call.name}: {key}"
            outcome = replay_arm.compare(call, arms[0], replay.arguments, result, no_outputs, exact=False, bound=None)
            assert outcome.wrong is None
            if calls is not recorded[0]:
                rebuild_memos(arms[0], recorded[0][(place + 1) % len(recorded[0])])


def test_every_op_has_rows() -> None:
    ops = {op.name for op in dispatch.OPS if op.folder is None}
    assert set(replay_rows.ROWS) - {"attention"} == ops == set(OP_OF_ROW.values()) | (OTHERS & ops)
    rows = {row for row in op_rows.OPS if row not in OTHERS}
    assert rows <= set(OP_OF_ROW), "a row of the benchmark that no op's name begins"


def test_inputs_differ_from_seed_to_seed() -> None:
    first, second = (record("rms_norm", seed)[0] for seed in SEEDS[:2])
    assert not torch.equal(value_of(first, first.inputs["x"]), value_of(second, second.inputs["x"]))


@torch.inference_mode()
def test_a_value_baked_into_a_graph_is_found() -> None:
    """An op that remembers an input of its first call: the kit must see it."""
    first, second = (record("silu_mul", seed)[0] for seed in SEEDS[:2])

    class Remembers(type(first.op)):
        def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
            self.__dict__.setdefault("kept", gate_up.clone())
            return super().__call__(self.kept)

    arm = replay_arm.Arm("reference", ["silu_mul"], torch.device(DEVICE), {}, lambda _: None)
    arm._ops["silu_mul"] = Remembers(first.op.choice)
    replay = Replayed(arm, first)
    result = replay(second)
    outcome = replay_arm.compare(second, arm, replay.arguments, result, no_outputs, exact=False, bound=None)
    assert outcome.wrong is not None and "relative RMS" in outcome.wrong
