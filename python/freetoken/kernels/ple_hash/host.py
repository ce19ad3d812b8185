"""Row ids of hashed n-grams on the host, in numpy: for tables whose rows are fetched by the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HostHash:
    """The constants of one table: ``multipliers [n]``, ``vocab_sizes`` and ``offsets [H]``, all int64."""

    multipliers: np.ndarray
    vocab_sizes: np.ndarray
    offsets: np.ndarray
    eos_token_id: int
    heads_per_ngram: int

    @classmethod
    def of(
        cls,
        multipliers: Sequence[int],
        vocab_sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        eos_token_id: int,
        heads_per_ngram: int,
    ) -> HostHash:
        """From plain integers; ``ValueError`` when their numbers do not go together."""
        arrays = [np.array(values, dtype=np.int64) for values in (multipliers, vocab_sizes, offsets)]
        orders = len(multipliers) - 1
        if orders < 1 or not len(vocab_sizes) == len(offsets) == orders * heads_per_ngram:
            raise ValueError(
                f"ple_hash: {len(vocab_sizes)} head sizes and {len(offsets)} offsets for {orders} orders of {heads_per_ngram} heads"
            )
        return cls(*arrays, eos_token_id, heads_per_ngram)

    def context(self, ids: Sequence[int], start: int) -> list[int]:
        """The n - 1 ids before position ``start`` of a request, oldest first; what lies before position 0 is the boundary."""
        width = len(self.multipliers) - 1
        tail = list(ids[max(0, start - width) : start])
        return [self.eos_token_id] * (width - len(tail)) + tail

    def row_ids(self, input_ids: np.ndarray, context: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """``[T, H] int64`` for requests of ``lengths`` tokens, one after another in ``input_ids [T]``, each after its row of
        ``context [B, n - 1]``; :func:`freetoken.kernels.ple_hash.row_ids_reference` to the integer.

        ``ValueError`` for shapes that do not fit together.
        """
        ids, counts = np.asarray(input_ids, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        n, tokens = len(self.multipliers), int(counts.sum())
        if context.shape != (len(counts), n - 1) or ids.shape != (tokens,) or (counts < 0).any():
            raise ValueError(
                f"ple_hash: {list(ids.shape)} ids and a context {list(context.shape)} for {len(counts)} requests of {tokens} tokens"
            )
        request = np.repeat(np.arange(len(counts)), counts)
        local = np.arange(tokens) - np.repeat(np.cumsum(counts) - counts, counts)
        result = np.empty((tokens, len(self.vocab_sizes)), dtype=np.int64)
        mix = ids * self.multipliers[0]
        whole = np.ones(tokens, dtype=bool)
        for shift in range(1, n):
            word = np.empty(tokens, dtype=np.int64)
            inside = local >= shift
            word[inside] = ids[np.flatnonzero(inside) - shift]
            word[~inside] = context[request[~inside], n - 1 + local[~inside] - shift]
            whole &= word != self.eos_token_id
            mix = mix ^ (np.where(whole, word, self.eos_token_id) * self.multipliers[shift])
            heads = slice((shift - 1) * self.heads_per_ngram, shift * self.heads_per_ngram)
            result[:, heads] = np.remainder(mix[:, None], self.vocab_sizes[heads]) + self.offsets[heads]
        return result
