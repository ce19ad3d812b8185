"""A Chrome trace of torch.profiler, reduced to what the accounting needs (torch-free). Times are microseconds.

Format: the Trace Event Format, an object whose ``traceEvents`` hold complete events (``ph`` ``X``) with ``cat``, ``name``, ``ts``,
``dur``, ``pid``, ``tid``; work on a GPU and the call that launched it share ``args.correlation``, and all kernels of a graph have that
of the launch of the graph.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken.errors import StartupError

STEP, ROLE, DRAW, REFERENCE = "step:", "role:", "draw:", "reference:"
"""How the names of our own ranges begin: see :mod:`freetoken.profiling.marks`."""
FACTS = "freetoken"
"""Key of the trace under which the facts of the model stand: see :mod:`freetoken.profiling.traffic`."""

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")
Thread = tuple[Any, Any]


@dataclass(frozen=True)
class Span:
    """Something on the CPU: one of our ranges, or an operator."""

    name: str
    start: float
    end: float
    thread: Thread


@dataclass(frozen=True)
class Kernel:
    """Work on the GPU: a kernel, a copy or a fill."""

    name: str
    start: float
    end: float
    correlation: int | None


@dataclass(frozen=True)
class Launch:
    """The call that put work on the GPU; ``graph`` when it launched a whole graph."""

    start: float
    thread: Thread
    graph: bool


@dataclass
class Trace:
    """``marks`` are our own ranges, ``ops`` the operators beside them, ``launches`` by correlation."""

    marks: list[Span] = field(default_factory=list)
    ops: list[Span] = field(default_factory=list)
    launches: dict[int, Launch] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def parse(document: Mapping[str, Any]) -> Trace:
    """The trace of a parsed file; events of other kinds are passed over. :class:`StartupError` if it is no trace."""
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise StartupError("this is no trace of torch.profiler: it has no traceEvents")
    facts = document.get(FACTS)
    result = Trace(facts=dict(facts) if isinstance(facts, dict) else {})
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        try:
            _add(result, event)
        except (KeyError, TypeError, ValueError):
            raise StartupError(f"this is no trace of torch.profiler: bad event {str(event)[:200]}") from None
    return result


def _add(trace: Trace, event: Mapping[str, Any]) -> None:
    category, name = event.get("cat"), str(event.get("name", ""))
    if category in _GPU:
        start = float(event["ts"])
        trace.kernels.append(Kernel(name, start, start + float(event.get("dur", 0)), _correlation(event)))
    elif category in _LAUNCH:
        correlation = _correlation(event)
        if correlation is not None:
            thread = (event.get("pid"), event.get("tid"))
            trace.launches[correlation] = Launch(float(event["ts"]), thread, "GraphLaunch" in name)
    elif category in ("user_annotation", "cpu_op"):
        start = float(event["ts"])
        span = Span(name, start, start + float(event.get("dur", 0)), (event.get("pid"), event.get("tid")))
        ours = name.startswith((STEP, ROLE, DRAW, REFERENCE))
        if name.startswith(STEP):
            step_values(name)
        elif name.startswith(REFERENCE):
            int(name.removeprefix(REFERENCE))
        (trace.marks if ours else trace.ops).append(span)


def _correlation(event: Mapping[str, Any]) -> int | None:
    args = event.get("args")
    found = args.get("correlation") if isinstance(args, dict) else None
    return int(found) if found is not None else None


def read(path: str | Path) -> Trace:
    """:func:`parse` of a ``.json`` or ``.json.gz`` file; :class:`StartupError` names a file that cannot be read."""
    opener: Any = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError):
        raise StartupError(f"{path} is no trace of torch.profiler: it is not JSON") from None
    if not isinstance(document, dict):
        raise StartupError(f"{path} is no trace of torch.profiler: it has no traceEvents")
    return parse(document)


def step_values(name: str) -> tuple[str, dict[str, int]]:
    """``step:decode requests=8 bucket=8`` as ``("decode", {"requests": 8, "bucket": 8})``; ``ValueError`` for another form."""
    kind, *words = name.removeprefix(STEP).split()
    return kind, {key: int(value) for key, _, value in (word.partition("=") for word in words)}
