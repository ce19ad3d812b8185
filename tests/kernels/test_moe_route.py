"""Routing to experts: kernels against torch exactly, torch against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch
from poison import DEVICE, choice

from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.moe_route import MoeRoute, block_count, reference, triton


def scalar_choice(row: list[float], top_k: int, renormalise: bool) -> tuple[list[int], list[float]]:
    """One token by hand."""
    left = list(range(len(row)))
    chosen: list[int] = []
    for _ in range(top_k):
        best = left[0]
        for expert in left:
            if row[expert] > row[best]:
                best = expert
        chosen.append(best)
        left.remove(best)
    top = max(row)
    parts = [math.exp(row[expert] - top) for expert in chosen]
    total = sum(parts) if renormalise else sum(math.exp(value - top) for value in row)
    return chosen, [part / total for part in parts]


def scalar_groups(ids: list[int], experts: int, block: int) -> tuple[list[int], list[int]]:
    """Order and expert of every block that is needed, by hand."""
    order: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        mine = [route for route, chosen in enumerate(ids) if chosen == expert]
        while len(mine) % block:
            mine.append(-1)
        order += mine
        owners += [expert] * (len(mine) // block)
    return order, owners


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (3, 5, 5), (7, 60, 4), (2, 512, 10), (5, 33, 3)])
def test_choice(tokens: int, experts: int, top_k: int, renormalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among logits of few values, so that many tie, in a matrix with further columns."""
    wide = (torch.randn(tokens, experts + 3, device=DEVICE) * 4).round() / 2
    wide[:, experts:] = 99.0
    poison_integers(monkeypatch)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = wide.to(dtype)
        ids, weights = triton.choose_experts(logits, experts, top_k, renormalise)
        wanted, expected = reference.choose_experts(logits, experts, top_k, renormalise)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert torch.equal(ids, wanted)
        assert relative_rms(weights, expected) < 1e-6
    for row, chosen, given in zip(wide.tolist(), wanted.tolist(), expected.tolist(), strict=True):
        by_hand, parts = scalar_choice(row[:experts], top_k, renormalise)
        assert chosen == by_hand
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(given, parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_choice_among_any_bits(dtype: torch.dtype) -> None:
    """Both zeros, subnormals, infinities and NaN among them."""
    size = torch.int16 if dtype.itemsize == 2 else torch.int32
    limits = torch.iinfo(size)
    bits = torch.randint(limits.min, limits.max, (6, 130), dtype=size)
    bits[1, :128] = bits[1, :2].repeat(64)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan]).to(dtype).view(size)
    bits[2:4] = special[torch.randint(5, (2, 130))]
    bits[4] = special[torch.randint(2, (130,))]
    logits = bits.view(dtype).to(DEVICE)
    ids, _ = triton.choose_experts(logits, 130, 9, True)
    assert torch.equal(ids, reference.choose_experts(logits, 130, 9, True)[0])


@pytest.mark.parametrize("top_k", [1, 4])
def test_the_shared_expert_comes_last(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 9, device=DEVICE) * 3
    poison_integers(monkeypatch)
    ids, weights = triton.choose_experts(logits, 7, top_k, True, True)
    wanted, expected = reference.choose_experts(logits, 7, top_k, True, True)
    assert torch.equal(ids, wanted) and relative_rms(weights, expected) < 1e-6
    alone, parts = reference.choose_experts(logits, 7, top_k, True)
    assert torch.equal(ids[:, :top_k], alone) and relative_rms(weights[:, :top_k], parts) < 1e-6
    assert ids[:, top_k].tolist() == [7] * 5
    for given, gate in zip(weights[:, top_k].tolist(), logits[:, 7].tolist(), strict=True):
        assert math.isclose(given, 1 / (1 + math.exp(-gate)), rel_tol=1e-5)


def poison_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised tensors hold a value no output may have."""
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = real(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)


def test_odd_logits_choose_distinct_experts() -> None:
    """No number, infinities, zeros of both signs: ids stay inside and apart."""
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 6, [-inf] * 6, [nan, 1.0, -inf, 2.0, nan, nan], [0.0, -0.0, 0.0, -0.0, 0.0, -1e-30]]
    logits = torch.tensor(rows, device=DEVICE)
    ids, weights = triton.choose_experts(logits, 6, 4, True)
    wanted, expected = reference.choose_experts(logits, 6, 4, True)
    assert torch.equal(ids, wanted)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0, 2], [0, 1, 2, 3]]
    torch.testing.assert_close(weights, expected, equal_nan=True)


CASES = {
    "even": ([[0, 1], [2, 3], [1, 0]], 4, 4),
    "all on one": ([[2]] * 9, 5, 4),
    "an expert with none": ([[0, 3], [3, 0], [0, 3]], 4, 2),
    "one route": ([[6]], 7, 16),
    "left out": ([[0, -1], [-1, -1], [2, 0]], 3, 2),
    "all left out": ([[-1, -1]], 3, 2),
    "full blocks": ([[1]] * 8, 2, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, experts, block = CASES[name]
    compare_groups(torch.tensor(table, dtype=torch.int32, device=DEVICE), experts, block, monkeypatch)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block"), [(300, 4, 13, 16), (513, 4, 3, 64), (1, 8, 60, 16)])
def test_many_routes(tokens: int, top_k: int, experts: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More routes than one scan holds; a skewed choice leaves some experts without any."""
    ids = (torch.rand(tokens, top_k, device=DEVICE).square() * (experts - 1)).to(torch.int32)
    compare_groups(ids, experts, block, monkeypatch)


def compare_groups(ids: torch.Tensor, experts: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_integers(monkeypatch)
    order, owners = triton.group_by_expert(ids, experts, block)
    wanted, expected = reference.group_by_expert(ids, experts, block)
    assert owners.numel() == block_count(ids.numel(), experts, block)
    assert torch.equal(owners, expected)
    by_hand, named = scalar_groups(ids.flatten().tolist(), experts, block)
    assert owners.tolist() == named + [-1] * (owners.numel() - len(named))
    used = len(named) * block
    assert order[:used].tolist() == wanted[:used].tolist() == by_hand


@pytest.mark.parametrize("block", [1, 2, 16])
def test_blocks_are_enough_for_the_worst_case(block: int) -> None:
    for routes in range(1, 40):
        for experts in (1, 3, 50):
            spread = [1] * min(routes, experts)
            spread[0] += routes - len(spread)
            needed = sum(-(-count // block) for count in spread)
            assert needed <= block_count(routes, experts, block) <= routes


def test_no_tokens() -> None:
    ids, weights = triton.choose_experts(torch.empty(0, 4, device=DEVICE), 4, 2, True)
    assert ids.shape == weights.shape == (0, 2)
    order, owners = triton.group_by_expert(ids, 4, 16)
    assert order.numel() == owners.numel() == 0
    assert [x.numel() for x in reference.group_by_expert(ids, 4, 16)] == [0, 0]


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    route = MoeRoute(choice("moe_route", "check"))
    logits = torch.randn(5, 8, device=DEVICE)
    ids, _ = route(logits, 8, 2, True)
    route.group(ids, 8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "choose_experts", lambda *_: (ids.flip(1), torch.ones(5, 2)))
        with pytest.raises(KernelCheckError, match="moe_route: a chosen expert"):
            route(logits, 8, 2, True)
    real = reference.group_by_expert
    monkeypatch.setattr(reference, "group_by_expert", lambda *args: (real(*args)[0] + 1, real(*args)[1]))
    with pytest.raises(KernelCheckError, match="moe_route: a place"):
        route.group(ids, 8, 16)
