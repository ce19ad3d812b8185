"""The fused sampler: split argmax and log-sum-exp over tiles, exact thresholds without a sort, a draw from two tiles.

Launches a batch needs: ``_tile_stats`` (rows x tiles), with filters ``_select`` (one program a row) and ``_tile_stats`` again
over what they keep, then ``_pick`` (one program a row). Nothing is read by the host.

``_select`` finds the lowest kept value by bisection over the order-preserving integer image of float32. While more than
``cap`` values lie between the bounds it counts over the whole row; the rest are gathered once and bisected in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.host_kernel import launched
from freetoken.kernels.integers import cdiv, next_power_of_two
from freetoken.kernels.sample.params import TOP_K_OFF, SampleParams
from freetoken.kernels.sample.reference import TILE

CHUNK = 4096
CAP = 4096
SELECT_WARPS = 16

_LARGEST = tl.constexpr(3.4028234663852886e38)
_MASS_ONE = tl.constexpr(2.0**40)
_NO_MASS = tl.constexpr(28.0)
"""Values this far below the maximum have no integer mass: exp(-28) is less than 2**-40."""
_NO_LIMIT = tl.constexpr(TOP_K_OFF)
_NO_KEY = tl.constexpr(-(2**31))
"""Pads gathered keys; below the key of -inf."""


@triton.jit
def _load_scaled(x_ptr, inv_temperature, ids, vocab):
    y = tl.load(x_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * inv_temperature
    y = tl.where(y != y, float("-inf"), y)
    y = tl.where(y == 0.0, 0.0, y)
    return tl.minimum(y, _LARGEST)


@triton.jit
def _key(y):
    bits = y.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(y, top):
    return (tl.exp(y - top) * _MASS_ONE).to(tl.int64)


@triton.jit
def _key_mass(keys, top):
    return _mass(tl.where(keys > _NO_KEY, _value(keys), float("-inf")), top)


@triton.jit
def _noise(counters, key_low, key_high):
    """Gumbel noise of ``hashing.hash_words`` and ``hashing.exponential``."""
    words = counters.to(tl.uint32) * 0x9E3779B1 + key_low
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) ^ key_high
    words = words ^ (words >> 15)
    words = words * 0x846CA68B
    words = words ^ (words >> 16)
    v = ((words >> 1).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    v = tl.minimum(v, 1.0 - 1.0 / 16777216.0)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1.0 - v)))


@triton.jit
def _keep(y, ids, floor_ptr, last_ptr, row):
    floor = tl.load(floor_ptr + row)
    last = tl.load(last_ptr + row)
    return tl.where((y > floor) | ((y == floor) & (ids <= last)), y, float("-inf"))


@launched
@triton.jit(do_not_specialize_on_alignment=["floor_ptr", "last_ptr", "top_ptr", "arg_ptr", "lse_ptr"])
def _tile_stats(
    x_ptr,
    x_stride,
    inv_temperature_ptr,
    floor_ptr,
    last_ptr,
    top_ptr,
    arg_ptr,
    lse_ptr,
    vocab,
    tiles,
    SCALED: tl.constexpr,
    FILTERED: tl.constexpr,
    SUM: tl.constexpr,
    TILE_: tl.constexpr,
):
    """Of each tile: its maximum and that one's lowest id (not FILTERED), and the log-sum-exp of its kept values (SUM)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE_ + tl.arange(0, TILE_)
    inv_temperature = 1.0
    if SCALED:
        inv_temperature = tl.load(inv_temperature_ptr + row)
    y = _load_scaled(x_ptr + row * x_stride, inv_temperature, ids, vocab)
    if FILTERED:
        y = _keep(y, ids, floor_ptr, last_ptr, row)
    top = tl.max(y, 0)
    if not FILTERED:
        tl.store(top_ptr + row * tiles + tile, top)
        tl.store(arg_ptr + row * tiles + tile, tl.min(tl.where(y == top, ids, vocab), 0))
    if SUM:
        base = tl.maximum(top, -_LARGEST)
        tl.store(lse_ptr + row * tiles + tile, tl.log(tl.sum(tl.exp(y - base), 0)) + base)


@launched
@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["floor_ptr", "last_ptr", "greedy_ptr", "key_ptr", "top_ptr", "arg_ptr", "lse_ptr"],
)
def _pick(
    x_ptr,
    x_stride,
    inv_temperature_ptr,
    floor_ptr,
    last_ptr,
    greedy_ptr,
    key_ptr,
    top_ptr,
    arg_ptr,
    lse_ptr,
    out_ptr,
    vocab,
    tiles,
    rows,
    DRAW: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE_: tl.constexpr,
    TILES_: tl.constexpr,
):
    """The id of each row: its argmax from the tiles' maxima, or with DRAW, where it is not greedy, a tile and an id in it."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_)
    inside = tile < tiles
    greedy = 1
    if DRAW:
        greedy = tl.load(greedy_ptr + row)
    if greedy != 0:
        tops = tl.load(top_ptr + row * tiles + tile, mask=inside, other=float("-inf"))
        args = tl.load(arg_ptr + row * tiles + tile, mask=inside, other=vocab)
        best = tl.max(tops, 0)
        tl.store(out_ptr + row, tl.min(tl.where(tops == best, args, vocab), 0).to(tl.int64))
    else:
        if DRAW:
            key_low = tl.load(key_ptr + row).to(tl.uint32, bitcast=True)
            key_high = tl.load(key_ptr + rows + row).to(tl.uint32, bitcast=True)
            scores = tl.load(lse_ptr + row * tiles + tile, mask=inside, other=float("-inf"))
            scores += _noise(tile.to(tl.uint32) + 0x80000000, key_low, key_high)
            best = tl.max(scores, 0)
            chosen = tl.min(tl.where(scores == best, tile, TILES_), 0)
            ids = chosen * TILE_ + tl.arange(0, TILE_)
            y = _load_scaled(x_ptr + row * x_stride, tl.load(inv_temperature_ptr + row), ids, vocab)
            if FILTERED:
                y = _keep(y, ids, floor_ptr, last_ptr, row)
            y += _noise(ids, key_low, key_high)
            best = tl.max(y, 0)
            tl.store(out_ptr + row, tl.min(tl.where(y == best, ids, vocab), 0).to(tl.int64))


@triton.jit
def _scan(x_ptr, inv_temperature, top, bound, vocab, WANT_MASS: tl.constexpr, CHUNK_: tl.constexpr):
    """``(count, mass)`` of the row's values whose key is at least ``bound``."""
    count = tl.zeros([CHUNK_], tl.int32)
    mass = tl.zeros([CHUNK_], tl.int64)
    for start in range(0, vocab, CHUNK_):
        ids = start + tl.arange(0, CHUNK_)
        y = _load_scaled(x_ptr, inv_temperature, ids, vocab)
        hit = (ids < vocab) & (_key(y) >= bound)
        count += hit.to(tl.int32)
        if WANT_MASS:
            mass += tl.where(hit, _mass(y, top), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _middle(lo, hi, turn):
    """A bound strictly between the keys, by turns halving the values and the keys: fast on smooth rows, sure on any."""
    middle = (lo + hi) >> 1
    if turn % 2 == 0:
        between = 0.5 * _value(lo) + 0.5 * _value(hi)
        # Not so from -inf or to NaN beyond the largest float: the bounds below then hold it.
        middle = tl.where(between == between, _key(between).to(tl.int64), middle)
    return tl.minimum(tl.maximum(middle, lo + 1), hi - 1)


@triton.jit
def _narrow(
    x_ptr,
    inv_temperature,
    top,
    goal,
    lo,
    hi,
    count_lo,
    count_hi,
    mass_lo,
    mass_hi,
    vocab,
    MASS: tl.constexpr,
    CAP_: tl.constexpr,
    CHUNK_: tl.constexpr,
):
    """Close ``[lo, hi)`` around the threshold, over the whole row, until at most CAP_ values lie between the keys.

    The count (MASS: the mass) of values from ``lo`` on reaches ``goal``, that from ``hi`` on does not.
    """
    turn = 0
    while (count_lo - count_hi > CAP_) & (hi - lo > 1):
        middle = _middle(lo, hi, turn)
        count, mass = _scan(x_ptr, inv_temperature, top, middle.to(tl.int32), vocab, MASS, CHUNK_)
        reached = count >= goal
        if MASS:
            reached = mass >= goal
        lo = tl.where(reached, middle, lo)
        count_lo = tl.where(reached, count, count_lo)
        mass_lo = tl.where(reached, mass, mass_lo)
        hi = tl.where(reached, hi, middle)
        count_hi = tl.where(reached, count_hi, count)
        mass_hi = tl.where(reached, mass_hi, mass)
        turn += 1
    return lo, hi, count_lo, count_hi, mass_lo, mass_hi


@triton.jit
def _gather(x_ptr, inv_temperature, lo, hi, scratch_ptr, vocab, CAP_: tl.constexpr, CHUNK_: tl.constexpr):
    """The keys in ``[lo, hi)``, at most CAP_, as a block padded with _NO_KEY; through this row's scratch."""
    tl.debug_barrier()
    found = 0
    for start in range(0, vocab, CHUNK_):
        ids = start + tl.arange(0, CHUNK_)
        key = _key(_load_scaled(x_ptr, inv_temperature, ids, vocab))
        hit = (ids < vocab) & (key >= lo) & (key < hi)
        ones = hit.to(tl.int32)
        tl.store(scratch_ptr + found + tl.cumsum(ones, 0) - 1, key, mask=hit)
        found += tl.sum(ones, 0)
    tl.debug_barrier()
    place = tl.arange(0, CAP_)
    return tl.load(scratch_ptr + place, mask=place < found, other=_NO_KEY)


@triton.jit
def _bisect(keys, masses, goal, lo, hi, count_lo, count_hi, mass_lo, mass_hi, MASS: tl.constexpr):
    """Close ``[lo, hi)`` to one key over gathered keys, which hold every value between the two."""
    count_base, mass_base, end = count_hi, mass_hi, hi
    while hi - lo > 1:
        middle = (lo + hi) >> 1
        hit = (keys >= middle) & (keys < end)
        count = count_base + tl.sum(hit.to(tl.int32), 0)
        mass = mass_base
        reached = count >= goal
        if MASS:
            mass = mass_base + tl.sum(tl.where(hit, masses, 0), 0)
            reached = mass >= goal
        lo = tl.where(reached, middle, lo)
        count_lo = tl.where(reached, count, count_lo)
        mass_lo = tl.where(reached, mass, mass_lo)
        hi = tl.where(reached, hi, middle)
        count_hi = tl.where(reached, count_hi, count)
        mass_hi = tl.where(reached, mass_hi, mass)
    return lo, count_lo, count_hi, mass_lo, mass_hi


@triton.jit
def _nth_equal(x_ptr, inv_temperature, key, wanted, vocab, CHUNK_: tl.constexpr):
    """The id of the ``wanted``-th value with this key."""
    seen = 0
    last = -1
    for start in range(0, vocab, CHUNK_):
        ids = start + tl.arange(0, CHUNK_)
        y = _load_scaled(x_ptr, inv_temperature, ids, vocab)
        ones = ((ids < vocab) & (_key(y) == key)).to(tl.int32)
        rank = seen + tl.cumsum(ones, 0)
        last = tl.maximum(last, tl.max(tl.where((ones == 1) & (rank == wanted), ids, -1), 0))
        seen += tl.sum(ones, 0)
    return last


@triton.jit
def _kth_of_tops(tops, k, lo, hi):
    """Key of the ``k``-th largest tile maximum, of at least ``k``: as many values of the row reach it."""
    keys = _key(tops)
    while hi - lo > 1:
        middle = (lo + hi) >> 1
        reached = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        lo = tl.where(reached, middle, lo)
        hi = tl.where(reached, hi, middle)
    return lo


@triton.jit
def _top_k_bound(
    x_ptr,
    inv_temperature,
    top,
    tops,
    k,
    bottom,
    end,
    scratch_ptr,
    vocab,
    tiles,
    CAP_: tl.constexpr,
    CHUNK_: tl.constexpr,
):
    """Key of the row's ``k``-th largest value, the counts of values from it on and above it, the gathered keys, and
    whether those hold every value from that key on."""
    zero = end * 0
    lo, count_lo, complete = bottom, zero + vocab, zero
    keys = tl.full([CAP_], _NO_KEY, tl.int32)
    if k <= tiles:
        lo = _kth_of_tops(tops, k, bottom, end)
        count, _ = _scan(x_ptr, inv_temperature, top, lo.to(tl.int32), vocab, False, CHUNK_)
        count_lo = zero + count
    lo, hi, count_lo, count_hi, _, _ = _narrow(
        x_ptr, inv_temperature, top, k, lo, end, count_lo, zero, zero, zero, vocab, False, CAP_, CHUNK_
    )
    if hi - lo > 1:
        complete = (count_hi == 0).to(tl.int64)
        keys = _gather(x_ptr, inv_temperature, lo, hi, scratch_ptr, vocab, CAP_, CHUNK_)
        lo, count_lo, count_hi, _, _ = _bisect(keys, keys, k, lo, hi, count_lo, count_hi, zero, zero, False)
    return lo, count_lo, count_hi, keys, complete


@triton.jit
def _top_p_bound(
    x_ptr,
    inv_temperature,
    top,
    top_p,
    lo,
    end,
    count_lo,
    count_hi,
    wanted,
    keys,
    complete,
    scratch_ptr,
    vocab,
    CAP_: tl.constexpr,
    CHUNK_: tl.constexpr,
):
    """The same under top-p over the values above ``lo`` and ``wanted`` of those equal to it: its key, the counts of values
    from it on and above it, and how many of those equal to it are kept."""
    zero = end * 0
    if complete != 0:
        masses = _key_mass(keys, top)
        mass_lo = tl.sum(tl.where(keys >= lo, masses, 0), 0)
        mass_hi = tl.sum(tl.where(keys > lo, masses, 0), 0)
    else:
        count, mass_lo = _scan(x_ptr, inv_temperature, top, lo.to(tl.int32), vocab, True, CHUNK_)
        count_lo = zero + count
        count, mass_hi = _scan(x_ptr, inv_temperature, top, (lo + 1).to(tl.int32), vocab, True, CHUNK_)
        count_hi = zero + count
    equals = tl.maximum(count_lo - count_hi, 1)
    whole = mass_hi + tl.minimum(wanted, equals) * ((mass_lo - mass_hi) // equals)
    share = top_p * whole.to(tl.float64)
    goal = share.to(tl.int64)
    goal = tl.maximum(goal + (goal.to(tl.float64) < share).to(tl.int64), 1)
    hi = end
    count_hi, mass_hi = zero, zero
    if complete == 0:
        lo, hi, count_lo, count_hi, mass_lo, mass_hi = _narrow(
            x_ptr, inv_temperature, top, goal, lo, hi, count_lo, zero, mass_lo, zero, vocab, True, CAP_, CHUNK_
        )
        if hi - lo > 1:
            keys = _gather(x_ptr, inv_temperature, lo, hi, scratch_ptr, vocab, CAP_, CHUNK_)
    if hi - lo > 1:
        lo, count_lo, count_hi, mass_lo, mass_hi = _bisect(
            keys, _key_mass(keys, top), goal, lo, hi, count_lo, count_hi, mass_lo, mass_hi, True
        )
    each = tl.maximum((mass_lo - mass_hi) // tl.maximum(count_lo - count_hi, 1), 1)
    wanted = tl.minimum(tl.maximum((goal - mass_hi + each - 1) // each, 1), count_lo - count_hi)
    return lo, count_lo, count_hi, wanted


@launched
@triton.jit(do_not_specialize_on_alignment=["top_ptr", "floor_ptr", "last_ptr"])
def _select(
    x_ptr,
    x_stride,
    inv_temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    greedy_ptr,
    top_ptr,
    scratch_ptr,
    floor_ptr,
    last_ptr,
    vocab,
    tiles,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    CAP_: tl.constexpr,
    CHUNK_: tl.constexpr,
    TILES_: tl.constexpr,
):
    """Each row's kept set under top-k, top-p and min-p: its lowest value, and the highest id kept of those equal to it."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    scratch_ptr += row * CAP_
    inv_temperature = tl.load(inv_temperature_ptr + row)
    tile = tl.arange(0, TILES_)
    tops = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    top = tl.maximum(tl.max(tops, 0), -_LARGEST)
    drawn = tl.load(greedy_ptr + row) == 0
    end = _key(top).to(tl.int64) + 1
    bottom = _key(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    zero = end * 0
    no_limit = zero + _NO_LIMIT
    lo, count_lo, count_hi, complete, wanted = bottom, zero, zero, zero, no_limit
    keys = tl.full([CAP_], _NO_KEY, tl.int32)
    if HAS_K:
        k = tl.load(top_k_ptr + row).to(tl.int64)
        if drawn & (k < vocab):
            lo, count_lo, count_hi, keys, complete = _top_k_bound(
                x_ptr, inv_temperature, top, tops, k, bottom, end, scratch_ptr, vocab, tiles, CAP_, CHUNK_
            )
            wanted = k - count_hi
    if HAS_P:
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        if drawn & (top_p < 1.0):
            if lo == bottom:
                lo = _key(top - _NO_MASS).to(tl.int64)
            lo, count_lo, count_hi, wanted = _top_p_bound(
                x_ptr, inv_temperature, top, top_p, lo, end, count_lo, count_hi, wanted, keys, complete, scratch_ptr,
                vocab, CAP_, CHUNK_,
            )  # fmt: skip
    last = no_limit
    if wanted < count_lo - count_hi:
        last = zero + _nth_equal(x_ptr, inv_temperature, lo.to(tl.int32), wanted, vocab, CHUNK_)
    floor = _value(lo)
    likely = top + tl.load(log_min_p_ptr + row)
    if drawn & (likely > floor):
        floor = likely
        last = no_limit
    tl.store(floor_ptr + row, floor)
    tl.store(last_ptr + row, last.to(tl.int32))


def _check(logits: torch.Tensor, sample_vocab: int) -> tuple[int, int]:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError("logits must be float32 [rows, vocabulary] with contiguous rows")
    if not 0 < sample_vocab <= logits.shape[1]:
        raise ValueError(f"sample_vocab {sample_vocab} does not fit {logits.shape[1]} logits")
    return logits.shape[0], cdiv(sample_vocab, TILE)


def argmax_ids(logits: torch.Tensor, sample_vocab: int) -> torch.Tensor:
    """``logits [S, V] float32`` -> ``[S] int64``; see :func:`freetoken.kernels.sample.argmax_ids`."""
    return _run(logits, None, sample_vocab, CAP, CHUNK)


def sample_ids(
    logits: torch.Tensor, params: SampleParams, sample_vocab: int, *, cap: int = CAP, chunk: int = CHUNK
) -> torch.Tensor:
    """``logits [S, V] float32`` -> ``[S] int64``; see :func:`freetoken.kernels.sample.sample_ids`.

    ``cap`` and ``chunk``, powers of two, size the gathered block and the step of a scan.
    """
    return _run(logits, params, sample_vocab, cap, chunk)


def tile_stats(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor | None,
    sample_vocab: int,
    stats: torch.Tensor,
    bounds: torch.Tensor | None,
    with_sum: bool,
) -> None:
    """Fill ``stats [3, S, tiles] float32``: maxima, log-sum-exps, and the maxima's ids (int32 bits); under ``bounds``, from
    :func:`kept_bounds`, the log-sum-exps alone."""
    rows, tiles = stats.shape[1:]
    floor, last = (stats[0], stats[2]) if bounds is None else (bounds[0], bounds[1])
    _tile_stats[(rows, tiles)](
        logits, logits.stride(0), stats[0] if inv_temperature is None else inv_temperature, floor, last.view(torch.int32),
        stats[0], stats[2].view(torch.int32), stats[1], sample_vocab, tiles, SCALED=inv_temperature is not None,
        FILTERED=bounds is not None, SUM=with_sum, TILE_=TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def kept_bounds(
    logits: torch.Tensor, params: SampleParams, sample_vocab: int, stats: torch.Tensor, cap: int, chunk: int
) -> torch.Tensor:
    """``[2, S] float32``: each row's lowest kept value, and (int32 bits) the highest id kept among those equal to it."""
    rows, tiles = stats.shape[1:]
    bounds = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    scratch = torch.empty(rows, cap, dtype=torch.int32, device=logits.device)
    _select[(rows,)](
        logits, logits.stride(0), params.inv_temperature, params.top_k, params.top_p, params.log_min_p, params.greedy,
        stats[0], scratch, bounds[0], bounds[1].view(torch.int32), sample_vocab, tiles, HAS_K=params.has_top_k,
        HAS_P=params.has_top_p, CAP_=cap, CHUNK_=chunk, TILES_=next_power_of_two(tiles), num_warps=SELECT_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return bounds


def _run(logits: torch.Tensor, params: SampleParams | None, sample_vocab: int, cap: int, chunk: int) -> torch.Tensor:
    rows, tiles = _check(logits, sample_vocab)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    stats = torch.empty(3, rows, tiles, dtype=torch.float32, device=logits.device)
    heat = None if params is None else params.inv_temperature
    filtered = params is not None and (params.has_top_k or params.has_top_p or params.has_min_p)
    tile_stats(logits, heat, sample_vocab, stats, None, params is not None and not filtered)
    bounds = stats[:2, :, 0]
    if params is not None and filtered:
        bounds = kept_bounds(logits, params, sample_vocab, stats, cap, chunk)
        tile_stats(logits, heat, sample_vocab, stats, bounds, True)
    args = stats[2].view(torch.int32)
    greedy, key = (args, args) if params is None else (params.greedy, params.key)
    _pick[(rows,)](
        logits, logits.stride(0), stats[0] if heat is None else heat, bounds[0], bounds[1].view(torch.int32), greedy, key,
        stats[0], args, stats[1], out, sample_vocab, tiles, rows, DRAW=params is not None, FILTERED=filtered, TILE_=TILE,
        TILES_=next_power_of_two(tiles), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
