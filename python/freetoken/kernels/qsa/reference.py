"""QSA in plain torch, exact on any device; with lengths from the host, nothing is read back.

Keys of the indexer lie in pages like K and V, one row a token. Blocks of ``ratio`` tokens are counted from the start of the text. A
block's key is the mean of its tokens' raw keys, normed and rotated as the block's first position; it takes the place of the raw key
of the block's last token, which nobody needs any more. So every row is a function of the text up to its token, and pages can be shared
wherever a prefix ends.

The score of block n for query t is ``sum over heads of relu(q_h . k_n) / sqrt(Di)`` (float32). Of equal scores the earlier block wins.
Formulas are those of ``qwen4_exp`` in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from freetoken.kernels.rope_kv.reference import Lines, head_norm, rotate


class Geometry(Protocol):
    """The indexer: ``ratio`` tokens a block, of which a query sees the ``blocks`` best and the open one, ``visible`` tokens at most.

    Decodes gather ``gather_elements`` of keys, or of K and V, at a time; a part of a prompt piece has a mask of ``mask_elements``, or
    with the kernels ``score_elements`` scores and as many listed tokens.
    """

    gather_elements: ClassVar[int]
    mask_elements: ClassVar[int]
    score_elements: ClassVar[int]

    @property
    def head_dim(self) -> int:
        """Elements of an index key."""

    @property
    def ratio(self) -> int:
        """Tokens of a block."""

    @property
    def blocks(self) -> int:
        """Whole blocks that a query sees at most."""

    @property
    def visible(self) -> int:
        """Tokens that a query sees at most."""


@dataclass(frozen=True)
class IndexStep:
    """What all indexers of one forward share. ``block_slots [T, ratio]`` are the slots of the tokens that end with each token;
    ``ends [T]`` says that they are a whole block. ``key_lines`` rotate to the first of them, ``query_lines`` to the token itself."""

    query_lines: Lines
    key_lines: Lines
    out_slots: torch.Tensor
    block_slots: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class Pools:
    """One layer's pages: ``k`` and ``v`` ``[pages, Hkv, page_size, D]``, ``index [pages, page_size, Di]``."""

    k: torch.Tensor
    v: torch.Tensor
    index: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.index.shape[1]


def flat_slots(page_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Flat slots ``[N, P]`` int64 of ``positions [N, P]`` of the requests in ``rows [N]``."""
    page = torch.div(positions, page_size, rounding_mode="floor")
    return page_table[rows[:, None], page].long() * page_size + positions - page * page_size


def index(
    projected: torch.Tensor,
    pool: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    step: IndexStep,
) -> torch.Tensor:
    """Index queries ``[T, Hi, Di]``, normed and rotated, of ``projected [T, (Hi + 1) Di]`` (queries, then the raw key).

    Raw keys go to ``pool [pages, page_size, Di]``, and the keys of the blocks that end in this step in place of the last of theirs.
    ``norms`` are the float32 weights ``[Di]`` for queries and keys.
    """
    size = pool.shape[2]
    heads = projected.unflatten(1, (-1, size))
    rows = pool.view(-1, size)
    raw = heads[:, -1]
    stored = raw.to(pool.dtype)
    rows[step.out_slots] = stored
    mean = rows[step.block_slots].float().mean(1).to(raw.dtype)
    keys = rotate(head_norm(mean[:, None], norms[1], eps), step.key_lines)[:, 0]
    rows[step.out_slots] = torch.where(step.ends[:, None], keys.to(pool.dtype), stored)
    return rotate(head_norm(heads[:, :-1], norms[0], eps), step.query_lines)


def _scores(index_q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[..., T, N]`` float32 of ``index_q [..., T, Hi, Di]`` and ``keys [..., N, Di]``."""
    products = torch.matmul(index_q.float().flatten(-3, -2), keys.float().mT)
    return products.relu_().unflatten(-2, index_q.shape[-3:-1]).sum(-2) * index_q.shape[-1] ** -0.5


def _best(scores: torch.Tensor, count: int, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best blocks ``[..., T, count]`` of the first ``whole [..., T]``, and whether there are so many.

    Scores are not negative (``abs`` makes a zero of either sign the same), so the bits of a float32 order as it does; below them the number of the block breaks ties.
    """
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    rank = (scores.abs().contiguous().view(torch.int32).long() << 32) - blocks
    rank = torch.where(blocks < whole[..., None], rank, torch.iinfo(torch.int64).min)
    found, best = rank.topk(min(count, scores.shape[-1]), sorted=False)
    return best, found > torch.iinfo(torch.int64).min


def attend_decodes(
    q: torch.Tensor,
    index_q: torch.Tensor,
    pools: Pools,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    config: Geometry,
    scale: float,
) -> torch.Tensor:
    """``[B, Hq * D]``: one query ``q [B, Hq, D]`` of each request, at the end of its ``seq_lens [B]`` tokens, ``longest`` at most.

    Shapes depend on ``longest`` alone, so that it may be captured. Lanes are taken so many at a time as bounds what is gathered.
    """
    width = max(longest // config.ratio * config.head_dim, config.visible * 2 * pools.k.shape[1] * pools.k.shape[3])
    count = max(1, config.gather_elements // width)
    out = []
    for begin in range(0, q.shape[0], count):
        lanes = slice(begin, begin + count)
        lens = seq_lens[lanes].long()
        chosen, valid = select(index_q[lanes], pools, page_table, rows[lanes], lens, longest, config)
        out.append(attend_slots(q[lanes], pools, chosen, valid, scale))
    return torch.cat(out) if out else q.flatten(1)


def score(
    index_q: torch.Tensor,
    pools: Pools,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    longest: int,
    config: Geometry,
) -> torch.Tensor:
    """Scores ``[B, longest // ratio]`` float32 of the blocks of each request; those past its end mean nothing."""
    block = torch.arange(longest // config.ratio, device=index_q.device)
    ends = (block * config.ratio + config.ratio - 1).expand(rows.shape[0], -1)
    keys = pools.index.view(-1, config.head_dim)[flat_slots(page_table, rows, ends, pools.page_size)]
    return _scores(index_q[:, None], keys)[:, 0]


def select(
    index_q: torch.Tensor,
    pools: Pools,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    config: Geometry,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat slots ``[B, S]`` that the last token of each request sees, and which of them count."""
    scores = score(index_q, pools, page_table, rows, longest, config)
    return select_best(scores, page_table, rows, seq_lens, pools.page_size, config)


def select_best(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    config: Geometry,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`select`, from the scores ``[B, blocks]``."""
    ratio, device = config.ratio, scores.device
    whole = torch.div(seq_lens, ratio, rounding_mode="floor")
    best, found = _best(scores, config.blocks, whole)
    inside = torch.arange(ratio, device=device)
    tail = whole[:, None] * ratio + inside[:-1]
    positions = torch.cat([(best[..., None] * ratio + inside).flatten(1), tail], 1)
    valid = torch.cat([found.repeat_interleave(ratio, 1), tail < seq_lens[:, None]], 1)
    return flat_slots(page_table, rows, positions.where(valid, 0), page_size), valid


def attend_slots(q: torch.Tensor, pools: Pools, slots: torch.Tensor, valid: torch.Tensor, scale: float) -> torch.Tensor:
    kv_heads, size = pools.k.shape[1], pools.k.shape[3]
    page = torch.div(slots, pools.page_size, rounding_mode="floor")
    offset = slots - page * pools.page_size
    k, v = (pool.transpose(1, 2)[page, offset].transpose(1, 2) for pool in (pools.k, pools.v))
    # Query heads of a group take the place of query positions.
    queries = q.view(q.shape[0], kv_heads, -1, size)
    out = F.scaled_dot_product_attention(queries, k.to(q.dtype), v.to(q.dtype), valid[:, None, None], scale=scale)
    return out.flatten(1)


def attend_piece(
    q: torch.Tensor,
    index_q: torch.Tensor,
    pools: Pools,
    page_table: torch.Tensor,
    row: torch.Tensor,
    seq_len: int,
    config: Geometry,
    scale: float,
) -> torch.Tensor:
    """``[T, Hq * D]``: queries ``q [T, Hq, D]``, the last of the ``seq_len`` tokens of the request in ``row [1]``."""
    ratio, device = config.ratio, q.device
    pages = page_table[:, : -(-seq_len // pools.page_size)].index_select(0, row)[0].long()
    k, v = (pool[pages].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(q.dtype)[None] for pool in (pools.k, pools.v))
    token = torch.arange(seq_len, device=device)
    keys = pools.index[pages].flatten(0, 1)[ratio - 1 : seq_len : ratio]
    out = torch.empty_like(q)
    step = max(1, config.mask_elements // seq_len)
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        at = token[seq_len - q.shape[0] :][part]
        whole = torch.div(at + 1, ratio, rounding_mode="floor")
        best, found = _best(_scores(index_q[part], keys), config.blocks, whole)
        # Blocks that do not count go to a column of their own.
        seen = torch.zeros((at.shape[0], keys.shape[0] + 1), dtype=torch.bool, device=device)
        seen.scatter_(1, best.where(found, keys.shape[0]), True)
        block = torch.div(token, ratio, rounding_mode="floor")
        mask = seen[:, :-1].repeat_interleave(ratio, 1)
        mask = F.pad(mask, (0, seq_len - mask.shape[1])) | ((block >= whole[:, None]) & (token <= at[:, None]))
        queries = q[part].transpose(0, 1)[None]
        result = F.scaled_dot_product_attention(queries, k, v, mask, scale=scale, enable_gqa=q.shape[1] > k.shape[1])
        out[part] = result[0].transpose(0, 1)
    return out.flatten(1)
