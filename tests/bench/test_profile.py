"""The profile of tiny models on the CPU: roles add up, nothing of the model stays changed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model

from freetoken.bench import figures, one_batch, profile, roof
from freetoken.bench.one_batch import BatchDriver
from freetoken.profiling import accounting, roles, summary, trace, traffic
from freetoken.profiling.marks import Marks, facts_of
from freetoken.profiling.session import Session, write_roles
from freetoken.runner.model_runner import ModelRunner
from freetoken.scheduler.request import ScheduleBatch
from freetoken.server_args import Config, ServerArgs
from freetoken.startup import prepare

DENSE = {
    "embedding",
    "norms",
    "attn qkv",
    "rotation",
    "attn",
    "attn out",
    "gate+up",
    "down",
    "head",
    "sampler",
    "other",
}
LINEAR = {"gdn in", "gdn step", "gdn out"}
EXPERTS = {"router", "experts", "shared expert"}
PACKED: dict[str, Any] = {
    "arch": "qwen3_5",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 3,
    "layer_pattern": "llf",
    "head_dim": 32,
    "linear_key_heads": 1,
    "linear_value_heads": 2,
    "linear_key_dim": 16,
    "linear_value_dim": 64,
    "hadamard": 128,
}
SHAPE = (2, 20)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of an architecture, made on first use."""
    made: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in made:
            folder = tmp_path_factory.mktemp(arch)
            if arch == "packed":
                made[arch] = make_tiny_model(folder / "tiny.gguf", format="gguf", quant="pq2_0", **PACKED)
            else:
                layers = 2 if arch == "qwen3" else 4
                made[arch] = make_tiny_model(folder / "tiny", arch=arch, num_layers=layers, seed=3)
        return made[arch]

    return get


def make_runner(path: Path, buckets: tuple[int, ...] = ()) -> tuple[ModelRunner, Config]:
    given = {"max_running_requests": 4, "context_length": 128, "max_total_tokens": 512}
    config, _ = prepare(ServerArgs(model_path=str(path), **given))
    config = dataclasses.replace(config, cuda_graph_bs=buckets)
    return ModelRunner(config), config


def roles_add_up(path: Path) -> None:
    """Against the ranges of the steps in the file itself."""
    events = json.loads(path.read_text())["traceEvents"]
    steps = [e["dur"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("step:")]
    read = trace.read(path)
    found = accounting.account(read)
    for number, whole in enumerate(steps):
        spent = sum(p.us for p in found.pieces if p.step == number)
        assert spent == pytest.approx(whole, rel=0.03)


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("qwen3", DENSE),
        ("qwen3_5", DENSE | LINEAR),
        ("packed", DENSE | LINEAR),
        ("qwen3_5_moe", (DENSE | LINEAR | EXPERTS) - {"gate+up", "down"}),
        ("qwen4_exp", (DENSE | LINEAR | EXPERTS | {"hyper-connections", "n-grams"}) - {"gate+up", "down", "norms"}),
    ],
)
def test_roles_add_up_to_the_step(
    models: Callable[[str], Path], tmp_path: Path, arch: str, expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tmp_path / "out", tmp_path / "figures.jsonl"
    words = ["--model-path", str(models(arch)), "--shape", "2x20", "--steps", "2", "--label", "tiny", "--kernels", "5"]
    assert (
        profile.main(
            [
                *words,
                "--chunked-prefill-size",
                "30",
                "--max-prefill-tokens",
                "30",
                "--no-roof",
                "--folder",
                str(folder),
                "--output",
                str(output),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        f"{kind}-2x20.{ending}" for kind in ("decode", "prefill") for ending in ("trace.json", "txt", "svg")
    )
    for kind in ("decode", "prefill"):
        roles_add_up(folder / f"{kind}-2x20.trace.json")
        assert (folder / f"{kind}-2x20.txt").read_text().splitlines()[0] in printed
        ET.parse(folder / f"{kind}-2x20.svg")
    found = figures.read(output)
    for what, tokens, kv in (("profile decode", 2, 2 * 26.5), ("profile prefill", 30, 30)):
        (step,) = [f for f in found if f["what"] == what]
        rows = [f for f in found if f["what"] == what + " role"]
        assert {f["role"] for f in rows} == expected <= set(roles.ROLES)
        assert sum(f["us"] for f in rows) + step["gaps_us"] == pytest.approx(step["us"], rel=1e-4)
        assert (step["model"], step["tokens"], step["kv_tokens"], step["graph"]) == ("tiny", tokens, kv, False)
        assert step["traced_us"] > 0 and step["plain_us"] > 0 and step["run_us"] >= step["traced_us"]
        assert 0 < step["accounted"] < 1.03
    # The tables of a written trace are made anew without the model.
    again = tmp_path / "again"
    assert profile.main(["--from-trace", str(folder / "decode-2x20.trace.json"), "--folder", str(again)]) == 0
    first = (folder / "decode-2x20.txt").read_text().split("\nby the clock")[0].splitlines()
    assert (again / "decode-2x20.txt").read_text().splitlines()[: len(first) - 20] == first[:-20]


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5_moe", "packed"])
def test_facts_count_all_weights(models: Callable[[str], Path], arch: str) -> None:
    runner, config = make_runner(models(arch))
    facts = facts_of(runner)
    assert sum(facts.weights.values()) == runner.model.weight_bytes
    model = config.model
    used = (facts.top_k + facts.joined) / max(facts.experts + facts.joined, 1)
    elements = sum(
        n * (used if role == "experts" else 1)
        for role, n in facts.matrices.items()
        if role not in ("embedding", "head")
    )
    assert elements == pytest.approx(roof.matrix_elements(model), rel=0.01)
    assert facts.kv_token == model.kv_bytes_per_token(4)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5", "qwen3_5_moe"])
def test_bytes_and_operations_are_those_of_the_whole_step(models: Callable[[str], Path], arch: str) -> None:
    runner, config = make_runner(models(arch))
    facts, model = facts_of(runner), config.model
    values = {"requests": 3, "tokens": 3, "sampled": 3, "read": 3 * 20}
    moved = traffic.step_bytes(facts, values)
    # One row of the embedding a token, and what the step adds to KV, come on top.
    extra = 3 * (facts.embedding_row + facts.kv_token)
    whole = roof.decode_bytes(model, requests=3, depth=20, dtype="float32", kv_dtype="float32")
    assert sum(moved.values()) - extra == pytest.approx(whole, rel=0.01)
    prompt = {"requests": 2, "tokens": 40, "sampled": 2, "read": 40, "pairs": 2 * 20 * 21 // 2}
    done = traffic.step_operations(facts, prompt)
    assert sum(done.values()) == pytest.approx(roof.prefill_flops(model, requests=2, tokens=20), rel=0.01)


class Interrupted(BatchDriver):
    """Runs every bucket outside its graph between the launch of a step and its collection."""

    def draw(self, launched: tuple[ScheduleBatch, Any]) -> None:
        graphs = self.runner.graphs
        assert graphs is not None
        with torch.inference_mode():
            for size in graphs.buckets:
                graphs.rerun(size, nullcontext())


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5"])
def test_a_run_outside_the_graph_disturbs_nobody(models: Callable[[str], Path], arch: str) -> None:
    outputs = []
    for driver in (BatchDriver, Interrupted):
        runner, config = make_runner(models(arch), (1, 2, 4))
        outputs.append(driver(runner, config, one_batch.random_ids(config, 3, 9, 1), 12).run().outputs)
    assert outputs[0] == outputs[1]
    assert len({tuple(ids) for ids in outputs[0]}) > 1


def test_marks_leave_no_trace_on_the_model(models: Callable[[str], Path]) -> None:
    runner, config = make_runner(models("qwen3_5_moe"))
    parts = [runner, runner.sampler, runner.attention, runner.model.head, *runner.model.modules()]
    before = [type(part) for part in parts]
    marks = Marks(runner)
    marks.put_on()
    assert sum(type(part) is not kind for part, kind in zip(parts, before)) > len(parts) / 2
    marked = BatchDriver(runner, config, one_batch.random_ids(config, 2, 9, 1), 8).run().outputs
    marks.remove()
    assert [type(part) for part in parts] == before
    assert BatchDriver(runner, config, one_batch.random_ids(config, 2, 9, 1), 8).run().outputs == marked
    runner.sampler = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        broken = Marks(runner)
        runner.model.layers.append(object())  # type: ignore[arg-type]
        broken.put_on()
    assert type(runner) is ModelRunner and type(runner.model.embedding) is before[4]


def test_a_session_writes_its_table_beside_the_trace(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, config = make_runner(models("qwen3"), (2,))
    path = tmp_path / "x.trace.json"
    session = Session(runner)
    session.start()
    BatchDriver(runner, config, one_batch.random_ids(config, 2, 9, 1), 8).run()
    session.stop(path)
    table, why = write_roles(path)
    assert table == tmp_path / "x.roles.json" and why == ""
    found = json.loads(table.read_text())
    assert [p["kind"] for p in found] == ["decode", "prefill"] and found[0]["values"]["bucket"] == 2
    assert {row["role"] for row in found[0]["roles"]} == DENSE
    assert "attn qkv" in (tmp_path / "x.roles.txt").read_text()
    roles_add_up(path)
    monkeypatch.setattr("freetoken.profiling.session.LARGEST_ANALYSED", 10)
    assert write_roles(path) == (
        None,
        f"the trace has {path.stat().st_size / 2**20:.0f} MiB; see python -m freetoken.bench.profile --from-trace {path}",
    )
    session = Session(runner)
    session.start()
    session.stop(tmp_path / "idle.trace.json")
    monkeypatch.undo()
    table, why = write_roles(tmp_path / "idle.trace.json")
    assert table is None and "no whole step" in why
    assert {p.name for p in tmp_path.iterdir()} == {"x.trace.json", "x.roles.json", "x.roles.txt", "idle.trace.json"}


def test_means_of_a_trace_are_of_chained_steps(models: Callable[[str], Path], tmp_path: Path) -> None:
    runner, config = make_runner(models("qwen3"))
    driver = BatchDriver(runner, config, one_batch.random_ids(config, *SHAPE, 1), 8)
    session = Session(runner)
    driver._run(driver.prefill_batches())
    session.start()
    driver._run([driver.decode_batch(index) for index in range(5)])
    session.stop(tmp_path / "t.trace.json")
    (found,) = summary.profiles(trace.read(tmp_path / "t.trace.json"))
    assert found.steps == 4 and found.values["read"] == sum(2 * (21 + n) for n in range(1, 5)) / 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2"),
        (["--shape", "8"], "--shape must be like"),
        (["--model-path", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--device", "cuda"], "--device cuda"),
        (["--from-trace", "/nowhere.json"], "cannot read /nowhere.json"),
    ],
)
def test_refusals_write_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    folder = tmp_path / "out"
    assert profile.main([*words, "--folder", str(folder), "--output", str(tmp_path / "figures.jsonl")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["--model-path", str(models("qwen3")), "--folder", str(tmp_path / "file" / "below")]
    assert profile.main(words) == 1
    assert "--folder: cannot write" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arch", "expected"),
    [("qwen3", DENSE), ("qwen3_5_moe", (DENSE | LINEAR | EXPERTS) - {"gate+up", "down"}), ("packed", DENSE | LINEAR)],
)
def test_replays_on_a_gpu_have_the_roles_of_their_reference(
    models: Callable[[str], Path], tmp_path: Path, arch: str, expected: set[str]
) -> None:
    folder, output = tmp_path / "out", tmp_path / "figures.jsonl"
    words = [
        "--model-path",
        str(models(arch)),
        "--shape",
        "2x20",
        "--steps",
        "6",
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    ]
    assert profile.main([*words, "--no-roof", "--folder", str(folder), "--output", str(output)]) == 0
    found = figures.read(output)
    (step,) = [f for f in found if f["what"] == "profile decode"]
    rows = {f["role"]: f for f in found if f["what"] == "profile decode role"}
    assert step["graph"] and step["steps"] == 6 and step["guessed"] < 0.05
    assert set(rows) == expected and all(row["us"] > 0 for row in rows.values())
    assert sum(row["us"] for row in rows.values()) + step["gaps_us"] == pytest.approx(step["us"], rel=0.03)
    # Of a tiny step, beside other tests on the same GPU, the host's clock is no measure; that of whole models is among the figures.
    assert 0 < step["accounted"] < 1.5
    # One launch of the graph, and a few around it, for all kernels of the layers.
    assert step["host_launches"] < step["launches"] / 2
    read = trace.read(folder / "decode-2x20.trace.json")
    how = [piece.how for piece in accounting.account(read).pieces]
    assert how.count(accounting.BY_REPLAY) > 0.6 * len(how)
