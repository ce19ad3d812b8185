"""Launch settings of the products with two-bit weights, by shape, number of tokens and card."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from freetoken.errors import FreetokenError

MAX_TOKENS = 16
"""Tokens up to which these kernels run."""
CLASSES = (1, 4, 8, 16)
"""Settings are kept for up to this many tokens each."""
FEW_TOKENS = 4
"""Tokens a program takes without tensor cores."""
PIECE, BLOCK, TILE = 64, 128, 16
TABLES = Path(__file__).parent / "tables"

Capability = tuple[int, int]
Kind = Literal["single", "few", "fragments"]


@dataclass(frozen=True)
class PQ2Config:
    """Settings of one launch.

    ``kind`` is the kernel: ``single`` (one token), ``few`` (dot products in each thread) or ``fragments`` (tensor cores).
    ``rows`` of the weight a program; ``ahead`` steps of K are on their way at a time; ``num_warps`` warps a program. ``lanes``
    pieces of 64 weights along K a step, without tensor cores; with them a step is a block of 128 for each warp.
    """

    kind: Kind
    rows: int
    ahead: int
    num_warps: int
    lanes: int = 0

    def steps(self, k: int) -> int:
        """Steps along K."""
        if self.kind == "fragments":
            return -(-k // (BLOCK * self.num_warps))
        return -(-k // (PIECE * self.lanes))

    def legal(self, k: int) -> bool:
        """Whether the kernel can run so at all."""
        powers = all(value > 0 and value & (value - 1) == 0 for value in (self.rows, self.num_warps, self.lanes or 1))
        return powers and 1 <= self.ahead <= self.steps(k) and (self.kind != "fragments" or self.rows % TILE == 0)


class TableError(FreetokenError):
    """A table of settings that does not hold settings."""


def m_class(m: int) -> int:
    """The smallest of :data:`CLASSES` that ``m`` (1 to 16) fits in."""
    return next(limit for limit in CLASSES if m <= limit)


def table_path(capability: Capability) -> Path:
    """Where the settings of cards of a compute capability lie."""
    return TABLES / f"sm_{capability[0]}{capability[1]}.json"


def read_table(path: Path) -> dict[tuple[int, int, int], PQ2Config]:
    """Settings by ``(N, K, class)``; :class:`TableError` for anything else than what :func:`write_table` writes."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["settings"]
        found = {(row.pop("n"), row.pop("k"), row.pop("tokens")): PQ2Config(**row) for row in rows}
        wrong = [
            (key, config)
            for key, config in found.items()
            if key[2] not in CLASSES or not config.legal(key[1]) or (config.kind == "single") != (key[2] == 1)
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(f"{path}: not a table of settings: {error!r}") from None
    if wrong:
        raise TableError(f"{path}: settings that cannot run: {wrong[0]}")
    return found


def write_table(path: Path, card: str, settings: dict[tuple[int, int, int], PQ2Config]) -> None:
    """Write what :func:`read_table` reads, with the name of the card that it was measured on."""
    rows = [{"n": n, "k": k, "tokens": m, **asdict(config)} for (n, k, m), config in sorted(settings.items())]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n  "card": {json.dumps(card)},\n  "settings": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


@functools.cache
def _measured(capability: Capability) -> dict[tuple[int, int, int], PQ2Config]:
    path = table_path(capability)
    return read_table(path) if path.exists() else {}


def measured(capability: Capability) -> int:
    """Number of settings that were measured on cards of a compute capability."""
    return len(_measured(capability))


def forget_tables() -> None:
    """Read tables anew from now on: one was written."""
    _measured.cache_clear()


def pick_config(n: int, k: int, m: int, capability: Capability | None = None) -> PQ2Config:
    """The measured settings of ``m`` (1 to 16) tokens of an ``[n, k]`` weight on a GPU of ``capability``, or a default."""
    found = _measured(capability).get((n, k, m_class(m))) if capability is not None else None
    return found or default_config(n, k, m)


def default_config(n: int, k: int, m: int) -> PQ2Config:
    """Settings for a card nobody has measured: enough programs for small weights, few registers."""
    if m == 1:
        lanes = 16
        while lanes > 1 and lanes > k // PIECE:
            lanes //= 2
        per_thread = 4 if n >= 8192 else 2
        config = PQ2Config("single", max(1, per_thread * 64 // lanes), 1, 2, lanes)
        return _with_ahead(config, k, 2 if per_thread == 4 else 3)
    warps = 4 if n >= 8192 else 8
    while warps > 1 and warps > k // BLOCK:
        warps //= 2
    return _with_ahead(PQ2Config("fragments", TILE, 1, warps), k, 3 if m <= 8 else 2)


def _with_ahead(config: PQ2Config, k: int, ahead: int) -> PQ2Config:
    return PQ2Config(config.kind, config.rows, min(ahead, config.steps(k)), config.num_warps, config.lanes)


def candidates(n: int, k: int, m: int, capability: Capability | None = None) -> list[PQ2Config]:
    """Settings worth timing for this shape, the present one first.

    What a thread holds of weights on their way is kept within about 110 registers, and of a step's work at most a quarter may
    lie past the end of K. Some may still spill on a given GPU; a tuning loop skips those.
    """
    found = [pick_config(n, k, m, capability), default_config(n, k, m)]
    if m <= FEW_TOKENS:
        found += _thread_candidates("single" if m == 1 else "few", n, k, m)
    if m > 1:
        found += _fragment_candidates(n, k, m)
    return list(dict.fromkeys(found))


def _thread_candidates(kind: Kind, n: int, k: int, m: int) -> Iterable[PQ2Config]:
    for lanes, warps, per_thread in itertools.product((8, 16, 32, 64), (1, 2, 4), (1, 2, 4, 8)):
        rows = per_thread * 32 * warps // lanes
        steps = PQ2Config(kind, rows, 1, warps, lanes).steps(k)
        wasted = steps * lanes * PIECE > 1.25 * k
        rare = warps > 1 and per_thread not in (2, 4)
        if lanes > 32 * warps or wasted or rare or n < 4 * rows:
            continue
        for ahead in _depths(steps):
            if 4 <= per_thread * ahead <= 20 - 4 * (m - 1):
                yield PQ2Config(kind, rows, ahead, warps, lanes)


def _fragment_candidates(n: int, k: int, m: int) -> Iterable[PQ2Config]:
    for warps in (2, 4, 8):
        for tiles in (1, 2):
            steps = PQ2Config("fragments", TILE * tiles, 1, warps).steps(k)
            wasted = steps * warps * BLOCK > 1.25 * k
            if wasted or n < 4 * TILE * tiles:
                continue
            for ahead in _depths(steps):
                if tiles * ahead <= 8:
                    yield PQ2Config("fragments", TILE * tiles, ahead, warps)


def _depths(steps: int) -> list[int]:
    """Numbers of steps to be ahead by: two, four and six, and all steps where these are few."""
    wanted = {2, 4, 6, *((steps,) if steps <= 6 else ())}
    return sorted(depth for depth in wanted if depth <= steps)
