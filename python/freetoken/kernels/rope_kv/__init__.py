"""What happens to q, k and v between their projection and attention: head norms, rotary embedding, KV write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetoken.kernels import checking
from freetoken.kernels.dispatch import Choice
from freetoken.kernels.rope_kv import reference


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward stand: prepared once, used by every layer. ``lines`` serves only the reference."""

    positions: torch.Tensor
    slots: torch.Tensor
    lines: reference.Lines | None = None


class RopeKv:
    """The op with its implementation and its table bound once.

    ``table`` is ``[max_pos, R]`` float32 (R/2 cosines, then R/2 sines; R at most the head width). Use:
    ``step = rope.prepare(positions, slots, page_size)`` once a forward, then ``q = rope(qkv, k_pool, v_pool, step, ...)``
    in every layer.
    """

    def __init__(self, choice: Choice, table: torch.Tensor) -> None:
        self.choice = choice
        self.table = table
        self._fused = choice.impl != "reference"
        self._checked = choice.impl == "check"
        if self._fused:
            from freetoken.kernels.rope_kv import triton

            self._triton = triton

    def prepare(self, positions: torch.Tensor, slots: torch.Tensor, page_size: int) -> Step:
        """``positions [T]`` and ``slots [T]`` int64 (flat KV slots; −1 writes nothing)."""
        if self._fused and not self._checked:
            return Step(positions, slots)
        return Step(positions, slots, reference.prepare(self.table, positions, slots, page_size))

    def __call__(
        self,
        qkv: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        step: Step,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """q ``[T, Hq, D]`` of ``qkv [T, (Hq + 2 Hkv) D]``; k and v are written to the pools ``[pages, Hkv, page_size, D]``."""
        if step.lines is None:
            return self._triton.rope_kv(
                qkv, k_pool, v_pool, self.table, step.positions, step.slots, q_norm, k_norm, eps
            )
        if self._checked:
            return self._check(qkv, k_pool, v_pool, step, step.lines, q_norm, k_norm, eps)
        return reference.rope_kv(qkv, k_pool, v_pool, step.lines, q_norm, k_norm, eps)

    def _check(
        self,
        qkv: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        step: Step,
        lines: reference.Lines,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Runs the reference into the pools, remembers its lines, then the kernel over them; page 0 is nobody's."""
        checking.refuse_capture("rope_kv", self.choice.flag)
        owned = lines.page > 0
        page, offset = lines.page[owned], lines.offset[owned]
        expected_q = reference.rope_kv(qkv, k_pool, v_pool, lines, q_norm, k_norm, eps)
        expected = [pool[page, :, offset].clone() for pool in (k_pool, v_pool)]
        for pool in (k_pool, v_pool):
            pool[page, :, offset] = float("nan")
        q = self._triton.rope_kv(qkv, k_pool, v_pool, self.table, step.positions, step.slots, q_norm, k_norm, eps)
        bound = checking.RELATIVE_RMS[qkv.dtype]
        checking.require_close("rope_kv", "q", q, expected_q, bound)
        for name, pool, wanted in zip(("k", "v"), (k_pool, v_pool), expected, strict=True):
            checking.require_close("rope_kv", name, pool[page, :, offset], wanted, bound)
        return q
