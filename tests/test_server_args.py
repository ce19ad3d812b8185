"""Flags and ``resolve()``: pure, every derived value has a reason, every refusal is one sentence that names the flag."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.errors import StartupError
from freetoken.hardware import Facts
from freetoken.models.config import ModelConfig
from freetoken.resolve import graph_buckets, resolve
from freetoken.server_args import Config, ServerArgs, model_overrides, parse

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    name="tiny",
    vocab_size=1000,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
CPU = Facts(gpu_count=0, torch_has_cuda=False, cpu_count=2, memory_bytes=2**34)
GPU = Facts(gpu_count=1, torch_has_cuda=True, cpu_count=16, memory_bytes=2**37)
BLIND = Facts(gpu_count=1, torch_has_cuda=False, cpu_count=16, memory_bytes=2**37)


def settle(facts: Facts = CPU, **values: Any) -> Config:
    return resolve(ServerArgs(**values), facts, MODEL, model_path="folder", seed=7)


def refused(facts: Facts = CPU, **values: Any) -> str:
    with pytest.raises(StartupError) as caught:
        settle(facts, **values)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "gpu"])
def test_resolve_is_pure(facts: Facts) -> None:
    args = ServerArgs(cuda_graph_bs=[8, 1])
    before = dataclasses.asdict(args)
    first = resolve(args, facts, MODEL, model_path="folder", seed=7)
    assert resolve(args, facts, MODEL, model_path="folder", seed=7) == first
    assert dataclasses.asdict(args) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.device = "cuda"  # type: ignore[misc]


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "gpu"])
def test_nothing_is_left_undecided_and_reasons_name_fields(facts: Facts) -> None:
    config = settle(facts)
    for field in dataclasses.fields(config):
        # The loader decides the format when it sees the files, the server the parsers when it sees the chat template, the runner
        # where tables go when it sees the memory.
        late = ("load_format", "reasoning_parser", "tool_call_parser", "ple_table")
        assert getattr(config, field.name) != "auto" or field.name in late, field.name
    known = {field.name for field in dataclasses.fields(config)} | {"cuda_graph_max_bs"}
    assert set(config.reasons) <= known
    assert {"device", "dtype", "attention_backend", "context_length", "max_running_requests"} <= set(config.reasons)
    assert all(reason for reason in config.reasons.values())


def test_a_given_value_has_no_reason_and_is_kept() -> None:
    config = settle(GPU, dtype="float16", max_running_requests=3, context_length=100, random_seed=5)
    assert (config.dtype, config.max_running_requests, config.context_length, config.random_seed) == (
        "float16",
        3,
        100,
        5,
    )
    assert not {"dtype", "max_running_requests", "context_length", "random_seed"} & set(config.reasons)


def test_defaults_differ_by_device() -> None:
    cpu, gpu = settle(CPU), settle(GPU)
    assert (cpu.device, cpu.dtype, cpu.attention_backend, cpu.cuda_graph_bs, cpu.overlap) == (
        "cpu",
        "float32",
        "torch",
        (),
        False,
    )
    assert (gpu.device, gpu.dtype, gpu.attention_backend, gpu.overlap) == ("cuda", "bfloat16", "triton", True)
    assert gpu.cuda_graph_bs[0] == 1
    assert gpu.cuda_graph_bs[-1] == min(256, gpu.max_running_requests)
    assert cpu.random_seed == 7


def test_device_reasons() -> None:
    assert "no NVIDIA GPU" in refused(CPU, device="cuda")
    assert "no CUDA" in refused(BLIND, device="cuda")
    assert settle(BLIND).device == "cpu"
    assert settle(GPU, device="cpu").device == "cpu"
    assert "--attention-backend" in refused(CPU, attention_backend="triton")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("max_queued_requests", 0),
        ("max_request_bytes", 0),
        ("stream_interval", 0),
        ("decode_log_interval", -1),
        ("context_length", 0),
        ("context_length", 4097),
        ("max_total_tokens", 0),
        ("max_running_requests", 0),
        ("max_queued_tokens", 0),
        ("chunked_prefill_size", 0),
        ("max_prefill_tokens", -3),
        ("cuda_graph_max_bs", 0),
        ("cuda_graph_bs", [0]),
        ("cuda_graph_bs", [1, 5000]),
        ("page_size", 0),
        ("page_size", 3),
        ("page_size", 512),
        ("mem_fraction_static", 0.0),
        ("mem_fraction_static", 1.0),
        ("mem_fraction_static", float("nan")),
        ("tp_size", 0),
        ("tp_size", 2),
        ("dtype", "float8"),
        ("device", "tpu"),
        ("load_format", "pickle"),
        ("schedule_policy", "random"),
        ("api_key", ""),
        ("tool_call_parser", "pythonic"),
        ("reasoning_parser", "r1"),
        ("attention_backend", "magic"),
        ("log_level", "loud"),
        ("kv_cache_dtype", "int8"),
    ],
)
def test_bad_values_name_the_flag(name: str, value: Any) -> None:
    for facts in (CPU, GPU):
        assert "--" + name.replace("_", "-") in refused(facts, **{name: value})


def test_budgets_hold_together() -> None:
    config = settle(GPU, chunked_prefill_size=4096, max_prefill_tokens=100)
    assert config.max_prefill_tokens >= config.chunked_prefill_size == 4096
    assert settle(GPU).max_queued_tokens == max(16 * 4096, 2**21)


def test_graph_choices() -> None:
    assert settle(GPU, disable_cuda_graph=True).cuda_graph_bs == ()
    assert settle(GPU, cuda_graph_bs=[4, 1, 4]).cuda_graph_bs == (1, 4)
    assert settle(GPU, cuda_graph_max_bs=5).cuda_graph_bs == (1, 2, 4, 5)
    assert settle(GPU, max_running_requests=3).cuda_graph_bs == (1, 2, 3)


@given(st.integers(1, 600))
def test_graph_buckets(largest: int) -> None:
    buckets = graph_buckets(largest)
    assert buckets[-1] == largest
    assert list(buckets) == sorted(set(buckets))
    for size in range(1, largest + 1):
        bucket = next(b for b in buckets if b >= size)
        assert bucket - size < max(8, 1) and (size > 4 or bucket <= max(4, size))


def test_sampled_vocabulary_is_the_smaller() -> None:
    for size, expected in ((None, 1000), (900, 900), (1200, 1000)):
        config = resolve(ServerArgs(), CPU, MODEL, model_path="p", seed=1, tokenizer_size=size)
        assert config.sample_vocab == expected


def test_the_key_is_not_published() -> None:
    config = settle(api_key="secret")
    public = config.public()
    assert "secret" not in json.dumps(public)
    assert public["api_key"] == "set"
    assert settle().public()["api_key"] is None


def test_command_line_round_trip() -> None:
    args = parse(
        [
            "--model",
            "m",
            "--port",
            "1",
            "--dtype",
            "float16",
            "--cuda-graph-bs",
            "1",
            "8",
            "--tp",
            "1",
            "--disable-radix-cache",
            "--no-enable-metrics",
        ]
    )
    assert (args.model_path, args.port, args.dtype, args.cuda_graph_bs) == ("m", 1, "float16", [1, 8])
    assert args.disable_radix_cache is True
    assert args.enable_metrics is False
    assert parse([]) == ServerArgs()
    assert parse(["--model-path", "m"]) == parse(["--model", "m"])


@pytest.mark.parametrize("line", ["--port x", "--unknown 1", "--dtype int4", "--cuda-graph-bs"])
def test_a_bad_command_line_exits_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(line.split())
    assert caught.value.code == 2
    assert line.split()[0] in capsys.readouterr().err


def test_keyword_arguments_are_checked_by_name() -> None:
    assert ServerArgs.from_dict({"page_size": 8}).page_size == 8
    with pytest.raises(StartupError, match="page_sise"):
        ServerArgs.from_dict({"page_sise": 8})


@pytest.mark.parametrize("text", ["{", "[1]", "3", "nope"])
def test_model_overrides_must_be_an_object(text: str) -> None:
    with pytest.raises(StartupError, match="--json-model-override-args"):
        model_overrides(ServerArgs(json_model_override_args=text))
    assert model_overrides(ServerArgs(json_model_override_args='{"a": 1}')) == {"a": 1}


def test_flags_are_documented() -> None:
    fields = dataclasses.fields(ServerArgs)
    for field in fields:
        assert field.metadata["help"].endswith("."), field.name
    assert len(fields) <= 55


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "80"),
        ("port", True),
        ("page_size", 4.0),
        ("dtype", None),
        ("cuda_graph_bs", 8),
        ("cuda_graph_bs", ["8"]),
    ],
)
def test_keywords_of_a_wrong_type_name_the_argument(name: str, value: object) -> None:
    with pytest.raises(StartupError, match=f"^argument '{name}' must be (a|text|true)"):
        ServerArgs.from_dict({name: value})


def test_keywords_of_the_right_type() -> None:
    args = ServerArgs.from_dict({"mem_fraction_static": 1, "cuda_graph_bs": (1, 2), "max_total_tokens": None})
    assert (args.mem_fraction_static, args.cuda_graph_bs, args.max_total_tokens) == (1, (1, 2), None)


def test_overrides_are_kept_for_the_loader() -> None:
    assert settle(CPU, json_model_override_args='{"num_hidden_layers": 2}').model_overrides == {"num_hidden_layers": 2}
    assert settle(CPU).model_overrides == {}


def test_state_cache() -> None:
    assert (settle(CPU).state_cache_bytes, settle(CPU).state_checkpoint_interval) == (2**34 // 10, 2048)
    assert "tenth" in settle(CPU).reasons["state_cache_bytes"]
    given = settle(CPU, state_cache_gb=1.5, state_checkpoint_interval=100, page_size=32)
    assert (given.state_cache_bytes, given.state_checkpoint_interval) == (1_500_000_000, 96)
    assert settle(CPU, state_cache_gb=0).state_cache_bytes == 0
    assert settle(CPU, state_checkpoint_interval=5, page_size=16).state_checkpoint_interval == 16
    for wrong in (-1.0, float("nan"), float("inf")):
        assert "--state-cache-gb" in refused(CPU, state_cache_gb=wrong)
    assert "--state-checkpoint-interval" in refused(CPU, state_checkpoint_interval=0)


def test_the_hard_watchdog_is_for_gpus_unless_asked_for() -> None:
    assert (settle(GPU).watchdog_timeout, settle(CPU).watchdog_timeout) == (300.0, 0.0)
    assert (
        settle(CPU, watchdog_timeout=5).watchdog_timeout == 5 and settle(GPU, watchdog_timeout=0).watchdog_timeout == 0
    )
    for name in ("watchdog_timeout", "soft_watchdog_timeout"):
        for value in (-1.0, float("nan")):
            assert f"--{name.replace('_', '-')}" in refused(**{name: value})


@pytest.mark.parametrize("origin", ["*", "null", "http://localhost:3000", "https://a.example"])
def test_origins(origin: str) -> None:
    assert settle(cors_allow_origins=[origin]).cors_allow_origins == (origin,)


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://a.example, https://b.example", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    assert "--cors-allow-origins" in refused(cors_allow_origins=[origin])
