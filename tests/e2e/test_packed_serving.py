"""Tiny packed, rotated GGUF files served whole: token for token against transformers with the float weights that they mean."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import TinyModel, make_tiny_model
from oracle import Oracle
from rig import Answer, Rig
from tiny_spec import hf_config
from ways import BUCKETS, WAYS, check, random_prompts, serve_all_ways

from e2e.servers import Server
from freetoken import Engine
from freetoken.kernels import pq2_gemv
from gguf_oracle import hf_model

GROUP = "FREETOKEN_PQ2_ACTIVATION_GROUP"
HYBRID: dict[str, Any] = {
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
    "gdn_v_grouped": True,
    "mtp": 1,
    "extra_vocab": 3,
}
DENSE: dict[str, Any] = {"arch": "qwen3", "hidden_size": 128, "head_dim": 32, "hadamard": 64, "tied": True}


class PackedOracle(Oracle):
    """transformers with the weights that a packed file means."""

    def __init__(self, path: Path, spec: TinyModel, sample_vocab: int) -> None:
        self.model = hf_model(path, spec)
        self.sample_vocab = sample_vocab


@pytest.fixture(scope="module")
def floats() -> Iterator[None]:
    """Activations are not quantised, so that transformers' tokens are ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GROUP, "0")
        yield


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hybrid") / "tiny.gguf", format="gguf", quant="pq2_0", **HYBRID)


@pytest.fixture(scope="module")
def oracle(hybrid: Path) -> Oracle:
    return PackedOracle(hybrid, TinyModel(**HYBRID), 384)


@pytest.mark.parametrize("way", ["arrivals", "chunks of 7", "graphs, overlap", "retraction"])
def test_greedy_is_the_same_in_every_way(way: str, floats: None, hybrid: Path, oracle: Oracle) -> None:
    rig = serve_all_ways(hybrid, random_prompts(12), WAYS[way].every, **WAYS[way].options)
    assert WAYS[way].happened(rig)
    check(oracle, list(rig.answers.values()))


def test_prefix_hits(floats: None, hybrid: Path, oracle: Oracle) -> None:
    rig = Rig(hybrid, page_size=4, cuda_graph_bs=BUCKETS, overlap=True, chunked_prefill_size=50)
    base = [(7 * index + 3) % 384 for index in range(150)]
    (first,) = rig.serve([base], max_new_tokens=12, logprobs=1)
    again = [rig.serve([prompt], max_new_tokens=12, logprobs=1)[0] for prompt in (base, base + first.ids)]
    assert all(answer.cached_tokens >= 140 for answer in again)
    check(oracle, [first, *again])


def test_a_dense_model(floats: None, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny.gguf", format="gguf", quant="ptq1_0", **DENSE)
    rig = serve_all_ways(path, random_prompts(6), chunked_prefill_size=16)
    check(PackedOracle(path, TinyModel(**DENSE), 384), list(rig.answers.values()))


def test_8_bits_in_every_way(hybrid: Path) -> None:
    """Quantised activations differ by what rounding makes of sums in another order, however the work is cut."""
    prompt = [(7 * index + 3) % 384 for index in range(100)]
    found: list[Answer] = []
    for options in ({}, {"chunked_prefill_size": 7}, {"overlap": True, "cuda_graph_bs": BUCKETS}):
        rig = Rig(hybrid, **options)
        found += rig.serve([prompt], max_new_tokens=8, logprobs=1)
        found += rig.serve([prompt], max_new_tokens=8, logprobs=1)
        assert found[-1].cached_tokens > 90
        found += rig.serve([prompt, prompt[:50]], max_new_tokens=8, logprobs=1)[:1]
    firsts = torch.tensor([answer.logprobs[0].top_logprobs[0] for answer in found if answer.logprobs])
    assert len(firsts) == 9 and float(firsts.max() - firsts.min()) < 0.05
    assert all(math.isfinite(entry.logprob) for answer in found for entry in answer.logprobs or [])


def test_engine_on_a_file(hybrid: Path) -> None:
    """Text in and text out, twice the same, with the tokenizer and the weights of one file."""
    with Engine(hybrid, device="cpu", max_total_tokens=512, context_length=300, random_seed=1) as engine:
        prompts = ["The quick brown fox jumps over", "def add(left, right):"]
        wishes = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}
        first, second = (engine.generate(prompts, wishes) for _ in range(2))
        assert [a["output_ids"] for a in first] == [b["output_ids"] for b in second]
        assert all(a["meta_info"]["completion_tokens"] == 12 and a["text"] for a in first)


def test_random_packed_weights_of_a_config(tmp_path: Path) -> None:
    """``--load-format dummy`` on a folder whose config asks for 2 bits, and on one that is told to."""
    config = hf_config(TinyModel(**HYBRID), 384)
    asked = {"quantization_config": {"quant_method": "pq2", "hadamard_block": 64}}
    for values, override in ((config | asked, {}), (config, asked)):
        (tmp_path / "config.json").write_text(json.dumps(values))
        rig = Rig(tmp_path, load_format="dummy", json_model_override_args=json.dumps(override))
        assert rig.config.model.packed is not None and len(rig.config.model.packed.rotated) == 21
        assert rig.config.public()["model"]["packed"]["block"] == 64
        answers = rig.serve(random_prompts(2), max_new_tokens=6, logprobs=0)
        assert all(len(answer.ids) == 6 for answer in answers)


def test_a_server_on_a_file(hybrid: Path) -> None:
    """Over HTTP: a chat, and what the server says of its weights."""
    with Server("--model-path", str(hybrid), "--max-total-tokens", "2048", "--context-length", "1024") as server:
        packed = server.info()["args"]["model"]["packed"]
        assert packed == {"matrices": 21, "groups": [128], "rotated": 21, "block": 128}
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Count to ten. " * 40}],
            "max_tokens": 8,
            "ignore_eos": True,
        }
        answers = [server.post("/v1/chat/completions", **body, temperature=0) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        first, second = (answer.json()["choices"][0]["message"]["content"] for answer in answers)
        assert first == second and server.metric("freetoken:cached_tokens_total") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["1", "check", "0"])
def test_a_gpu_stays_near_transformers(
    kernels: str, hybrid: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of what a GPU generates, prompt and output, by fused kernels, checked ones, and references."""
    for name in ("FUSED_HADAMARD", "PQ2_FUSED_GEMV", "PQ2_SINGLE_GEMV", "PQ2_FUSED_GEMM"):
        monkeypatch.setenv(f"FREETOKEN_{name}", kernels)
    pq2_gemv._product.cache_clear()
    prompts = [*random_prompts(3), [(7 * index + 3) % 384 for index in range(150)]]
    wish = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12, "return_logprob": True, "prompt_logprobs": 0}
    flags = {"dtype": "bfloat16", "max_total_tokens": 1024, "context_length": 512, "disable_cuda_graph": kernels != "1"}
    with Engine(hybrid, device="cuda", **flags) as engine:
        answers = engine.generate(input_ids=prompts, sampling_params=wish)
    pq2_gemv._product.cache_clear()
    for prompt, answer in zip(prompts, answers):
        ids = prompt + answer["output_ids"]
        wanted = next(iter(oracle.logits([ids]))).log_softmax(-1)
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        there = wanted[len(prompt) - 1 : -1].gather(1, torch.tensor(answer["output_ids"])[:, None]).squeeze(1)
        assert float((torch.tensor(found) - there).abs().mean()) < 0.1
