"""Drawing of the next ids: temperature, top-k, top-p, min-p and a seeded draw, or the argmax; one id a row.

Exactness against the reference: argmax, top-k and ties are exact. Top-p sums integer masses of float32 exponentials, so the
kept sets are the same but where the sum comes within 1e-5 of ``top_p``; the draw compares float32 sums and logarithms, so
two implementations part where two ids tie to about 1e-5.
"""

from __future__ import annotations

import dataclasses

import torch

from freetoken.kernels.dispatch import Choice, choose
from freetoken.kernels.sample import reference
from freetoken.kernels.sample.params import TOP_K_OFF, SampleParams

__all__ = ["TOP_K_OFF", "SampleParams", "argmax_ids", "choice", "sample_ids"]

FLAG = "FREETOKEN_FUSED_SAMPLER"
NUDGE = 1e-5


def choice(device: str) -> Choice:
    """The implementation used on ``device`` (``cuda`` or ``cpu``), decided once."""
    why = "own kernels: sgl_kernel's sampling keeps no per-request seeds, and equal seeds must give equal text"
    return choose("sample", FLAG, device, sgl_kernel=why)


def argmax_ids(logits: torch.Tensor, sample_vocab: int, impl: str) -> torch.Tensor:
    """``logits [S, V] float32`` -> ``[S] int64``: the most likely id below ``sample_vocab``, ties to the lower id.

    NaN counts as ``-inf``; a row without a finite logit gives id 0. ``impl`` is that of :func:`choice`; ``check`` raises
    ``RuntimeError`` where the two implementations part.
    """
    if impl == "reference":
        return reference.argmax_ids(logits, sample_vocab)
    from freetoken.kernels.sample import triton

    ids = triton.argmax_ids(logits, sample_vocab)
    if impl == "check":
        _compare(ids, [reference.argmax_ids(logits, sample_vocab)])
    return ids


def sample_ids(logits: torch.Tensor, params: SampleParams, sample_vocab: int, impl: str) -> torch.Tensor:
    """``logits [S, V] float32``, after penalties, bias and bans -> ``[S] int64`` drawn ids below ``sample_vocab``.

    Each row depends on its own logits and parameters alone. ``check`` raises ``RuntimeError`` for an id that the reference
    does not draw either with temperature and ``top_p`` moved by a relative 1e-5.
    """
    if impl == "reference":
        return reference.sample_ids(logits, params, sample_vocab)
    from freetoken.kernels.sample import triton

    ids = triton.sample_ids(logits, params, sample_vocab)
    if impl == "check":
        _compare(ids, [reference.sample_ids(logits, near, sample_vocab) for near in _nudged(params)])
    return ids


def _nudged(params: SampleParams) -> list[SampleParams]:
    near = [params]
    for heat in (1.0 - NUDGE, 1.0 + NUDGE):
        for mass in (1.0 - NUDGE, 1.0 + NUDGE):
            top_p = torch.where(params.top_p < 1.0, (params.top_p * mass).clamp(max=1.0), params.top_p)
            near.append(dataclasses.replace(params, inv_temperature=params.inv_temperature * heat, top_p=top_p))
    return near


def _compare(ids: torch.Tensor, allowed: list[torch.Tensor]) -> None:
    matches = torch.stack([ids == other for other in allowed]).any(0)
    if not bool(matches.all()):
        row = int((~matches).nonzero()[0])
        raise RuntimeError(f"{FLAG}=check: row {row} drew id {int(ids[row])}, the reference {int(allowed[0][row])}")
