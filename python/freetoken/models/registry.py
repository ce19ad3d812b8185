"""Which class serves which architecture (torch-free until a model is built)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetoken.errors import StartupError
from freetoken.models.config import ModelConfig
from freetoken.models.state import StateSpec, linear_attention_states, ple_states

if TYPE_CHECKING:
    import torch

    from freetoken.models.decoder import DecoderModel


def _stateless(model: ModelConfig) -> tuple[StateSpec, ...]:
    """No state beside the KV."""
    return ()


def _hybrid_with_ple(model: ModelConfig) -> tuple[StateSpec, ...]:
    """States of linear attention, then those of n-gram embeddings."""
    return (*linear_attention_states(model), *ple_states(model))


@dataclass(frozen=True)
class ModelEntry:
    """One row: the architecture's name in ``config.json``, the class that serves it, what it keeps for each request, and
    the dialects of reasoning and tool calls its models speak where their chat template does not tell."""

    architecture: str
    module: str
    class_name: str
    state_specs: Callable[[ModelConfig], tuple[StateSpec, ...]] = _stateless
    reasoning_parser: str = "none"
    tool_call_parser: str = "hermes"

    def load_class(self) -> type[DecoderModel]:
        """Import the class, and torch with it."""
        found: type[DecoderModel] = getattr(importlib.import_module(self.module), self.class_name)
        return found


MODELS: tuple[ModelEntry, ...] = (
    ModelEntry("LlamaForCausalLM", "freetoken.models.llama", "LlamaModel"),
    ModelEntry("Qwen3ForCausalLM", "freetoken.models.qwen3", "Qwen3Model", reasoning_parser="qwen3"),
    ModelEntry("Qwen3MoeForCausalLM", "freetoken.models.qwen3_moe", "Qwen3MoeModel", reasoning_parser="qwen3"),
    ModelEntry(
        "Qwen3_5ForCausalLM",
        "freetoken.models.qwen3_5",
        "Qwen35Model",
        linear_attention_states,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
    ),
    ModelEntry(
        "Qwen3_5ForConditionalGeneration",
        "freetoken.models.qwen3_5",
        "Qwen35Model",
        linear_attention_states,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
    ),
    ModelEntry(
        "Qwen3_5MoeForCausalLM",
        "freetoken.models.qwen3_5_moe",
        "Qwen35MoeModel",
        linear_attention_states,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
    ),
    ModelEntry(
        "Qwen3_5MoeForConditionalGeneration",
        "freetoken.models.qwen3_5_moe",
        "Qwen35MoeModel",
        linear_attention_states,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
    ),
    ModelEntry(
        "Qwen4ExpForCausalLM",
        "freetoken.models.qwen4_exp",
        "Qwen4ExpModel",
        _hybrid_with_ple,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
    ),
    ModelEntry(
        "Qwen4ExpForConditionalGeneration",
        "freetoken.models.qwen4_exp",
        "Qwen4ExpModel",
        _hybrid_with_ple,
        reasoning_parser="qwen3",
        tool_call_parser="qwen3_coder",
    ),
)

_BY_ARCHITECTURE = {entry.architecture: entry for entry in MODELS}


def find(architecture: str) -> ModelEntry:
    """The row of an architecture; :class:`StartupError` names those that are served."""
    entry = _BY_ARCHITECTURE.get(architecture)
    if entry is None:
        raise StartupError(
            f"architecture {architecture!r} is not served; served: {', '.join(sorted(_BY_ARCHITECTURE))}"
        )
    return entry


def build_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, max_positions: int
) -> DecoderModel:
    """The model of ``config`` with uninitialised weights on ``device``; :class:`StartupError` for an unknown one."""
    return find(config.architecture).load_class()(config, dtype=dtype, device=device, max_positions=max_positions)
