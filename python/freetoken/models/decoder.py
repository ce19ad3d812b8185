"""The decoder shared by all families: pre-norm token mixers and SwiGLU blocks; the mixer here is attention over paged KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from freetoken.kernels.dispatch import Choice, choose_op
from freetoken.kernels.fp8_gemm import Fp8Gemm
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.rope_kv import RopeKv, Step
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.build import Builder
from freetoken.models.config import ModelConfig
from freetoken.models.layers import ColumnLinear, Linear, Placement, Slot, Weighted, load
from freetoken.models.moe import MoeBlock, MoeOps
from freetoken.models.packed import Fed, Feed, PackedHead, PackedLinear
from freetoken.models.rope import rotary_table

if TYPE_CHECKING:
    from freetoken.models.ple import PerLayerEmbeddings
    from freetoken.runner.forward_batch import ForwardBatch
    from freetoken.runner.kv_pool import KVPool
    from freetoken.runner.state_pool import StatePool


class AttentionBackend(Protocol):
    """What the model needs of an attention backend."""

    def forward(self, layer: int, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        """Attention of ``q [T, Hq, D]`` over the pages of KV layer ``layer``, as ``[T, Hq * D]``."""


@dataclass(frozen=True)
class Pass:
    """What every layer of one forward shares. ``states`` is ``None`` for a model without per-request state; ``extra`` is
    what the model's :meth:`DecoderModel.prepare` made of the batch, ``index`` what an indexer of attention needs of it."""

    fb: ForwardBatch
    kv: KVPool
    rope: Step
    backend: AttentionBackend
    states: StatePool | None = None
    extra: Any = None
    index: Any = None


class Mixer(Protocol):
    """The part of a layer that looks at other tokens.

    Its input comes through ``feed``, where that is not ``None``: a :class:`Fed`, with what its part ``beside`` takes or makes.
    """

    beside: Linear | PackedLinear | None

    @property
    def feed(self) -> Feed | None:
        """What its first projection takes, ``None`` for plain activations."""

    def modules(self) -> Iterator[Weighted]:
        """Its parts that own weights."""

    def forward(self, x: torch.Tensor | Fed, step: Pass) -> torch.Tensor:
        """``[T, hidden]`` of normed inputs ``[T, hidden]``; keys, values or states of all T tokens are stored."""


class Ops:
    """The fused ops of one model, each bound to its implementation once."""

    def __init__(self, config: ModelConfig, device: torch.device, max_positions: int) -> None:
        kind = device.type
        self.norm = RmsNorm(_norm_choice(config, kind))
        table = rotary_table(config, max_positions, device, rotary_dim=config.rotary_dim)
        self.rope = RopeKv(choose_op("rope_kv", kind), table)
        self.silu_mul = SiluMul(choose_op("silu_mul", kind))
        self.gemm = SmallGemm(choose_op("small_gemm", kind), self.silu_mul)
        self.build = Builder(config, device, self.norm, self.gemm, self.silu_mul)
        self.choices: list[Choice] = [self.norm.choice, self.rope.choice, self.silu_mul.choice, self.gemm.choice]
        self.choices += self.build.choices
        self.moe: MoeOps | None = None
        if config.moe is not None:
            self.moe = MoeOps(device)
            self.choices += self.moe.choices
        self.fp8: Fp8Gemm | None = None
        if config.fp8 is not None:
            self.fp8 = Fp8Gemm(choose_op("fp8_gemm", kind), self.silu_mul)
            self.choices.append(self.fp8.choice)


def _norm_choice(config: ModelConfig, kind: str) -> Choice:
    choice = choose_op("rms_norm", kind)
    if choice.impl == "sgl_kernel" and config.float32_norm:
        return Choice(choice.op, choice.flag, "triton", "sgl_kernel takes no float32 weights beside other activations")
    return choice


class Attention:
    """Causal attention over paged KV; ``kv_layer`` counts the layers that have KV."""

    beside: Linear | PackedLinear | None = None

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, name: str, kv_layer: int) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.kv_layer = kv_layer
        self.rope = ops.rope
        self.eps = eps
        self.qkv = self.make_projection(config, ops, place, name)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = ops.build.norm(place, f"{name}.q_norm", config.head_dim)
            self.k_norm = ops.build.norm(place, f"{name}.k_norm", config.head_dim)
        self.o = ops.build.row(place, f"{name}.o_proj", hidden, config.q_size, bias=config.attention_bias)

    def make_projection(
        self, config: ModelConfig, ops: Ops, place: Placement, name: str
    ) -> ColumnLinear | PackedLinear:
        """The merged projection of queries, keys and values."""
        parts = {f"{name}.q_proj": config.q_size, f"{name}.k_proj": config.kv_size, f"{name}.v_proj": config.kv_size}
        return ops.build.column(place, parts, config.hidden_size, bias=config.attention_bias)

    @property
    def feed(self) -> Feed | None:
        return self.qkv.feed

    def modules(self) -> Iterator[Weighted]:
        yield self.qkv
        if self.q_norm is not None and self.k_norm is not None:
            yield from (self.q_norm, self.k_norm)
        yield self.o

    def forward(self, x: torch.Tensor | Fed, step: Pass) -> torch.Tensor:
        return self.o(self.attend(self.qkv(x), step))

    def attend(self, qkv: torch.Tensor, step: Pass) -> torch.Tensor:
        """Heads side by side ``[T, Hq * D]`` from projections ``qkv [T, (Hq + 2 Hkv) D]`` of any row stride."""
        return step.backend.forward(self.kv_layer, self.rotate(qkv, step), step.fb)

    def rotate(self, qkv: torch.Tensor, step: Pass) -> torch.Tensor:
        """q ``[T, Hq, D]``, normed and rotated; k and v are stored."""
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        layer = self.kv_layer
        return self.rope(qkv, step.kv.k(layer), step.kv.v(layer), step.rope, q_norm, k_norm, self.eps)


class Mlp(Protocol):
    """The part of a layer that looks at one token at a time. Its input comes through ``feed``, where that is not ``None``."""

    @property
    def feed(self) -> Feed | None:
        """What its first projection takes, ``None`` for plain activations."""

    def modules(self) -> Iterator[Weighted]:
        """Its parts that own weights."""

    def __call__(self, x: torch.Tensor | Fed) -> torch.Tensor:
        """``[T, hidden]`` of normed inputs ``[T, hidden]``."""


class DenseMlp:
    """A SwiGLU MLP whose checkpoint prefix is ``name``."""

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, name: str) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        gates = {f"{name}.gate_proj": width, f"{name}.up_proj": width}
        self.down = ops.build.row(place, f"{name}.down_proj", hidden, width, bias=config.mlp_bias)
        self.gate_up = ops.build.gated(place, gates, hidden, bias=config.mlp_bias, down=self.down)

    @property
    def feed(self) -> Feed | None:
        return self.gate_up.feed

    def modules(self) -> Iterator[Weighted]:
        yield from (self.gate_up, self.down)

    def __call__(self, x: torch.Tensor | Fed) -> torch.Tensor:
        return self.down(self.gate_up(x))


class Layer(Protocol):
    """One block of a decoder."""

    mlp: Mlp

    def modules(self) -> Iterator[Weighted]:
        """Its parts that own weights."""

    def forward(self, x: torch.Tensor, residual: Any, step: Pass) -> tuple[torch.Tensor, Any]:
        """What the next block takes."""


class DecoderLayer:
    """One block: token mixer and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: ModelConfig, ops: Ops, place: Placement, index: int, mixer: Mixer, mlp: Mlp) -> None:
        prefix = f"model.layers.{index}"
        hidden, build = config.hidden_size, ops.build
        self.input_norm = build.norm_before(place, f"{prefix}.input_layernorm", hidden, mixer.feed, mixer.beside)
        self.mixer = mixer
        self.post_norm = build.norm_before(place, f"{prefix}.post_attention_layernorm", hidden, mlp.feed)
        self.mlp = mlp

    def modules(self) -> Iterator[Weighted]:
        yield self.input_norm
        yield from self.mixer.modules()
        yield self.post_norm
        yield from self.mlp.modules()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, step: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Block output that is still to be added, and the residual it is to be added to; both ``[T, hidden]``."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x, residual = self.post_norm.add(self.mixer.forward(x, step), residual)
        return self.mlp(x), residual


class DecoderModel:
    """A decoder with its weights on one device. A family with another mixer overrides :meth:`make_mixer`.

    ``max_positions`` bounds the positions a forward may use. Weights are uninitialised until :meth:`load_weights` or
    :meth:`random_weights`. Kernel flags are read here, once.
    """

    ple: PerLayerEmbeddings | None = None
    """N-gram embeddings of a model that has them: the runner attaches their tables."""

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
        with torch.inference_mode():
            self.ops = self.make_ops()
            place = Placement(dtype, self.device, tp_rank, tp_size, config.fp8, self.ops.fp8)
            place.share(config.num_heads, "num_attention_heads")
            place.share(config.num_kv_heads, "num_key_value_heads")
            self.embedding = self.ops.build.embedding(
                place, "model.embed_tokens", config.vocab_size, config.hidden_size
            )
            self.layers = [self.make_layer(place, index) for index in range(config.num_layers)]
            self.norm: Any = self.make_norm(place)
            self.head = self.ops.build.head(place, "lm_head", self.embedding, tied=config.tie_word_embeddings)

    def make_ops(self) -> Ops:
        """The fused ops of the model."""
        return Ops(self.config, self.device, self.max_positions)

    def make_layer(self, place: Placement, index: int) -> Layer:
        """Layer ``index``."""
        mixer, mlp = self.make_mixer(place, index), self.make_mlp(place, index)
        return DecoderLayer(self.config, self.ops, place, index, mixer, mlp)

    def make_norm(self, place: Placement) -> Any:
        """What stands between the last layer and the head."""
        return self.ops.build.norm(place, "model.norm", self.config.hidden_size)

    def make_mixer(self, place: Placement, index: int) -> Mixer:
        """The mixer of layer ``index``."""
        return Attention(self.config, self.ops, place, f"model.layers.{index}.self_attn", index)

    def make_mlp(self, place: Placement, index: int) -> Mlp:
        """The MLP of layer ``index``: dense, or with experts where the configuration says so."""
        name = f"model.layers.{index}.mlp"
        if self.config.is_sparse(index):
            assert self.ops.moe is not None
            return MoeBlock(self.config, self.ops.gemm, self.ops.moe, place, name)
        return DenseMlp(self.config, self.ops, place, name)

    def reserve(self, states: StatePool) -> None:
        """Prepare scratch memory for steps over ``states``; called once, before the first."""
        return

    def prepare(self, fb: ForwardBatch) -> Any:
        """What the mixers need of a batch, made once a forward: :attr:`Pass.extra`."""
        return None

    def modules(self) -> Iterator[Weighted]:
        """All layers that own weights, in forward order."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.modules()
        yield from (self.norm, self.head)

    @property
    def slots(self) -> dict[str, Slot]:
        """Checkpoint tensor name (Hugging Face) to its place."""
        return {name: slot for module in self.modules() for name, slot in module.slots.items()}

    def pieces(self) -> dict[str, dict[str, Slot]]:
        """For each tensor of :attr:`slots` that a checkpoint may hold in pieces, the places of those."""
        found: dict[str, dict[str, Slot]] = {}
        for layer in self.layers:
            if isinstance(layer.mlp, MoeBlock):
                found |= layer.mlp.experts.pieces()
        return found

    @torch.inference_mode()
    def settle(self) -> None:
        """Put packed weights, now that they are there, in the order that the kernels read fastest; where none run, leave them."""
        if self.device.type == "cuda" and choose_op("pq2_gemv", "cuda").impl != "reference":
            for module in self.modules():
                if isinstance(module, (PackedLinear, PackedHead)):
                    module.interleave()

    @torch.inference_mode()
    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all weights, once, from a stream of Hugging Face names; :class:`StartupError` as in :func:`layers.load`."""
        ignored = frozenset({"lm_head.weight"} if self.config.tie_word_embeddings else ())
        load(self.slots, ignored, stream, self.pieces)
        self.settle()

    @torch.inference_mode()
    def random_weights(self, seed: int) -> None:
        """Normal weights with the variance of one over their inputs (norms 1, biases 0), drawn on the device."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for module in self.modules():
            module.randomise(generator)
        self.settle()

    @torch.inference_mode()
    def forward(
        self, fb: ForwardBatch, kv: KVPool, backend: AttentionBackend, states: StatePool | None = None
    ) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` after the final norm; K, V and states of all T tokens are stored afterwards."""
        rope = self.ops.rope.prepare(fb.positions, fb.out_slots, kv.page_size)
        step = Pass(fb, kv, rope, backend, states, self.prepare(fb))
        x, residual = self.embedding(fb.input_ids), None
        for layer in self.layers:
            x, residual = layer.forward(x, residual, step)
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
