"""Runners on random weights of small models, and a scheduler that drives them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from freetoken.hardware import probe
from freetoken.messages import AddRequest
from freetoken.runner.model_runner import ModelRunner
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler.scheduler import Scheduler
from freetoken.server_args import Config, ServerArgs
from freetoken.startup import configure, open_model

GPU = probe().usable_gpu
DEVICE, DTYPE = ("cuda", "bfloat16") if GPU else ("cpu", "float32")
GEOMETRY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "vocab_size": 999,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


QWEN3_8B_LAYERS: dict[str, object] = {
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}


# Two layers of linear attention with a state each, one of gated attention.
HYBRID: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# The same with weights of 2 bits, rotated.
PACKED: dict[str, object] = {**HYBRID, "quantization_config": {"quant_method": "pq2", "hadamard_block": 128}}
QWEN3_5_27B_LAYERS: dict[str, object] = {
    **HYBRID,
    "hidden_size": 5120,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
}


PACKED_27B_LAYERS = {**QWEN3_5_27B_LAYERS, "quantization_config": {"quant_method": "pq2"}}


def make_config(
    folder: Path, buckets: tuple[int, ...], geometry: dict[str, object] | None = None, **changes: object
) -> Config:
    (folder / "config.json").write_text(json.dumps({**GEOMETRY, **(geometry or {})}))
    args = ServerArgs(
        model_path=str(folder),
        load_format="dummy",
        device=DEVICE,
        dtype=DTYPE,
        max_running_requests=24,
        max_total_tokens=4096,
        random_seed=5,
        disable_cuda_graph=True,
    )
    config = configure(args, open_model(args))
    return dataclasses.replace(config, cuda_graph_bs=buckets, **changes)


def generate(runner: ModelRunner, config: Config, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return generate_with(Scheduler(config, runner, check_invariants=True), prompts, tokens)


def generate_with(scheduler: Scheduler, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    for index, ids in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        scheduler.add(AddRequest(str(index), ids, sampling))
    found: list[list[int]] = [[] for _ in prompts]
    while scheduler.has_work:
        for output in scheduler.step():
            assert output.finish is None or output.finish.kind == "length", output.finish
            found[int(output.rid)].extend(output.ids)
    return found


def prompts_of(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 999, rng.integers(1, 70)).tolist() for _ in range(count)]


TINY: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 96}
EXPERTS: dict[str, object] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODEL_SIZES: dict[str, dict[str, object]] = {
    "llama": {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": TINY,
    "qwen3_moe": {**TINY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **EXPERTS},
    "qwen3_5": {**HYBRID, **TINY},
    "qwen3_5_moe": {
        **HYBRID,
        **TINY,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **EXPERTS,
        "shared_expert_intermediate_size": 64,
    },
}
"""A small geometry for each served class."""
