"""q/k norm, rotary embedding and KV write: kernel against reference, reference against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.rope_kv import RopeKv, triton

POISON = -77.0
EPS = 1e-6
MAX_POSITIONS = 50


def make(
    tokens: int, q_heads: int, kv_heads: int, size: int, rotary: int, page_size: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Random inputs; pools filled with a sentinel, distinct slots, the first of them skipped where there are several."""
    pages = 2 + -(-tokens // page_size)
    angles = torch.rand(MAX_POSITIONS, rotary // 2) * 6
    slots = torch.randperm((pages - 1) * page_size)[:tokens] + page_size
    if tokens > 1:
        slots[0] = -1
    return {
        "qkv": torch.randn(tokens, (q_heads + 2 * kv_heads) * size).to(DEVICE, dtype),
        "k_pool": torch.full((pages, kv_heads, page_size, size), POISON, dtype=dtype, device=DEVICE),
        "v_pool": torch.full((pages, kv_heads, page_size, size), POISON, dtype=dtype, device=DEVICE),
        "table": torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE),
        "positions": torch.randint(0, MAX_POSITIONS, (tokens,), device=DEVICE),
        "slots": slots.to(DEVICE),
        "q_norm": torch.randn(size).to(DEVICE, dtype),
        "k_norm": torch.randn(size).to(DEVICE, dtype),
    }


def run(impl: str, data: dict[str, torch.Tensor], norm: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and the pools after the op, run on copies of the pools."""
    rope = RopeKv(choice("rope_kv", impl), data["table"])
    k_pool, v_pool = data["k_pool"].clone(), data["v_pool"].clone()
    step = rope.prepare(data["positions"], data["slots"], k_pool.shape[2])
    weights = (data["q_norm"], data["k_norm"]) if norm else (None, None)
    return rope(data["qkv"], k_pool, v_pool, step, *weights, EPS), k_pool, v_pool


def test_rows_of_a_wider_tensor_and_float32_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a merged projection, and weights that round the product alone."""
    data = make(5, 4, 2, 16, 4, 4, torch.float16)
    wide = torch.full((5, 8 * 16 + 7), POISON, dtype=torch.float16, device=DEVICE)
    wide[:, 3:-4] = data["qkv"]
    precise = {name: torch.randn(16, device=DEVICE) for name in ("q_norm", "k_norm")}
    view = {**data, **precise, "qkv": wide[:, 3:-4]}
    assert not view["qkv"].is_contiguous()
    expected = run("reference", {**data, **precise}, norm=True)
    with poisoned_outputs(monkeypatch):
        actual = run("triton", view, norm=True)
    for ours, reference, whole in zip(actual, run("reference", view, norm=True), expected, strict=True):
        assert torch.equal(reference, whole)
        assert ours.dtype == torch.float16
        assert relative_rms(ours, whole) <= checking.RELATIVE_RMS[torch.float16] / 10
    heads = data["qkv"].view(5, 8, 16)[:, :4, 4:].float()
    scale = torch.rsqrt(data["qkv"].view(5, 8, 16)[:, :4].float().square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(expected[0][..., 4:], (precise["q_norm"][4:] * (heads * scale)).half())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "size", "rotary", "page_size"),
    [
        (1, 4, 2, 16, 16, 4),
        (3, 9, 3, 64, 64, 16),
        (5, 2, 1, 24, 24, 1),
        (4, 2, 2, 32, 8, 8),
        (2, 3, 1, 20, 12, 2),
        (65, 8, 4, 16, 16, 16),
        (0, 2, 1, 16, 16, 4),
    ],
)
def test_kernel_equals_reference(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    size: int,
    rotary: int,
    page_size: int,
    dtype: torch.dtype,
    norm: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make(tokens, q_heads, kv_heads, size, rotary, page_size, dtype)
    kept = data["qkv"].clone()
    expected = run("reference", data, norm)
    with poisoned_outputs(monkeypatch):
        actual = run("triton", data, norm)
    assert actual[0].shape == (tokens, q_heads, size)
    for name, ours, theirs in zip(("q", "k", "v"), actual, expected, strict=True):
        assert torch.equal(ours == POISON, theirs == POISON), f"{name} was written elsewhere"
        assert relative_rms(ours, theirs) <= checking.RELATIVE_RMS[dtype] / 2, name
    assert torch.equal(actual[2], expected[2])
    assert torch.equal(data["qkv"], kept)


def test_reference_equals_scalar_python() -> None:
    q_heads, kv_heads, size, rotary, page_size = 2, 1, 6, 4, 2
    data = make(3, q_heads, kv_heads, size, rotary, page_size, torch.float32)
    q, k_pool, v_pool = run("reference", data, True)
    table, half = data["table"].tolist(), rotary // 2
    for token, line in enumerate(data["qkv"].tolist()):
        slot, angles = int(data["slots"][token]), table[int(data["positions"][token])]
        for head in range(q_heads + 2 * kv_heads):
            x = line[head * size : (head + 1) * size]
            if head < q_heads + kv_heads:
                weight = data["q_norm" if head < q_heads else "k_norm"].tolist()
                root = math.sqrt(sum(value * value for value in x) / size + EPS)
                x = [value / root * w for value, w in zip(x, weight, strict=True)]
                first, second = x[:half], x[half:rotary]
                cos, sin = angles[:half], angles[half:]
                x = (
                    [a * c - b * s for a, b, c, s in zip(first, second, cos, sin, strict=True)]
                    + [b * c + a * s for a, b, c, s in zip(first, second, cos, sin, strict=True)]
                    + x[rotary:]
                )
            if head < q_heads:
                found = q[token, head].tolist()
            elif slot < 0:
                continue
            else:
                pool = k_pool if head == q_heads else v_pool
                found = pool[slot // page_size, 0, slot % page_size].tolist()
            assert all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in zip(found, x, strict=True))
    written = int((k_pool != POISON).any(-1).sum())
    assert written == 2 and int((v_pool != POISON).any(-1).sum()) == 2


def test_another_pool_type_is_converted() -> None:
    data = make(3, 4, 2, 16, 16, 4, torch.float32)
    data["k_pool"], data["v_pool"] = data["k_pool"].half(), data["v_pool"].half()
    for ours, theirs in zip(run("triton", data, True), run("reference", data, True), strict=True):
        assert ours.dtype == theirs.dtype and relative_rms(ours, theirs) < 1e-3


def test_slots_beyond_two_to_the_31_elements() -> None:
    """The pools are never touched but at one line, so the system does not back them with memory."""
    pages, kv_heads, page_size, size = 8194, 8, 256, 128
    k_pool, v_pool = (torch.empty(pages, kv_heads, page_size, size, dtype=torch.float16, device=DEVICE) for _ in "kv")
    assert k_pool.numel() > 2**31
    table = torch.cat([torch.ones(1, size // 2), torch.zeros(1, size // 2)], -1).to(DEVICE)
    qkv = torch.randn(1, (1 + 2 * kv_heads) * size, device=DEVICE).half()
    slot = torch.tensor([pages * page_size - 3], device=DEVICE)
    triton.rope_kv(qkv, k_pool, v_pool, table, torch.tensor([0], device=DEVICE), slot)
    assert torch.equal(k_pool[-1, :, -3].reshape(-1), qkv[0, size : 9 * size])
    assert torch.equal(v_pool[-1, :, -3].reshape(-1), qkv[0, 9 * size :])


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(3, 4, 2, 16, 16, 4, torch.float32)
    for ours, theirs in zip(run("check", data, True), run("reference", data, True), strict=True):
        torch.testing.assert_close(ours, theirs)
    fused = triton.rope_kv

    def forgets_v(qkv: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, *rest: object) -> torch.Tensor:
        return fused(qkv, k_pool, v_pool.clone(), *rest)

    monkeypatch.setattr(triton, "rope_kv", forgets_v)
    with pytest.raises(KernelCheckError, match="rope_kv: v differs"):
        run("check", data, True)
