"""Capture and replay on the CPU: a dense and a hybrid model, right and wrong implementations, captures of something else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from freetoken.bench import figures, recorder, replay, replay_arm, replay_rows, replay_store
from freetoken.bench.recorder import Recorder, layout, placed, same_bits
from freetoken.errors import StartupError
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.silu_mul import SiluMul
from freetoken.runner import model_runner

DENSE: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
HYBRID = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PACKED = HYBRID | {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "quantization_config": {"quant_method": "pq2", "group_size": 128, "hadamard_block": 128, "sign_mode": "explicit"},
}
GEOMETRIES = {"dense": DENSE, "hybrid": HYBRID, "packed": PACKED}
COMMON = {"rms_norm", "rope_kv", "small_gemm", "silu_mul", "sample", "attention"}
OPS = {"dense": COMMON, "hybrid": COMMON | {"gdn_conv", "gdn_decode", "gdn_prefill"}}
OPS["packed"] = {"small_gemm", "rope_kv", "sample", "attention", "gdn_conv", "gdn_decode", "gdn_prefill"} | {
    "hadamard",
    "pq2_gemv",
    "pq2_gemm",
}


def flags(folder: Path, **changes: str) -> list[str]:
    values = {
        "model-path": str(folder),
        "load-format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "random-seed": "5",
    }
    return [part for name, value in (values | changes).items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module", autouse=True)
def _room() -> Iterator[None]:
    """Memory as on a machine on which nothing else runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model_runner.psutil, "virtual_memory", lambda: SimpleNamespace(available=15 << 30, total=16 << 30)
        )
        yield


@pytest.fixture(scope="module", params=sorted(GEOMETRIES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def captured(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model's folder and the capture of a prompt step and two decode steps of two requests."""
    folder = tmp_path_factory.mktemp(kind)
    (folder / "config.json").write_text(json.dumps(GEOMETRIES[kind]))
    out = folder / "capture"
    steps = ["--positions", "0", "3", "--prefill", "--batch-size", "2", "--input-len", "17", "--temperature", "0.8"]
    assert replay.main(["capture", str(out), *flags(folder), *steps]) == 0
    return folder, out


def rerun(out: Path, *more: str) -> int:
    return replay.main(["run", str(out), "--device", "cpu", *more])


def test_what_was_recorded_is_made_again_bit_for_bit(
    kind: str, captured: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = captured
    # The host form of small products takes the way that is faster here, which may round otherwise.
    assert rerun(out, "--impl", "reference", "--exact", "--ops", *sorted(OPS[kind] - {"small_gemm"})) == 0
    assert rerun(out, "--impl", "reference", "--ops", "small_gemm") == 0
    said = capsys.readouterr().out
    assert {line.split()[0] for line in said.splitlines()} == OPS[kind]
    assert said.count("all agree") == len(OPS[kind])


def test_steps_layers_and_links_are_what_they_should_be(kind: str, captured: tuple[Path, Path]) -> None:
    found = replay_store.Capture(captured[1])
    assert list(dict.fromkeys(call.step for call in found.calls)) == ["prefill-0", "decode-0", "decode-3"]
    assert {call.layer for call in found.calls} == {-1, 0, 1}
    for call in found.calls:
        if call.op_name == "rope_kv":
            assert set(call.after) == {"k_pool", "v_pool"}
    if kind == "packed":
        # Quantised activations and two-bit weights are made of several tensors.
        products = [call for call in found.calls if call.op_name == "pq2_gemv"]
        assert all("p" in call.inputs["weight"]["f"]["codes"] for call in products)
        assert any(
            "l" in call.inputs["activation"]["f"]["values"] for call in products if "f" in call.inputs["activation"]
        )
        return
    gates = [call for call in found.calls if call.method == "linear_silu_mul"]
    assert len(gates) == 3 * 2
    downs = [c for c in found.calls if c.inputs.get("x", {}).get("l") in {gate.name for gate in gates}]
    assert [call.layer for call in downs] == [gate.layer for gate in gates]
    # Parameters are named, never stored.
    assert all("p" in call.inputs["weight"] for call in found.calls if call.op_name in ("rms_norm", "small_gemm"))
    assert gates[0].inputs["weight"]["p"] == "model.layers.0.mlp.gate_proj.weight:0"


def test_a_configuration_reads_the_same_in_every_process() -> None:
    @dataclasses.dataclass(frozen=True)
    class Model:
        name: str
        rotated: frozenset[str]
        signs: bytes

    names = [f"layer {i}" for i in range(40)]
    texts = {
        replay_store.describe(Model(n, frozenset(order), b"\x01")) for n, order in (("a", names), ("b", names[::-1]))
    }
    assert len(texts) == 1 and '"rotated": ["layer 0", "layer 1", "layer 10"' in texts.pop()


@pytest.mark.parametrize("kind", ["dense"], indirect=True)
def test_timed_pairs_become_figures(captured: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    arguments = ["--impl", "host", "--versus", "reference", "--ops", "small_gemm", "--layers", "1", "--pairs", "2"]
    assert rerun(captured[1], *arguments, "--output", str(output), "--label", "tiny") == 0
    (figure,) = figures.read(output)
    assert (figure["what"], figure["impl"], figure["versus"]) == ("replay small_gemm", "host", "reference")
    assert figure["calls"] == 12 and figure["graph"] is False and figure["us"] > 0 and figure["model"] == "tiny"


def test_of_attention_the_pages_in_use_are_kept(kind: str, captured: tuple[Path, Path]) -> None:
    found = replay_store.Capture(captured[1])
    calls = [found.fill(call) for call in found.calls if call.op_name == "attention"]
    assert {call.step for call in calls} == {"prefill-0", "decode-0", "decode-3"}
    for call in calls:
        # Two requests of 17 tokens, and up to 21 with those that were drawn: two pages of 16 each.
        assert call.tensors["in.k"].shape[0] == call.tensors["in.v"].shape[0] == 4
        assert call.tensors["in.fb.page_table"][:, :2].tolist() == [[1, 2], [3, 4]]
    if kind != "packed":  # whose heads of 64 would take the interpreter longer
        assert rerun(captured[1], "--impl", "triton", "--ops", "attention") == 0


@pytest.mark.parametrize("kind", ["dense"], indirect=True)
@pytest.mark.parametrize(
    ("impl", "op", "said"),
    [
        ("Norm", "rms_norm", "layer 0/rms_norm.__call__.0: the output differs by relative RMS 0.001, bound 1e-05"),
        ("Forgetful", "rope_kv", "rope_kv.__call__.0: v_pool differs by relative RMS 1"),
        ("Backwards", "attention", "layer 0/attention.forward.0: the output differs by relative RMS"),
        ("Ragged", "rms_norm", "the output is torch.float32 [33, 64], recorded was torch.float32 [34, 64]"),
    ],
)
def test_a_wrong_implementation_is_reported_and_not_timed(
    impl: str, op: str, said: str, captured: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "figures.jsonl"
    arguments = ["--impl", f"bench.replay_wrong:{impl}", "--versus", "reference", "--ops", op, "--output", str(output)]
    assert rerun(captured[1], *arguments) == 1
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.startswith("error: bench.replay_wrong")
    assert "differ" in printed.out and not output.exists()


@pytest.mark.parametrize("kind", ["dense"], indirect=True)
def test_linked_inputs_carry_an_error_on(captured: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--impl", "bench.replay_wrong:Gate", "--ops", "small_gemm"]
    assert rerun(captured[1], *arguments) == 1
    assert "6 differ" in capsys.readouterr().out
    assert rerun(captured[1], *arguments, "--linked") == 1
    assert "12 differ" in capsys.readouterr().out
    assert rerun(captured[1], *arguments, "--linked", "--bound", "0.01") == 0
    for bound in ("nan", "-1", "inf"):
        assert rerun(captured[1], *arguments, "--bound", bound) == 1


@pytest.mark.parametrize("kind", ["dense"], indirect=True)
def test_captures_of_something_else_are_refused(
    captured: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = captured
    description = json.loads((out / replay_store.DESCRIPTION).read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(DENSE | {"intermediate_size": 112}))
    said = {
        "another configuration": ["--model-path", str(other)],
        "other weights": ["--random-seed", "6"],
        "a model in float32, not bfloat16": ["--dtype", "bfloat16"],
    }
    for text, changes in said.items():
        assert rerun(out, "--impl", "reference", *changes) == 1
        assert text in capsys.readouterr().err
    older = tmp_path / "older"
    older.mkdir()
    description["fingerprint"]["version"] = "0.0.1"
    (older / replay_store.DESCRIPTION).write_text(json.dumps(description))
    assert rerun(older, "--impl", "reference") == 1
    assert "another version of freetoken (0.0.1, this is " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["dense"], indirect=True)
def test_a_capture_of_which_parts_were_exchanged_is_refused(
    captured: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(captured[1], tmp_path / "damaged")
    steps = sorted(out.glob("*.safetensors"))
    shutil.copy(steps[0], steps[-1])
    assert rerun(out, "--impl", "reference") == 1
    error = capsys.readouterr().err
    assert "holds no tensor" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file or directory"), ("[]", "does not describe one"), ("{", "does not describe one"),
     ('{"format": 0}', "another form")],
)  # fmt: skip
def test_what_is_no_capture_is_refused(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / replay_store.DESCRIPTION).write_text(content)
    assert rerun(tmp_path, "--impl", "reference") == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--positions"], "nothing to record"),
        (["--layers", "2"], "--layers 2: the model's layers are 0 to 1"),
        (["--positions", "-1"], "--positions must be at least 0"),
        (["--ops", "gdn_decode"], "no call of these ops"),
    ],
)
def test_a_capture_that_cannot_be_leaves_nothing(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert replay.main(["capture", str(tmp_path / "out"), *flags(tmp_path), *more]) == 1
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_an_existing_place_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert replay.main(["capture", str(tmp_path), *flags(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "impl", "said"),
    [
        ("rms_norm", "host", "rms_norm has no implementation host; it has reference, triton, sgl_kernel"),
        ("rms_norm", "sgl_kernel", "sgl_kernel needs an NVIDIA GPU"),
        ("rms_norm", "bench.replay_wrong:Nothing", "no implementation bench.replay_wrong:Nothing"),
        ("rms_norm", "no.such:Thing", "no implementation no.such:Thing"),
    ],
)
def test_implementations_that_cannot_be_had(name: str, impl: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        replay_rows.build(name, impl, "cpu")


def test_classes_are_as_they_were_after_a_recording() -> None:
    def methods() -> dict[str, list[object]]:
        return {
            name: [getattr(owner, method) for owner in row.load_recorded() for method in row.methods]
            for name, row in replay_rows.ROWS.items()
        }

    before = methods()
    with pytest.raises(ZeroDivisionError), Recorder(list(replay_rows.ROWS)):
        assert all(ours != theirs for pair in zip(methods().values(), before.values()) for ours, theirs in zip(*pair))
        1 / 0  # noqa: B018
    assert methods() == before


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[:, 3:7],
        lambda x: x.t(),
        lambda x: x[1:1],
        lambda x: x[2, 3],
        lambda x: x[:1].expand(4, 8),
    ],
)
def test_strides_are_kept(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.randn(5, 8))
    made = placed(tensor.contiguous(), layout(tensor), torch.device("cpu"))
    assert made.stride() == tensor.stride() and torch.equal(made, tensor)


def test_links_end_where_a_value_was_changed() -> None:
    act = SiluMul(Choice("silu_mul", "", "reference", "test"))
    with Recorder(["silu_mul"]) as record:
        record.begin("s")
        first = act(torch.randn(3, 16))
        act(first[:, 2:6])
        first.add_(1)
        act(first)
        calls = record.end()
        act(first)
    linked = calls[1].inputs["gate_up"]
    assert (linked["l"], linked["path"], linked["offset"], linked["stride"]) == (calls[0].name, "out", 2, [8, 1])
    assert "t" in calls[2].inputs["gate_up"] and len(calls) == 3


def test_a_value_that_cannot_be_recorded_is_named() -> None:
    act = SiluMul(Choice("silu_mul", "", "reference", "test"))
    with (
        Recorder(["silu_mul"]) as record,
        pytest.raises(StartupError, match=r"silu_mul.__call__.0: in.gate_up is of type set"),
    ):
        record.begin("s")
        act({1})


def test_differences() -> None:
    one = torch.tensor([1.0, -float("inf"), float("nan")])
    assert replay_arm.difference("x", one.clone(), one, 1e-5) == (0.0, None)
    _, clause = replay_arm.difference("x", torch.tensor([1.0, 2.0, float("nan")]), one, 1e-5)
    assert clause == "x is not finite in other places than the recorded one"
    _, clause = replay_arm.difference("x", torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]), 0.5)
    assert clause == "x differs in 1 of 3 values"
    _, clause = replay_arm.difference("x", None, one, 0.5)
    assert clause is not None and clause.startswith("x is NoneType")
    assert same_bits(one, one.clone()) and not same_bits(one, one.double())
    assert recorder.extent((2, 3), (10, 1)) == 13 and recorder.extent((2, 0), (10, 1)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_on_a_gpu_fused_kernels_are_replayed_and_timed_in_graphs(geometry: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEOMETRIES[geometry]))
    out, output = tmp_path / "capture", tmp_path / "figures.jsonl"
    values = flags(tmp_path, device="cuda", dtype="bfloat16")
    assert replay.main(["capture", str(out), *values, "--positions", "0", "3", "--input-len", "9"]) == 0
    ops = ["--ops", "rms_norm", "rope_kv", "small_gemm", "silu_mul", "attention"] + ["gdn_decode"] * (
        geometry == "hybrid"
    )
    arguments = ["--impl", "triton", "--versus", "triton", *ops, "--pairs", "3", "--output", str(output)]
    assert replay.main(["run", str(out), "--device", "cuda", *arguments]) == 0
    assert all(figure["graph"] for figure in figures.read(output))
    assert replay.main(["run", str(out), "--device", "cuda", "--impl", "reference"]) == 0
