"""A profile of a runner: ranges on, profiler on; and the trace file with the tables beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from freetoken import environ
from freetoken.errors import StartupError
from freetoken.profiling import summary, trace
from freetoken.profiling.marks import Marks, facts_of
from freetoken.profiling.traffic import Facts

LARGEST_ANALYSED = 64 * 2**20
"""Bytes of a trace that a server analyses itself; it serves nobody in the meantime."""


class Session:
    """Profiles what ``runner`` does from :meth:`start` to :meth:`stop`. The runner works as before, with a few microseconds more for each
    range and kernel that the host launches; replays of graphs launch one thing each."""

    def __init__(self, runner: Any, roofs: tuple[float, float] | None = None) -> None:
        self._runner = runner
        self._marks = Marks(runner)
        self._profiler = torch.profiler.profile()
        modelled = getattr(runner, "model", None) is not None
        self._facts = facts_of(runner, roofs) if modelled else Facts("")

    def start(self) -> None:
        """Put the ranges on and start the profiler."""
        environ.keep_profiler_tools()
        self._marks.put_on()
        try:
            self._profiler.start()
        except BaseException:
            self._marks.remove()
            raise

    def stop(self, path: Path) -> None:
        """Stop, and write the trace to ``path``; :class:`StartupError` if it cannot be written."""
        try:
            self._marks.references()
        finally:
            self._marks.remove()
            self._profiler.add_metadata_json(trace.FACTS, json.dumps(self._facts.public()))
            self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))
        # The exporter reports a file it cannot open in the log alone.
        if not path.exists():
            raise StartupError(f"cannot write to {path}; the profile is lost")

    def discard(self) -> None:
        """Start and stop without a trace: the first profile of a process sets the tools up, which later ones need not wait for."""
        self.start()
        self._marks.remove()
        self._profiler.stop()


def write_roles(path: Path) -> tuple[Path | None, str]:
    """Write the profiles in the trace ``path`` beside it, as ``.roles.json`` and ``.roles.txt``; returns the first, or ``None`` and why there
    are none."""
    size = path.stat().st_size
    if size > LARGEST_ANALYSED:
        return None, f"the trace has {size / 2**20:.0f} MiB; see python -m freetoken.bench.profile --from-trace {path}"
    stem = str(path).removesuffix(".json").removesuffix(".trace")
    try:
        found = summary.profiles(trace.read(path))
        _write(Path(f"{stem}.roles.txt"), "\n".join(summary.table(profile) for profile in found))
        table = Path(f"{stem}.roles.json")
        _write(table, json.dumps([profile.public() for profile in found], indent=1) + "\n")
    except StartupError as error:
        return None, str(error)
    except OSError as error:
        return None, f"cannot write beside {path}: {error.strerror}"
    return table, ""


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
