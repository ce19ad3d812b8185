"""The torch-free description of a model, common to all file formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from freetoken.models.ple_config import PleConfig

PACKED_METHOD = "pq2"
"""The ``quant_method`` of random 2-bit weights; real ones come from GGUF files, which say so themselves."""
FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Geometry of the Gated DeltaNet layers of a hybrid model. Value head h uses key head ``h // (value / key heads)``.
    Its output is gated by SiLU, with ``sigmoid_gate`` by a sigmoid."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    sigmoid_gate: bool = False

    @property
    def key_size(self) -> int:
        """Width of all key (or query) heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def projected(self) -> int:
        """Width of everything that is projected from a layer's input: the channels, z, a and b."""
        return self.channels + self.value_size + 2 * self.num_value_heads


@dataclass(frozen=True, kw_only=True)
class HyperConfig:
    """Hyper-connections: ``streams`` residual streams, whose mixing into one input has ``rank``."""

    streams: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """What chooses the tokens that a query of full attention sees.

    Keys of ``ratio`` tokens make a block. ``num_heads`` index queries of ``head_dim`` score all whole blocks before the query; it sees
    the tokens of the best ``budget // ratio`` of them, and those after the last whole block. ``gather_elements``, ``mask_elements`` and
    ``score_elements`` bound the temporary memory of attention over them.
    """

    num_heads: int
    head_dim: int
    budget: int
    ratio: int
    gather_elements: ClassVar[int] = 1 << 25
    mask_elements: ClassVar[int] = 1 << 20
    score_elements: ClassVar[int] = 1 << 25

    @property
    def blocks(self) -> int:
        """How many whole blocks a query sees at most."""
        return self.budget // self.ratio

    @property
    def visible(self) -> int:
        """Up to so many tokens of context nothing is left out."""
        return self.budget + self.ratio - 1


@dataclass(frozen=True, kw_only=True)
class PackedWeights:
    """Matrices that are held in 2 bits an element, and the rotation that some of them were stored under.

    ``groups`` maps canonical tensor names to the number of consecutive elements of a row that share a float16 scale. Of those
    in ``rotated`` each row was multiplied by the sign of its column and then rotated (normalised Walsh-Hadamard, in blocks
    of ``block`` columns): activations take the same sign and rotation first, and rows of the embedding are turned back.
    ``signs`` holds for each width one int8 of 1 or -1 a column; a width that is not there has none.
    """

    groups: dict[str, int] = field(repr=False)
    rotated: frozenset[str] = field(default=frozenset(), repr=False)
    block: int = 0
    signs: dict[int, bytes] = field(default_factory=dict, repr=False)

    def nbytes(self, name: str, elements: int) -> int:
        """Bytes of codes and scales of tensor ``name``."""
        return elements // 4 + elements // self.groups[name] * 2

    def summary(self) -> dict[str, Any]:
        """What to tell of it in JSON."""
        groups = sorted(set(self.groups.values()))
        return {"matrices": len(self.groups), "groups": groups, "rotated": len(self.rotated), "block": self.block}


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Geometry of the mixture-of-experts blocks.

    A token has ``top_k`` of ``num_experts`` SwiGLU experts of ``intermediate_size``, weighted by the softmax over all logits of the router, which is
    divided by its sum over the chosen where ``norm_topk_prob``. ``shared_intermediate_size`` is that of an expert which every
    token has besides, times the sigmoid of a gate; 0 for none. ``dense_layers`` have a plain MLP instead.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()


FP8_MODULES = frozenset(
    (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
)
"""Last names of the linear layers that are held in FP8 where a checkpoint has them so; others are dequantised at load."""


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Weights of linear layers in FP8 (e4m3), a float32 scale for each block of 128 x 128. ``skipped`` names modules left in the
    checkpoint's own type, from the start up to a dot or by their end."""

    skipped: tuple[str, ...] = ()

    def converts(self, module: str) -> bool:
        """Whether the weight of ``module`` is FP8 in the checkpoint."""
        return not any(module == key or module.startswith(f"{key}.") or module.endswith(key) for key in self.skipped)

    def holds(self, modules: Iterable[str]) -> bool:
        """Whether the merged weight of ``modules`` is kept in FP8: all are converted and of a kind that is kept."""
        return all(name.rpartition(".")[2] in FP8_MODULES and self.converts(name) for name in modules)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry and conventions of a decoder.

    ``architecture`` is the Hugging Face class name (``LlamaForCausalLM``, ``Qwen3ForCausalLM``), the key into the model
    registry. ``vocab_size`` counts embedding rows; ``tokenizer`` ids above the tokenizer's own are never sampled.
    ``rope_scaling`` is the Hugging Face dictionary (``rope_type`` and its parameters) or ``None``. ``dtype`` is the
    checkpoint's own. ``eos_token_ids`` unites config and generation config. ``sampling_defaults`` holds the
    ``generation_config.json`` values of temperature, top_p, top_k, min_p and repetition_penalty where present.

    ``layer_types`` names each layer of a hybrid model ``full_attention`` or ``linear_attention``; empty means full attention
    everywhere. ``linear_attention`` is the geometry of the latter kind. ``rotary_dim`` is how much of a head is rotated
    (``None``: all). With ``attn_output_gate`` the query projection holds, for each head, a query and a gate on the head's
    output. With ``zero_centred_norm`` the stored norm weights are those used less 1 (all but the norm inside linear attention).
    ``float32_norm`` says that these are held in float32. ``packed`` names the matrices that stay in 2 bits.

    ``hyper`` describes hyper-connections in place of the residual and its norms, ``indexer`` the sparse selection of full attention.

    ``moe`` describes mixture-of-experts blocks, without which every layer has an MLP of ``intermediate_size``. ``fp8`` says that linear
    layers are stored in FP8; ``dtype`` is then that of all else. ``ple`` is the geometry of per-layer n-gram embeddings, for a model that has them.
    """

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] = ()
    linear_attention: LinearAttentionConfig | None = None
    rotary_dim: int | None = None
    attn_output_gate: bool = False
    zero_centred_norm: bool = False
    float32_norm: bool = False
    packed: PackedWeights | None = None
    moe: MoeConfig | None = None
    fp8: Fp8Config | None = None
    ple: PleConfig | None = None
    hyper: HyperConfig | None = None
    indexer: IndexerConfig | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def layer_type(self, layer: int) -> str:
        """``full_attention`` or ``linear_attention``."""
        return self.layer_types[layer] if self.layer_types else FULL_ATTENTION

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts instead of an MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.is_sparse(layer) for layer in range(self.num_layers))

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR_ATTENTION)

    @property
    def num_attention_layers(self) -> int:
        """Layers that have K and V."""
        return self.num_layers - self.num_linear_layers

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K, V and keys of the indexer of one token over all layers that have them."""
        index = 0 if self.indexer is None else self.indexer.head_dim
        return self.num_attention_layers * (2 * self.kv_size + index) * element_bytes
