"""``python -m freetoken.kernels``: the implementation each fused op uses on this machine, and why."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from freetoken import environ, hardware
from freetoken.environ import EnvironmentValueError
from freetoken.kernels.dispatch import OPS, Choice, table, tested, tuned

HEAD = ("op", "flag", "value", "implementation", "compiled for", "settings", "why")


def rows(choices: Sequence[Choice], capability: tuple[int, int] | None) -> list[tuple[str, ...]]:
    """The cells below :data:`HEAD` of each choice, which are those of ``dispatch.OPS`` in their order."""
    return [
        (c.op, c.flag, environ.raw(c.flag), c.impl, tested(op), tuned(op, capability), c.why)
        for op, c in zip(OPS, choices, strict=True)
    ]


def render(lines: Sequence[Sequence[str]]) -> str:
    """A text table: columns as wide as their widest cell, the last one as it is."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=False)), line[-1]])
        for line in lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table for the device this machine would serve on; 1 when a setting is unknown or has a bad value."""
    description = "Print which implementation each fused op uses on this machine, and why."
    argparse.ArgumentParser(prog="python -m freetoken.kernels", description=description).parse_args(argv)
    device = "cuda" if hardware.probe().usable_gpu else "cpu"
    capability = hardware.capability() if device == "cuda" else None
    try:
        environ.validate()
        print(render([HEAD, *rows(table(device), capability)]), flush=True)
    except BrokenPipeError:
        # Whoever read it has seen enough; nothing is left to be flushed at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EnvironmentValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
