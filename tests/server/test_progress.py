"""Progress lines on a terminal and elsewhere."""

from __future__ import annotations

import io

from freetoken.server.frontend import Status
from freetoken.server.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loading(phase: str, done: int, total: int, unit: str = "bytes") -> Status:
    return Status("loading", phase, done, total, unit)


def test_plain_lines_every_quarter() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for done in range(101):
        progress.show(loading("graphs", done, 100, "graphs"))
    progress.show(loading("warm-up", 0, 0))
    progress.close()
    shares = [0, 25, 50, 75, 100]
    assert out.getvalue().splitlines() == [f"graphs: {n} % ({n} of 100 graphs)" for n in shares] + ["warm-up"]


def test_a_terminal_line_is_rewritten() -> None:
    out = Terminal()
    progress = Progress(out)
    progress.show(loading("weights", 0, 4 * 2**30))
    progress.show(loading("weights", 1, 4 * 2**30))  # too soon
    progress.show(loading("weights", 4 * 2**30, 4 * 2**30))
    progress.close()
    progress.close()
    start, end = "weights: 0 % (0.0 of 4.0 GiB)", "weights: 100 % (4.0 of 4.0 GiB)"
    assert out.getvalue() == f"\r\x1b[2K{start}\r\x1b[2K{end}\n"


def test_rate() -> None:
    assert Progress.line(loading("weights", 2**20, 2**21), 0.5) == "weights: 50 % (1.0 of 2.0 MiB, 2.0 MiB/s)"
