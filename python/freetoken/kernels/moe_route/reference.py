"""Routing of tokens to experts in plain torch: the specification of the fused kernels."""

from __future__ import annotations

import torch


def choose_experts(
    logits: torch.Tensor, num_experts: int, top_k: int, renormalise: bool, shared: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their weights, from ``logits [T, num_experts or more]`` (further columns are not the router's).

    Returns ``ids [T, top_k]`` int32, largest logit first and the lower expert first among equals, and ``weights [T, top_k]``
    float32: the softmax over all experts, divided by its sum over the chosen where ``renormalise`` is set. A logit that is
    no number counts as minus infinity. With ``shared`` every token has expert ``num_experts`` besides, in a last column, weighted by the
    sigmoid of its logit.
    """
    wide = logits[:, :num_experts].float()
    wide = torch.where(wide.isnan(), float("-inf"), wide)
    values, ids = wide.sort(dim=1, descending=True, stable=True)
    parts = (values[:, :top_k] - values[:, :1]).exp()
    total = parts if renormalise else (wide - values[:, :1]).exp()
    ids, weights = ids[:, :top_k].to(torch.int32), parts / total.sum(1, keepdim=True)
    if shared:
        ids = torch.cat((ids, torch.full_like(ids[:, :1], num_experts)), 1)
        weights = torch.cat((weights, logits[:, num_experts : num_experts + 1].float().sigmoid()), 1)
    return ids, weights


def block_count(routes: int, num_experts: int, block: int) -> int:
    """Blocks that are enough however ``routes`` fall on the experts: each expert in use leaves at most ``block - 1`` places."""
    return (routes + min(routes, num_experts) * (block - 1)) // block


def group_by_expert(ids: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes in order of their experts, each expert's from the start of a block.

    ``ids [T, K]`` int32; a negative one belongs to nobody and is left out. Returns ``order [blocks * block]`` int32, the flat
    index of a route in ``ids`` or -1 on a place without one, and ``experts [blocks]`` int32, -1 for blocks that are not
    needed (whose ``order`` means nothing). ``blocks`` is :func:`block_count`. Reads nothing on the host.
    """
    flat, device = ids.reshape(-1).long(), ids.device
    blocks = block_count(flat.numel(), num_experts, block)
    known = torch.where(flat < 0, num_experts, flat)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, known, torch.ones_like(known))
    needed = (counts[:num_experts] + block - 1) // block
    ends = needed.cumsum(0)
    experts = torch.searchsorted(ends, torch.arange(blocks, device=device), right=True)
    experts = torch.where(experts == num_experts, -1, experts).to(torch.int32)
    sorted_ids, routes = known.sort(stable=True)
    first_route = counts.cumsum(0) - counts
    first_place = torch.cat((ends - needed, ends[-1:])) * block
    places = first_place[sorted_ids] + torch.arange(flat.numel(), device=device) - first_route[sorted_ids]
    order = torch.full((blocks * block + 1,), -1, dtype=torch.int32, device=device)
    order.scatter_(0, torch.where(sorted_ids < num_experts, places, blocks * block), routes.to(torch.int32))
    return order[:-1], experts
