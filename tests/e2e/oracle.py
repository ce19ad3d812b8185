"""The oracle of greedy text and log-probabilities: transformers on the same files, under teacher forcing.

One forward over prompt and output gives the logits before every output token. Where each of our tokens is the argmax of
its row, greedy generation by transformers gives the same text; one that is not must lie within :data:`TIE` of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from freetoken.messages import TokenLogprob

TIE = 1e-3
"""Two logits this close may be ordered either way by float32 sums in another order."""

LOGPROB_TOLERANCE = 1e-4
TOKENS_A_FORWARD = 2048


@dataclass
class Generated:
    """A prompt, what we generated after it, and the log-probabilities that were asked for."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def all_ids(self) -> list[int]:
        return self.prompt + self.ids


class Oracle:
    """transformers' model of a folder or ``.gguf`` file in float32. Ids from ``sample_vocab`` on are never drawn."""

    def __init__(self, path: str | Path, sample_vocab: int | None = None) -> None:
        path = Path(path)
        source = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
        if hasattr(self.model.config, "num_experts"):
            # The faster forms want sizes of whole 16 bytes.
            self.model.set_experts_implementation("eager")
        self.sample_vocab = sample_vocab or self.model.config.vocab_size

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """``count`` greedy tokens by transformers' own loop, past any end of sequence."""
        ids = torch.tensor([prompt])
        unknown = list(range(self.sample_vocab, self.model.config.vocab_size))
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=unknown or None,
        )
        return made[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, sequences: Sequence[list[int]]) -> Iterator[torch.Tensor]:
        """Logits ``[tokens, vocabulary]`` of each sequence, in order; padded on the right, where nothing looks back."""
        batch: list[list[int]] = []
        for sequence in sequences:
            longest = max(map(len, [*batch, sequence]))
            if batch and longest * (len(batch) + 1) > TOKENS_A_FORWARD:
                yield from self._forward(batch)
                batch = []
            batch.append(sequence)
        if batch:
            yield from self._forward(batch)

    def _forward(self, batch: list[list[int]]) -> Iterator[torch.Tensor]:
        longest = max(map(len, batch))
        ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in batch])
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        for sequence, states in zip(batch, hidden):
            yield self.model.lm_head(states[: len(sequence)])[:, : self.sample_vocab].float()

    def check(self, generated: Sequence[Generated]) -> int:
        """Assert that every output is transformers' greedy text with its log-probabilities; returns the ties met."""
        ties = 0
        for item, logits in zip(generated, self.logits([item.all_ids for item in generated])):
            first = len(item.prompt)
            ties += _check_greedy(item.ids, logits[first - 1 : -1])
            logprobs = logits.log_softmax(-1)
            if item.logprobs is not None:
                _check_logprobs(item.ids, item.logprobs, logprobs[first - 1 : -1])
            if item.prompt_logprobs is not None:
                assert item.prompt_logprobs[0] == TokenLogprob(item.prompt[0], None)
                _check_logprobs(item.prompt[1:], item.prompt_logprobs[1:], logprobs[: first - 1])
        return ties


def _check_greedy(ids: list[int], logits: torch.Tensor) -> int:
    assert ids, "nothing was generated"
    gaps = logits.max(-1).values - logits.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
    other = (logits.argmax(-1) != torch.tensor(ids)).nonzero().flatten().tolist()
    for place in other:
        assert gaps[place] < TIE, (
            f"output {place} is {ids[place]}, but transformers takes {int(logits[place].argmax())}, "
            f"whose logit is {float(gaps[place]):.6f} higher"
        )
    return len(other)


def _check_logprobs(ids: list[int], entries: list[TokenLogprob], expected: torch.Tensor) -> None:
    """``entries[i]`` against row i of ``expected [tokens, vocabulary]``: the token, its value, and the best beside it."""
    assert [entry.id for entry in entries] == ids
    chosen = expected.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
    ours = torch.tensor([entry.logprob for entry in entries])
    torch.testing.assert_close(ours, chosen, rtol=0, atol=LOGPROB_TOLERANCE)
    for entry, row in zip(entries, expected):
        count = len(entry.top_ids)
        assert len(set(entry.top_ids)) == count == len(entry.top_logprobs)
        values = torch.tensor(entry.top_logprobs)
        torch.testing.assert_close(values, row.topk(count).values, rtol=0, atol=LOGPROB_TOLERANCE)
        torch.testing.assert_close(values, row[entry.top_ids], rtol=0, atol=LOGPROB_TOLERANCE)
