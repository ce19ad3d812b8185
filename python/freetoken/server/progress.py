"""Progress of the start in the terminal: one line rewritten on a terminal, a few plain lines elsewhere (torch-free)."""

from __future__ import annotations

import time
from typing import TextIO

from freetoken.server.frontend import Status

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class Progress:
    """Shows :class:`Status` while loading. A phase shows its share, amount and, for bytes, the rate."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._phase = ""
        self._since = 0.0
        self._shown_share = -1.0
        self._shown_at = 0.0
        self._open = False

    def show(self, status: Status) -> None:
        """Write the status if it says something new: ten times a second at most, without a terminal every quarter."""
        now = time.monotonic()
        share = status.done / status.total if status.total else 0.0
        new = status.phase != self._phase
        if new:
            self.close()
            self._phase, self._since, self._shown_share = status.phase, now, -1.0
        if self._terminal:
            if not new and now - self._shown_at < 0.1 and share < 1.0:
                return
        elif not new and share < self._shown_share + 0.25 and not (share >= 1.0 > self._shown_share):
            return
        self._shown_at, self._shown_share = now, share
        text = self.line(status, now - self._since)
        self._out.write(f"\r\x1b[2K{text}" if self._terminal else text + "\n")
        self._out.flush()
        self._open = self._terminal

    def close(self) -> None:
        """End a rewritten line."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False

    @staticmethod
    def line(status: Status, seconds: float) -> str:
        """The text of one status, ``seconds`` into its phase."""
        if not status.total:
            return status.phase
        text = f"{status.phase}: {100 * status.done // status.total} %"
        if status.unit != "bytes":
            return f"{text} ({status.done} of {status.total} {status.unit})".rstrip()
        size, unit = next((row for row in _UNITS if status.total >= row[0]), _UNITS[-1])
        rate = f", {status.done / size / seconds:.1f} {unit}/s" if seconds > 0.2 else ""
        return f"{text} ({status.done / size:.1f} of {status.total / size:.1f} {unit}{rate})"
