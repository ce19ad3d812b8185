"""Launches that remember: what Triton tells apart is told apart, arguments arrive in order, and anything unusual goes through Triton."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from poison import DEVICE

from freetoken.kernels import host_kernel
from freetoken.kernels.host_kernel import HostKernel, integer_kind, launched
from freetoken.kernels.integers import cdiv, next_power_of_two

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def scale_kernel(x, y, n, factor, offset, rest, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, place < n, 0.0) * factor + offset + rest, place < n)


class Compiled:
    """Stands for a compiled kernel; keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.launches.append((grid, *args))


class Parameter:
    def __init__(self, name: str, *, is_constexpr: bool = False, default: Any = None) -> None:
        self.name, self.is_constexpr, self.default = name, is_constexpr, default


class Function:
    """Stands for a ``JITFunction``: a new compiled kernel for every call that reaches it."""

    answer = 42

    def __init__(self) -> None:
        self.params = [Parameter(name) for name in ("x", "n", "factor")]
        self.params += [Parameter("BLOCK", is_constexpr=True), Parameter("EARLY", is_constexpr=True, default=False)]
        self.pre_run_hooks: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def call(*args: Any, **named: Any) -> Compiled:
            self.calls.append((grid, args, named))
            return Compiled()

        return call


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device is ``device[0]``, GPU or not."""
    current = [0]
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    return current


@pytest.fixture
def fake() -> tuple[Function, HostKernel]:
    function = Function()
    return function, HostKernel(function)


def aligned(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    room = torch.zeros(count + 64, dtype=dtype)
    first = next(i for i in range(64) if room[i:].data_ptr() % 16 == 0)
    return room[first:]


def test_a_call_of_a_known_kind_goes_past_triton(fake: tuple[Function, HostKernel]) -> None:
    function, kernel = fake
    x, y = aligned(64), aligned(32)
    first = kernel[(3,)](x, 48, 0.5, BLOCK=16, num_warps=2)
    again = kernel[(2, 5)](y, 96, 1.5, BLOCK=16, num_warps=2)
    assert again is first and function.calls == [((3,), (x, 48, 0.5), {"BLOCK": 16, "num_warps": 2})]
    (launch,) = first.launches
    assert launch[0] == (2, 5, 1) and launch[1] is y and launch[2:] == (96, 1.5, 16, False)
    assert kernel.answer == 42


def test_calls_of_another_kind_do_not(fake: tuple[Function, HostKernel], device: list[int]) -> None:
    function, kernel = fake
    x = aligned(64)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 48, 0.5), {"BLOCK": 16}),
        ((x[1:], 48, 0.5), {"BLOCK": 16}),
        ((x.int(), 48, 0.5), {"BLOCK": 16}),
        ((x, 1, 0.5), {"BLOCK": 16}),
        ((x, 47, 0.5), {"BLOCK": 16}),
        ((x, 2**31, 0.5), {"BLOCK": 16}),
        ((x, 2**63, 0.5), {"BLOCK": 16}),
        ((x, 48, 1), {"BLOCK": 16}),
        ((x, 48, 0.5), {"BLOCK": 32}),
        ((x, 48, 0.5), {"BLOCK": 16, "EARLY": True}),
        ((x, 48, 0.5), {"BLOCK": 16, "EARLY": 1}),
        ((x, 48, 0.5), {"BLOCK": 16, "num_warps": 1}),
        ((x, 48, 0.5), {"BLOCK": 16, "num_stages": 1}),
    ]
    made = [kernel[(1,)](*args, **named) for args, named in calls]
    assert len(function.calls) == len(calls) == len({id(one) for one in made})
    assert [kernel[(1,)](*args, **named) for args, named in calls] == made and len(function.calls) == len(calls)
    if DEVICE == "cpu":
        device[0] = 1
        assert kernel[(1,)](x, 48, 0.5, BLOCK=16) is not made[0]


@pytest.mark.parametrize(
    ("grid", "args", "named"),
    [
        (lambda _: (1,), (torch.zeros(4), 48, 0.5), {"BLOCK": 16}),
        ((1,), (torch.zeros(4), 48), {"factor": 0.5, "BLOCK": 16}),
        ((1,), (torch.zeros(4), 48, 0.5, 16), {}),
        ((1,), (torch.zeros(4), 48, None), {"BLOCK": 16}),
        ((1,), (torch.zeros(4), True, 0.5), {"BLOCK": 16}),
        ((1,), (torch.nn.Parameter(torch.zeros(4)), 48, 0.5), {"BLOCK": 16}),
    ],
)
def test_what_is_unusual_is_left_to_triton(
    fake: tuple[Function, HostKernel], grid: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    function, kernel = fake
    assert kernel[grid](*args, **named) is not kernel[grid](*args, **named)
    assert len(function.calls) == 2


def test_hooks_and_the_switch_leave_all_to_triton(
    fake: tuple[Function, HostKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, kernel = fake
    x = aligned(64)
    for _ in range(2):
        kernel[(1,)](x, 48, 0.5, BLOCK=16)
    assert len(function.calls) == 1
    function.pre_run_hooks.append(print)
    kernel[(1,)](x, 48, 0.5, BLOCK=16)
    function.pre_run_hooks.clear()
    host_kernel._on.cache_clear()
    monkeypatch.setenv("FREETOKEN_FAST_LAUNCH", "0")
    kernel[(1,)](x, 48, 0.5, BLOCK=16)
    host_kernel._on.cache_clear()
    assert len(function.calls) == 3


def test_what_triton_tells_apart_is_told_apart() -> None:
    """Against Triton's own binder, for random arguments: calls of one kind are the same to it."""
    jit = pytest.importorskip("triton.runtime.jit")
    compiler = pytest.importorskip("triton.compiler.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    function = jit.JITFunction(scale_kernel, do_not_specialize=["rest"])
    bind = jit.create_function_from_signature(function.signature, function.params, compiler.make_backend(target))
    kernel, rng = HostKernel(function), random.Random(1)
    rooms = {dtype: aligned(64, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.uint8)}
    integers = [
        0,
        1,
        2,
        15,
        16,
        17,
        32,
        -1,
        -16,
        2**31 - 1,
        2**31,
        -(2**31),
        -(2**31) - 1,
        2**40,
        2**62 + 1,
        2**63,
        2**63 + 16,
    ]
    seen: dict[Any, str] = {}
    kinds = set()
    for _ in range(4000):
        x, y = (rng.choice(list(rooms.values()))[rng.choice((0, 0, 1, 3, 16)) :] for _ in range(2))
        args = (x, y, rng.choice(integers), rng.choice((0.0, 1.0, 0.5)), rng.choice((0.5, 3)), rng.choice(integers))
        named = {"BLOCK": rng.choice((16, 32)), "EARLY": rng.random() < 0.5, "num_warps": rng.choice((1, 2))}
        kind = kernel.kind(args, named)
        _, specialised, options = bind(*args, **named)
        theirs = repr((specialised, options))
        kinds.add(theirs)
        assert seen.setdefault(kind, theirs) == theirs
    assert len(kinds) > 500


def test_integer_kinds() -> None:
    assert len({integer_kind(n) for n in (1, 2, 16, 2**31, 2**31 + 1, 2**63, 2**63 + 1)}) == 7
    assert integer_kind(3) == integer_kind(-7) and integer_kind(0) == integer_kind(-16) == integer_kind(4096)


def test_grids_and_tiles() -> None:
    for n in range(1, 300):
        assert next_power_of_two(n) == triton.next_power_of_2(n)
        for by in (1, 2, 7, 64):
            assert cdiv(n, by) == triton.cdiv(n, by) == -(-n // by)
    assert next_power_of_two(0) == 1 and cdiv(0, 5) == 0


@pytest.mark.gpu
def test_on_a_gpu_every_kind_of_call_is_right() -> None:
    """Kinds in turn, so that one remembered for another would show; and the same inside a graph that is replayed."""
    kernel = launched(triton.jit(scale_kernel, do_not_specialize=["rest"]))
    assert isinstance(kernel, HostKernel)
    room = torch.randn(4096, device="cuda")
    rng = random.Random(2)
    for round_ in range(200):
        first, count = rng.choice((0, 1, 4, 5)), rng.choice((1, 16, 17, 1000, 1024))
        x = room[first : first + count]
        y = torch.full((count + 1,), float("nan"), device="cuda")
        block, factor, offset = rng.choice((64, 256)), rng.random(), rng.choice((1, 2, 16))
        kernel[(cdiv(count, block),)](
            x, y, count, factor, offset, round_ % 3, BLOCK=block, num_warps=rng.choice((1, 4))
        )
        torch.testing.assert_close(y[:count], x * factor + offset + round_ % 3)
        assert bool(y[count].isnan())
    assert 10 < len(kernel._known) <= 200
    y = torch.empty(4096, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[(16,)](room, y, 4096, 2.0, 2, 0, BLOCK=256, num_warps=4)
        kernel[(16,)](y, y, 4096, 2.0, 2, 0, BLOCK=256, num_warps=4)
    room.normal_()
    graph.replay()
    torch.testing.assert_close(y, room * 4 + 6)
