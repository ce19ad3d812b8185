"""Paired experiments: statistics, equivalence, whole runs with a slowed and a wrong arm, refusals."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import shlex
from pathlib import Path
from typing import Any

import psutil
import pytest
from make_tiny_model import make_tiny_model

from e2e.servers import wait_until
from freetoken.bench import ab, ab_arm, ab_stats, figures
from freetoken.bench.ab import NotEquivalentError, Setting, equivalence, experiment, score_distance
from freetoken.bench.ab_arm import Arm
from freetoken.bench.ab_runs import Run, take_turns
from freetoken.bench.ab_stats import Pair
from freetoken.errors import StartupError

ARMS = Path(__file__).parent / "arms"
PACKAGE = Path(ab.__file__).parents[2]


def noisy(rng: random.Random, factor: float = 1.0, spread: float = 0.03) -> Arm:
    """A run of 10 ms with noise, drift left out: ids that every arm draws."""
    return Arm(
        {"decode, ms": [10 * factor * math.exp(rng.gauss(0, spread))]}, {"decode, ms": True}, [[1, 2]], [{}], 0.1
    )


def verdict(seed: int, factor: float, **counts: int) -> str:
    rng = random.Random(seed)
    a, b = Setting("A", {}, ()), Setting("B", {}, ())
    run = {"A": lambda: noisy(rng), "B": lambda: noisy(rng, factor)}
    counts = {"pairs": 5, "control_pairs": 4} | counts
    (found,), agreement, _ = experiment(a, b, lambda s: run[s.name](), bound=None, progress=False, **counts)
    assert agreement == "all ids equal"
    return found.verdict


def test_two_runs_of_the_same_are_not_told_apart() -> None:
    assert sum(verdict(seed, 1.0) == "not resolved" for seed in range(200)) >= 190


def test_a_large_difference_is() -> None:
    assert [verdict(seed, 1.5, pairs=8, control_pairs=8) for seed in range(20)].count("slower") >= 19
    assert [verdict(seed, 1 / 1.5, pairs=8, control_pairs=8) for seed in range(20)].count("faster") >= 19
    rates = [Pair.of([a], [b]) for a, b in ((100.0, 150.0), (100.5, 151.0), (99.0, 149.0))]
    control = [Pair.of([a], [b]) for a, b in ((100.0, 100.1), (100.0, 99.9), (99.9, 100.0))]
    assert ab_stats.compare("tok/s", control, rates, lower_is_better=False).verdict == "faster"
    assert ab_stats.compare("ms", control, rates, lower_is_better=True).verdict == "slower"


def test_intervals_against_known_values() -> None:
    found = ab_stats.interval([math.e, math.e**2, math.e**3])
    # Logarithms 1, 2, 3: mean 2, standard error 1 / sqrt(3), t of 2 degrees 9.925.
    assert found.ratio == pytest.approx(math.e**2)
    assert math.log(found.high) == pytest.approx(2 + 9.925 / math.sqrt(3))
    for bad in ([1.0], [1.0, 0.0], [1.0, math.nan], []):
        with pytest.raises(ValueError, match="two or more positive"):
            ab_stats.interval(bad)


def test_what_meets_both_of_a_pair_cancels() -> None:
    # Others slow the machine down for some turns: more of them than not, and the medians alone would say nothing.
    pair = Pair.of([10, 20, 21, 10, 22], [11, 22, 23.1, 22, 24.2])
    assert (pair.a, pair.b) == (20, 22) and pair.ratio == pytest.approx(1.1)
    assert Pair.of([10, 30, 11], [11, 33]) == Pair(11, 22, 2)


def test_order_alternates_and_controls_come_first() -> None:
    rng, calls = random.Random(0), []

    def run(setting: Setting) -> Arm:
        calls.append(setting.name)
        return noisy(rng)

    a, b = Setting("A", {}, ()), Setting("B", {}, ())
    experiment(a, b, run, pairs=3, control_pairs=2, bound=None, progress=False)
    assert "".join(calls) == "AB" + "AAAA" + "AB" + "BA" + "AB"
    assert [setting.name for setting in ab.plan(a, b, pairs=3, control_pairs=2)] == calls


def arm(outputs: list[list[int]], scores: list[dict[str, dict[str, float]]], bound: float | None = 0.1) -> Arm:
    return Arm({}, {}, outputs, scores, bound)


def test_equivalence() -> None:
    place = {"5": 2.0, "6": 1.9, "7": -1.0, "8": -2.9}
    near = {"5": 2.90, "6": 2.95, "7": 0.0, "8": -1.9}
    far = {"5": -2.0, "6": 1.9, "7": 1.0, "8": 0.0}
    assert score_distance(place, {k: v + 3 for k, v in place.items()}) == pytest.approx(0, abs=1e-12)
    assert score_distance(place, {"5": 1.0}) == math.inf
    same = arm([[5, 1]], [{"0": place}])
    assert equivalence(same, arm([[5, 1]], [{"0": far}]), None) == "all ids equal"
    assert "1 of 1 outputs part" in equivalence(same, arm([[6, 1]], [{"0": near}]), None)
    with pytest.raises(NotEquivalentError, match=r"relative RMS .* bound 0\.001"):
        equivalence(same, arm([[6, 1]], [{"0": near}]), 0.001)
    with pytest.raises(NotEquivalentError, match=r"bound 0\.1"):
        equivalence(same, arm([[6, 1]], [{"0": far}]), None)
    # Places behind the first difference have different histories and say nothing.
    later = [{"0": place, "1": place}], [{"0": near, "1": far}]
    assert "part" in equivalence(arm([[5, 1]], later[0]), arm([[6, 1]], later[1]), None)
    assert "reference" in equivalence(arm([], [], None), arm([], [], None), None)
    with pytest.raises(NotEquivalentError, match="A drew 2 tokens where B drew 3"):
        equivalence(same, arm([[5, 1, 2]], [{"0": place}]), None)
    with pytest.raises(NotEquivalentError, match="timed requests drew 0 tokens and B's 9"):
        equivalence(same, Arm(outputs=[[5, 1]], bound=0.1, tokens=9), None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ab") / "tiny", seed=4)


def words(model: Path, arms: str, folder: Path, pairs: int) -> list[str]:
    """A small experiment whose B finds ``arms`` on its path."""
    path = os.pathsep.join([str(ARMS / arms), str(PACKAGE)])
    files = ["--output", str(folder / "o.jsonl"), "--markdown", str(folder / "t.md"), "--plot", str(folder / "p.svg")]
    own = ["--a-env", f"PYTHONPATH={PACKAGE}", "--b-env", f"PYTHONPATH={path}"]
    own += ["--pairs", str(pairs), "--control-pairs", str(pairs)]
    run = ["--model-path", str(model), "--shape", "2x9", "--output-len", "8", "--repeats", "1", "--no-roof"]
    return [*own, *files, "--disable-tqdm", "--", *run]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slowed_arm_is_called_slower(model: Path, tmp_path: Path) -> None:
    arguments = words(model, "slow", tmp_path, 4)
    # Several runs are made ready at once: those that wait take no time from the one that is timed.
    assert ab.main(["--ahead", "4", *arguments, "--eager-too"]) == 0
    found = {f["metric"]: f for f in figures.read(tmp_path / "o.jsonl")}
    assert list(found) == ["prefill 2x9, ms", "decode 2x9, ms", "decode 2x9 without graphs, ms"]
    for figure in found.values():
        assert figure["verdict"] == "slower" and figure["low"] > 1.5 and figure["outputs"] == "all ids equal"
    assert "| decode 2x9, ms |" in (tmp_path / "t.md").read_text()
    assert (tmp_path / "p.svg").read_text().count("<circle") == 3 * (4 + 4)


def test_waves_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    waves: list[str] = []

    def made(arms: list[Setting], words: list[list[str]]) -> list[Arm]:
        waves.append("".join(setting.name for setting in arms))
        assert words == [["one_batch", "", "--x"]] * len(arms)
        return [arm([[1]], []) for _ in arms]

    monkeypatch.setattr(ab, "run_wave", lambda arms, words, timeout: iter(made(arms, words)))
    args = ab.parser().parse_args(["--ahead", "4", "--", "--x"])
    order = ab.plan(Setting("A", {}, ()), Setting("B", {}, ()), pairs=3, control_pairs=2)
    assert len(list(ab.in_turn(order, args))) == len(order)
    assert waves == ["AB", "AAAA", "ABBA", "AB"]


def test_a_run_that_is_given_up_leaves_nothing() -> None:
    with Run(Setting("A", {}, ()), ["ops", "", "all"], 60.0) as run:
        run.wait_ready()
        process, folder = run._process, run._result.parent
        assert run.left == 1 and process.poll() is None and folder.exists()
        # What it starts is ended with it.
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert process.returncode is not None and not folder.exists()


def test_a_run_that_hangs_is_late() -> None:
    with Run(Setting("B", {"X": "1"}, ()), ["ops", "", "all"], 60.0) as run:
        run.wait_ready()
        run._timeout = 0.0
        # Nobody told it to go.
        with pytest.raises(StartupError, match=r"arm B \(X=1\) ran past 0 s"):
            run._answer()


def test_a_run_that_dies_is_named() -> None:
    with Run(Setting("B", {"X": "1"}, ()), ["ops", "", "all"], 60.0) as run:
        run.wait_ready()
        run._process.kill()
        with pytest.raises(StartupError, match=r"arm B \(X=1\) failed: exit status -9"):
            run.turn()


@pytest.mark.parametrize("where", ["arm", "tool"])
def test_a_killed_arm_leaves_no_server(model: Path, where: str) -> None:
    server = ["--model-path", str(model), "--device", "cpu", "--max-total-tokens", "256"]
    load = ["--num-prompts", "1", "--random-input-len", "8", "--random-output-len", "200", "--disable-tqdm"]
    with Run(Setting("A", {}, ()), ["serving", shlex.join(server), *load], 60.0) as run:
        run.wait_ready()
        assert run._process.stdin is not None
        run._process.stdin.write(b"go\n")
        group = run._process.pid
        wait_until(lambda: len(members(group)) >= 2, 60)
        if where == "arm":
            run._process.kill()
            with pytest.raises(StartupError, match=r"arm A \(as it is\) failed: exit status -9"):
                run._answer()
    wait_until(lambda: not members(group), 60)


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_flags_as_values_are_joined_to_theirs() -> None:
    given = ["--a-args", "--x", "--b-args", "--y 1", "--pairs", "2", "--server-args", "", "--", "--a-args", "--z"]
    assert ab.joined(given) == [
        *("--a-args=--x", "--b-args=--y 1", "--pairs", "2", "--server-args=", "--", "--a-args", "--z")
    ]
    assert ab.joined(["--pairs", "2", "--a-args"]) == ["--pairs", "2", "--a-args"]


class Turned:
    """Stands for a run: writes its name into ``order`` at each turn."""

    def __init__(self, name: str, left: int, order: list[str]) -> None:
        self.name, self.left, self.order = name, left, order

    def turn(self) -> None:
        self.left -= 1
        self.order.append(self.name)


def test_pairs_take_turns() -> None:
    order: list[str] = []
    runs: Any = [Turned("a", 2, order), Turned("b", 4, order)]
    take_turns(runs)
    assert "".join(order) == "ab" + "ba" + "b" + "b"
    order.clear()
    alone: Any = [Turned("a", 3, order)]
    take_turns(alone)
    assert order == ["a"] * 3


def test_turns_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, done = io.StringIO(), []
    monkeypatch.setattr("sys.stdin", io.StringIO("go\ngo\n"))
    with pytest.raises(StartupError, match="nobody waits"):
        for _ in ab_arm.in_turns(answers)(3):
            done.append(answers.getvalue())
    assert done == ["3\n", "3\ndone\n"]


def test_a_wrong_arm_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words(model, "wrong", tmp_path, 2)
    assert ab.main(arguments) == 1
    assert "logits differ by relative RMS" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flag", "FREETOKEN_NONE"], "FREETOKEN_NONE is not a freetoken setting"),
        (["--flag", "PATH"], "FREETOKEN_ name"),
        (["--flag", "FREETOKEN_FUSED_NORM", "--values", "1", "2"], "use 1, 0 or check"),
        (["--a-env", "X"], "NAME=VALUE"),
        (["--pairs", "1"], "--pairs must be at least 2"),
        (["--server-args", "--port 1"], "--workload serving"),
        (["--ahead", "0"], "--ahead must be at least 1"),
        (["--ahead", "3"], "--ahead must be 1 or even, not 3"),
        (["--ahead", "2", "--workload", "ops"], "--workload one_batch"),
        (["--output", "/nowhere/at/all.jsonl"], "folder does not exist"),
        (["--a-env", "X=1", "--markdown", "/"], "--markdown / is a folder"),
        (["--a-env", "X=1", "--output", "/"], "--output / is a folder"),
        (["--a-env", "X=1", "--", "--output", "o.jsonl"], "goes to the --output in front of --, not to o.jsonl"),
        (["--a-env", "X=1", "--workload", "ops", "--", "all", "--output", "o"], "goes to the --output in front of --"),
        (
            ["--flag", "FREETOKEN_FUSED_NORM", "--b-env", "FREETOKEN_FUSED_NORM=0"],
            "--flag and --b-env both set FREETOKEN_",
        ),
        (["--b-args", "--disable-radix-cache", "--", "--shape", "1"], "--shape must be like 64x1024, not '1'"),
        (
            ["--a-args", "--page-size 16", "--b-args", "--disable-radix-cache", "--", "--shape", "2"],
            "--shape must be like 64x1024, not '2'",
        ),
        (["--pairs", "2"], "the arms have no setting of their own"),
        (["--bound", "nan"], "--bound must be at least 0 and finite, not nan"),
        (["--flag", "FREETOKEN_FUSED_NORM", "--", "--output-len", "4"], "--output-len must be at least 6, not 4"),
        (["--flag", "FREETOKEN_FUSED_NORM", "--b-args", "--repeats 0"], "--repeats must be at least 1, not 0"),
        (
            ["--b-args", "--page-size 32", "--pairs", "2", "--", "--model-path", "/nowhere"],
            "arm A (as it is) failed: model path /nowhere does not",
        ),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ab.main(["--disable-tqdm", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_one_arm_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    real: Any = ab.run_process

    def run(setting: Setting, args: Any) -> Arm:
        return noisy(rng) if setting.name == "A" else real(setting, args)

    monkeypatch.setattr(ab, "run_process", run)
    missing = ["--b-args", "--model-path /nowhere", "--disable-tqdm", "--", "--shape", "1x4"]
    assert ab.main(missing) == 1
    assert "arm B (--model-path /nowhere) failed: model path /nowhere does not exist" in capsys.readouterr().err


def test_an_arm_writes_only_whole_results(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    run = ["--model-path", str(model), "--shape", "5x3", "--output-len", "6", "--repeats", "1", "--no-roof"]
    assert ab_arm.main([str(result), "one_batch", "", *run]) == 0
    found = json.loads(result.read_text())
    assert len(found["outputs"]) == 4 and all(len(ids) == 6 for ids in found["outputs"])
    for ids, scores in zip(found["outputs"], found["scores"], strict=True):
        for place, values in scores.items():
            assert int(max(values, key=values.get)) == ids[int(place)]
