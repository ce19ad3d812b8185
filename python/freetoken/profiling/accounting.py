"""From a trace to the time of each role (torch-free, pure).

**On a GPU** work counts in order of its start, each piece by what it adds: ``end - max(start, the latest end before)``, and before
it a gap where ``start`` lies behind that end. Kernels that overlap (programmatic dependent launch) thus share no time, one that lies
wholly under others adds none, and roles and gaps add up to the step. How long each ran is kept beside. A piece has the role of the innermost range around its launch. Kernels of a graph have one launch in
common; they take theirs, in order and by name, from a reference run of the same batch size outside its graph. Where that fails a
kernel takes the role that its name has most often elsewhere in the trace, and without one ``other``.

**On a CPU** a role has the time of its ranges less that of ranges inside them; ``other`` is the rest of the step.

A step that was launched while another was under way begins where that one's last kernel ended; else at its own launch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from freetoken.profiling.roles import OTHER
from freetoken.profiling.trace import DRAW, REFERENCE, ROLE, STEP, Kernel, Span, Thread, Trace, step_values

BY_RANGE, BY_REPLAY, BY_NAME, UNKNOWN = "range", "replay", "name", "unknown"
"""How a piece came by its role."""
PYTHON = "(python)"
"""Name of the time of a range outside all operators."""


@dataclass(frozen=True)
class Step:
    """A launch of the runner: its kind, what it held, and the range of its launch on the CPU."""

    kind: str
    values: dict[str, int]
    start: float
    end: float
    thread: Thread

    @property
    def chained(self) -> bool:
        """Whether another step was under way when this one was launched."""
        return bool(self.values.get("chained", 0))


@dataclass(frozen=True)
class Piece:
    """A kernel (on a CPU: an operator or a range) of step ``step``: microseconds it adds, of the gap before it, and (``hidden``) those in
    which it ran under kernels before it."""

    step: int
    role: str
    name: str
    us: float
    gap: float = 0.0
    how: str = BY_RANGE
    launch: int | None = None
    hidden: float = 0.0


@dataclass
class Account:
    """All pieces of a trace. ``whole`` says of each step whether its beginning is known."""

    steps: list[Step]
    pieces: list[Piece]
    on_gpu: bool
    whole: list[bool] = field(default_factory=list)


def find_steps(trace: Trace) -> list[Step]:
    """The steps of a trace in order of their launch."""
    spans = sorted((s for s in trace.marks if s.name.startswith(STEP)), key=lambda s: s.start)
    return [Step(*step_values(s.name), s.start, s.end, s.thread) for s in spans]


def account(trace: Trace) -> Account:
    """Give every piece of the trace's steps a role and a time."""
    steps = find_steps(trace)
    return _account_gpu(trace, steps) if trace.kernels else _account_cpu(trace, steps)


# --- ranges -----------------------------------------------------------------------------------------------------------


def innermost(ranges: Iterable[Span], points: Iterable[tuple[float, Thread, int]]) -> dict[int, list[str]]:
    """For each point ``(time, thread, key)`` the names of the ranges of its thread around it, outermost first, by key. Where all ranges are
    of one thread, points of threads without any count as of it: the profiler does not always name a launch's thread as that of a range."""
    by_thread: dict[Thread, list[tuple[float, int, Span | int]]] = defaultdict(list)
    for span in ranges:
        by_thread[span.thread].append((span.start, 0, span))
    sole = next(iter(by_thread)) if len(by_thread) == 1 else None
    for time, thread, key in points:
        by_thread[thread if sole is None else sole].append((time, 1, key))
    found: dict[int, list[str]] = {}
    for items in by_thread.values():
        stack: list[Span] = []
        items.sort(key=lambda item: (item[0], item[1], -item[2].end if isinstance(item[2], Span) else 0.0))
        for time, _, what in items:
            while stack and stack[-1].end <= time:
                stack.pop()
            if isinstance(what, Span):
                stack.append(what)
            else:
                found[what] = [span.name for span in stack]
    return found


def _role(names: Sequence[str]) -> str | None:
    return next((name.removeprefix(ROLE) for name in reversed(names) if name.startswith(ROLE)), None)


# --- GPU --------------------------------------------------------------------------------------------------------------


def align(names: Sequence[str], reference: Sequence[tuple[str, str]]) -> list[str | None]:
    """Roles for the kernels ``names`` of a replay, from the ``(name, role)`` of the reference run: one by one where the names are
    the same, else by the longest common runs; ``None`` where nothing matches."""
    known = [name for name, _ in reference]
    if list(names) == known:
        return [role for _, role in reference]
    result: list[str | None] = [None] * len(names)
    for a, b, size in SequenceMatcher(None, names, known, autojunk=False).get_matching_blocks():
        for offset in range(size):
            result[a + offset] = reference[b + offset][1]
    return result


class _Roles:
    """Roles of the kernels of a trace, by their index in ``kernels``, which are in order of their start."""

    def __init__(self, trace: Trace, kernels: Sequence[Kernel], steps: Sequence[Step]) -> None:
        self._kernels = kernels
        self._launches = trace.launches
        self._steps = steps
        self._starts = [step.start for step in steps]
        points = ((launch.start, launch.thread, key) for key, launch in trace.launches.items())
        self._around = innermost(trace.marks, points)
        self.found: list[tuple[str | None, str]] = [(None, UNKNOWN)] * len(kernels)
        references = self._from_ranges()
        self._from_replays(references)
        self._by_name()

    def step_of(self, index: int) -> int | None:
        """Number of the step that launched a kernel, -1 for a launch outside all steps, ``None`` if the launch is unknown."""
        key = self._kernels[index].correlation
        launch = None if key is None else self._launches.get(key)
        if launch is None or key is None:
            return None
        if any(name.startswith(REFERENCE) for name in self._around[key]):
            return -1
        return bisect_right(self._starts, launch.start) - 1

    def _from_ranges(self) -> dict[int, list[tuple[str, str]]]:
        """Roles of eager launches; returns the sequences of the reference runs, by batch size."""
        references: dict[int, list[tuple[float, float, str, str]]] = defaultdict(list)
        for index, kernel in enumerate(self._kernels):
            launch = None if kernel.correlation is None else self._launches.get(kernel.correlation)
            if launch is None or kernel.correlation is None or launch.graph:
                continue
            names = self._around[kernel.correlation]
            role = _role(names) or OTHER
            self.found[index] = (role, BY_RANGE)
            for name in names:
                if name.startswith(REFERENCE):
                    size = int(name.removeprefix(REFERENCE))
                    references[size].append((launch.start, kernel.start, kernel.name, role))
        return {size: [(name, role) for _, _, name, role in sorted(items)] for size, items in references.items()}

    def _from_replays(self, references: Mapping[int, list[tuple[str, str]]]) -> None:
        replays: dict[int, list[int]] = defaultdict(list)
        for index, kernel in enumerate(self._kernels):
            launch = None if kernel.correlation is None else self._launches.get(kernel.correlation)
            if kernel.correlation is not None and launch is not None and launch.graph:
                replays[kernel.correlation].append(index)
        aligned: dict[tuple[int, tuple[str, ...]], list[str | None]] = {}
        for indices in replays.values():
            step = self.step_of(indices[0])
            size = None if step is None or step < 0 else self._steps[step].values.get("bucket")
            reference = references.get(size) if size is not None else None
            if reference is None or size is None:
                continue
            names = tuple(self._kernels[i].name for i in indices)
            if (size, names) not in aligned:
                aligned[size, names] = align(names, reference)
            for index, role in zip(indices, aligned[size, names]):
                if role is not None:
                    self.found[index] = (role, BY_REPLAY)

    def _by_name(self) -> None:
        votes: dict[str, Counter[str]] = defaultdict(Counter)
        for kernel, (role, _) in zip(self._kernels, self.found):
            if role is not None:
                votes[kernel.name][role] += 1
        for index, kernel in enumerate(self._kernels):
            if self.found[index][0] is None and votes[kernel.name]:
                self.found[index] = (votes[kernel.name].most_common(1)[0][0], BY_NAME)


def _account_gpu(trace: Trace, steps: list[Step]) -> Account:
    kernels = sorted(trace.kernels, key=lambda k: (k.start, k.end))
    roles = _Roles(trace, kernels, steps)
    result = Account(steps, [], on_gpu=True, whole=[False] * len(steps))
    cursor: float | None = None
    current, begun = -1, -1
    for index, kernel in enumerate(kernels):
        step = roles.step_of(index)
        number = current if step is None else step
        if number > begun:
            # After a step that the trace does not hold the beginning of a chained one is unknown.
            result.whole[number] = not steps[number].chained or (current >= 0 and current == number - 1)
            begun = number
            if cursor is None or (not steps[number].chained and cursor < steps[number].start):
                cursor = min(steps[number].start, kernel.start)
        before = kernel.start if cursor is None else cursor
        role, how = roles.found[index]
        if number >= 0:
            gap, added = max(0.0, kernel.start - before), max(0.0, kernel.end - max(kernel.start, before))
            hidden = kernel.end - kernel.start - added
            result.pieces.append(Piece(number, role or OTHER, kernel.name, added, gap, how, kernel.correlation, hidden))
        cursor, current = max(before, kernel.end), number
    return result


# --- CPU --------------------------------------------------------------------------------------------------------------


def _account_cpu(trace: Trace, steps: list[Step]) -> Account:
    result = Account(steps, [], on_gpu=False, whole=[True] * len(steps))
    starts = [step.start for step in steps]
    by_thread: dict[Thread, list[Span]] = defaultdict(list)
    threads = {step.thread for step in steps}
    for span in (*trace.marks, *trace.ops):
        if span.thread in threads:
            by_thread[span.thread].append(span)
    for spans in by_thread.values():
        for span, path, exclusive in exclusive_times(spans):
            begin = next((outer.start for outer in path if outer.name.startswith((STEP, DRAW))), None)
            step = -1 if begin is None else bisect_right(starts, begin) - 1
            if step < 0:
                continue
            ours = span.name.startswith((STEP, ROLE, DRAW))
            role = _role([outer.name for outer in path]) or OTHER
            launch = None if ours else id(span)
            result.pieces.append(Piece(step, role, PYTHON if ours else span.name, exclusive, launch=launch))
    return result


def exclusive_times(spans: Iterable[Span]) -> list[tuple[Span, tuple[Span, ...], float]]:
    """For each span of one thread: itself, those around it with itself last, and its microseconds less those of its children."""
    order = sorted(spans, key=lambda s: (s.start, -s.end))
    paths: list[tuple[Span, ...]] = []
    spent: list[float] = []
    stack: list[int] = []
    for index, span in enumerate(order):
        while stack and order[stack[-1]].end <= span.start:
            stack.pop()
        outer = stack[-1] if stack else None
        paths.append((*(paths[outer] if outer is not None else ()), span))
        end = span.end if outer is None else min(span.end, order[outer].end)
        spent.append(max(0.0, end - span.start))
        if outer is not None:
            spent[outer] -= spent[index]
        stack.append(index)
    return [(span, path, max(0.0, us)) for span, path, us in zip(order, paths, spent)]
