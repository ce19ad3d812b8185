"""Where the time of a decode step and of a prefill chunk goes: ``python -m freetoken.bench.profile``.

    python -m freetoken.bench.profile --model-path M --shape 8x1024 --folder out
    python -m freetoken.bench.profile --from-trace out/decode-8x1024.trace.json

Each shape, a batch as in ``one_batch``, is run once to compile, once for its times, and once under torch.profiler: its first prefill
chunk, and ``--steps`` decode steps. Of each there are, in ``--folder``, the trace (for Perfetto or chrome://tracing), a table of roles
and kernels, and a flame-style SVG. Graph replays are profiled as they are; a run of the same batch outside its graph says which kernel
plays which role. ``--from-trace`` makes the tables of a trace that is there, also of one that a server wrote (``/start_profile``).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.bench import cli, figures, flame, one_batch, roof
from freetoken.bench.one_batch import WARMUP_STEPS, BatchDriver
from freetoken.errors import StartupError
from freetoken.hardware import probe
from freetoken.profiling import summary, trace
from freetoken.profiling.summary import Profile
from freetoken.profiling.traffic import Facts
from freetoken.scheduler.request import ScheduleBatch
from freetoken.server_args import Config
from freetoken.server_args import parser as server_parser

if TYPE_CHECKING:
    from freetoken.profiling.session import Session
    from freetoken.runner.model_runner import ModelRunner

_OWN = ("batch_size", "input_len", "shape", "steps", "kernels", "folder", "from_trace", "output", "label", "no_roof")


def parser() -> argparse.ArgumentParser:
    """The server's flags and the profile's own."""
    result = server_parser()
    result.prog = "python -m freetoken.bench.profile"
    result.description = "Where the time of a decode step and of a prefill chunk goes, by role and kernel."
    add = result.add_argument_group("profile").add_argument
    add("--batch-size", type=int, nargs="+", default=[1], help="Requests decoded at once; several are run in turn.")
    add("--input-len", type=int, nargs="+", default=[128], help="Prompt tokens, which is the depth decode starts at.")
    add("--shape", nargs="+", default=[], metavar="BxL", help="Batch x length pairs instead of the two above.")
    add("--steps", type=int, default=8, help="Decode steps that are profiled; their mean is reported.")
    add("--kernels", type=int, default=summary.KERNELS_SHOWN, help="Longest kernels that the table lists.")
    default = os.path.join(tempfile.gettempdir(), "freetoken-profile")
    add("--folder", default=default, help="Where traces, tables and drawings go.")
    add("--from-trace", metavar="FILE", help="Make the tables of this trace; no model is loaded.")
    add("--output", help="Append the figures as JSON lines.")
    add("--label", help="What the model is, for the figures; default: its served name.")
    add("--no-roof", action="store_true", help="Do not measure bandwidth and matmul rate.")
    return result


@dataclasses.dataclass(frozen=True)
class Taken:
    """What was profiled: a file name without its ending, its trace, and microseconds by the clock: ``traced_us`` a step under the profiler,
    ``plain_us`` a step without, and ``run_us`` from the launch of the first step in the trace until the last was collected. All are 0 for
    a trace whose making was not watched."""

    name: str
    trace: Path
    traced_us: float = 0.0
    plain_us: float = 0.0
    run_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds on the host's clock: of a step, and of the whole run."""

    step: float
    run: float


class ProfiledBatch(BatchDriver):
    """A batch whose first prefill chunk and whose decode steps behind the warm-up are timed, under the profiler where there is one."""

    def _timed(self, batches: Sequence[ScheduleBatch], session: Session | None, path: Path | None) -> Clock:
        """A run of ``batches``. On a GPU a step takes the time between collections, since launches overlap; on a CPU a launch is the step.

        A step is collected behind the launch of the next. Where that launch lasts longer than the step, as under the profiler, all
        collections are late by as much, but for the last one: the time before that is no step's and is left out.
        """
        if session is not None:
            session.start()
        start = time.perf_counter()
        stamps = self._run(batches)
        if session is not None and path is not None:
            session.stop(path)
        run = stamps[-1] - start
        if self.config.device == "cuda" and len(stamps) > 2:
            return Clock((stamps[-2] - stamps[0]) / (len(stamps) - 2), run)
        return Clock(run / len(stamps), run)

    def prefill(self, session: Session | None = None, path: Path | None = None) -> Clock:
        """Prefill; the clock is that of the first chunk."""
        first, *rest = self.prefill_batches()
        clock = self._timed([first], session, path)
        self._run(rest)
        return clock

    def decode(self, steps: int, session: Session | None = None, path: Path | None = None) -> Clock:
        """Decode; ``steps`` steps and one before them are timed."""
        batches = [self.decode_batch(index) for index in range(WARMUP_STEPS + steps + 1)]
        self._run(batches[:WARMUP_STEPS])
        return self._timed(batches[WARMUP_STEPS:], session, path)


def check(args: argparse.Namespace) -> None:
    """Refuse values that cannot work, with :class:`StartupError`."""
    cli.require_at_least(args, {"batch_size": 1, "input_len": 1, "steps": 2, "kernels": 0})


def make_batch(runner: ModelRunner, config: Config, shape: tuple[int, int], steps: int, seed: int) -> ProfiledBatch:
    """A batch of ``shape`` (requests, prompt tokens) that can decode ``steps`` steps behind the warm-up."""
    prompts = one_batch.random_ids(config, *shape, seed)
    return ProfiledBatch(runner, config, prompts, WARMUP_STEPS + steps + 2)


def plain_seconds(runner: ModelRunner, config: Config, shape: tuple[int, int], steps: int) -> tuple[float, float]:
    """``(a prefill chunk, a decode step)`` without the profiler."""
    seconds = 0.0, 0.0
    for seed in range(2):  # the first run compiles kernels
        batch = make_batch(runner, config, shape, steps, seed)
        seconds = batch.prefill().step, batch.decode(steps).step
    return seconds


def take(
    runner: ModelRunner, config: Config, shape: tuple[int, int], steps: int, roofs: tuple[float, float] | None, to: Path
) -> tuple[Taken, Taken]:
    """Profile the prefill and the decode of one shape; the traces go into folder ``to``."""
    from freetoken.profiling.session import Session

    batch = make_batch(runner, config, shape, steps, 2)
    names = [f"{kind}-{shape[0]}x{shape[1]}" for kind in ("prefill", "decode")]
    prefill, decode = (to / f"{name}.trace.json" for name in names)
    clocks = batch.prefill(Session(runner, roofs), prefill), batch.decode(steps, Session(runner, roofs), decode)
    first, second = (
        Taken(name, path, clock.step * 1e6, run_us=clock.run * 1e6)
        for name, path, clock in zip(names, (prefill, decode), clocks)
    )
    return first, second


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


def to_figures(profile: Profile, taken: Taken, context: dict[str, Any]) -> list[dict[str, Any]]:
    """A figure of the step, and one of each of its roles; ``context`` names ``model`` and ``device``."""
    what, v = f"profile {profile.kind}", profile.values
    shape: dict[str, Any] = {
        name: _whole(v.get(key, 0)) for name, key in (("requests",) * 2, ("tokens",) * 2, ("kv_tokens", "read"))
    }
    step: dict[str, Any] = {
        "steps": profile.steps,
        "graph": "bucket" in v,
        "us": profile.step_us,
        "gaps_us": profile.gap_us,
        "busy": profile.busy,
        "hidden_us": profile.hidden_us,
        "launches": profile.launches,
        "host_launches": profile.host_launches,
        "gb": sum(row.bytes for row in profile.roles) / 1e9,
        "guessed": profile.guessed,
    }
    if taken.traced_us:
        step |= {"traced_us": taken.traced_us, "plain_us": taken.plain_us}
        step |= {"run_us": taken.run_us, "accounted": accounted(taken, profile)}
    found = [figures.figure(what, **context, **shape, **step)]
    for row in profile.roles:
        values: dict[str, Any] = {"us": row.us, "of_step": row.us / profile.step_us, "gaps_us": row.gap_us}
        values["launches"] = row.launches
        if row.hidden_us:
            values["hidden_us"] = row.hidden_us
        if row.bytes:
            values |= {"gb": row.bytes / 1e9, "gb_s": row.gb_s}
        if row.operations:
            values["tflop"] = row.operations / 1e12
        if row.share is not None:
            values |= {"roof": row.roof_us, "share": row.share}
        found.append(figures.figure(f"{what} role", **context, role=row.role, **shape, **values))
    return found


def accounted(taken: Taken, profile: Profile) -> float:
    """Roles and gaps of all steps over the time of the run by the clock. Both begin where the first step is launched and nothing else is under
    way, and end with the last: what the clock has more is the host before that launch and behind the last kernel."""
    return profile.run_us / taken.run_us


def report(taken: Taken, profile: Profile, kernels: int) -> str:
    """The table, and how it compares with the clock."""
    text = summary.table(profile, kernels)
    if taken.traced_us:
        text += f"\nby the clock {taken.traced_us:,.1f} us a step under the profiler, {taken.plain_us:,.1f} us without it; roles and gaps "
        text += f"of the whole run {profile.run_us:,.1f} us of {taken.run_us:,.1f} us ({accounted(taken, profile):.1%} accounted for)\n"
    return text


def write(taken: Taken, found: Sequence[Profile], kernels: int, to: Path) -> list[Path]:
    """Tables and drawings in folder ``to``, of a trace that may hold several kinds of steps; returns their paths."""
    paths = []
    for profile in found:
        name = taken.name if len(found) == 1 else f"{taken.name}-{profile.kind}"
        for ending, text in (("txt", report(taken, profile, kernels)), ("svg", flame.draw(profile))):
            paths.append(to / f"{name}.{ending}")
            paths[-1].write_text(text, encoding="utf-8")
    return paths


def _publish(made: Sequence[Path], folder: Path) -> None:
    """Move finished files to where they belong, and say so."""
    for path in made:
        target = folder / path.name
        os.replace(path, target)
        print(f"wrote {target}")


def _workplace(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder inside ``folder``, for files that are not finished."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-")
    except OSError as error:
        raise StartupError(f"--folder: cannot write to {folder}: {error.strerror}") from None


def _from_trace(args: argparse.Namespace) -> list[dict[str, Any]]:
    path = Path(args.from_trace)
    read = trace.read(path)
    facts = Facts.of(read.facts)
    here = probe().usable_gpu and figures.gpu_name() == facts.card
    if here and not args.no_roof and not facts.bandwidth:
        bandwidth, rate = roof.measure("cuda", "bfloat16")
        facts = dataclasses.replace(facts, bandwidth=bandwidth, rate=rate)
    found = summary.profiles(read, facts)
    taken = Taken(path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace"), path)
    folder = Path(args.folder)
    context = {"model": args.label or taken.name, "device": facts.card or found[0].device}
    with _workplace(folder) as unfinished:
        made = write(taken, found, args.kernels, Path(unfinished))
        for profile in found:
            print(report(taken, profile, args.kernels))
        _publish(made, folder)
    return [figure for profile in found for figure in to_figures(profile, taken, context)]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Profile every shape the flags ask for; prints each table as it comes and returns the figures."""
    check(args)
    if args.from_trace is not None:
        return _from_trace(args)
    from freetoken.profiling.session import Session
    from freetoken.runner.model_runner import ModelRunner
    from freetoken.startup import prepare

    values = argparse.Namespace(**{**vars(args), "output_len": WARMUP_STEPS + args.steps + 2})
    config, _ = prepare(one_batch.server_args(values, (*_OWN, "output_len")))
    folder = Path(args.folder)
    found: list[dict[str, Any]] = []
    with _workplace(folder) as unfinished:
        roofs = None if args.no_roof else roof.measure(config.device, config.dtype)
        runner = ModelRunner(config, one_batch.progress)
        context = {"model": args.label or config.served_model_name, "device": config.device}
        shapes = one_batch.shapes(args)
        # All of them before the first profile, since the tools it sets up stay.
        plain = {shape: plain_seconds(runner, config, shape, args.steps) for shape in shapes}
        Session(runner).discard()
        for shape in shapes:
            for taken, seconds in zip(take(runner, config, shape, args.steps, roofs, Path(unfinished)), plain[shape]):
                taken = dataclasses.replace(taken, plain_us=seconds * 1e6)
                profiles = summary.profiles(trace.read(taken.trace))
                made = write(taken, profiles, args.kernels, Path(unfinished))
                for profile in profiles:
                    print(report(taken, profile, args.kernels), flush=True)
                    found += to_figures(profile, taken, context)
                _publish([taken.trace, *made], folder)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    cli.leave(main())
