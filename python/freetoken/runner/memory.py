"""Byte arithmetic: how much one page, one state, one step and one table cost, and how many fit (torch-free and pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from freetoken.errors import StartupError
from freetoken.loader.names import weight_bytes
from freetoken.models.config import ModelConfig
from freetoken.models.ple_config import BLOCK_TOKENS
from freetoken.models.state import StateSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}
GIB = 2**30
# A KV cache below this many tokens would refuse ordinary prompts, so the start says what is missing instead.
MIN_TOKENS = 128
# States on their way to the host: a step that ends more prompts than this waits for the first of its copies.
STAGED_STATES = 4
# What states may take of the memory that weights and a step leave; the rest is for KV.
STATE_SHARE = 0.5
# Tokens that experts take at once; more go through them in slices.
MOE_SLICE_TOKENS = 8192

# What tables of n-gram embeddings may take of the GPU memory that weights leave, and of the host's, when nothing was asked for.
TABLE_SHARE, HOST_SHARE = 0.5, 0.85
# Per token and value head of a chunked delta rule: two matrices of a chunk's width.
GDN_CHUNK = 64
# Float32 copies of the residual streams of a block of tokens that n-gram embeddings hold at once.
PLE_BLOCK_COPIES = 8


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
    state_bytes: int = 0

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
    attention output, or what linear attention projects, convolves and makes of a chunk) for ``prefill_tokens`` tokens, or of its experts, four fp32
    copies of the sampled logits, the largest FP8 matrix of a dense layer in ``dtype``, and the page table.
    """
    element = ELEMENT_BYTES[dtype]
    gate = 2 * model.q_size if model.attn_output_gate else 0
    widest = max(3 * model.intermediate_size, 2 * (model.q_size + model.kv_size) + model.q_size + gate)
    linear = model.linear_attention
    if linear is not None:
        chunk = 2 * GDN_CHUNK * linear.num_value_heads
        widest = max(widest, linear.projected + linear.channels + 2 * linear.value_size + chunk)
    layer = max(widest * element * prefill_tokens, _expert_bytes(model, element, prefill_tokens))
    tokens = 4 * model.hidden_size * element * prefill_tokens + layer
    if model.ple is not None:
        # Looked-up rows, keys and value, gated and normed streams and the rows of the convolution; float32 copies of a block.
        ple = model.ple
        wide = ple.embed_dim + ple.hidden_size + 4 * ple.channels
        tokens += wide * element * prefill_tokens + PLE_BLOCK_COPIES * ple.channels * 4 * min(
            BLOCK_TOKENS, prefill_tokens
        )
    tokens += _indexer_bytes(model, element, prefill_tokens)
    matrix = 0 if model.fp8 is None else max(2 * model.intermediate_size, widest) * model.hidden_size * element
    return tokens + matrix + 4 * 4 * rows * model.vocab_size + 4 * page_table_entries


def _indexer_bytes(model: ModelConfig, element: int, tokens: int) -> int:
    """Temporary bytes of attention over selected tokens: of a piece, scores and listed tokens, or K and V of one text with scores of a
    part of its queries and of their blocks; of decodes, what they gather at a time with its float32 copy. Nothing where a text cannot
    be longer than what is always seen."""
    indexer = model.indexer
    if indexer is None or model.max_position_embeddings <= indexer.visible:
        return 0
    blocks = model.max_position_embeddings // indexer.ratio + 1
    # A float32 score, and two words for each token of a list.
    listed = 12 * min(indexer.score_elements, max(tokens, 1) * indexer.ratio * blocks)
    text = 2 * model.max_position_embeddings * model.kv_size * element
    piece = indexer.mask_elements * (2 * 4 * model.num_heads + 4 * (indexer.num_heads + 8) // indexer.ratio)
    return max(listed, text + piece, indexer.gather_elements * (element + 8))


def _expert_bytes(model: ModelConfig, element: int, tokens: int) -> int:
    """Temporary bytes of a layer of experts: activations and outputs of every route of a slice, and for each token the router's
    logits, the shared expert and the output."""
    moe = model.moe
    if moe is None:
        return 0
    routes = min(tokens, MOE_SLICE_TOKENS) * (moe.top_k + 1)
    alone = moe.num_experts + 3 * moe.shared_intermediate_size + 2 * model.hidden_size
    return (routes * (moe.intermediate_size + model.hidden_size) + tokens * alone) * element + 16 * routes


def check_model_fits(
    model: ModelConfig,
    *,
    dtype: str,
    rows: int,
    page_table_entries: int,
    free_bytes: int,
    total_bytes: int,
    positions: int = 0,
) -> None:
    """Before anything is allocated: :class:`StartupError` when weights (packed, or in ``dtype``), the token counts of ``rows`` running
    requests (2 bytes an id), the page table (4 bytes an entry) and the rotary table of ``positions`` exceed ``free_bytes`` of the
    device's ``total_bytes``.
    """
    weights = weight_bytes(model, ELEMENT_BYTES[dtype])
    state = 2 * rows * model.vocab_size + 4 * page_table_entries
    rotary = 4 * positions * (model.rotary_dim or model.head_dim)
    if weights + state <= free_bytes < weights + state + rotary:
        raise StartupError(
            f"too little memory: beside {gib(weights + state)} for the weights and the running requests, the rotary table of "
            f"{positions} positions needs {gib(rotary)}, but {gib(free_bytes)} of {gib(total_bytes)} is free; lower --context-length"
        )
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


@dataclass(frozen=True)
class StatePlan:
    """Room for per-request state: ``rows`` requests of ``slot_bytes`` each, in all ``device_bytes`` with the padding slot and those
    on their way to the host. ``reason`` says what set the number of rows; ``limited`` that it is below what was asked for.
    """

    rows: int
    slot_bytes: int
    device_bytes: int
    reason: str
    limited: bool = False

    def blocks(self, cache_bytes: int, num_pages: int) -> int:
        """Copies that ``cache_bytes`` of the host hold; no more than there are pages where one could be of use."""
        return min(cache_bytes // self.slot_bytes, num_pages - 1) if self.slot_bytes else 0


def state_slot_bytes(specs: Sequence[StateSpec], dtype: str) -> int:
    """Bytes of all state of one request."""
    return sum(spec.elements * ELEMENT_BYTES[spec.dtype or dtype] for spec in specs)


def plan_states(
    specs: Sequence[StateSpec],
    *,
    dtype: str,
    rows: int,
    staged: bool,
    total_bytes: int,
    free_bytes: int,
    fraction: float,
    step_bytes: int,
) -> StatePlan:
    """Decide how many of the ``rows`` requests asked for can run at once after the weights are loaded.

    Each needs a slot, and one more is for padding; with ``staged`` up to :data:`STAGED_STATES` more are on their way to the host.
    They take at most :data:`STATE_SHARE` of what ``fraction`` of the device leaves (see :func:`plan_memory`), but for one
    request all of it. Raises :class:`StartupError` when not even one fits.
    """
    slot = state_slot_bytes(specs, dtype)
    if not slot:
        return StatePlan(rows, 0, 0, "--max-running-requests")

    def cost(count: int) -> int:
        return slot * (count + 1 + (min(STAGED_STATES, count) if staged else 0))

    available = max(int(total_bytes * fraction) - (total_bytes - free_bytes) - step_bytes, 0)
    budget = int(available * STATE_SHARE)
    fits = rows
    if cost(rows) > budget:
        spare = cost(STAGED_STATES) - STAGED_STATES * slot
        fits = max(min(rows, (budget - spare) // slot), 1)
        while fits > 1 and cost(fits) > budget:
            fits -= 1
    if cost(fits) > available:
        raise StartupError(
            f"too little memory for the recurrent state of one request: {gib(cost(1))} is needed, but --mem-fraction-static "
            f"{fraction:g} leaves {gib(available)} of {gib(total_bytes)}; raise it, or lower --max-prefill-tokens"
        )
    if fits == rows:
        return StatePlan(rows, slot, cost(rows), "--max-running-requests")
    reason = f"{gib(slot)} of state a request and {gib(available)} for state and KV, of which at most {STATE_SHARE:.0%} for state"
    return StatePlan(fits, slot, cost(fits), reason, limited=True)


@dataclass(frozen=True)
class TablePlan:
    """Where the tables of n-gram embeddings are held: ``kind`` is ``gpu``, ``pinned`` or ``mmap``; ``reason`` says why."""

    kind: str
    reason: str


def plan_tables(
    asked: str,
    nbytes: int,
    *,
    on_disk: bool,
    device: str,
    total_bytes: int,
    free_bytes: int,
    fraction: float,
    host_bytes: int,
) -> TablePlan:
    """Decide for tables of ``nbytes`` in all, once the weights are loaded and before anything else is sized.

    ``asked`` is ``auto`` or a kind. ``total_bytes`` and ``free_bytes`` describe the device, ``fraction`` of which may be used;
    ``host_bytes`` are available on the host. On the GPU they may take :data:`TABLE_SHARE` of what is left there, in page-locked
    memory :data:`HOST_SHARE` of the host's; on the CPU both are the same memory. Without files (``on_disk`` false, random weights)
    nothing can be mapped. :class:`StartupError` when what was asked for does not fit.
    """
    left = max(int(total_bytes * fraction) - (total_bytes - free_bytes), 0)
    room = {"gpu": left, "pinned": int(host_bytes * HOST_SHARE)}
    place = {
        "gpu": "left on the GPU" if device == "cuda" else "left of the memory",
        "pinned": "may be page-locked on the host",
    }
    if asked == "mmap":
        if not on_disk:
            raise StartupError("--ple-table mmap: random weights have no file to map")
        return TablePlan("mmap", "--ple-table mmap")
    if asked != "auto":
        if nbytes > room[asked]:
            raise StartupError(
                f"--ple-table {asked}: the n-gram tables need {gib(nbytes)}, but {gib(room[asked])} {place[asked]}; use "
                f"{'pinned or ' if asked == 'gpu' and device == 'cuda' else ''}mmap"
            )
        return TablePlan(asked, f"--ple-table {asked}")
    limit = int(left * TABLE_SHARE)
    if nbytes <= limit:
        return TablePlan(
            "gpu", f"{gib(nbytes)} of tables are at most {TABLE_SHARE:.0%} of the {gib(left)} {place['gpu']}"
        )
    if device == "cuda" and nbytes <= room["pinned"]:
        return TablePlan(
            "pinned",
            f"{gib(nbytes)} of tables are above {TABLE_SHARE:.0%} of the {gib(left)} {place['gpu']}; the host has room",
        )
    if not on_disk:
        raise StartupError(f"random n-gram tables need {gib(nbytes)}, but {gib(room['pinned'])} {place['pinned']}")
    return TablePlan(
        "mmap",
        f"{gib(nbytes)} of tables fit neither the {gib(left)} {place['gpu']} nor the {gib(host_bytes)} of the host",
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
    state_bytes: int = 0,
    cap_tokens: int | None = None,
) -> MemoryPlan:
    """Decide the number of KV pages after the weights are loaded.

    ``total_bytes`` and ``free_bytes`` describe the device now. Everything used so far counts against ``fraction`` of the
    total; ``step_bytes`` is kept back for one step and ``state_bytes`` for per-request state. ``max_total_tokens`` is the operator's wish, ``cap_tokens`` a default
    limit that is not worth exceeding. Raises :class:`StartupError` when too little is left, saying what is needed, what
    is there and which flag helps.
    """
    page_bytes = model.kv_bytes_per_token(ELEMENT_BYTES[kv_dtype]) * page_size
    used = total_bytes - free_bytes
    available = int(total_bytes * fraction) - used - step_bytes - state_bytes
    fits = max(available, 0) // page_bytes - 1
    states = f", {gib(state_bytes)} for states" if state_bytes else ""
    reason = f"{fraction:.0%} of {gib(total_bytes)} less {gib(used)} in use{states} and {gib(step_bytes)} for a step"
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
            return _plan(pages, page_size, page_bytes, weight_bytes, step_bytes, state_bytes, available, reason)
        need = used + step_bytes + state_bytes + (-(-MIN_TOKENS // page_size) + 1) * page_bytes
        raise StartupError(
            f"too little memory for a KV cache: {gib(need)} is needed in all, but --mem-fraction-static {fraction:g} allows "
            f"{gib(int(total_bytes * fraction))} of {gib(total_bytes)}; raise it, or lower --max-prefill-tokens or --max-running-requests"
        )
    return _plan(pages, page_size, page_bytes, weight_bytes, step_bytes, state_bytes, available, reason)


def _plan(
    pages: int, page_size: int, page_bytes: int, weights: int, step: int, states: int, available: int, reason: str
) -> MemoryPlan:
    return MemoryPlan(
        num_pages=pages + 1,
        page_size=page_size,
        kv_bytes=(pages + 1) * page_bytes,
        weight_bytes=weights,
        step_bytes=step,
        available_bytes=max(available, 0),
        reason=reason,
        state_bytes=states,
    )
