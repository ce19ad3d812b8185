"""The torch-free description of a model, common to all file formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry and conventions of a dense decoder.

    ``architecture`` is the Hugging Face class name (``LlamaForCausalLM``, ``Qwen3ForCausalLM``), the key into the model
    registry. ``vocab_size`` counts embedding rows; ``tokenizer`` ids above the tokenizer's own are never sampled.
    ``rope_scaling`` is the Hugging Face dictionary (``rope_type`` and its parameters) or ``None``. ``dtype`` is the
    checkpoint's own. ``eos_token_ids`` unites config and generation config. ``sampling_defaults`` holds the
    ``generation_config.json`` values of temperature, top_p, top_k, min_p and repetition_penalty where present.
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

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes
