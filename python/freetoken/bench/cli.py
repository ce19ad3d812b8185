"""What the benchmarks' command lines share: range checks, the split from the server's flags, the entry point."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
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


def require_writable(args: argparse.Namespace, *names: str) -> None:
    """:class:`StartupError` for a given path of these that no file can be written to: it is a folder, or lies below a file. Folders on the way
    to it are made when it is written."""
    for name in names:
        given = getattr(args, name, None)
        if given is None:
            continue
        path = Path(given).absolute()
        flag = f"--{name.replace('_', '-')} {given}"
        if path.is_dir():
            raise StartupError(f"{flag} is a folder")
        if not next(parent for parent in path.parents if parent.exists()).is_dir():
            raise StartupError(f"{flag} lies below a file")


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


class Stopped(BaseException):
    """The process was told to end by ``number``, a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def entry(args: argparse.Namespace, run: Callable[[argparse.Namespace], list[dict[str, Any]]]) -> int:
    """Run a benchmark, append its figures to ``--output``; 1 and one sentence when it cannot work, 128 and the signal's number when stopped by
    Ctrl-C, SIGTERM or SIGHUP (but not under nohup): what it started is then ended as at its own end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # What nohup has set stays.
    before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, _stop)
    try:
        require_writable(args, "output")
        found = run(args)
    except (FreetokenError, EnvironmentValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Stopped) as error:
        print("stopped: no figure is written", file=sys.stderr)
        return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if args.output:
        figures.append(args.output, found)
    return 0
