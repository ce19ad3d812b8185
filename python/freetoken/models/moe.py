"""The mixture-of-experts block: router, experts, and an optional shared expert behind a gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from freetoken.errors import StartupError
from freetoken.kernels import block_fp8
from freetoken.kernels.block_fp8 import Fp8Weight, Weight
from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.moe_gemm import MoeGemm, Shared
from freetoken.kernels.moe_route import MoeRoute
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.config import ModelConfig, MoeConfig
from freetoken.models.layers import (
    ColumnLinear,
    GatedLinear,
    Placement,
    RowLinear,
    Slot,
    Weighted,
    fill_normal,
    scale_slot,
    weight_tensors,
)

ROUTER_ROWS = 16


class MoeOps:
    """The fused ops of mixture-of-experts blocks, each bound to its implementation once."""

    def __init__(self, device: torch.device) -> None:
        self.route = MoeRoute(choose_op("moe_route", device.type))
        self.gemm = MoeGemm(choose_op("moe_gemm", device.type), self.route)
        self.choices = [self.route.choice, self.gemm.choice]


class Experts(Weighted, Protocol):
    """Where the weights of a block's experts live and how tokens get to them.

    The block knows no more of its experts than this: an implementation that keeps weights off the GPU brings in those of ``ids``
    and hands the op ids into what it holds. Where ``joins_shared``, the shared expert is one of them, under the number of experts.
    """

    joins_shared: bool

    def pieces(self) -> dict[str, dict[str, Slot]]:
        """For each of ``slots``, the places of its parts in a checkpoint that stores every expert by itself."""

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: Shared | None
    ) -> torch.Tensor:
        """``[T, H]`` for ``x [T, H]``, experts ``ids [T, K]`` int32 and their ``weights [T, K]`` float32; the output of a shared
        expert ``[T, H]`` times the sigmoid of its logits ``[T]`` is added."""


def _joins(moe: MoeConfig, place: Placement, name: str, fp8: bool) -> bool:
    """Whether the shared expert of block ``name`` is of the same size and type as the others."""
    modules = [f"{name}.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
    held = [place.holds_fp8(modules[:2]), place.holds_fp8(modules[2:])]
    return moe.shared_intermediate_size == moe.intermediate_size and held == [fp8, fp8]


class ResidentExperts:
    """All experts of block ``name`` on the device: ``gate_up [E, 2F, H]``, ``down [E, H, F]``, float or FP8.

    A shared expert like the others is the last of the stack, so that it takes no launches of its own.
    """

    def __init__(self, ops: MoeOps, moe: MoeConfig, place: Placement, name: str, hidden: int) -> None:
        if place.tp_size != 1:
            raise StartupError(f"{name}.experts: experts are not split over tensor-parallel ranks")
        self._gemm = ops.gemm
        self._name = f"{name}.experts"
        self._count, self._width = moe.num_experts, moe.intermediate_size
        fp8 = place.fp8 is not None and place.fp8.converts(self._name)
        self.joins_shared = _joins(moe, place, name, fp8)
        stack = self._count + self.joins_shared
        self.gate_up, self.down = (
            block_fp8.empty(shape, block_fp8.group_rows(shape[1], part), place.device) if fp8 else place.empty(*shape)
            for shape, part in (((stack, 2 * self._width, hidden), self._width), ((stack, hidden, self._width), hidden))
        )
        self.slots: dict[str, Slot] = {}
        regular = slice(0, self._count)
        self._add(self.slots, f"{self._name}.gate_up_proj", self.gate_up, regular)
        self._add(self.slots, f"{self._name}.down_proj", self.down, regular)
        if self.joins_shared:
            self._add_one(self.slots, self.slots, f"{name}.shared_expert", self._count)

    @staticmethod
    def _add(slots: dict[str, Slot], name: str, weight: Weight, which: int | slice, rows: slice = slice(None)) -> None:
        """The places of tensor ``name``, and of its scales: some rows of one expert or of several."""
        if not isinstance(weight, Fp8Weight):
            target = weight[which, rows]
            slots[name] = Slot(target, tuple(target.shape))
            return
        target, group = weight.data[which, rows], weight.rows
        scales = slice(*(None if edge is None else edge // group for edge in (rows.start, rows.stop)))
        slots[name] = Slot(target, tuple(target.shape))
        slots[f"{name}_scale_inv"] = scale_slot(weight.scale[which, scales], tuple(target.shape), group)

    def _add_one(self, first: dict[str, Slot], second: dict[str, Slot], name: str, expert: int) -> None:
        """The places of one expert's tensors: gate and up into ``first``, down into ``second``."""
        width = self._width
        self._add(first, f"{name}.gate_proj.weight", self.gate_up, expert, slice(0, width))
        self._add(first, f"{name}.up_proj.weight", self.gate_up, expert, slice(width, 2 * width))
        self._add(second, f"{name}.down_proj.weight", self.down, expert)

    def pieces(self) -> dict[str, dict[str, Slot]]:
        """As :meth:`Experts.pieces`: ``experts.N.gate_proj``, ``up_proj`` and ``down_proj``."""
        first: dict[str, Slot] = {}
        second: dict[str, Slot] = {}
        for expert in range(self._count):
            self._add_one(first, second, f"{self._name}.{expert}", expert)
        found = {}
        for part, slots in (("gate_up_proj", first), ("down_proj", second)):
            for suffix in ("", "_scale_inv"):
                whole = f"{self._name}.{part}{suffix}"
                if whole in self.slots:
                    found[whole] = {name: slot for name, slot in slots.items() if name.endswith(".weight" + suffix)}
        return found

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: Shared | None
    ) -> torch.Tensor:
        return self._gemm(x, ids, weights, self.gate_up, self.down, shared)

    def tensors(self) -> Iterator[torch.Tensor]:
        for weight in (self.gate_up, self.down):
            yield from weight_tensors(weight)

    def randomise(self, generator: torch.Generator) -> None:
        for weight in (self.gate_up, self.down):
            fill_normal(weight, generator)


class Router(ColumnLinear):
    """Logits of all experts and, in the column after them, of the shared expert's gate.

    Rows of the weight are filled up to a multiple of :data:`ROUTER_ROWS`: products of an odd number of them are slow. The logits they make
    mean nothing.
    """

    def __init__(self, moe: MoeConfig, gemm: SmallGemm, place: Placement, name: str, hidden: int) -> None:
        parts = {f"{name}.gate": moe.num_experts}
        if moe.shared_intermediate_size:
            parts[f"{name}.shared_expert_gate"] = 1
        used, filling = sum(parts.values()), f"{name}.filling"
        if used % ROUTER_ROWS:
            parts[filling] = ROUTER_ROWS - used % ROUTER_ROWS
        super().__init__(gemm, place, parts, hidden)
        self.weight[used:].zero_()
        self.slots.pop(f"{filling}.weight", None)


class MoeBlock:
    """The MLP of a layer with experts: ``block(x [T, H]) -> [T, H]``. ``name`` is its prefix in the checkpoint (``….mlp``).

    The logits of the router and of the shared expert's gate come from one product.
    """

    feed: None = None
    """Takes activations as they are."""

    def __init__(self, config: ModelConfig, gemm: SmallGemm, ops: MoeOps, place: Placement, name: str) -> None:
        moe = config.moe
        assert moe is not None
        self._moe = moe
        self._ops = ops
        hidden, shared = config.hidden_size, moe.shared_intermediate_size
        self.experts: Experts = ResidentExperts(ops, moe, place, name, hidden)
        self.router = Router(moe, gemm, place, name, hidden)
        self.shared: tuple[GatedLinear, RowLinear] | None = None
        if shared and not self.experts.joins_shared:
            prefix = f"{name}.shared_expert"
            gate_up = GatedLinear(gemm, place, {f"{prefix}.gate_proj": shared, f"{prefix}.up_proj": shared}, hidden)
            self.shared = gate_up, RowLinear(gemm, place, f"{prefix}.down_proj", hidden, shared)

    def modules(self) -> Iterator[Weighted]:
        yield from (self.router, self.experts)
        if self.shared is not None:
            yield from self.shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        moe = self._moe
        logits = self.router(x)
        ids, weights = self._ops.route(
            logits, moe.num_experts, moe.top_k, moe.norm_topk_prob, self.experts.joins_shared
        )
        beside: Shared | None = None
        if self.shared is not None:
            gate_up, down = self.shared
            beside = down(gate_up(x)), logits[:, moe.num_experts]
        return self.experts(x, ids, weights, beside)
