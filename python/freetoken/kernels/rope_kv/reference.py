"""q/k norm, rotary embedding and KV write in plain torch: the specification of the fused kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of every head ``[T, H, D]`` by ``weight [D]``, with the roundings of :mod:`freetoken.kernels.rms_norm.reference`."""
    if heads.dtype == torch.float32:
        return torch.nn.functional.rms_norm(heads, weight.shape, weight, eps)
    wide = heads.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normal.to(weight.dtype)).to(heads.dtype)


@dataclass(frozen=True)
class Lines:
    """What the reference looks up once a forward.

    ``cos`` and ``signed_sin`` ``[T, 1, R]``: the cosines twice, and the sines negated, then as they are. ``page`` and
    ``offset`` ``[T]`` int64: where each token's K and V go. ``skipped`` ``[T, 1, 1]`` marks tokens that go nowhere (their
    page is 0), or is ``None`` when there are none.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    skipped: torch.Tensor | None


def prepare(table: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, page_size: int) -> Lines:
    """From a table ``[max_pos, R]`` (R/2 cosines, then R/2 sines), positions and flat slots ``[T]`` int64 (−1: skip)."""
    half = table.shape[1] // 2
    rows = table[positions].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    missing = slots < 0
    on_host = not slots.is_cuda
    skipped = None if on_host and not bool(missing.any()) else missing[:, None, None]
    kept = slots.clamp_min(0)
    page = torch.div(kept, page_size, rounding_mode="floor")
    return Lines(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), page, kept - page * page_size, skipped)


def rotate(heads: torch.Tensor, lines: Lines) -> torch.Tensor:
    """NeoX rotation of the first R of D dimensions of ``[T, H, D]``: float32 arithmetic, one rounding."""
    size = lines.cos.shape[-1]
    turned = heads if size == heads.shape[-1] else heads[..., :size]
    wide = turned.float()
    result = torch.addcmul(wide * lines.cos, wide.roll(size // 2, -1), lines.signed_sin).to(heads.dtype)
    return result if size == heads.shape[-1] else torch.cat((result, heads[..., size:]), -1)


def write(pool: torch.Tensor, heads: torch.Tensor, lines: Lines) -> None:
    """Put ``heads [T, Hkv, D]`` into ``pool [pages, Hkv, page_size, D]``.

    Skipped tokens put back what page 0 holds, so that no shape depends on the data.
    """
    by_token = pool.transpose(1, 2)
    value = heads.to(pool.dtype)
    if lines.skipped is not None:
        value = torch.where(lines.skipped, by_token[lines.page, lines.offset], value)
    by_token[lines.page, lines.offset] = value


def rope_kv(
    qkv: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    lines: Lines,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Split ``qkv [T, (Hq + 2 Hkv) D]``, norm and rotate q and k, write k and v, and return q ``[T, Hq, D]``.

    ``k_pool`` and ``v_pool`` are ``[pages, Hkv, page_size, D]``; ``lines`` comes from :func:`prepare`. ``q_norm`` and
    ``k_norm`` are ``[D]``, both or neither. The rows of ``qkv`` may have any stride.
    """
    kv_heads, size = k_pool.shape[1], k_pool.shape[3]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // size, size)
    q_heads = heads.shape[1] - 2 * kv_heads
    if q_norm is not None and k_norm is not None:
        q = rotate(head_norm(heads[:, :q_heads], q_norm, eps), lines)
        k = rotate(head_norm(heads[:, q_heads : q_heads + kv_heads], k_norm, eps), lines)
    else:
        both = rotate(heads[:, : q_heads + kv_heads], lines)
        q, k = both[:, :q_heads].contiguous(), both[:, q_heads:]
    write(k_pool, k, lines)
    write(v_pool, heads[:, q_heads + kv_heads :], lines)
    return q
