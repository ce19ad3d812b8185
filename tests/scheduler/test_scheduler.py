"""The scheduler against requests running alone, on a runner that notices every fault in pages, positions and ids."""

from __future__ import annotations

import random

import pytest
from fake_runner import Harness, make_config

from freetoken.scheduler import policy

CONFIGS = [
    {"overlap": overlap, "chunked_prefill_size": chunk, "page_size": page, "schedule_policy": order}
    for overlap in (False, True)
    for chunk in (1, 7, 64)
    for page in (1, 4, 16)
    for order in ("fcfs", "lpm")
]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(50) for _ in range(length)]


@pytest.mark.parametrize("flags", CONFIGS, ids=lambda f: "-".join(str(v) for v in f.values()))
@pytest.mark.parametrize("pool_tokens", [96, 2048])
def test_text_is_that_of_running_alone(flags: dict, pool_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Expecting no output at all admits until nothing is left, so that the small pool must retract.
    monkeypatch.setattr(policy, "RATIO_START", 0.0)
    monkeypatch.setattr(policy, "RATIO_FLOOR", 0.0)
    monkeypatch.setattr(policy, "RATIO_RISE", 0.0)
    rng = random.Random(str(flags))
    h = Harness(make_config(max_prefill_tokens=64, **flags), num_pages=pool_tokens // flags["page_size"] + 1)
    shared = prompt(rng, 24)
    for i in range(14):
        ids = shared[: rng.randrange(25)] + prompt(rng, rng.randrange(1, 20))
        endless = pool_tokens == 96 or i % 3 == 0
        h.add(f"r{i}", ids, max_new_tokens=rng.randrange(1, 40), ignore_eos=endless, min_new_tokens=i % 2)
        if i % 4 == 0:
            h.step()
    h.run()
    for i in range(14):
        h.check_text(f"r{i}")
    if pool_tokens == 96:
        assert h.scheduler.stats().retractions > 0
