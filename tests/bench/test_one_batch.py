"""The one-batch benchmark: what it hands to the runner, what it counts, what it reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from freetoken.bench import figures, one_batch, roof, summary
from freetoken.bench.one_batch import BatchDriver, Timing
from freetoken.errors import StartupError
from freetoken.hardware import Facts
from freetoken.models.config import Fp8Config, ModelConfig, MoeConfig
from freetoken.resolve import resolve
from freetoken.scheduler.request import ScheduleBatch, StepResult
from freetoken.server_args import Config, ServerArgs

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    name="tiny",
    vocab_size=100,
    hidden_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    qk_norm=True,
)
CPU = Facts(gpu_count=0, torch_has_cuda=False, cpu_count=2, memory_bytes=2**34)


def config(**values: Any) -> Config:
    return resolve(ServerArgs(**values), CPU, MODEL, model_path="x", seed=0)


class FakeRunner:
    """Checks every batch as a runner may rely on it, and draws ``position + 1`` as the next id."""

    page_size = 4

    def __init__(self, num_pages: int = 64) -> None:
        self.num_pages = num_pages
        self.computed: dict[str, int] = {}
        self.batches: list[ScheduleBatch] = []
        self.waiting: list[ScheduleBatch] = []

    def launch(self, batch: ScheduleBatch) -> ScheduleBatch:
        self.waiting.append(batch)
        assert len(self.waiting) <= 2
        self.batches.append(batch)
        pages: set[int] = set()
        for s in batch.slices:
            known = self.computed.setdefault(s.req.rid, 0)
            assert (s.req in batch.new_rows) == (known == 0)
            assert s.start == known
            assert s.decode == (known >= s.req.prompt_len)
            assert len(s.req.pages) * self.page_size >= s.start + s.length
            assert not pages & set(s.req.pages)
            assert 0 not in s.req.pages
            pages |= set(s.req.pages)
            self.computed[s.req.rid] = s.start + s.length
            assert s.sample == (self.computed[s.req.rid] >= s.req.prompt_len)
            assert s.out_index == max(0, s.start - s.req.prompt_len + 1)
        return batch

    def collect(self, handle: ScheduleBatch) -> StepResult:
        assert self.waiting.pop(0) is handle
        return StepResult(ids=[s.start + s.length for s in handle.sampled])


@pytest.mark.parametrize(("requests", "tokens", "budget"), [(1, 1, 8), (3, 10, 8), (2, 16, 16), (4, 5, 1000)])
def test_batches_are_what_a_scheduler_would_send(requests: int, tokens: int, budget: int) -> None:
    settings = config(chunked_prefill_size=1, max_prefill_tokens=budget)
    runner: Any = FakeRunner()
    prompts = one_batch.random_ids(settings, requests, tokens, 3)
    timing = BatchDriver(runner, settings, prompts, 9).run()
    assert timing.prefill_steps == -(-requests * tokens // budget)
    assert len(runner.batches) == timing.prefill_steps + 8
    assert all(batch.num_tokens <= budget for batch in runner.batches[: timing.prefill_steps])
    assert timing.outputs == [[tokens + i for i in range(9)]] * requests
    assert timing.wall_s == pytest.approx(sum(timing.steps_s))
    assert len(timing.steps_s) == 8 - one_batch.WARMUP_STEPS - 2


@pytest.mark.parametrize("output_len", [6, 7, 12])
def test_the_last_step_is_not_timed(output_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of 5 s hold up all collections but the last."""
    driver = BatchDriver(FakeRunner(), config(), [[1]], output_len)  # type: ignore[arg-type]
    monkeypatch.setattr(
        driver, "_run", lambda batches: [*(5.0 * n for n in range(1, len(batches))), 5 * len(batches) - 4.9]
    )
    timing = driver.run()
    assert timing.step_s == 5.0 and set(timing.steps_s) == {5.0}


def test_a_batch_that_does_not_fit_is_refused() -> None:
    runner: Any = FakeRunner(num_pages=5)
    with pytest.raises(StartupError, match="--batch-size"):
        BatchDriver(runner, config(), [[1] * 10] * 2, 6)


def test_prompts_stay_below_the_sampled_vocabulary() -> None:
    settings = dataclasses.replace(config(), sample_vocab=7)
    ids = one_batch.random_ids(settings, 5, 50, 0)
    assert {token for prompt in ids for token in prompt} == set(range(7))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_bytes_against_a_list_of_tensors(tied: bool, bias: bool) -> None:
    model = dataclasses.replace(MODEL, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    layer = [(16, 8), (8, 8), (8, 8), (8, 16), (16, 8), (16, 8), (8, 16), (8,), (8,), (4,), (4,)]
    if bias:
        layer += [(16,), (8,), (8,), (8,), (16,), (16,), (8,)]
    tensors = layer * 3 + [(8,), (100, 8)]
    count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in tensors)
    assert roof.weight_bytes_read(model, requests=1, dtype="bfloat16") == 2 * count


def test_step_counts() -> None:
    weights = roof.weight_bytes_read(MODEL, requests=1, dtype="bfloat16") / 2
    got = roof.decode_bytes(MODEL, requests=2, depth=10, dtype="bfloat16", kv_dtype="float32")
    assert got == weights * 2 + 2 * 10 * (2 * 3 * 8 * 4)
    pairs = sum(position + 1 for position in range(5))
    by_hand = 2 * 5 * roof.matrix_elements(MODEL) + 3 * 4 * 4 * 4 * pairs + 2 * 100 * 8
    assert roof.prefill_flops(MODEL, requests=1, tokens=5) == by_hand
    assert roof.prefill_flops(MODEL, requests=7, tokens=5) == 7 * by_hand


def test_experts_count_by_use() -> None:
    """Two layers of four experts, two a token: a step of one token reads half of them, prompts multiply by two each."""
    moe = MoeConfig(num_experts=4, top_k=2, intermediate_size=6, norm_topk_prob=True, shared_intermediate_size=5)
    model = dataclasses.replace(MODEL, num_layers=2, moe=moe)
    dense = dataclasses.replace(MODEL, num_layers=2)
    expert, shared, router = 3 * 8 * 6, 3 * 8 * 5 + 8, 4 * 8
    mlp = 3 * 8 * 16
    for requests, used in ((1, 2.0), (2, 3.0)):
        read = roof.weight_bytes_read(model, requests=requests, dtype="bfloat16")
        plain = roof.weight_bytes_read(dense, requests=requests, dtype="bfloat16")
        assert read - plain == 2 * 2 * (used * expert + shared + router - mlp)
    assert roof.matrix_elements(model) - roof.matrix_elements(dense) == 2 * (2 * expert + shared + router - mlp)
    fp8 = dataclasses.replace(model, fp8=Fp8Config())
    less = roof.weight_bytes_read(model, requests=1, dtype="bfloat16")
    less -= roof.weight_bytes_read(fp8, requests=1, dtype="bfloat16")
    held = 2 * expert + shared - 8 + 2 * 16 * 8 + 2 * 8 * 8
    scales = 4 * (2 * 2 + 3 + 4)
    assert less == 2 * (held - scales)


def test_qwen3_8b_has_its_published_size() -> None:
    model = dataclasses.replace(
        MODEL,
        vocab_size=151936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
    )
    assert roof.weight_bytes_read(model, requests=1, dtype="bfloat16") / 2 + 151936 * 4096 == 8190735360


def test_roofs_are_measured() -> None:
    assert roof.copy_bandwidth("cpu") > 1e8
    calls: list[int] = []
    assert roof.timer("cpu")(lambda: calls.append(1), 3) >= 0
    assert len(calls) == 4


def timing(prefill: float, step: float) -> Timing:
    return Timing(prefill, 1, [step] * 4, step * 4, [[1]])


def test_figures_hold_rate_and_share() -> None:
    settings = config()
    found = one_batch.to_figures(
        [timing(0.5, 0.3), timing(0.1, 0.1), timing(0.2, 0.2)],
        settings,
        label="tiny",
        requests=4,
        input_len=16,
        output_len=8,
        roofs=(1e9, 1e12),
        graph=False,
    )
    prefill, decode = found
    assert prefill["ms"] == pytest.approx(200)
    assert prefill["tok_s"] == pytest.approx(320)
    assert decode["ms"] == pytest.approx(200)
    assert decode["tok_s"] == pytest.approx(20)
    moved = roof.decode_bytes(MODEL, requests=4, depth=20, dtype="float32", kv_dtype="float32")
    assert decode["share"] == pytest.approx(moved / 0.2 / 1e9)
    assert decode["gb"] == pytest.approx(moved / 1e9)
    assert all("%" in line for line in summary.lines(found))


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--batch-size 0", "--batch-size"),
        ("--input-len 0", "--input-len"),
        ("--output-len 2", "--output-len"),
        ("--repeats 0", "--repeats"),
        ("--shape 4x", "--shape"),
        ("--shape 0x4", "--shape"),
        ("--compare-transformers --load-format dummy", "--compare-transformers"),
    ],
)
def test_bad_flags_are_refused(line: str, flag: str) -> None:
    args = one_batch.parser().parse_args(line.split())
    with pytest.raises(StartupError, match=flag):
        one_batch.check(args)
        one_batch.shapes(args)


def test_shapes_and_sizes() -> None:
    args = one_batch.parser().parse_args(["--shape", "2x10", "8x3", "--output-len", "6", "--page-size", "4"])
    assert one_batch.shapes(args) == [(2, 10), (8, 3)]
    server = one_batch.server_args(args)
    assert (server.max_running_requests, server.context_length) == (8, 16)
    assert server.max_total_tokens == 8 * 12
    assert server.cuda_graph_bs == [2, 8] and server.state_cache_gb == 0
    args = one_batch.parser().parse_args(["--state-cache-gb", "0.5"])
    assert one_batch.server_args(args).state_cache_gb == 0.5
    args = one_batch.parser().parse_args(["--batch-size", "1", "2", "--input-len", "5", "6"])
    assert one_batch.shapes(args) == [(1, 5), (2, 5), (1, 6), (2, 6)]


def serving_figure(**values: Any) -> dict[str, Any]:
    base = {"max_concurrency": 4, "mean_input_len": 16.0, "mean_output_len": 8.0, "output_tok_s": 15.0}
    return figures.figure("serving http", model="tiny", device="cpu", **{**base, "failed": 0, **values})


def test_http_stands_beside_one_batch() -> None:
    decode = figures.figure(
        "decode one_batch", model="tiny", device="cpu", requests=4, depth=16, tokens=8, ms=200.0, tok_s=20.0
    )
    other = {**decode, "depth": 1000, "tok_s": 1.0}
    lines = summary.lines([decode, other, serving_figure(decode_tok_s=19.0)])
    assert "-5.0% against one_batch at depth 16" in lines[-1]
    alone = summary.lines([serving_figure(decode_tok_s=None, failed=3)])[0]
    assert "3 FAILED" in alone
    assert "one_batch" not in alone
