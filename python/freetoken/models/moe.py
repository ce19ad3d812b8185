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


class MoeOps:
    """The fused ops of mixture-of-experts blocks, each bound to its implementation once."""

    def __init__(self, device: torch.device) -> None:
        self.route = MoeRoute(choose_op("moe_route", device.type))
        self.gemm = MoeGemm(choose_op("moe_gemm", device.type), self.route)
        self.choices = [self.route.choice, self.gemm.choice]


class Experts(Weighted, Protocol):
    """Where the weights of a block's experts live and how tokens get to them.

    The block knows no more of its experts than this: an implementation that keeps weights off the GPU brings in those of ``ids``
    and hands the op ids into what it holds.
    """

    def pieces(self) -> dict[str, dict[str, Slot]]:
        """For each of ``slots``, the places of its parts in a checkpoint that stores every expert by itself."""

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: Shared | None
    ) -> torch.Tensor:
        """``[T, H]`` for ``x [T, H]``, experts ``ids [T, K]`` int32 and their ``weights [T, K]`` float32; the output of a shared
        expert ``[T, H]`` times the sigmoid of its logits ``[T]`` is added."""


class ResidentExperts:
    """All experts of a block on the device: ``gate_up [E, 2F, H]``, ``down [E, H, F]``, float or FP8."""

    def __init__(self, ops: MoeOps, moe: MoeConfig, place: Placement, name: str, hidden: int) -> None:
        if place.tp_size != 1:
            raise StartupError(f"{name}: experts are not split over tensor-parallel ranks")
        self._gemm = ops.gemm
        self._name = name
        count, width = moe.num_experts, moe.intermediate_size
        shapes = {"gate_up_proj": (count, 2 * width, hidden), "down_proj": (count, hidden, width)}
        fp8 = place.fp8 is not None and place.fp8.converts(name)
        self.gate_up, self.down = (
            block_fp8.empty(shape, block_fp8.group_rows(shape[1], rows), place.device) if fp8 else place.empty(*shape)
            for shape, rows in zip(shapes.values(), (width, hidden), strict=True)
        )
        self.slots: dict[str, Slot] = {}
        for part, weight in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            self._add(self.slots, f"{name}.{part}", "", weight, slice(None))

    @staticmethod
    def _add(
        slots: dict[str, Slot], name: str, kind: str, weight: Weight, rows: slice, expert: int | None = None
    ) -> None:
        """Places of all experts, or of some rows of one."""
        index = (slice(None) if expert is None else expert, rows)
        if not isinstance(weight, Fp8Weight):
            slots[name + kind] = Slot(weight[index], tuple(weight[index].shape))
            return
        shape, group = tuple(weight.data[index].shape), weight.rows
        scales = slice(*(None if edge is None else edge // group for edge in (rows.start, rows.stop)))
        slots[name + kind] = Slot(weight.data[index], shape)
        slots[f"{name}{kind}_scale_inv"] = scale_slot(weight.scale[index[0], scales], shape, group)

    def pieces(self) -> dict[str, dict[str, Slot]]:
        """As :meth:`Experts.pieces`: ``experts.N.gate_proj``, ``up_proj`` and ``down_proj``."""
        width = self.down.shape[2]
        first: dict[str, Slot] = {}
        second: dict[str, Slot] = {}
        for expert in range(self.down.shape[0]):
            name = f"{self._name}.{expert}"
            self._add(first, f"{name}.gate_proj", ".weight", self.gate_up, slice(0, width), expert)
            self._add(first, f"{name}.up_proj", ".weight", self.gate_up, slice(width, 2 * width), expert)
            self._add(second, f"{name}.down_proj", ".weight", self.down, slice(None), expert)
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


class MoeBlock:
    """The MLP of a layer with experts: ``block(x [T, H]) -> [T, H]``. ``name`` is its prefix in the checkpoint (``….mlp``).

    The logits of the router and of the shared expert's gate come from one product.
    """

    def __init__(self, config: ModelConfig, gemm: SmallGemm, ops: MoeOps, place: Placement, name: str) -> None:
        moe = config.moe
        assert moe is not None
        self._moe = moe
        self._ops = ops
        hidden, shared = config.hidden_size, moe.shared_intermediate_size
        self.experts: Experts = ResidentExperts(ops, moe, place, f"{name}.experts", hidden)
        logits = {f"{name}.gate": moe.num_experts}
        if shared:
            logits[f"{name}.shared_expert_gate"] = 1
        self.router = ColumnLinear(gemm, place, logits, hidden)
        self.shared: tuple[GatedLinear, RowLinear] | None = None
        if shared:
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
        ids, weights = self._ops.route(logits, moe.num_experts, moe.top_k, moe.norm_topk_prob)
        beside: Shared | None = None
        if self.shared is not None:
            gate_up, down = self.shared
            beside = down(gate_up(x)), logits[:, moe.num_experts]
        return self.experts(x, ids, weights, beside)
