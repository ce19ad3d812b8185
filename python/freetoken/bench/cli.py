"""What the benchmarks' command lines share: range checks, the split from the server's flags, the entry point."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from freetoken import environ
from freetoken.bench import figures
from freetoken.environ import EnvironmentValueError
from freetoken.errors import FreetokenError, StartupError


def require_at_least(args: argparse.Namespace, lowest: Mapping[str, int]) -> None:
    """:class:`StartupError` for a given value (or one of a list) below its lowest; values of ``None`` are left alone."""
    for name, low in lowest.items():
        value = getattr(args, name)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item < low:
                raise StartupError(f"--{name.replace('_', '-')} must be at least {low}, not {item}")


def require_bound(bound: float | None) -> None:
    """:class:`StartupError` for a given ``--bound`` that no error could be compared with."""
    if bound is not None and not 0 <= bound < float("inf"):
        raise StartupError(f"--bound must be at least 0 and finite, not {bound:g}")


def server_values(args: argparse.Namespace, own: Collection[str]) -> dict[str, Any]:
    """The arguments that are the server's flags: all but the benchmark's ``own``."""
    return {name: value for name, value in vars(args).items() if name not in own}


def leave(code: int) -> NoReturn:
    """End the process, all being written. Where the profiler's tools are in place that is at once: taken down beside captured graphs they
    abort it now and then."""
    if environ.profiler_tools_stay():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def entry(args: argparse.Namespace, run: Callable[[argparse.Namespace], list[dict[str, Any]]]) -> int:
    """Run a benchmark, append its figures to ``--output``; 1 and one sentence when it cannot work, 130 when stopped by Ctrl-C."""
    try:
        found = run(args)
    except (FreetokenError, EnvironmentValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: no figure is written", file=sys.stderr)
        return 130
    if args.output:
        figures.append(args.output, found)
    return 0
