"""q/k norm, rotary embedding and KV write in plain torch: the specification of the fused kernel."""

from __future__ import annotations

import torch


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of every head ``[T, H, D]`` by ``weight [D]``, with the roundings of the model's other norms."""
    if heads.dtype == torch.float32:
        return torch.nn.functional.rms_norm(heads, weight.shape, weight, eps)
    wide = heads.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(heads.dtype)


def rotation(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a table ``[max_pos, R]`` (R/2 cosines, then R/2 sines) as ``(cos, signed sin)``, each ``[T, 1, R]``."""
    half = table.shape[1] // 2
    rows = table[positions].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """NeoX rotation of the first R of D dimensions of ``[T, H, D]``: float32 arithmetic, one rounding."""
    size = cos.shape[-1]
    turned = heads if size == heads.shape[-1] else heads[..., :size]
    wide = turned.float()
    result = torch.addcmul(wide * cos, wide.roll(size // 2, -1), signed_sin).to(heads.dtype)
    return result if size == heads.shape[-1] else torch.cat((result, heads[..., size:]), -1)


def write(pool: torch.Tensor, heads: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> None:
    """Put ``heads [T, Hkv, D]`` into ``pool [pages, Hkv, page_size, D]``; a negative page leaves the pool as it is.

    Skipped tokens put back what page 0 holds, so that no shape depends on the data.
    """
    by_token = pool.transpose(1, 2)
    value = heads.to(pool.dtype)
    skipped = page < 0
    if page.is_cuda or bool(skipped.any()):
        page = page.clamp_min(0)
        value = torch.where(skipped[:, None, None], by_token[page, offset], value)
    by_token[page, offset] = value


def rope_kv(
    qkv: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Split ``qkv [T, (Hq + 2 Hkv) D]``, norm and rotate q and k, write k and v, and return q ``[T, Hq, D]``.

    ``k_pool`` and ``v_pool`` are ``[pages, Hkv, page_size, D]``. ``cos`` and ``signed_sin`` come from :func:`rotation`.
    Token t goes to ``page [T]`` and ``offset [T]`` (int64); page −1 skips it. ``q_norm`` and ``k_norm`` are ``[D]``, both
    or neither.
    """
    kv_heads, size = k_pool.shape[1], k_pool.shape[3]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // size, size)
    q_heads = heads.shape[1] - 2 * kv_heads
    if q_norm is not None and k_norm is not None:
        q = rotate(head_norm(heads[:, :q_heads], q_norm, eps), cos, signed_sin)
        k = rotate(head_norm(heads[:, q_heads : q_heads + kv_heads], k_norm, eps), cos, signed_sin)
    else:
        both = rotate(heads[:, : q_heads + kv_heads], cos, signed_sin)
        q, k = both[:, :q_heads].contiguous(), both[:, q_heads:]
    write(k_pool, k, page, offset)
    write(v_pool, heads[:, q_heads + kv_heads :], page, offset)
    return q
