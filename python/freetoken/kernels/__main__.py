"""``python -m freetoken.kernels``: the implementation each fused op uses on this machine, and why."""

from __future__ import annotations

import sys

from freetoken import hardware
from freetoken.environ import EnvironmentValueError
from freetoken.kernels.dispatch import Choice, table


def render(choices: list[Choice]) -> str:
    """A text table with one line an op."""
    rows = [("op", "flag", "implementation", "why")]
    rows += [(choice.op, choice.flag, choice.impl, choice.why) for choice in choices]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


def main() -> int:
    """Print the table for the device this machine would serve on; 1 when a flag has a bad value."""
    try:
        print(render(table("cuda" if hardware.probe().usable_gpu else "cpu")))
    except EnvironmentValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
