"""Host side of the sampler: each row's parameters, and the staging buffers that carry a step's share to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freetoken.kernels.sample import TOP_K_OFF
from freetoken.kernels.sample.hashing import mix64
from freetoken.scheduler.request import Req

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy; a logit times their inverse could leave float32."""
NO_IDS = np.zeros(0, dtype=np.int64)
NO_VALUES = np.zeros(0, dtype=np.float32)


class SamplerTable:
    """Parameters of every row as numpy arrays ``[max_rows]``, written when a request takes the row."""

    def __init__(self, max_rows: int, vocab_size: int, default_seed: int) -> None:
        self.vocab_size = vocab_size
        self._server_word = mix64(np.array([default_seed % 2**64], dtype=np.uint64))[0]
        self.inv_temperature = np.ones(max_rows, np.float32)
        self.top_k = np.full(max_rows, TOP_K_OFF, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.log_min_p = np.full(max_rows, -np.inf, np.float32)
        self.greedy = np.ones(max_rows, bool)
        self.seed = np.zeros(max_rows, np.uint64)
        self.repetition = np.ones(max_rows, np.float32)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.penalised = np.zeros(max_rows, bool)
        self.min_new_tokens = np.zeros(max_rows, np.int64)
        self.logprobs = np.full(max_rows, -1, np.int64)
        self.biased = np.zeros(max_rows, bool)
        self.bias_ids: list[np.ndarray] = [NO_IDS] * max_rows
        self.bias_values: list[np.ndarray] = [NO_VALUES] * max_rows
        self.stop_ids: list[np.ndarray] = [NO_IDS] * max_rows

    def set(self, req: Req) -> None:
        """Take over ``req.row`` for ``req``."""
        row, asked = req.row, req.sampling
        greedy = asked.greedy or asked.temperature < GREEDY_TEMPERATURE
        self.greedy[row] = greedy
        self.inv_temperature[row] = 1.0 if greedy else 1.0 / asked.temperature
        limited = 0 < asked.top_k < self.vocab_size
        self.top_k[row] = 1 if greedy else asked.top_k if limited else TOP_K_OFF
        # Rounding to float32 must neither reach 0 nor switch the filter off.
        below_one = np.nextafter(np.float32(1), np.float32(0))
        off = greedy or asked.top_p == 1.0
        self.top_p[row] = 1.0 if off else np.clip(np.float32(asked.top_p), np.finfo(np.float32).tiny, below_one)
        self.log_min_p[row] = -np.inf if greedy or asked.min_p == 0.0 else np.log(asked.min_p)
        seed = np.uint64(req.seed % 2**64)
        self.seed[row] = seed if asked.seed is not None else seed ^ self._server_word
        self.repetition[row] = asked.repetition_penalty
        self.presence[row] = asked.presence_penalty
        self.frequency[row] = asked.frequency_penalty
        self.penalised[row] = asked.needs_penalties
        # A grammar's masks leave the stop ids out themselves, while they have anything else to allow.
        self.min_new_tokens[row] = 0 if asked.grammar is not None else asked.min_new_tokens
        self.logprobs[row] = -1 if asked.logprobs is None else asked.logprobs
        self._set_ids(row, req)

    def _set_ids(self, row: int, req: Req) -> None:
        bias = {i: v for i, v in (req.sampling.logit_bias or {}).items() if 0 <= i < self.vocab_size}
        self.biased[row] = bool(bias)
        self.bias_ids[row] = np.fromiter(bias.keys(), np.int64, len(bias)) if bias else NO_IDS
        self.bias_values[row] = np.fromiter(bias.values(), np.float32, len(bias)) if bias else NO_VALUES
        stops = NO_IDS
        if req.sampling.min_new_tokens > 0:
            ids = sorted(i for i in {*req.stop_ids, *req.sampling.stop_token_ids} if 0 <= i < self.vocab_size)
            stops = np.array(ids, dtype=np.int64)
        self.stop_ids[row] = stops


def gather_ids(rows: np.ndarray, places: np.ndarray, lists: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """``(place of each entry, entry)`` over ``lists[rows[p]]`` for each of ``places``."""
    parts = [lists[row] for row in rows[places]]
    if not parts:
        return NO_IDS, NO_IDS
    return np.repeat(places, [len(part) for part in parts]), np.concatenate(parts)
