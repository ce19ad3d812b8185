"""Where log lines go, in both processes (torch-free)."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Any


class LossyFile(io.RawIOBase):
    """A file that takes everything and drops what cannot be written: a full disk, or a reader that went away, costs lines of
    the log and never the server."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        except OSError:
            pass
        return len(view)


def set_up(level: str, *, replace: bool = False) -> None:
    """Log to standard error, from ``level`` on, ``replace`` takes away whatever handlers there are.

    The stream becomes a :class:`LossyFile` unless somebody has put another one in its place.
    """
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        raw = LossyFile(sys.stderr.fileno())
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=replace,
    )
