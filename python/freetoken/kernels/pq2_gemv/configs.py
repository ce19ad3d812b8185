"""Launch settings of the products with two-bit weights, by shape, number of tokens and card."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from freetoken.errors import FreetokenError

MAX_TOKENS = 32
"""Tokens up to which these kernels run."""
CLASSES = (1, 8, 16, 32)
"""Settings are kept for up to this many tokens each."""
PIECE, BLOCK = 64, 128
TILE = {"single": 8, "fragments": 16}
"""Rows of a tile, by kind."""
STEP = {"single": 4 * PIECE, "fragments": BLOCK}
"""Columns that a warp takes at a step."""
TABLES = Path(__file__).parent / "tables"

Capability = tuple[int, int]
Kind = Literal["single", "fragments"]


@dataclass(frozen=True)
class PQ2Config:
    """Settings of one launch.

    ``kind`` is the kernel: ``single`` (one token) or ``fragments`` (tensor cores).
    ``rows`` of the weight a program; ``ahead`` steps of K are on their way at a time; ``num_warps`` warps a program, of which
    ``row_warps`` have rows of their own, the others parts of K.
    """

    kind: Kind
    rows: int
    ahead: int
    num_warps: int
    row_warps: int = 1

    @property
    def k_warps(self) -> int:
        """Warps that share the same rows."""
        return self.num_warps // self.row_warps

    @property
    def tiles(self) -> int:
        """Tiles of rows a warp."""
        return self.rows // (TILE[self.kind] * self.row_warps)

    def steps(self, k: int) -> int:
        """Steps along K."""
        return -(-k // (STEP[self.kind] * self.k_warps))

    def legal(self, k: int) -> bool:
        """Whether the kernel can run so at all."""
        sizes = (self.rows, self.num_warps, self.row_warps)
        powers = all(value > 0 and value & (value - 1) == 0 for value in sizes)
        return powers and self.num_warps >= self.row_warps and self.tiles > 0 and 1 <= self.ahead <= self.steps(k)


class TableError(FreetokenError):
    """A table of settings that does not hold settings."""


def m_class(m: int) -> int:
    """The smallest of :data:`CLASSES` that ``m`` (1 to 32) fits in."""
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
    """The measured settings of ``m`` (1 to 32) tokens of an ``[n, k]`` weight on a GPU of ``capability``, or a default."""
    found = _measured(capability).get((n, k, m_class(m))) if capability is not None else None
    return found or default_config(n, k, m)


def default_config(n: int, k: int, m: int) -> PQ2Config:
    """Settings for a card nobody has measured: enough programs for small weights, few registers."""
    if m == 1:
        warps = 4
        while warps > 1 and warps > -(-k // STEP["single"]):
            warps //= 2
        return _with_ahead(PQ2Config("single", 16, 1, warps), k, 3)
    if m > 16 and k >= 4 * BLOCK:
        # Two tiles read an activation once for both; few registers leave room for the warps that hide the wait for weights.
        return PQ2Config("fragments", 2 * TILE["fragments"], 1, 4)
    # Many tokens want many rows a program, which share them; few programs want to share K.
    row_warps, warps = (2, 8) if n >= 8192 else (1, 8)
    while warps > row_warps and warps // row_warps > k // BLOCK:
        warps //= 2
    return _with_ahead(
        PQ2Config("fragments", TILE["fragments"] * row_warps, 1, warps, row_warps=row_warps), k, 3 if m <= 16 else 2
    )


def _with_ahead(config: PQ2Config, k: int, ahead: int) -> PQ2Config:
    return replace(config, ahead=min(ahead, config.steps(k)))


def candidates(n: int, k: int, m: int, capability: Capability | None = None) -> list[PQ2Config]:
    """Settings worth timing for this shape, the present one first.

    What a thread holds of weights on their way is kept within about 110 registers, and of a step's work at most a quarter may
    lie past the end of K. Some may still spill on a given GPU; a tuning loop skips those.
    """
    found = [pick_config(n, k, m, capability), default_config(n, k, m)]
    found += _single_candidates(n, k) if m == 1 else _fragment_candidates(n, k, m)
    return list(dict.fromkeys(found))


def _single_candidates(n: int, k: int) -> Iterable[PQ2Config]:
    for row_warps, k_warps, tiles in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)):
        warps, rows = row_warps * k_warps, TILE["single"] * tiles * row_warps
        steps = PQ2Config("single", rows, 1, warps, row_warps).steps(k)
        wasted = steps * k_warps * STEP["single"] > 1.25 * k
        if wasted or warps > 8 or n < 4 * rows:
            continue
        for ahead in _depths(steps):
            if 4 <= tiles * ahead <= 16:
                yield PQ2Config("single", rows, ahead, warps, row_warps)


def _fragment_candidates(n: int, k: int, m: int) -> Iterable[PQ2Config]:
    for row_warps, k_warps, tiles in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        warps, rows = row_warps * k_warps, TILE["fragments"] * tiles * row_warps
        steps = PQ2Config("fragments", rows, 1, warps, row_warps=row_warps).steps(k)
        wasted = steps * k_warps * BLOCK > 1.25 * k
        if wasted or not 2 <= warps <= 8 or n < 64 * rows:
            continue
        # With many tokens the sums of two tiles leave registers for few warps, and weights on their way for fewer still.
        for ahead in [*([1] if tiles > 1 and m > 16 else []), *_depths(steps)]:
            # Words of codes on their way, those unpacked and sums of a thread.
            halves = -(-m // 8)
            if 5 * tiles * ahead + 16 * min(tiles, halves) + 4 * tiles * halves <= 110:
                yield PQ2Config("fragments", rows, ahead, warps, row_warps)


def _depths(steps: int) -> list[int]:
    """Numbers of steps to be ahead by: two, four and six, and all steps where these are few."""
    wanted = {2, 4, 6, *((steps,) if steps <= 6 else ())}
    return sorted(depth for depth in wanted if depth <= steps)
