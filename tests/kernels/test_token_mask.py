"""Token masks: kernel against reference bit by bit, reference against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch
from poison import DEVICE, choice

from freetoken.kernels.checking import KernelCheckError
from freetoken.kernels.token_mask import TokenMask, reference, triton


def inputs(rows: int, vocab: int, places: list[int], words: int | None = None) -> tuple[torch.Tensor, ...]:
    logits = torch.randn(rows, vocab, device=DEVICE) * 3
    words = -(-vocab // 32) if words is None else words
    masks = torch.randint(-(2**31), 2**31, (len(places), words), dtype=torch.int64, device=DEVICE)
    return logits, torch.tensor(places, dtype=torch.int64, device=DEVICE), masks.to(torch.int32)


def slow(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> list[list[float]]:
    result = [[float(x) for x in row] for row in logits.tolist()]
    for place, mask in zip(places.tolist(), masks.tolist()):
        for token in range(logits.shape[1] if place >= 0 else 0):
            word = mask[token // 32] & 0xFFFFFFFF if token // 32 < len(mask) else 0
            if not word >> token % 32 & 1:
                result[place][token] = -math.inf
    return result


CASES = [
    (1, 31, [0], None),
    (3, 65, [2, 0], None),
    (4, 4097, [1, 3, 2, 0], None),
    (3, 4100, [1, -1], None),
    (2, 100, [1], 2),
    (2, 64, [0, 1], 3),
    (2, 40, [], None),
]


@pytest.mark.parametrize(("rows", "vocab", "places", "words"), CASES)
def test_kernel_reference_and_scalar_python_agree(rows: int, vocab: int, places: list[int], words: int | None) -> None:
    logits, at, masks = inputs(rows, vocab, places, words)
    expected = slow(logits, at, masks)
    fused, plain = logits.clone(), logits.clone()
    triton.token_mask(fused, at, masks)
    reference.token_mask(plain, at, masks)
    assert fused.tolist() == expected
    assert plain.tolist() == expected


def test_rows_of_a_wider_tensor_and_what_the_model_gave_stay() -> None:
    wide = torch.full((3, 200), 7.0, device=DEVICE)
    view = wide[:, :70]
    view[1, 5] = float("nan")
    mask = torch.tensor([[-1, -1, 0b100]], dtype=torch.int32, device=DEVICE)
    triton.token_mask(view, torch.tensor([1], device=DEVICE), mask)
    assert bool((wide[:, 70:] == 7.0).all()) and bool((wide[[0, 2]] == 7.0).all())
    assert math.isnan(float(view[1, 5]))
    assert (view[1] == -math.inf).nonzero().flatten().tolist() == [64, 65, 67, 68, 69]


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op = TokenMask(choice("token_mask", "check"))
    logits, places, masks = inputs(2, 50, [1])
    expected = logits.clone()
    reference.token_mask(expected, places, masks)
    op(logits, places, masks)
    assert torch.equal(logits, expected)
    monkeypatch.setattr(reference, "token_mask", lambda logits, places, masks: logits.zero_())
    with pytest.raises(KernelCheckError, match="token_mask: the logits differ"):
        op(*inputs(2, 50, [1]))
