"""Per-layer embeddings of hashed n-grams (PLE): their geometry, and the constants of the hash (torch-free).

The constants follow from a seed, as published with ``qwen4_exp`` in transformers; checkpoints also store them, and
:meth:`PleConfig.check_constants` holds the two against each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from freetoken.errors import StartupError
from freetoken.models.config import LINEAR_ATTENTION

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LAYER_SEED_STEP = 10_007
MAX_ROWS = 2**40
MAX_NGRAM = 16
BLOCK_TOKENS = 1024
"""Tokens convolved at once in a prompt: bounds the float32 copies of residual streams that are held."""


def splitmix64(value: int) -> int:
    """The mixing function of the SplitMix64 generator (Steele, Lea, Flood 2014), of a 64-bit state before its step."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    if value % 2 == 0:
        return False
    return all(value % divisor for divisor in range(3, int(value**0.5) + 2, 2))


@functools.lru_cache(maxsize=32)
def _primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes that are at least ``start``."""
    return tuple(itertools.islice((value for value in itertools.count(start) if _is_prime(value)), count))


@dataclass(frozen=True)
class HashConstants:
    """What hashes the n-grams of one layer: ``multipliers`` (one an id of the window), and of each head its number of rows and where
    they begin in the table."""

    multipliers: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def used_rows(self) -> int:
        """Rows of the table that a token can look up."""
        return sum(self.vocab_sizes)


@dataclass(frozen=True, kw_only=True)
class PleConfig:
    """Geometry of the per-layer embeddings.

    ``layers`` are the decoder layers that have one, from 0, rising. ``streams`` residual streams of ``hidden_size`` each
    (hyper-connections) take the same embedding. ``ngram_size`` n is the longest n-gram hashed; ``boundary_id`` is the id no
    n-gram reaches over. Each of the ``(n - 1) * heads_per_ngram`` heads looks up one row of ``row_width`` elements. The convolution
    has ``conv_width`` taps, ``ngram_size`` tokens apart.
    """

    layers: tuple[int, ...]
    streams: int
    hidden_size: int
    vocab_size: int
    boundary_id: int
    embed_dim: int
    ngram_size: int = 3
    heads_per_ngram: int = 8
    conv_width: int = 4
    vocab_base: int = 20_000_000
    divisible_by: int = 128
    seed: int = 1234

    @property
    def heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def row_width(self) -> int:
        """Elements of one row of a table."""
        return self.embed_dim // self.heads

    @property
    def channels(self) -> int:
        """Width of all residual streams together."""
        return self.streams * self.hidden_size

    @property
    def dilation(self) -> int:
        """Tokens between two taps of the convolution."""
        return self.ngram_size

    @property
    def history(self) -> int:
        """Tokens before the current one that the convolution reaches."""
        return (self.conv_width - 1) * self.dilation

    def constants(self, ordinal: int) -> HashConstants:
        """Those of the layer ``layers[ordinal]``; for the multipliers and the head sizes alike it is the ordinal that counts."""
        base = self.seed + _LAYER_SEED_STEP * ordinal
        half = max(1, (2**63 - 1) // self.vocab_size // 2)
        multipliers = tuple(
            2 * (splitmix64((base + _GOLDEN * (index + 1)) & _MASK) % half) + 1 for index in range(self.ngram_size)
        )
        sizes = _primes_from(self.vocab_base, (ordinal + 1) * self.heads)[ordinal * self.heads :]
        return HashConstants(multipliers, sizes, tuple(itertools.accumulate(sizes[:-1], initial=0)))

    def table_rows(self, ordinal: int) -> int:
        """Rows of the table of ``layers[ordinal]``, padding included."""
        return -(-self.constants(ordinal).used_rows // self.divisible_by) * self.divisible_by

    def check(self, layer_types: Sequence[str]) -> None:
        """:class:`StartupError` for a geometry that cannot be served; ``layer_types`` names the mixer of each decoder layer."""
        for layer in self.layers:
            if not 0 <= layer < len(layer_types):
                raise StartupError(
                    f"ple_layer_ids: {layer + 1} is not one of the {len(layer_types)} layers, counted from 1"
                )
            if layer_types[layer] != LINEAR_ATTENTION:
                raise StartupError(
                    f"ple_layer_ids: layer {layer + 1} is {layer_types[layer]}; only linear_attention can be"
                )
        if list(self.layers) != sorted(set(self.layers)):
            raise StartupError("ple_layer_ids: layers must rise and appear once")
        if not 2 <= self.ngram_size <= MAX_NGRAM:
            raise StartupError(f"ngram_size must be from 2 to {MAX_NGRAM}, not {self.ngram_size}")
        if self.heads_per_ngram < 1 or self.embed_dim % self.heads or self.embed_dim < 1:
            raise StartupError(f"ple_embed_dim {self.embed_dim} does not divide over {self.heads} n-gram heads")
        if self.conv_width < 2:
            raise StartupError(f"ple_conv_kernel_size must be at least 2, not {self.conv_width}")
        if not 0 <= self.boundary_id < self.vocab_size:
            raise StartupError(f"eos_token_id {self.boundary_id} lies outside the vocabulary of {self.vocab_size}")
        if self.vocab_base < 2 or self.divisible_by < 1:
            raise StartupError(
                "ngram_vocab_size_base must be at least 2 and make_ngram_vocab_size_divisible_by at least 1, not "
                f"{self.vocab_base} and {self.divisible_by}"
            )
        if self.vocab_base * self.heads * max(1, len(self.layers)) > MAX_ROWS:
            raise StartupError(f"ngram_vocab_size_base {self.vocab_base} for {self.heads} heads asks for too many rows")

    def check_constants(self, ordinal: int, stored: HashConstants, where: str) -> None:
        """:class:`StartupError` when what the checkpoint stores for ``layers[ordinal]`` is not what its configuration gives."""
        derived = self.constants(ordinal)
        for name in ("multipliers", "vocab_sizes", "offsets"):
            found, expected = getattr(stored, name), getattr(derived, name)
            if tuple(found) == expected:
                continue
            if len(found) != len(expected):
                raise StartupError(f"{where}: {len(found)} {name} are stored, but the config asks for {len(expected)}")
            first = next(i for i, pair in enumerate(zip(found, expected)) if pair[0] != pair[1])
            raise StartupError(
                f"{where}: stored {name}[{first}] is {found[first]}, but the config's seed and sizes give {expected[first]}"
            )


class ConfigReader(Protocol):
    """Typed reads from a configuration dictionary, as :mod:`freetoken.models.parse` makes them."""

    values: Mapping[str, Any]
    where: str

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them."""

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise :class:`StartupError` that names the key."""


def parse_ple(r: ConfigReader, *, layer_types: Sequence[str], hidden_size: int, vocab_size: int) -> PleConfig | None:
    """The n-gram embeddings that the keys of a ``qwen4_exp`` configuration ask for, checked; ``None`` for none.

    ``ple_layer_ids`` count from 1. Defaults are those of transformers. The boundary is the first end-of-sequence id; a configuration
    that was made from other metadata may name it as ``ple_boundary_token_id``.
    """
    listed = r.values.get("ple_layer_ids") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        r.fail("ple_layer_ids", "must be a list of layer numbers")
    if not listed:
        return None
    seed = r.values.get("seed", 1234)
    if type(seed) is not int or seed < 0:
        r.fail("seed", f"must be a whole number of at least 0, not {seed!r}")
    boundary = r.ids("ple_boundary_token_id") or r.ids("eos_token_id")
    if not boundary:
        r.fail("eos_token_id", "is missing, and n-grams must not reach over it")
    config = PleConfig(
        layers=tuple(sorted({layer - 1 for layer in listed})),
        streams=r.integer("hc_count", 4),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        boundary_id=boundary[0],
        embed_dim=r.integer("ple_embed_dim", hidden_size),
        ngram_size=r.integer("ngram_size", 3),
        heads_per_ngram=r.integer("heads_per_ngram", 8),
        conv_width=r.integer("ple_conv_kernel_size", 4),
        vocab_base=r.integer("ngram_vocab_size_base", 20_000_000),
        divisible_by=r.integer("make_ngram_vocab_size_divisible_by", 128),
        seed=seed,
    )
    try:
        config.check(layer_types)
    except StartupError as error:
        raise StartupError(f"{r.where}: {error}") from None
    return config
