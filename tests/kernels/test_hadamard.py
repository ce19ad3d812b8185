"""Signs and rotation: reference against scalar Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from freetoken.kernels.hadamard import reference, rotate, unrotate


def scalar_transform(values: list[float], block: int) -> list[float]:
    """Row by row of ``H[r, c] = (-1)^popcount(r & c) / sqrt(block)``."""
    out = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        for row in range(block):
            terms = (-value if bin(row & column).count("1") % 2 else value for column, value in enumerate(part))
            out.append(math.fsum(terms) / math.sqrt(block))
    return out


def close(actual: torch.Tensor, expected: list[float]) -> bool:
    return actual.dtype == torch.float64 and torch.allclose(
        actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("width", "block"), [(8, 8), (12, 4), (6, 2), (5, 1), (192, 64), (16, 16)])
def test_reference_equals_scalar_python(width: int, block: int) -> None:
    values = [random.gauss(0, 1) for _ in range(width)]
    signs = [random.choice((-1, 1)) for _ in range(width)]
    x, s = torch.tensor(values, dtype=torch.float64), torch.tensor(signs, dtype=torch.int8)
    signed = [a * b for a, b in zip(values, signs)]
    assert close(rotate(x, s, block), scalar_transform(signed, block))
    assert close(rotate(x, None, block), scalar_transform(values, block))
    after = [a * b for a, b in zip(scalar_transform(values, block), signs)]
    assert close(unrotate(x, s, block), after)
    assert close(unrotate(x, None, block), scalar_transform(values, block))


def test_unrotate_undoes_rotate_and_a_folded_weight_gives_the_plain_product() -> None:
    width, block = 96, 32
    x = torch.randn(3, 2, width, dtype=torch.float64)
    signs = torch.randint(0, 2, (width,)) * 2 - 1
    torch.testing.assert_close(unrotate(rotate(x, signs, block), signs, block), x)
    weight = torch.randn(7, width, dtype=torch.float64)
    folded = reference.transform(weight * signs, block)
    torch.testing.assert_close(rotate(x, signs, block) @ folded.mT, x @ weight.mT)
    torch.testing.assert_close(unrotate(folded, signs, block), weight)
    assert not torch.allclose(rotate(x, None, block) @ folded.mT, x @ weight.mT)


def test_types() -> None:
    x = torch.randn(2, 64).half()
    signs = (torch.randint(0, 2, (64,)) * 2 - 1).to(torch.int8)
    wide = rotate(x, signs, 16, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, rotate(x.float(), signs, 16))
    assert torch.equal(rotate(x, signs, 16), wide.half())
    assert torch.equal(unrotate(x, signs, 16), unrotate(x.float(), signs, 16).half())


@pytest.mark.parametrize(
    ("width", "signs", "block", "reason"),
    [(12, 12, 8, "no multiple"), (12, 12, 6, "power of two"), (12, 12, 0, "power of two"), (8, 4, 8, "8 wide")],
)
def test_shapes_that_do_not_fit_are_refused(width: int, signs: int, block: int, reason: str) -> None:
    for call in (rotate, unrotate):
        with pytest.raises(ValueError, match=reason):
            call(torch.ones(2, width), torch.ones(signs), block)
