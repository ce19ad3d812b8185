"""The chain of a token's two-bit products: its order, how tuning settles on settings, what is printed."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from freetoken.bench import ops, pq2
from freetoken.errors import StartupError
from freetoken.kernels.pq2_gemv import PQ2Config, candidates


def test_a_token_has_257_products() -> None:
    order = pq2.model_order()
    assert len(order) == 257 and order[-1] == pq2.HEAD
    assert Counter(order) == {
        pq2.GDN_IN: 48,
        pq2.ATTENTION_IN: 16,
        pq2.OUT: 64,
        pq2.GATE_UP: 64,
        pq2.DOWN: 64,
        pq2.HEAD: 1,
    }
    assert order[:4] == [pq2.GDN_IN, pq2.OUT, pq2.GATE_UP, pq2.DOWN] and order[12] == pq2.ATTENTION_IN
    # 2.125 bits each, less than the 6.857 GB that a token reads by the small unpacked tensors.
    assert 6.75e9 < sum(n * k for n, k in order) * 2.125 / 8 < 6.857e9


class FakeChain:
    """Costs one millisecond and what each shape's depth is away from three."""

    def __init__(self) -> None:
        self.calls = 0

    def ms(self, tokens: int, settings: pq2.Settings) -> float:
        self.calls += 1
        return 1.0 + sum(abs(config.ahead - 3) for config in settings.values())


def ranked() -> dict[pq2.Shape, list[PQ2Config]]:
    return {shape: [PQ2Config("single", 8, ahead, 1) for ahead in (1, 2, 3, 4)] for shape in pq2.SHAPES}


def test_each_shape_settles_on_what_is_best_in_the_chain() -> None:
    chain: Any = FakeChain()
    session = pq2.Tuning(chain, time.monotonic() + 60)
    assert session.in_chain(1, ranked(), rounds=3) == 1.0
    assert {config.ahead for config in session.found.values()} == {3}
    assert set(session.found) == {(n, k, 1) for n, k in pq2.SHAPES}
    # One for the start, three others a shape, and a second round that changes nothing ends it.
    assert chain.calls == 1 + 2 * 3 * len(pq2.SHAPES)
    assert [line["ms"] for line in session.log] == [1.0 + 2 * len(pq2.SHAPES), 1.0]


def test_when_the_time_is_over_the_best_of_each_alone_stay() -> None:
    chain: Any = FakeChain()
    session = pq2.Tuning(chain, time.monotonic() - 1)
    session.in_chain(8, ranked(), rounds=3)
    assert chain.calls == 1 and {config.ahead for config in session.found.values()} == {1}


@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
def test_tuning_takes_a_few_minutes(tokens: int) -> None:
    for n, k in pq2.SHAPES:
        assert 10 < len(candidates(n, k, tokens)) < 80


def test_summary() -> None:
    base = {"what": "op pq2_gemv", "n": 8, "k": 128}
    found = [
        {**base, "tokens": 1, "us": 2.5, "share": 0.5},
        {**base, "tokens": 3, "us": 3.5, "share": 0.4},
        {**base, "tokens": 16, "us": 12.25, "share": 0.25},
        {"what": "op silu_mul", "tokens": 1},
        {
            "what": "pq2 chain",
            "products": 257,
            "tokens": 8,
            "early_launch": False,
            "quantisers": True,
            "ms": 2.25,
            "roof": 1.5,
            "share": 2 / 3,
        },
    ]
    head, row, chain = pq2.summary(found)
    assert head.split() == ["us", "(share)", "M=1", "M=16"]
    assert row.split() == ["8", "x", "128", "2.50", "(", "50%)", "12.25", "(", "25%)"]
    assert chain == "chain of 257 products, 8 tokens, plain launch, with quantisers: 2.250 ms (67% of 1.500 ms)"
    assert pq2.summary([]) == []


def test_a_class_that_is_none_is_refused() -> None:
    args = ops.parser().parse_args(["pq2_chain", "--tune", "--tune-tokens", "8", "9"])
    with pytest.raises(StartupError, match=r"--tune-tokens 9: the classes are 1, 8, 16, 32"):
        ops._chain(args, 1.0, timed=False)
