"""Filtering and drawing in torch, on any device: the specification of the fused kernels.

Every filter keeps a prefix of the ids ordered by (scaled logit descending, id ascending), so the kept set of a row is two
numbers: the lowest kept logit, and the highest id kept among those equal to it. Probability mass is counted in integers,
units of ``2**-40`` of the most likely id's weight, so that sums do not depend on the order of adding.

The draw is Gumbel-max in two levels: first a tile of ``TILE`` neighbouring ids by its log-sum-exp, then an id inside it;
each level adds the noise of its own counters. That is an exact draw from the kept distribution, and costs one exponential
an id and ``V / TILE + TILE`` random numbers a row.
"""

from __future__ import annotations

import numpy as np
import torch

from freetoken.kernels.sample.hashing import TILE_DOMAIN, exponential, hash_words, signed32
from freetoken.kernels.sample.params import SampleParams

TILE = 1024
MASS_ONE = 2.0**40
"""Integer mass of an id as likely as the most likely one."""
LARGEST = torch.finfo(torch.float32).max
NEGLIGIBLE = -80.0
"""Exponents are held above this: exp(-80) vanishes beside 1 in float32, while exp of -inf or to a denormal is slow on a CPU."""
CPU_PREFIXES = (64, 1024)
"""On a CPU, filters first look at this many of the largest values before they sort all of them."""


def scaled_tiles(logits: torch.Tensor, sample_vocab: int, inv_temperature: torch.Tensor | None) -> torch.Tensor:
    """``logits [S, V]`` times ``inv_temperature [S]`` -> ``[S, tiles * TILE] float32``.

    NaN becomes ``-inf``, ``+inf`` the largest float; ids from ``sample_vocab`` on and the padding are ``-inf``.
    """
    rows = logits.shape[0]
    width = -(-sample_vocab // TILE) * TILE
    scaled = torch.empty(rows, width, dtype=torch.float32, device=logits.device)
    scaled[:, sample_vocab:] = float("-inf")
    inside = scaled[:, :sample_vocab]
    if inv_temperature is None:
        inside.copy_(logits[:, :sample_vocab])
    else:
        torch.mul(logits[:, :sample_vocab], inv_temperature[:, None], out=inside)
    return scaled.nan_to_num_(nan=float("-inf"), posinf=LARGEST, neginf=float("-inf"))


def first_argmax(values: torch.Tensor) -> torch.Tensor:
    """``values [S, N]`` without NaN -> ``[S] int64``, the lowest index of each row's maximum."""
    index = torch.arange(values.shape[1], device=values.device)
    best = values.amax(-1, keepdim=True)
    return torch.where(values == best, index, values.shape[1]).amin(-1)


def tile_of(scaled: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """The values of one tile a row: ``scaled [S, tiles * TILE]``, ``tile [S]`` -> ``[S, TILE]``."""
    tiles = scaled.unflatten(1, (-1, TILE))
    return torch.gather(tiles, 1, tile[:, None, None].expand(-1, 1, TILE)).squeeze(1)


def argmax_tiles(scaled: torch.Tensor) -> torch.Tensor:
    """The lowest id of each row's maximum: ``scaled [S, tiles * TILE]`` -> ``[S] int64``."""
    tile = first_argmax(scaled.unflatten(1, (-1, TILE)).amax(-1))
    return tile * TILE + first_argmax(tile_of(scaled, tile))


def argmax_ids(logits: torch.Tensor, sample_vocab: int) -> torch.Tensor:
    """Greedy ids, ties to the lower id: ``logits [S, V]`` -> ``[S] int64``."""
    return argmax_tiles(scaled_tiles(logits, sample_vocab, None))


def masses(values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Integer weights, ``exp(values - top) * 2**40`` rounded down: ``values [S, N]``, ``top [S, 1]`` -> ``[S, N] int64``."""
    return torch.sub(values, top).clamp_(min=NEGLIGIBLE).exp_().mul_(MASS_ONE).to(torch.int64)


def row_top(scaled: torch.Tensor) -> torch.Tensor:
    """Each row's maximum, finite even where every value is ``-inf``: ``[S, N]`` -> ``[S, 1]``."""
    return scaled.amax(-1, keepdim=True).clamp_(min=-LARGEST)


def _kept_count(
    scaled: torch.Tensor, ordered: torch.Tensor, limit: torch.Tensor, top_p: torch.Tensor | None, total: bool
) -> torch.Tensor:
    """Ids each row keeps under top-k (``limit [S, 1] int64``), then top-p (``[S, 1]``) -> ``[S, 1] int64``.

    ``ordered [S, N]`` holds the row's N largest values in descending order; ``total`` says that some row keeps mass beyond
    them before top-p. A count above N says that the N do not suffice.
    """
    if top_p is None:
        return limit
    size, top = ordered.shape[1], row_top(ordered)
    sums = masses(ordered, top).cumsum_(-1)
    whole = sums.gather(1, limit.clamp(max=size) - 1)
    if total:
        whole = torch.where(limit <= size, whole, masses(scaled, top).sum(-1, keepdim=True))
    target = (top_p.double() * whole.double()).ceil_().to(torch.int64).clamp_(min=1)
    nucleus = (sums < target).sum(-1, keepdim=True) + 1
    exact = (limit <= size) | (limit >= scaled.shape[1])
    return torch.where(top_p < 1.0, torch.where(exact, torch.minimum(nucleus, limit), limit), limit)


def _descending(scaled: torch.Tensor, size: int) -> torch.Tensor:
    if size < scaled.shape[1]:
        return scaled.topk(size, dim=-1).values
    if scaled.device.type == "cpu":
        # numpy sorts float32 with vector instructions, several times faster than torch.
        return torch.from_numpy(np.sort(scaled.numpy(), axis=-1)).flip(-1)
    return scaled.sort(dim=-1, descending=True).values


def _last_equal(scaled: torch.Tensor, lowest: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The id of the ``wanted [S, 1]``-th value equal to ``lowest [S, 1]``: as many positions have seen fewer of them."""
    seen = (scaled == lowest).cumsum(-1, dtype=torch.int32)
    return (seen < wanted).sum(-1, keepdim=True)


def _thresholds_on_device(scaled: torch.Tensor, params: SampleParams) -> tuple[torch.Tensor, torch.Tensor]:
    width = scaled.shape[1]
    size = params.max_top_k if params.all_top_k and params.max_top_k * 8 <= width else width
    limit = params.top_k.to(torch.int64)[:, None].clamp(max=width)
    ordered = _descending(scaled, size)
    count = _kept_count(scaled, ordered, limit, params.top_p[:, None] if params.has_top_p else None, False)
    lowest = ordered.gather(1, count - 1)
    above = (ordered > lowest).sum(-1, keepdim=True)
    return lowest, _last_equal(scaled, lowest, count - above)


def _thresholds_on_host(scaled: torch.Tensor, params: SampleParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As on a device, but looks at the data: only rows with a filter, and no more of their order than they turn out to
    need. Integer mass makes both ways keep the same ids."""
    rows, width = scaled.shape
    limit = params.top_k.to(torch.int64)[:, None].clamp(max=width)
    lowest = scaled.new_full((rows, 1), float("-inf"))
    last: torch.Tensor | None = None
    pending = ((limit < width) | (params.top_p[:, None] < 1.0)).squeeze(1).nonzero().squeeze(1)
    for size in (*(n for n in CPU_PREFIXES if n < width), width):
        able = ((limit[pending] < size) | (limit[pending] == width) & (params.top_p[pending, None] < 1.0)).squeeze(1)
        ready = pending if size == width else pending[able]
        if not len(ready):
            continue
        part = scaled if len(ready) == rows else scaled[ready]
        ordered = _descending(part, size)
        top_p = params.top_p[ready, None] if params.has_top_p else None
        count = _kept_count(part, ordered, limit[ready], top_p, bool((limit[ready] > size).any()))
        enough = (count < size).squeeze(1) if size < width else torch.ones(len(ready), dtype=torch.bool)
        ready, count, ordered = ready[enough], count[enough], ordered[enough]
        bottom = ordered.gather(1, count - 1)
        lowest[ready] = bottom
        cut = (
            ((count < width) & (ordered.gather(1, count.clamp(max=size - 1)) == bottom)).squeeze(1).nonzero().squeeze(1)
        )
        if len(cut):
            last = torch.full((rows, 1), width) if last is None else last
            wanted = count[cut] - (ordered[cut] > bottom[cut]).sum(-1, keepdim=True)
            last[ready[cut]] = _last_equal(scaled[ready[cut]], bottom[cut], wanted)
        pending = pending[~torch.isin(pending, ready)]
    return lowest, last


def thresholds(scaled: torch.Tensor, params: SampleParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kept set under top-k and top-p of each row of ``scaled [S, N]``.

    Returns ``(lowest [S, 1] float32, last [S, 1] int64)``: ids above ``lowest`` are kept, and those equal to it up to the id
    ``last`` (``None``: all of them).
    """
    if scaled.device.type == "cpu":
        return _thresholds_on_host(scaled, params)
    return _thresholds_on_device(scaled, params)


def apply_filters(scaled: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Set every value that top-k, top-p and min-p drop to ``-inf``, in place; rows without a filter keep theirs."""
    floor, last = None, None
    if params.has_top_k or params.has_top_p:
        floor, last = thresholds(scaled, params)
    if last is not None:
        index = torch.arange(scaled.shape[1], device=scaled.device)
        scaled.masked_fill_((scaled == floor) & (index > last), float("-inf"))
    if params.has_min_p:
        likely = row_top(scaled) + params.log_min_p[:, None]
        floor = likely if floor is None else torch.maximum(floor, likely)
    return scaled if floor is None else scaled.masked_fill_(scaled < floor, float("-inf"))


def _noisy(scores: torch.Tensor, key: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    return scores - torch.log(exponential(hash_words(key[:, :, None], counters)))


def draw_ids(scaled: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """One id a row from ``softmax(scaled)``: ``scaled [S, tiles * TILE]``, ``key [2, S] int32`` -> ``[S] int64``."""
    tiles = scaled.unflatten(1, (-1, TILE))
    top = tiles.amax(-1, keepdim=True).clamp_(min=-LARGEST)
    weight = torch.sub(tiles, top).clamp_(min=NEGLIGIBLE).exp_().sum(-1)
    scores = torch.log(weight).add_(top.squeeze(-1))
    counters = torch.arange(tiles.shape[1], dtype=torch.int32, device=scaled.device)
    tile = first_argmax(_noisy(scores, key, counters + signed32(TILE_DOMAIN)))
    ids = torch.arange(TILE, dtype=torch.int32, device=scaled.device) + (tile * TILE).to(torch.int32)[:, None]
    best = first_argmax(_noisy(tile_of(scaled, tile), key, ids))
    return tile * TILE + best


def sample_ids(logits: torch.Tensor, params: SampleParams, sample_vocab: int) -> torch.Tensor:
    """Temperature, filters and the draw: ``logits [S, V] float32`` -> ``[S] int64``; greedy rows take their argmax."""
    scaled = scaled_tiles(logits, sample_vocab, params.inv_temperature)
    best = argmax_tiles(scaled) if params.has_greedy else None
    drawn = draw_ids(apply_filters(scaled, params), params.key)
    return drawn if best is None else torch.where(params.greedy != 0, best, drawn)
