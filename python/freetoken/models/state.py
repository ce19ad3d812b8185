"""What a model keeps for each running request beside its KV: declared here, held by ``runner/state_pool.py`` (torch-free)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from freetoken.models.config import ModelConfig

CONV_STATE, REC_STATE = "conv", "rec"
PLE_CONTEXT, PLE_HISTORY = "ple_context", "ple_history"


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """One kind of per-request state: ``layers`` tensors of ``shape`` a request, in ``dtype`` (``None``: the model's own; else
    a floating type or ``int32``)."""

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: str | None = None

    @property
    def elements(self) -> int:
        """Elements of one request over all layers."""
        return self.layers * math.prod(self.shape)


def linear_attention_states(model: ModelConfig) -> tuple[StateSpec, ...]:
    """Of each linear-attention layer: the last inputs of the convolution, as a ring, and the matrix of each value head.

    ``conv [W, C]`` holds at entry ``p % W`` the raw input row of position p; ``rec [Hv, Dv, Dk]`` is float32.
    """
    linear = model.linear_attention
    if linear is None:
        return ()
    layers = model.num_linear_layers
    recurrent = (linear.num_value_heads, linear.value_head_dim, linear.key_head_dim)
    return (
        StateSpec(name=CONV_STATE, layers=layers, shape=(linear.conv_width, linear.channels)),
        StateSpec(name=REC_STATE, layers=layers, shape=recurrent, dtype="float32"),
    )


def ple_states(model: ModelConfig) -> tuple[StateSpec, ...]:
    """The last ids of the text, which all layers of n-gram embeddings hash, and of each such layer the last inputs of its
    convolution, as a ring.

    ``ple_context [n - 1]`` int32 is oldest first; ``ple_history [L, C]`` holds at entry ``p % L`` the input row of position p, L
    being how far the convolution reaches back. Both are trusted only as far as the request's own tokens go.
    """
    ple = model.ple
    if ple is None or not ple.layers:
        return ()
    return (
        StateSpec(name=PLE_CONTEXT, layers=1, shape=(ple.ngram_size - 1,), dtype="int32"),
        StateSpec(name=PLE_HISTORY, layers=len(ple.layers), shape=(ple.history, ple.channels)),
    )
