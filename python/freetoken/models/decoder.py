"""The dense decoder shared by the Llama and Qwen3 families: pre-norm attention and SwiGLU blocks over paged KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.rope_kv import RopeKv, Step
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.config import ModelConfig
from freetoken.models.layers import (
    ColumnLinear,
    Embedding,
    GatedLinear,
    Norm,
    OutputHead,
    Placement,
    RowLinear,
    Slot,
    load,
)
from freetoken.models.rope import rotary_table

if TYPE_CHECKING:
    from freetoken.runner.forward_batch import ForwardBatch
    from freetoken.runner.kv_pool import KVPool


class Attention(Protocol):
    """What the model needs of an attention backend."""

    def forward(self, layer: int, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        """Attention of ``q [T, Hq, D]`` over the pages of layer ``layer``, as ``[T, Hq * D]``."""


class Ops:
    """The fused ops of one model, each bound to its implementation once."""

    def __init__(self, config: ModelConfig, device: torch.device, max_positions: int) -> None:
        kind = device.type
        self.norm = RmsNorm(choose_op("rms_norm", kind))
        self.rope = RopeKv(choose_op("rope_kv", kind), rotary_table(config, max_positions, device))
        silu_mul = SiluMul(choose_op("silu_mul", kind))
        self.gemm = SmallGemm(choose_op("small_gemm", kind), silu_mul)
        self.choices: list[Choice] = [self.norm.choice, self.rope.choice, silu_mul.choice, self.gemm.choice]


class DecoderLayer:
    """One block: attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, index: int) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.rope = ops.rope
        self.eps = eps
        self.input_norm = Norm(ops.norm, place, f"{prefix}.input_layernorm", hidden, eps)
        projections = {
            f"{attention}.q_proj": config.q_size,
            f"{attention}.k_proj": config.kv_size,
            f"{attention}.v_proj": config.kv_size,
        }
        self.qkv = ColumnLinear(ops.gemm, place, projections, hidden, bias=config.attention_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(ops.norm, place, f"{attention}.q_norm", config.head_dim, eps)
            self.k_norm = Norm(ops.norm, place, f"{attention}.k_norm", config.head_dim, eps)
        self.o = RowLinear(ops.gemm, place, f"{attention}.o_proj", hidden, config.q_size, bias=config.attention_bias)
        self.post_norm = Norm(ops.norm, place, f"{prefix}.post_attention_layernorm", hidden, eps)
        gates = {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size}
        self.gate_up = GatedLinear(ops.gemm, place, gates, hidden, bias=config.mlp_bias)
        self.down = RowLinear(
            ops.gemm, place, f"{mlp}.down_proj", hidden, config.intermediate_size, bias=config.mlp_bias
        )

    def modules(self) -> Iterator[ColumnLinear | RowLinear | Norm]:
        yield from (self.input_norm, self.qkv)
        if self.q_norm is not None and self.k_norm is not None:
            yield from (self.q_norm, self.k_norm)
        yield from (self.o, self.post_norm, self.gate_up, self.down)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        fb: ForwardBatch,
        kv: KVPool,
        step: Step,
        backend: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Block output that is still to be added, and the residual it is to be added to; both ``[T, hidden]``."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        q = self.rope(self.qkv(x), kv.k(self.index), kv.v(self.index), step, q_norm, k_norm, self.eps)
        x = self.o(backend.forward(self.index, q, fb))
        x, residual = self.post_norm.add(x, residual)
        return self.down(self.gate_up(x)), residual


class DecoderModel:
    """A dense decoder with its weights on one device.

    ``max_positions`` bounds the positions a forward may use. Weights are uninitialised until :meth:`load_weights` or
    :meth:`random_weights`. Kernel flags are read here, once.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.max_positions = max_positions
        place = Placement(dtype, self.device, tp_rank, tp_size)
        place.share(config.num_heads, "num_attention_heads")
        place.share(config.num_kv_heads, "num_key_value_heads")
        with torch.inference_mode():
            self.ops = Ops(config, self.device, max_positions)
            self.embedding = Embedding(place, "model.embed_tokens", config.vocab_size, config.hidden_size)
            self.layers = [DecoderLayer(config, self.ops, place, index) for index in range(config.num_layers)]
            self.norm = Norm(self.ops.norm, place, "model.norm", config.hidden_size, config.rms_norm_eps)
            self.head = OutputHead(self.ops.gemm, place, "lm_head", self.embedding, tied=config.tie_word_embeddings)

    def modules(self) -> Iterator[Embedding | ColumnLinear | RowLinear | Norm | OutputHead]:
        """All layers that own weights, in forward order."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.modules()
        yield from (self.norm, self.head)

    @property
    def slots(self) -> dict[str, Slot]:
        """Checkpoint tensor name (Hugging Face) to its place."""
        return {name: slot for module in self.modules() for name, slot in module.slots.items()}

    @torch.inference_mode()
    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all weights from a stream of Hugging Face names; :class:`StartupError` as in :func:`layers.load`."""
        ignored = frozenset({"lm_head.weight"} if self.config.tie_word_embeddings else ())
        load(self.slots, ignored, stream)

    @torch.inference_mode()
    def random_weights(self, seed: int) -> None:
        """Normal weights with the variance of one over their inputs (norms 1, biases 0), drawn on the device."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for module in self.modules():
            for tensor in module.tensors():
                if isinstance(module, Norm):
                    tensor.fill_(1.0)
                elif tensor.ndim == 1:
                    tensor.zero_()
                else:
                    tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)

    @torch.inference_mode()
    def forward(self, fb: ForwardBatch, kv: KVPool, attention: Attention) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` after the final norm; K and V of all T tokens are in ``kv`` afterwards."""
        step = self.ops.rope.prepare(fb.positions, fb.out_slots, kv.page_size)
        x, residual = self.embedding(fb.input_ids), None
        for layer in self.layers:
            x, residual = layer.forward(x, residual, fb, kv, step, attention)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [S, hidden]`` to logits ``[S, vocab]`` float32, computed in the type of the weights."""
        return self.head(hidden)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of this rank; a tied head counts once."""
        return sum(tensor.nbytes for module in self.modules() for tensor in module.tensors())

    def kernel_choices(self) -> list[Choice]:
        """Which implementation each op of this model uses, and why."""
        return list(self.ops.choices)
