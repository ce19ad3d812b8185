"""What the machine could do at best: measured copy bandwidth and matmul rate, and the bytes and FLOPs of a model's steps.

The counts are pure arithmetic on a :class:`~freetoken.models.config.ModelConfig`; torch is imported only to measure.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from freetoken.loader.names import expected_tensors, is_scale, tensor_bytes
from freetoken.models.config import ModelConfig
from freetoken.models.registry import find
from freetoken.runner.memory import ELEMENT_BYTES, state_slot_bytes

if TYPE_CHECKING:
    import torch


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONVOLUTION = "conv1d.weight"


EXPERTS = ".mlp.experts."


def matrix_elements(model: ModelConfig) -> int:
    """Elements of all layers' weight matrices that multiply a token; embedding and head are not among them, and of the experts only
    those a token has."""
    shapes = expected_tensors(model, stacked=True)
    share = 1.0 if model.moe is None else model.moe.top_k / model.moe.num_experts
    return sum(
        round(math.prod(s) * (share if EXPERTS in name else 1.0))
        for name, s in shapes.items()
        if len(s) >= 2 and name not in (EMBEDDING, HEAD) and not name.endswith(CONVOLUTION) and not is_scale(name)
    )


def experts_read(model: ModelConfig, requests: int) -> float:
    """Share of the experts that a decode step of ``requests`` tokens reads, if each token chooses by chance."""
    if model.moe is None:
        return 1.0
    return 1.0 - (1.0 - model.moe.top_k / model.moe.num_experts) ** requests


def weight_bytes_read(model: ModelConfig, *, requests: int, dtype: str) -> float:
    """Bytes of weights read by one decode step: every matrix, norm and bias and the output head once, of the experts
    those that ``requests`` tokens use.

    The embedding table is not counted (a step reads one row a request of it), except as the output head when tied.
    """
    shapes = expected_tensors(model, stacked=True)
    unread = () if model.tie_word_embeddings else (EMBEDDING,)
    used = experts_read(model, requests)
    return sum(
        tensor_bytes(name, shape, shapes, ELEMENT_BYTES[dtype], model.packed) * (used if EXPERTS in name else 1.0)
        for name, shape in shapes.items()
        if name not in unread
    )


def kv_bytes_read(model: ModelConfig, depth: float, element_bytes: int) -> float:
    """Bytes of K and V, and of index keys, that one query at the end of ``depth`` tokens reads over all layers."""
    indexer = model.indexer
    seen, index = depth, 0.0
    if indexer is not None and depth > indexer.visible:
        seen, index = indexer.visible, depth / indexer.ratio * indexer.head_dim
    return model.num_attention_layers * (2 * seen * model.kv_size + index) * element_bytes


def pairs_seen(model: ModelConfig, tokens: int) -> float:
    """Pairs of query and key in a prompt of ``tokens``: the lower triangle, behind an indexer cut off at what a query sees."""
    limit = tokens if model.indexer is None else min(tokens, model.indexer.visible)
    return limit * (limit + 1) / 2 + (tokens - limit) * limit


def decode_bytes(model: ModelConfig, *, requests: int, depth: float, dtype: str, kv_dtype: str) -> float:
    """Bytes one decode step must move: the weights it uses once, K and V of ``requests`` sequences of ``depth`` tokens (behind an indexer
    those of the tokens that are seen, and the keys of all blocks), and their recurrent state, which is read and written."""
    kv = requests * kv_bytes_read(model, depth, ELEMENT_BYTES[kv_dtype])
    states = 2 * requests * state_slot_bytes(find(model.architecture).state_specs(model), dtype)
    return weight_bytes_read(model, requests=requests, dtype=dtype) + kv + states


def prefill_flops(model: ModelConfig, *, requests: int, tokens: int) -> float:
    """Multiply-adds times two of a prefill of ``requests`` prompts of ``tokens`` each, from position 0.

    Layer matrices on every token (of experts those it has), causal attention (q·k and p·v for the pairs that are seen), the delta rule token by token (three
    products of state and vector), the output head on one row a request.
    """
    matrices = 2 * matrix_elements(model) * requests * tokens
    attention = model.num_attention_layers * 4 * model.q_size * requests * pairs_seen(model, tokens)
    rule = 0
    if model.linear_attention is not None:
        rule = 6 * model.num_linear_layers * model.linear_attention.value_size * model.linear_attention.key_head_dim
    return matrices + attention + rule * requests * tokens + 2 * requests * model.vocab_size * model.hidden_size


def timer(device: str) -> Callable[[Callable[[], object], int], float]:
    """``measure(fn, repeats)``: median seconds of one call, by CUDA events on a GPU, by the clock elsewhere."""

    def on_cuda(fn: Callable[[], object], repeats: int) -> float:
        import torch

        fn()
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            fn()
            mark.record()
        torch.cuda.synchronize()
        milliseconds: float = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
        return milliseconds / 1000

    def on_cpu(fn: Callable[[], object], repeats: int) -> float:
        fn()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    return on_cuda if device == "cuda" else on_cpu


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy within the device's memory, reads and writes both counted."""
    import torch

    size = 2**31 if device == "cuda" else 2**28
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = timer(device)(lambda: target.copy_(source), 20 if device == "cuda" else 5)
    return 2 * size / seconds


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOPs a second of a square product of random matrices: 8192 wide on a GPU, 2048 on the CPU."""
    import torch

    width = 8192 if device == "cuda" else 2048
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = timer(device)(lambda: torch.mm(a, b, out=out), 20 if device == "cuda" else 3)
    return 2 * width**3 / seconds


def measure(device: str, dtype: str) -> tuple[float, float]:
    """``(bytes a second, FLOPs a second)`` of this machine now; its buffers are freed before it returns."""
    import torch

    result = copy_bandwidth(device), matmul_rate(device, getattr(torch, dtype))
    if device == "cuda":
        torch.cuda.empty_cache()
    return result
