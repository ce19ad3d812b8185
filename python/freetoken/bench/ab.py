"""Two settings, one workload, paired runs in fresh processes: ``python -m freetoken.bench.ab``.

    python -m freetoken.bench.ab --flag FREETOKEN_GDN_FUSED_CONV -- --model-path M --shape 1x1024
    python -m freetoken.bench.ab --a-args "--attention-backend torch" --b-args "--attention-backend triton" -- --shape 8x64

Pairs of two A runs come first: their spread is the noise that a difference must exceed. Then A and B run in alternating
order. No figure is given unless B's outputs are equivalent to A's. Arguments behind ``--`` go to the workload.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from freetoken import environ, hardware
from freetoken.bench import ab_stats, cli, figures, one_batch, ops, svg
from freetoken.bench.ab_arm import Arm
from freetoken.bench.ab_runs import Setting, run_wave
from freetoken.bench.ab_stats import Comparison, Pair
from freetoken.environ import EnvironmentValueError
from freetoken.errors import FreetokenError, StartupError
from freetoken.server_args import parser as server_parser

WORKLOADS = ("one_batch", "serving", "ops")


class NotEquivalentError(FreetokenError):
    """The outputs of the two arms differ by more than rounding."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m freetoken.bench.ab",
        description="Compare two settings on one workload, with a control.",
        epilog="Arguments behind -- go to the workload (see its --help).",
    )
    add = result.add_argument
    add("--flag", help="Environment name that the arms differ in.")
    add("--values", nargs=2, default=["1", "0"], metavar=("A", "B"), help="Its values; default 1 and 0.")
    add("--a-env", nargs="+", default=[], metavar="NAME=VALUE", help="Environment of A.")
    add("--b-env", nargs="+", default=[], metavar="NAME=VALUE", help="Environment of B.")
    add("--a-args", default="", help="Words added to A's model or op arguments, in one string.")
    add("--b-args", default="", help="Words added to B's model or op arguments, in one string.")
    add("--workload", choices=WORKLOADS, default="one_batch")
    add("--server-args", default="", help="With serving: arguments of the server, in one string.")
    add("--pairs", type=int, default=5, help="Pairs of A and B.")
    add("--control-pairs", type=int, default=4, help="Pairs of A and A before them.")
    ahead = "Runs of one_batch that are made ready at once, pair by pair; the two of a pair then take turns. 1: one after the other."
    add("--ahead", type=int, default=1, help=ahead)
    add("--bound", type=float, help="Largest relative RMS between the arms' logits; default by type and depth.")
    add(
        "--timeout",
        type=float,
        default=1800.0,
        help="Seconds that the start of a run, and each timed part of it, may take.",
    )
    add("--label", help="What the workload is, for the figures; default: its arguments.")
    add("--device", choices=("cuda", "cpu"), help="Whose name the figures bear; default: the GPU where there is one.")
    add("--output", help="Append the figures as JSON lines.")
    add("--markdown", help="Write the table to this file.")
    add("--plot", help="Write a plot of the pairs (SVG) to this file.")
    add("--disable-tqdm", action="store_true", help="No progress bar.")
    add("words", nargs="*", help=argparse.SUPPRESS)
    return result


def _environment(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise StartupError(f"an environment setting must be like NAME=VALUE, not {word!r}")
        found[name] = value
    return found


def settings(args: argparse.Namespace) -> tuple[Setting, Setting]:
    """The two arms; :class:`StartupError` or :class:`EnvironmentValueError` for what is no setting."""
    arms = []
    for index, name in enumerate("ab"):
        environment = _environment(getattr(args, f"{name}_env"))
        if args.flag is not None:
            if args.flag in environment:
                raise StartupError(f"--flag and --{name}-env both set {args.flag}")
            environment[args.flag] = args.values[index]
        for key in environment:
            if key.startswith("FREETOKEN_"):
                if key not in {row.name for row in environ.TABLE}:
                    raise EnvironmentValueError(f"{key} is not a freetoken setting; docs/env.md lists them all")
                environ.get(key, environment)
            elif key == args.flag:
                raise EnvironmentValueError(f"--flag takes a FREETOKEN_ name, not {key!r}")
        try:
            words = tuple(shlex.split(getattr(args, f"{name}_args")))
        except ValueError as error:
            raise StartupError(f"--{name}-args cannot be split into words: {error}") from None
        arms.append(Setting(name.upper(), environment, words))
    given = (args.flag, args.a_env, args.b_env, args.a_args, args.b_args)
    if not any(given):
        raise StartupError("the arms have no setting of their own; give --flag, --a-env, --b-env, --a-args or --b-args")
    return arms[0], arms[1]


def check(args: argparse.Namespace) -> None:
    """Refuse values that cannot work, with :class:`StartupError`."""
    cli.require_at_least(args, {"pairs": 2, "control_pairs": 2, "ahead": 1})
    if args.ahead > 1 and args.workload != "one_batch":
        raise StartupError("--ahead belongs to --workload one_batch")
    if args.ahead > 1 and args.ahead % 2:
        raise StartupError(f"--ahead must be 1 or even, not {args.ahead}: runs are made ready in pairs")
    if not args.timeout > 0:
        raise StartupError(f"--timeout must be above 0, not {args.timeout:g}")
    if args.device == "cuda" and not hardware.probe().usable_gpu:
        raise StartupError(f"--device cuda: {hardware.probe().device_reason}")
    cli.require_bound(args.bound)
    if args.workload != "serving" and args.server_args:
        raise StartupError("--server-args belongs to --workload serving")
    for name in ("output", "markdown", "plot"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise StartupError(f"--{name} {path}: its folder does not exist")
    cli.require_writable(args, "output", "markdown", "plot")
    for arm in settings(args):
        _check_workload(args, arm)


def _check_workload(args: argparse.Namespace, arm: Setting) -> None:
    """The arguments that a process of ``arm`` will get; argparse ends this one where they are none."""
    words = [*args.words, *arm.words]
    if args.workload == "one_batch":
        given = one_batch.parser().parse_args(words)
        one_batch.check(given)
        written = given.output
    elif args.workload == "ops":
        written = ops.parser().parse_args(words).output
    else:
        from freetoken.bench import serving

        written = serving.parser().parse_args(args.words).output_file
        server_parser().parse_args([*shlex.split(args.server_args), *arm.words])
    if written is not None:
        raise StartupError(f"what the workload measures goes to the --output in front of --, not to {written}")


def _words(setting: Setting, args: argparse.Namespace) -> list[str]:
    words, server_words = list(args.words), args.server_args
    if args.workload == "serving":
        server_words = shlex.join([*shlex.split(server_words), *setting.words])
    else:
        words += setting.words
    return [args.workload, server_words, *words]


def run_process(setting: Setting, args: argparse.Namespace) -> Arm:
    """One run in a fresh process; :class:`StartupError` names the arm and says what its process said last."""
    (arm,) = run_wave([setting], [_words(setting, args)], args.timeout)
    return arm


def plan(a: Setting, b: Setting, *, pairs: int, control_pairs: int) -> list[Setting]:
    """Every run of an experiment, in order: one of each that is not timed, pairs of A and A, and pairs that begin with A and B in turn."""
    alternating = [setting for index in range(pairs) for setting in ((a, b) if index % 2 == 0 else (b, a))]
    return [a, b, *[a, a] * control_pairs, *alternating]


def in_turn(order: Sequence[Setting], args: argparse.Namespace) -> Generator[Arm, None, None]:
    """What the runs of ``order`` report, ``args.ahead`` (an even number, or 1) made ready at once: the first two by themselves, as these fill
    the caches of compiled kernels."""
    if args.ahead == 1:
        yield from (run_process(setting, args) for setting in order)
        return
    for wave in (order[:2], *(order[at : at + args.ahead] for at in range(2, len(order), args.ahead))):
        yield from run_wave(wave, [_words(setting, args) for setting in wave], args.timeout)


def score_distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Relative RMS between two sets of scores over the ids they share, each about its own mean: a shift common to all scores
    changes no probability. Infinite where they share fewer than two."""
    common = sorted(a.keys() & b.keys())
    if len(common) < 2:
        return float("inf")
    mean_a, mean_b = (sum(s[i] for i in common) / len(common) for s in (a, b))
    error = sum(((a[i] - mean_a) - (b[i] - mean_b)) ** 2 for i in common)
    size = sum((a[i] - mean_a) ** 2 for i in common)
    return float((error / size) ** 0.5) if size > 0 else float(error > 0) * float("inf")


def equivalence(a: Arm, b: Arm, bound: float | None) -> str:
    """How B's outputs agree with A's, in a clause; :class:`NotEquivalentError` where they do not.

    Ids that are all equal are enough. Otherwise scores are compared wherever both arms had drawn the same ids before.
    """
    if a.tokens != b.tokens:
        raise NotEquivalentError(f"A's timed requests drew {a.tokens} tokens and B's {b.tokens}")
    if a.bound is None:
        return "each run within its op's bound of the reference"
    if len(a.outputs) != len(b.outputs):
        raise NotEquivalentError(f"A gave {len(a.outputs)} outputs and B {len(b.outputs)}")
    limit = a.bound if bound is None else bound
    if a.outputs == b.outputs:
        return "all ids equal"
    worst, parted = 0.0, 0
    for ours, theirs, scores_a, scores_b in zip(a.outputs, b.outputs, a.scores, b.scores, strict=True):
        if len(ours) != len(theirs):
            raise NotEquivalentError(f"A drew {len(ours)} tokens where B drew {len(theirs)}")
        same = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x != y), min(len(ours), len(theirs)))
        parted += same < max(len(ours), len(theirs))
        places = [n for n in scores_a if n in scores_b and int(n) <= same]
        worst = max([worst, *(score_distance(scores_a[n], scores_b[n]) for n in places)])
    if not worst <= limit:
        raise NotEquivalentError(f"the arms' logits differ by relative RMS {worst:.3g}, bound {limit:.3g}")
    return f"{parted} of {len(a.outputs)} outputs part; logits within relative RMS {worst:.2g} (bound {limit:.2g})"


Runner = Callable[[Setting], Arm]


def experiment(
    a: Setting, b: Setting, run: Runner, *, pairs: int, control_pairs: int, bound: float | None, progress: bool
) -> tuple[list[Comparison], str, dict[str, list[list[Pair]]]]:
    """All runs, in the order of :func:`plan`: ``(comparisons, how the outputs agree, metric -> [control pairs, pairs])``.

    A run of each comes first, compared and not timed: it also fills the caches of compiled kernels.
    """
    bar = tqdm(total=2 * (1 + pairs + control_pairs), unit="run", disable=not progress, file=sys.stderr)

    def once(setting: Setting) -> Arm:
        arm = run(setting)
        bar.update()
        return arm

    with bar:
        agreement = equivalence(once(a), once(b), bound)
        control = [(once(a), once(a)) for _ in range(control_pairs)]
        measured: list[tuple[Arm, Arm]] = []
        for index in range(pairs):
            first, second = (a, b) if index % 2 == 0 else (b, a)
            left, right = once(first), once(second)
            measured.append((left, right) if index % 2 == 0 else (right, left))
            found = equivalence(*measured[-1], bound)
            agreement = found if found != "all ids equal" else agreement
    names = [name for name in measured[0][0].samples if all(name in arm.samples for pair in measured for arm in pair)]
    samples = {
        name: [[Pair.of(x.samples[name], y.samples[name]) for x, y in group] for group in (control, measured)]
        for name in names
    }
    lower = measured[0][0].lower
    found_all = [ab_stats.compare(name, *samples[name], lower_is_better=lower[name]) for name in names]
    return found_all, agreement, samples


def _noise(floor: float) -> str:
    """The noise floor as a share; runs that say nothing get no number."""
    return f"±{floor - 1:.2%}" if floor < 2 else "above ±100%: take more control pairs"


def markdown(a: Setting, b: Setting, found: Sequence[Comparison], agreement: str, label: str) -> str:
    """The result as a table."""
    lines = [
        f"A: `{a.label}`; B: `{b.label}`; {label}. Outputs: {agreement}.",
        "",
        "| metric | A | B | B / A (99 % interval) | control A / A | noise floor | B is |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in found:
        lines.append(
            f"| {c.metric} | {c.a:.4g} | {c.b:.4g} | {c.effect.ratio:.4f} ({c.effect.low:.4f} to {c.effect.high:.4f}) "
            f"| {c.control.ratio:.4f} | {_noise(c.floor)} | {c.verdict} |"
        )
    return "\n".join(lines) + "\n"


def to_figures(
    a: Setting, b: Setting, found: Sequence[Comparison], agreement: str, args: argparse.Namespace, label: str
) -> list[dict[str, Any]]:
    """One figure a metric."""
    device = args.device or ("cuda" if hardware.probe().usable_gpu else "cpu")
    return [
        figures.figure(
            f"ab {args.workload}",
            model=label,
            device=device,
            a=a.label,
            b=b.label,
            metric=c.metric,
            pairs=args.pairs,
            control_pairs=args.control_pairs,
            turns=args.ahead > 1,
            a_value=c.a,
            b_value=c.b,
            ratio=c.effect.ratio,
            low=c.effect.low,
            high=c.effect.high,
            noise=c.floor - 1,
            outputs=agreement,
            verdict=c.verdict,
        )
        for c in found
    ]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the experiment, print the table, write the files that were asked for; nothing is written when it fails."""
    check(args)
    a, b = settings(args)
    label = args.label or " ".join([args.workload, *args.words, args.server_args]).strip()
    counts = {"pairs": args.pairs, "control_pairs": args.control_pairs}
    with closing(in_turn(plan(a, b, **counts), args)) as arms:
        found, agreement, samples = experiment(
            a, b, lambda _: next(arms), bound=args.bound, progress=not args.disable_tqdm, **counts
        )
    table = markdown(a, b, found, agreement, label)
    print(table)
    if args.markdown:
        Path(args.markdown).write_text(table, encoding="utf-8")
    if args.plot:
        rows = []
        for c in found:
            control, pairs = ([pair.ratio for pair in group] for group in samples[c.metric])
            rows.append(svg.PairRow(c.metric, control, pairs, c.floor))
        Path(args.plot).write_text(svg.pair_plot(rows, f"{b.label} against {a.label}"), encoding="utf-8")
    return to_figures(a, b, found, agreement, args, label)


def joined(argv: Sequence[str]) -> list[str]:
    """``argv`` with the flags whose value is other flags joined to it by ``=``, up to ``--``: argparse would take a lone word with dashes for a
    flag of its own."""
    end = argv.index("--") if "--" in argv else len(argv)
    own, result = iter(argv[:end]), []
    for word in own:
        takes = word in ("--a-args", "--b-args", "--server-args")
        value = next(own, None) if takes else None
        result.append(word if value is None else f"{word}={value}")
    return [*result, *argv[end:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; 1 and one sentence when there is no result."""
    return cli.entry(parser().parse_args(joined(sys.argv[1:] if argv is None else argv)), run)


if __name__ == "__main__":
    sys.exit(main())
