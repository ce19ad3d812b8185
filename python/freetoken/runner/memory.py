"""Byte arithmetic: how much one page, one step and one table cost, and how many pages fit (torch-free and pure)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from freetoken.errors import StartupError
from freetoken.loader.names import expected_tensors
from freetoken.models.config import ModelConfig

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30
# A KV cache below this many tokens would refuse ordinary prompts, so the start says what is missing instead.
MIN_TOKENS = 128


@dataclass(frozen=True)
class MemoryPlan:
    """What fits. Bytes throughout; ``num_pages`` includes the padding page 0; ``reason`` says what set the limit."""

    num_pages: int
    page_size: int
    kv_bytes: int
    weight_bytes: int
    step_bytes: int
    available_bytes: int
    reason: str

    @property
    def num_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    def public(self) -> dict[str, object]:
        return {**asdict(self), "num_tokens": self.num_tokens}


def gib(count: int) -> str:
    """Bytes as a short text in GiB."""
    return f"{count / GIB:.2f} GiB"


def step_bytes(model: ModelConfig, *, dtype: str, prefill_tokens: int, rows: int, page_table_entries: int) -> int:
    """Upper estimate of the temporary bytes of one step.

    Counts the widest moment of a layer (residual, normed input, merged gate/up and its product, or merged qkv, q and
    attention output) for ``prefill_tokens`` tokens, four fp32 copies of the sampled logits, and the page table.
    """
    element = ELEMENT_BYTES[dtype]
    widest = max(3 * model.intermediate_size, 2 * (model.q_size + model.kv_size) + model.q_size)
    tokens = (4 * model.hidden_size + widest) * element * prefill_tokens
    return tokens + 4 * 4 * rows * model.vocab_size + 4 * page_table_entries


def check_model_fits(
    model: ModelConfig, *, dtype: str, rows: int, page_table_entries: int, free_bytes: int, total_bytes: int
) -> None:
    """Before anything is allocated: :class:`StartupError` when weights in ``dtype``, the token counts of ``rows`` running
    requests (2 bytes an id) and the page table (4 bytes an entry) exceed ``free_bytes`` of the device's ``total_bytes``.
    """
    weights = sum(math.prod(shape) for shape in expected_tensors(model).values()) * ELEMENT_BYTES[dtype]
    state = 2 * rows * model.vocab_size + 4 * page_table_entries
    if weights + state <= free_bytes:
        return
    advice = "lower --max-running-requests or --context-length"
    if weights > free_bytes:
        smaller = "--dtype bfloat16 or " if ELEMENT_BYTES[dtype] > 2 else ""
        advice = f"use {smaller}a smaller model"
    raise StartupError(
        f"too little memory: the weights need {gib(weights)} in {dtype} and the state of {rows} running requests "
        f"{gib(state)}, but {gib(free_bytes)} of {gib(total_bytes)} is free; {advice}"
    )


def plan_memory(
    model: ModelConfig,
    *,
    kv_dtype: str,
    page_size: int,
    context_length: int,
    max_total_tokens: int | None,
    total_bytes: int,
    free_bytes: int,
    fraction: float,
    weight_bytes: int,
    step_bytes: int,
    cap_tokens: int | None = None,
) -> MemoryPlan:
    """Decide the number of KV pages after the weights are loaded.

    ``total_bytes`` and ``free_bytes`` describe the device now. Everything used so far counts against ``fraction`` of the
    total; ``step_bytes`` is kept back for one step. ``max_total_tokens`` is the operator's wish, ``cap_tokens`` a default
    limit that is not worth exceeding. Raises :class:`StartupError` when too little is left, saying what is needed, what
    is there and which flag helps.
    """
    page_bytes = model.kv_bytes_per_token(ELEMENT_BYTES[kv_dtype]) * page_size
    used = total_bytes - free_bytes
    available = int(total_bytes * fraction) - used - step_bytes
    fits = max(available, 0) // page_bytes - 1
    reason = f"{fraction:.0%} of {gib(total_bytes)} less {gib(used)} in use and {gib(step_bytes)} for a step"
    if max_total_tokens is not None:
        wanted = -(-max_total_tokens // page_size)
        if wanted > fits:
            raise StartupError(
                f"--max-total-tokens {max_total_tokens} needs {gib((wanted + 1) * page_bytes)} of KV cache, but {gib(max(available, 0))} "
                f"is there ({reason}); lower it, or raise --mem-fraction-static"
            )
        pages, reason = wanted, "--max-total-tokens"
    else:
        pages = fits
        if cap_tokens is not None and pages * page_size > cap_tokens:
            pages, reason = -(-cap_tokens // page_size), "enough for every running request at its full context"
    if pages * page_size < min(MIN_TOKENS, context_length):
        if max_total_tokens is not None:
            return _plan(pages, page_size, page_bytes, weight_bytes, step_bytes, available, reason)
        need = used + step_bytes + (-(-MIN_TOKENS // page_size) + 1) * page_bytes
        raise StartupError(
            f"too little memory for a KV cache: {gib(need)} is needed in all, but --mem-fraction-static {fraction:g} allows "
            f"{gib(int(total_bytes * fraction))} of {gib(total_bytes)}; raise it, or lower --max-prefill-tokens or --max-running-requests"
        )
    return _plan(pages, page_size, page_bytes, weight_bytes, step_bytes, available, reason)


def _plan(
    pages: int, page_size: int, page_bytes: int, weights: int, step: int, available: int, reason: str
) -> MemoryPlan:
    return MemoryPlan(
        num_pages=pages + 1,
        page_size=page_size,
        kv_bytes=(pages + 1) * page_bytes,
        weight_bytes=weights,
        step_bytes=step,
        available_bytes=max(available, 0),
        reason=reason,
    )
