"""Launch settings of the products of many tokens, and which of their forms is used, by shape and GPU."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from freetoken.errors import FreetokenError

Form = Literal["int8", "float", "dense"]
FORMS: tuple[Form, ...] = ("int8", "float", "dense")
Capability = tuple[int, int]

SPLIT_PROGRAMS = 512
SPLIT_CELLS = 128 * 64
"""A split product has at most this many programs, of at most this many outputs each: what scratch memory is sized by."""
SLICE_BYTES = 192 * 2**20
"""Most bytes of weights that the dense form decodes at a time. Large slices fill the last wave of a product better, small ones may
still be in the L2 cache when they are multiplied."""
SMALL_SLICE = 24 * 2**20


@dataclass(frozen=True)
class GemmConfig:
    """A program multiplies ``block_n`` weight rows with ``block_m`` tokens; ``num_stages`` deep copies, ``num_warps`` warps.
    ``split_k`` programs share an output tile and add their parts in a fixed order. Without ``signed`` the int8 form multiplies codes
    instead of values and corrects the sums."""

    block_n: int
    block_m: int
    num_warps: int = 4
    num_stages: int = 3
    split_k: int = 1
    signed: bool = True

    def fits_scratch(self, m: int, n: int) -> bool:
        """Whether the parts of a split product fit the scratch memory."""
        programs = -(-m // self.block_m) * -(-n // self.block_n) * self.split_k
        return self.split_k == 1 or (programs <= SPLIT_PROGRAMS and self.block_n * self.block_m <= SPLIT_CELLS)


@dataclass(frozen=True)
class DenseConfig:
    """The dense form decodes ``rows`` rows of the weight at a time."""

    rows: int

    def fits_scratch(self, k: int) -> bool:
        """Whether a slice fits the scratch memory."""
        return 0 < self.rows * k * 2 <= SLICE_BYTES


USUAL_DENSE_FROM = 512
"""Tokens from which a GPU that nobody has measured takes the dense form."""
TABLES = Path(__file__).parent / "tables"


class TableError(FreetokenError):
    """A table of settings that does not hold settings."""


@dataclass(frozen=True)
class Table:
    """What was measured on a card: the number of tokens from which the dense form is the fastest, and settings by
    ``(form, n, k, class)`` with the class of :func:`m_class`."""

    dense_from: int = USUAL_DENSE_FROM
    settings: dict[tuple[str, int, int, int], GemmConfig | DenseConfig] = field(default_factory=dict)


def table_path(capability: Capability) -> Path:
    """Where the table of cards of a compute capability lies."""
    return TABLES / f"sm_{capability[0]}{capability[1]}.json"


def read_table(path: Path) -> Table:
    """What :func:`write_table` wrote; :class:`TableError` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found: dict[tuple[str, int, int, int], GemmConfig | DenseConfig] = {}
        for row in content["settings"]:
            key = (row.pop("form"), row.pop("n"), row.pop("k"), row.pop("tokens"))
            found[key] = DenseConfig(**row) if key[0] == "dense" else GemmConfig(**row)
        table = Table(int(content["dense_from"]), found)
        impossible = [key for key, config in found.items() if not _possible(*key, config)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(f"{path}: not a table of settings: {error!r}") from None
    if impossible:
        form, n, k, tokens = impossible[0]
        raise TableError(f"{path}: {found[impossible[0]]} cannot run {tokens} tokens of {n} by {k} in the form {form}")
    return table


def _possible(form: str, n: int, k: int, tokens: int, config: GemmConfig | DenseConfig) -> bool:
    if isinstance(config, DenseConfig):
        return config.fits_scratch(k)
    powers = all(x > 0 and x & (x - 1) == 0 for x in (config.block_n, config.block_m, config.num_warps))
    return form in FORMS and powers and config.split_k > 0 and config.fits_scratch(tokens, n)


def write_table(path: Path, card: str, table: Table) -> None:
    """Write what :func:`read_table` reads, with the name of the card that it was measured on."""
    rows = [
        {"form": form, "n": n, "k": k, "tokens": tokens, **asdict(config)}
        for (form, n, k, tokens), config in sorted(table.settings.items())
    ]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = f'{{\n  "card": {json.dumps(card)},\n  "dense_from": {table.dense_from},\n  "settings": [\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{lines}\n  ]\n}}\n", encoding="utf-8")


@functools.cache
def _measured(capability: Capability | None) -> Table:
    if capability is None or not table_path(capability).exists():
        return Table()
    return read_table(table_path(capability))


def measured(capability: Capability) -> int:
    """Number of settings that were measured on cards of a compute capability."""
    return len(_measured(capability).settings)


def m_class(m: int) -> int:
    """The class of a number of tokens: the power of two at or above it, from 32 to 4096."""
    return min(4096, max(32, 1 << max(m - 1, 0).bit_length()))


def pick_form(m: int, capability: Capability | None = None) -> Form:
    """The form for ``m`` tokens: decoding whole slices of weights costs the same for every number of tokens, so it is for many."""
    return "dense" if m >= _measured(capability).dense_from else "int8"


def pick_config(form: str, n: int, k: int, m: int, capability: Capability | None = None) -> GemmConfig:
    """The measured settings of this shape, or a default whose shared memory every served GPU has (99 KiB)."""
    found = _measured(capability).settings.get((form, n, k, m_class(m)))
    if isinstance(found, GemmConfig) and found.fits_scratch(m, n):
        return found
    return default_config(form, n, k, m)


def pick_slice(n: int, k: int, m: int, capability: Capability | None = None) -> DenseConfig:
    """The measured slice of the dense form, or as few slices as scratch memory allows."""
    found = _measured(capability).settings.get(("dense", n, k, m_class(m)))
    return found if isinstance(found, DenseConfig) else DenseConfig(_slice_rows(n, max(1, SLICE_BYTES // (2 * k))))


def slice_candidates(n: int, k: int, m: int, capability: Capability | None = None) -> list[DenseConfig]:
    """Slices worth timing, the default first."""
    found = [pick_slice(n, k, m, capability)]
    for slices in range(1, 17):
        config = DenseConfig(-(-n // slices // 256) * 256)
        if slices == 1 or 2 * config.rows * k >= SMALL_SLICE:
            found.append(config)
    return list(dict.fromkeys(each for each in found if each.fits_scratch(k)))


def _slice_rows(n: int, most: int) -> int:
    """Rows of a slice: as few slices as ``most`` rows allow, of nearly the same size, which is a multiple of 256 if it can be."""
    even = -(-n // -(-n // most))
    rounded = -(-even // 256) * 256
    return rounded if rounded <= most else even


def default_config(form: str, n: int, k: int, m: int) -> GemmConfig:
    """Settings for a card nobody has measured: two programs a multiprocessor, K split where there are few tiles."""
    block_m = 32 if m <= 32 else 64
    tiles = -(-n // 128) * -(-m // block_m)
    split = 1
    while split < 8 and tiles * split * 2 <= 264 and k // (split * 2) >= 1024:
        split *= 2
    stages = 3 if form == "int8" else 2
    return GemmConfig(128, block_m, 4 if form == "int8" else 8, stages, split, signed=form != "int8" or block_m > 32)


def candidates(form: str, n: int, k: int, m: int, capability: Capability | None = None) -> list[GemmConfig]:
    """Settings worth timing, the default first; some may ask for more than a given GPU has and fail to launch."""
    found = [pick_config(form, n, k, m, capability), default_config(form, n, k, m)]
    most = 64 if form == "int8" else 128
    grid = itertools.product((64, 128), (32, 64, 128, 256), (4, 8), (3, 4), (1, 2, 4, 8))
    for block_n, block_m, warps, stages, split in grid:
        config = GemmConfig(block_n, block_m, warps, stages, split, signed=form != "int8" or block_m > 32)
        tiles = -(-n // block_n) * -(-m // block_m)
        fits = (
            block_m <= m_class(m)
            and min(m_class(m), 1024) <= 16 * block_m
            and 16 <= block_n * block_m // (32 * warps) <= most
        )
        if fits and k // split >= 1024 and (split == 1 or tiles * split <= 528) and config.fits_scratch(m, n):
            found.append(config)
    return list(dict.fromkeys(found))
