"""The real file: weights against transformers' loading of it, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from freetoken.loader.checkpoint import open_checkpoint
from freetoken.loader.stream import stream_tensors


def test_description(smollm2: str) -> None:
    checkpoint = open_checkpoint(smollm2)
    model = checkpoint.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert (model.intermediate_size, model.vocab_size, model.max_position_embeddings) == (1536, 49152, 8192)
    assert (model.rope_theta, model.rms_norm_eps, model.rope_scaling) == (1e5, 1e-5, None)
    assert model.tie_word_embeddings and model.eos_token_ids == (2, 0) and model.bos_token_id == 1
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"


@pytest.mark.slow
def test_weights_equal_transformers(smollm2: str) -> None:
    path = Path(smollm2)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    names = set()
    for name, tensor in stream_tensors(open_checkpoint(path), torch.float32):
        assert torch.equal(tensor, oracle[name]), name
        names.add(name)
    assert set(oracle) - names == {"lm_head.weight"}


def test_streaming_holds_one_tensor_at_a_time(smollm2: str) -> None:
    """Peak memory grows by far less than the 540 MB that the weights take in float32."""
    code = (
        "import resource, sys, torch\n"
        "from freetoken.loader.checkpoint import open_checkpoint\n"
        "from freetoken.loader.stream import stream_tensors\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "total = sum(t.numel() for _, t in stream_tensors(open_checkpoint(sys.argv[1]), torch.float32))\n"
        "print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, smollm2], env=environment, capture_output=True, text=True, check=True
    )
    total, grown_kib = map(int, done.stdout.split())
    assert total == 134_515_008
    # The largest tensor (the embedding, 113 MB), the mapped file (98 MB) and some chunks.
    assert grown_kib < 300 * 1024
