"""The batched sampler: what each request asked for, applied to one step's logits without waiting for the device.

Order: repetition, presence and frequency penalties and logit bias on the raw logits; the ban of stop ids below the minimum
length; the token mask of a grammar; temperature; top-k; top-p over what top-k kept; min-p against the most likely id; the draw. A drawn id is a function
of the request's seed, the index of the token among its outputs, and its row of logits: neither the row's place nor its
neighbours count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from freetoken.kernels import sample
from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.kernels.sample import TOP_K_OFF, SampleParams
from freetoken.kernels.sample.hashing import row_keys
from freetoken.kernels.token_mask import TokenMask
from freetoken.messages import TokenLogprob
from freetoken.runner import penalties
from freetoken.runner.logprobs import logprob_entries, token_logprobs
from freetoken.runner.sampler_table import SamplerTable, gather_ids
from freetoken.runner.staging import HostRing
from freetoken.scheduler.request import Req, ScheduleBatch


@dataclass(frozen=True)
class PenaltyPlan:
    """Rows with penalties: their ``places [N]`` in the batch and table ``rows [N]``, and strengths ``[N] float32``."""

    places: torch.Tensor
    rows: torch.Tensor
    strengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SamplePlan:
    """One step's sampling, decided on the host. Index tensors are int64; ``None`` skips a stage.

    ``params`` is ``None`` when every row takes its argmax. ``bias`` holds ``(places, ids, values)``, ``banned`` ``(places,
    ids)``, ``masked`` the places of rows with a token mask, ``logprob_places`` the rows that asked for log-probabilities; ``tops`` says, for each of the ``size`` rows, how
    many alternatives (-1: no log-probability).
    """

    size: int
    params: SampleParams | None = None
    penalty: PenaltyPlan | None = None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    masked: torch.Tensor | None = None
    logprob_places: torch.Tensor | None = None
    tops: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """``argmax``, ``argmax+edits`` (penalties, bias, bans or masks before it), ``draw`` or ``draw+edits``."""
        edits = any(stage is not None for stage in (self.penalty, self.bias, self.banned, self.masked))
        return ("argmax" if self.params is None else "draw") + ("+edits" if edits else "")

    def entries(self, pieces: Sequence[torch.Tensor]) -> list[TokenLogprob | None] | None:
        """Host copies of :meth:`SampleOutput.device_tensors` -> entries aligned with ``batch.sampled``, ``None`` for rows
        that did not ask; ``None`` when no row did."""
        if self.logprob_places is None:
            return None
        asked = [place for place, top in enumerate(self.tops) if top >= 0]
        ids = pieces[0].tolist()
        found = logprob_entries([ids[p] for p in asked], pieces[1:], [self.tops[p] for p in asked])
        result: list[TokenLogprob | None] = [None] * self.size
        for place, entry in zip(asked, found):
            result[place] = entry
        return result


@dataclass(frozen=True)
class SampleOutput:
    """``ids [S] int64`` on the device; ``logprobs`` as from :func:`~freetoken.runner.logprobs.token_logprobs`, for the rows
    that asked, or empty."""

    ids: torch.Tensor
    logprobs: tuple[torch.Tensor, ...] = ()

    def device_tensors(self) -> list[torch.Tensor]:
        """What the host needs: the ids first. Copy all of them, wait, and give the copies to :meth:`SamplePlan.entries`."""
        return [self.ids, *self.logprobs]


class Sampler:
    """Sampler of one runner with ``max_rows`` request rows over logits of ``vocab_size`` ids.

    Ids from ``sample_vocab`` on (embedding rows that the tokenizer does not know) are never drawn nor listed.
    ``default_seed`` is the server's: it varies the draws of requests that gave no seed of their own, and of them alone.
    Build it before memory is sized: it holds ``2 * max_rows * vocab_size`` bytes on the device. All methods must be called
    on one stream, in launch order.
    """

    def __init__(
        self, *, max_rows: int, vocab_size: int, sample_vocab: int, device: torch.device | str, default_seed: int
    ) -> None:
        if not 0 < sample_vocab <= vocab_size:
            raise ValueError(f"sample_vocab {sample_vocab} must lie between 1 and vocab_size {vocab_size}")
        self.device = torch.device(device)
        self.sample_vocab = sample_vocab
        self.choice = sample.choice(self.device.type)
        self._mask = TokenMask(choose_op("token_mask", self.device.type))
        self.counts = penalties.TokenCounts(max_rows, vocab_size, self.device)
        self._table = SamplerTable(max_rows, vocab_size, default_seed)
        self._ring = HostRing(self.device)

    def kernel_choices(self) -> list[Choice]:
        """What its ops use, for the table of kernels."""
        return [self.choice, self._mask.choice]

    def register(self, reqs: Sequence[Req]) -> None:
        """Take over the rows of requests new to them; all their ids are known on the host."""
        for req in reqs:
            self._table.set(req)
            if req.sampling.needs_penalties:
                self.counts.reset(req.row, req.ids, req.prompt_len)

    def plan(self, batch: ScheduleBatch) -> SamplePlan:
        """Decide the stages of ``batch.sampled`` and start the copy of their parameters. Reads nothing from the device."""
        sampled, table = batch.sampled, self._table
        rows = np.fromiter((s.req.row for s in sampled), np.int64, len(sampled))
        out_index = np.fromiter((s.out_index for s in sampled), np.int64, len(sampled))
        penalised = table.penalised[rows].nonzero()[0]
        biased = table.biased[rows].nonzero()[0]
        short = (out_index < table.min_new_tokens[rows]).nonzero()[0]
        tops = table.logprobs[rows]
        asked = (tops >= 0).nonzero()[0]
        arrays: dict[str, np.ndarray] = {}
        if not table.greedy[rows].all():
            arrays |= self._draw_arrays(rows, out_index)
        if len(penalised):
            arrays |= {"pen_places": penalised, "pen_rows": rows[penalised]}
            for name in ("repetition", "presence", "frequency"):
                arrays[name] = getattr(table, name)[rows[penalised]]
        if len(biased):
            arrays["bias_places"], arrays["bias_ids"] = gather_ids(rows, biased, table.bias_ids)
            arrays["bias_values"] = np.concatenate([table.bias_values[row] for row in rows[biased]])
        ban_places, ban_ids = gather_ids(rows, short, table.stop_ids)
        if len(ban_places):
            arrays |= {"ban_places": ban_places, "ban_ids": ban_ids}
        if batch.masked:
            arrays["masked"] = np.array(batch.masked, dtype=np.int64)
        if len(asked):
            arrays["asked"] = asked
        if not arrays:
            return SamplePlan(len(sampled))
        sent = dict(zip(arrays, self._ring.send(list(arrays.values()))))
        return self._assemble(rows, sent, tuple(tops.tolist()) if len(asked) else ())

    def _draw_arrays(self, rows: np.ndarray, out_index: np.ndarray) -> dict[str, np.ndarray]:
        table = self._table
        return {
            "inv_temperature": table.inv_temperature[rows],
            "top_k": table.top_k[rows],
            "top_p": table.top_p[rows],
            "log_min_p": table.log_min_p[rows],
            "greedy": table.greedy[rows].astype(np.int32),
            "key": row_keys(table.seed[rows], out_index).reshape(-1),
        }

    def _assemble(self, rows: np.ndarray, sent: dict[str, torch.Tensor], tops: tuple[int, ...]) -> SamplePlan:
        penalty = None
        if "pen_places" in sent:
            strengths = (sent["repetition"], sent["presence"], sent["frequency"])
            penalty = PenaltyPlan(sent["pen_places"], sent["pen_rows"], strengths)
        return SamplePlan(
            size=len(rows),
            params=self._params(rows, sent) if "key" in sent else None,
            penalty=penalty,
            bias=(sent["bias_places"], sent["bias_ids"], sent["bias_values"]) if "bias_places" in sent else None,
            banned=(sent["ban_places"], sent["ban_ids"]) if "ban_places" in sent else None,
            masked=sent.get("masked"),
            logprob_places=sent.get("asked"),
            tops=tops,
        )

    def _params(self, rows: np.ndarray, sent: dict[str, torch.Tensor]) -> SampleParams:
        table = self._table
        greedy = table.greedy[rows]
        limits = table.top_k[rows[~greedy]]
        limited = limits[limits < TOP_K_OFF]
        return SampleParams(
            inv_temperature=sent["inv_temperature"],
            top_k=sent["top_k"],
            top_p=sent["top_p"],
            log_min_p=sent["log_min_p"],
            greedy=sent["greedy"],
            key=sent["key"].view(2, -1),
            has_top_k=len(limited) > 0,
            has_top_p=bool((table.top_p[rows] < 1.0).any()),
            has_min_p=bool((table.log_min_p[rows] > -np.inf).any()),
            has_greedy=bool(greedy.any()),
            max_top_k=int(limited.max()) if len(limited) else 0,
            all_top_k=len(limited) == len(limits),
        )

    def send_masks(self, masks: np.ndarray) -> torch.Tensor:
        """``masks [G, words] int32`` on the device; the copy has left ``masks`` when this returns."""
        (sent,) = self._ring.send([masks.reshape(-1)])
        return sent.view(masks.shape)

    def sample(self, logits: torch.Tensor, plan: SamplePlan, masks: torch.Tensor | None = None) -> SampleOutput:
        """Draw one id a row of ``logits [S, vocab_size] float32`` (edited in place), and count it where penalties need it.

        ``masks [G, words] int32`` belong to ``plan.masked``; every one of them must allow an id.

        Log-probabilities are those of the model: of the raw logits, before penalties, bias and temperature, normalised over
        ids below ``sample_vocab``. Nothing waits for the device (but the ``check`` mode of the kernel flag).
        """
        raw = None if plan.logprob_places is None else logits[plan.logprob_places]
        if plan.penalty is not None:
            penalties.penalise_rows(logits, self.counts, plan.penalty.places, plan.penalty.rows, plan.penalty.strengths)
        if plan.bias is not None:
            penalties.add_bias(logits, *plan.bias)
        if plan.banned is not None:
            penalties.ban(logits, *plan.banned)
        if plan.masked is not None:
            assert masks is not None
            self._mask(logits, plan.masked, masks)
        if plan.params is None:
            ids = sample.argmax_ids(logits, self.sample_vocab, self.choice.impl)
        else:
            ids = sample.sample_ids(logits, plan.params, self.sample_vocab, self.choice.impl)
        if plan.penalty is not None:
            self.counts.add(plan.penalty.rows, ids[plan.penalty.places])
        if raw is None or plan.logprob_places is None:
            return SampleOutput(ids)
        pieces = token_logprobs(raw, ids[plan.logprob_places], max(plan.tops), self.sample_vocab)
        return SampleOutput(ids, tuple(pieces))

    def prompt_logprobs(self, logits: torch.Tensor, target_ids: torch.Tensor, top: int) -> list[torch.Tensor]:
        """Log-probabilities of prompt tokens: ``logits [C, vocab_size]`` at the positions before ``target_ids [C] int64``.

        Returns device tensors to copy and give to :meth:`prompt_entries`: ``[C]``, and with ``top`` above 0 also ``[C, top]``
        values and ids.
        """
        return token_logprobs(logits, target_ids, top, self.sample_vocab)

    @staticmethod
    def prompt_entries(target_ids: Sequence[int], pieces: Sequence[torch.Tensor], top: int) -> list[TokenLogprob]:
        """Host copies of :meth:`prompt_logprobs` -> one entry a target id."""
        return logprob_entries(target_ids, pieces, [top] * len(target_ids))
