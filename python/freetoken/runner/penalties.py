"""Token counts of running requests, and what changes logits before the draw: penalties, bias, bans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

IN_PROMPT = 1 << 14
MAX_COUNT = IN_PROMPT - 1


def count_words(ids: Sequence[int], prompt_len: int) -> tuple[np.ndarray, np.ndarray]:
    """``(distinct ids int64, words int16)`` of one request: how often each id was output, and whether the prompt has it."""
    history = np.asarray(ids, dtype=np.int64)
    distinct, places = np.unique(history, return_inverse=True)
    words = np.bincount(places[prompt_len:], minlength=len(distinct)).clip(max=MAX_COUNT)
    words[places[:prompt_len]] |= IN_PROMPT
    return distinct, words.astype(np.int16)


class TokenCounts:
    """``words [max_rows, vocab_size] int16`` on the device: output count in the low 14 bits, prompt presence above them.

    Allocated at once, so that memory sized after construction counts it: 2 bytes an id and row. Counts stop at 16,383.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.words = torch.zeros(max_rows, vocab_size, dtype=torch.int16, device=device)

    def reset(self, row: int, ids: Sequence[int], prompt_len: int) -> None:
        """Make a row that of a request whose tokens so far are ``ids`` (all known on the host)."""
        distinct, words = count_words(ids, prompt_len)
        self.words[row].zero_()
        if len(distinct):
            self.words[row].index_copy_(0, self._upload(distinct), self._upload(words))

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self.words.device.type == "cpu":
            return tensor
        # The pinned allocator keeps the block until the copy that reads it has run.
        return tensor.pin_memory().to(self.words.device, non_blocking=True)

    def add(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Count one output id a row; ``rows [N]`` are distinct, ``ids [N] int64``."""
        grown = torch.where((self.words[rows, ids] & MAX_COUNT) < MAX_COUNT, 1, 0)
        self.words[rows, ids] += grown.to(torch.int16)


def penalised(
    logits: torch.Tensor,
    words: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """``logits [N, V] float32`` under the penalties of each row (``[N] float32``) and its count words ``[N, V] int16``.

    Repetition divides positive and multiplies negative logits of ids in prompt or output (Keskar et al., 2019, as in the
    transformers library); frequency times the count, and presence once, are then taken off ids in the output (OpenAI).
    """
    counts = words & MAX_COUNT
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    result = torch.where(words != 0, repeated, logits)
    return result - counts * frequency[:, None] - (counts > 0) * presence[:, None]


def penalise_rows(
    logits: torch.Tensor,
    counts: TokenCounts,
    places: torch.Tensor,
    rows: torch.Tensor,
    strengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Penalise rows ``places [N]`` of ``logits [S, V]`` in place; ``rows [N]`` are their table rows; ``strengths`` are
    repetition, presence and frequency ``[N]``."""
    logits[places] = penalised(logits[places], counts.words[rows], *strengths)


def add_bias(logits: torch.Tensor, places: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """``logits[places[i], ids[i]] += values[i]`` in place; the pairs are distinct."""
    logits[places, ids] = logits[places, ids] + values


def ban(logits: torch.Tensor, places: torch.Tensor, ids: torch.Tensor) -> None:
    """``logits[places[i], ids[i]] = -inf`` in place."""
    logits[places, ids] = torch.full((), float("-inf"), device=logits.device)
