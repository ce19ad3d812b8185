"""Routing of tokens to experts: one kernel that chooses, two that group routes by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels import launch
from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import next_power_of_two
from freetoken.kernels.moe_route.reference import block_count

SCAN = 1024
"""Routes an expert's program looks at in one step."""


@launched
@triton.jit
def choose_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    logits_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(T,)``. Logits become integers of the same order, below them the expert counted from the end, so that each maximum
    is one expert and the lower of equals wins. Logits of 16 bits, and expert, fit a word of four bytes."""
    ROUTES: tl.constexpr = TOP_K + 1 if SHARED else TOP_K
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logit = tl.load(logits_ptr + token * logits_stride + expert, mask=expert < EXPERTS, other=float("-inf"))
    logit = logit.to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    logit = tl.where(logit == 0.0, 0.0, logit)
    highest = tl.max(logit, 0)
    STORED: tl.constexpr = logits_ptr.dtype.element_ty
    SHORT: tl.constexpr = STORED.primitive_bitwidth == 16 and BLOCK_E <= 65536
    WORD: tl.constexpr = tl.int32 if SHORT else tl.int64
    HALF: tl.constexpr = 16 if SHORT else 32
    LOWEST: tl.constexpr = -(2 ** (2 * HALF - 1))
    if SHORT:
        bits = logit.to(STORED).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = logit.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & (2 ** (HALF - 1) - 1))
    key = (ordered.to(WORD) << HALF) | (BLOCK_E - 1 - expert).to(WORD)
    key = tl.where(expert < EXPERTS, key, LOWEST)
    place = tl.arange(0, BLOCK_K)
    chosen = tl.full((BLOCK_K,), LOWEST, WORD)
    for index in tl.range(TOP_K):
        best = tl.max(key, 0)
        chosen = tl.where(place == index, best, chosen)
        key = tl.where(key == best, LOWEST, key)
    kept = place < TOP_K
    ordered = (chosen >> HALF).to(tl.int32)
    ordered = ordered ^ ((ordered >> 31) & (2 ** (HALF - 1) - 1))
    if SHORT:
        value = ordered.to(tl.int16).to(STORED, bitcast=True).to(tl.float32)
    else:
        value = ordered.to(tl.float32, bitcast=True)
    part = tl.where(kept, tl.exp(value - highest), 0.0)
    if RENORMALISE:
        total = tl.sum(part, 0)
    else:
        total = tl.sum(tl.where(expert < EXPERTS, tl.exp(logit - highest), 0.0), 0)
    ids = BLOCK_E - 1 - (chosen & (2**HALF - 1)).to(tl.int32)
    tl.store(ids_ptr + token * ROUTES + place, ids, mask=kept)
    tl.store(weights_ptr + token * ROUTES + place, part / total, mask=kept)
    if SHARED:
        gate = tl.load(logits_ptr + token * logits_stride + EXPERTS).to(tl.float32)
        tl.store(ids_ptr + token * ROUTES + TOP_K, EXPERTS)
        tl.store(weights_ptr + token * ROUTES + TOP_K, 1.0 / (1.0 + tl.exp(-gate)))


@launched
@triton.jit(do_not_specialize=["routes"])
def count_kernel(ids_ptr, counts_ptr, routes, SCAN: tl.constexpr, EARLY: tl.constexpr):
    """Grid ``(experts,)``: routes of each expert."""
    expert = tl.program_id(0)
    lane = tl.arange(0, SCAN)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    found = tl.zeros((SCAN,), tl.int32)
    for start in tl.range(0, routes, SCAN):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < routes, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@launched
@triton.jit(do_not_specialize=["routes", "blocks"])
def place_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    experts_ptr,
    routes,
    blocks,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCAN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid ``(experts,)``: each program fills its expert's blocks, in order of the routes, and shares in naming unused ones."""
    expert = tl.program_id(0)
    lane = tl.arange(0, SCAN)
    every = tl.arange(0, BLOCK_E)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    counts = tl.load(counts_ptr + every, mask=every < EXPERTS, other=0)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(every < expert, needed, 0), 0)
    mine = tl.sum(tl.where(every == expert, needed, 0), 0)
    used = tl.sum(needed, 0)
    order = order_ptr + first.to(tl.int64) * BLOCK_M
    done = tl.sum(tl.zeros((SCAN,), tl.int32), 0)
    if mine > 0:
        for start in tl.range(0, routes, SCAN):
            route = start + lane
            ids = tl.load(ids_ptr + route, mask=route < routes, other=-1)
            hit = (ids == expert).to(tl.int32)
            tl.store(order + done + tl.cumsum(hit, 0) - 1, route, mask=hit > 0)
            done += tl.sum(hit, 0)
    hole = done + tl.arange(0, BLOCK_M)
    tl.store(order + hole, tl.full((BLOCK_M,), -1, tl.int32), mask=hole < mine * BLOCK_M)
    for block in tl.range(first, first + mine):
        tl.store(experts_ptr + block, expert)
    for block in tl.range(used + expert, blocks, EXPERTS):
        tl.store(experts_ptr + block, -1)


def choose_experts(
    logits: torch.Tensor, num_experts: int, top_k: int, renormalise: bool, shared: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`freetoken.kernels.moe_route.reference.choose_experts`; columns of ``logits`` contiguous."""
    tokens = logits.shape[0]
    routes = top_k + 1 if shared else top_k
    ids = torch.empty((tokens, routes), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routes), dtype=torch.float32, device=logits.device)
    if tokens > 0:
        early = launch.early(logits)
        choose_kernel[(tokens,)](
            logits,
            ids,
            weights,
            logits.stride(0),
            EXPERTS=num_experts,
            TOP_K=top_k,
            BLOCK_E=next_power_of_two(num_experts),
            BLOCK_K=next_power_of_two(top_k),
            RENORMALISE=renormalise,
            SHARED=shared,
            EARLY=early,
            launch_pdl=early,
            num_warps=1 if num_experts <= 1024 else 4,
        )
    return ids, weights


def group_by_expert(ids: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`freetoken.kernels.moe_route.reference.group_by_expert`, for contiguous ``ids``."""
    routes = ids.numel()
    blocks = block_count(routes, num_experts, block)
    order = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    if routes > 0:
        early = launch.early(ids)
        settings = {"SCAN": SCAN, "EARLY": early, "launch_pdl": early, "num_warps": 4}
        counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        count_kernel[(num_experts,)](ids, counts, routes, **settings)
        place_kernel[(num_experts,)](
            ids,
            counts,
            order,
            experts,
            routes,
            blocks,
            EXPERTS=num_experts,
            BLOCK_E=next_power_of_two(num_experts),
            BLOCK_M=block,
            **settings,
        )
    return order, experts
