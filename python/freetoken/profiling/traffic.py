"""Bytes and floating-point operations of a step by role, from a model's facts (torch-free, pure).

Bytes are those of weights as they are stored (packed and FP8 with their scales), and of KV and states; activations are not counted,
so roles that move little else (:data:`PARTIAL`) have no roof. Operations are multiply-adds times two. With the machine's measured copy bandwidth and
matmul rate a role could take no less than ``max(bytes / bandwidth, operations / rate)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PARTIAL = ("embedding", "norms", "rotation", "n-grams")
"""Roles whose bytes here are a small part of those they move."""


@dataclass(frozen=True)
class Facts:
    """Of a model as it is held: ``weights`` bytes and ``matrices`` elements by role (``experts`` without those of the shared one where
    it is held apart), bytes of an embedding row, of KV a token, of state a request; operations of attention a pair of query and key,
    and of the delta rule a token. Of ``experts`` a token takes ``top_k``, and with ``joined`` one more that all tokens take.

    ``card`` is the name of the GPU. ``bandwidth`` (bytes a second) and ``rate`` (operations a second) are 0 where they were not measured.
    """

    device: str
    card: str = ""
    weights: dict[str, int] = field(default_factory=dict)
    matrices: dict[str, int] = field(default_factory=dict)
    embedding_row: int = 0
    kv_token: int = 0
    state_request: int = 0
    pair_ops: int = 0
    rule_ops: int = 0
    experts: int = 0
    top_k: int = 0
    joined: int = 0
    bandwidth: float = 0.0
    rate: float = 0.0

    def public(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Facts:
        """From :meth:`public`; unknown keys are passed over, missing ones take their defaults."""
        return cls(**{"device": "", **{k: v for k, v in values.items() if k in cls.__dataclass_fields__}})


def _experts_read(facts: Facts, tokens: float) -> float:
    """Share of the stored experts that ``tokens`` tokens read, if each chooses by chance."""
    if not facts.experts:
        return 1.0
    chosen = facts.experts * (1.0 - math.pow(1.0 - facts.top_k / facts.experts, tokens))
    return (chosen + facts.joined) / (facts.experts + facts.joined)


def _experts_used(facts: Facts) -> float:
    """Share of the stored experts that multiply one token."""
    return (facts.top_k + facts.joined) / (facts.experts + facts.joined) if facts.experts else 1.0


def step_bytes(facts: Facts, values: Mapping[str, float]) -> dict[str, float]:
    """Bytes that a step moves, by role. ``values`` are those of a step's range (see :mod:`freetoken.profiling.marks`), or means of them:
    ``requests``, ``tokens``, ``sampled``, and ``read``, the tokens of KV that attention reads."""
    tokens, requests = values.get("tokens", 0), values.get("requests", 0)
    result: dict[str, float] = {role: float(count) for role, count in facts.weights.items()}
    result["embedding"] = float(facts.embedding_row * tokens)
    if "experts" in result:
        result["experts"] *= _experts_read(facts, tokens)
    if not values.get("sampled", 0):
        result.pop("head", None)
    for role, extra in (
        ("rotation", facts.kv_token * tokens),
        ("attn", facts.kv_token * values.get("read", 0)),
        ("gdn step", 2 * facts.state_request * requests),
    ):
        if extra:
            result[role] = result.get(role, 0.0) + extra
    return {role: count for role, count in result.items() if count}


def step_operations(facts: Facts, values: Mapping[str, float]) -> dict[str, float]:
    """Operations of a step, by role; ``values`` as in :func:`step_bytes` with ``pairs``, the pairs of query and key that causal attention
    looks at."""
    tokens = values.get("tokens", 0)
    result = {role: 2.0 * count * tokens for role, count in facts.matrices.items() if role != "embedding"}
    if "experts" in result:
        result["experts"] *= _experts_used(facts)
    if "head" in result:
        result["head"] = 2.0 * facts.matrices["head"] * values.get("sampled", 0)
    for role, extra in (("attn", facts.pair_ops * values.get("pairs", 0)), ("gdn step", facts.rule_ops * tokens)):
        if extra:
            result[role] = result.get(role, 0.0) + extra
    return {role: count for role, count in result.items() if count}
