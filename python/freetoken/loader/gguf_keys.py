"""Typed reads of the metadata of a GGUF file (torch-free)."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile

HF_CLASS = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen4exp": "Qwen4ExpForCausalLM",
}


class Keys:
    """Typed reads of the keys under the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            self.fail("metadata key 'general.architecture' is missing")
        if architecture not in HF_CLASS:
            self.fail(f"architecture {architecture[:40]!r} is not served; {', '.join(HF_CLASS)} are")
        self.prefix = architecture

    def fail(self, problem: str) -> NoReturn:
        raise StartupError(f"{self.file.path}: {problem}")

    def get(self, key: str) -> Any:
        """The value of ``key``; a list of one value for every layer counts as that value when all are the same."""
        value = self.file.metadata.get(f"{self.prefix}.{key}")
        if isinstance(value, np.ndarray):
            distinct = np.unique(value)
            if len(distinct) != 1:
                self.fail(f"metadata key '{self.prefix}.{key}' differs between layers, which is not served")
            return distinct[0].item()
        return value

    def required(self, key: str) -> Any:
        """The value of ``key`` as it is; an error where it is missing."""
        value = self.file.metadata.get(f"{self.prefix}.{key}")
        if value is None:
            self.fail(f"metadata key '{self.prefix}.{key}' is missing")
        return value

    def integers(self, key: str) -> list[int]:
        """The value of ``key``, a list of integers of at least 0."""
        value = self.required(key)
        empty = isinstance(value, list) and not value
        if not empty and (not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or (value < 0).any()):
            self.fail(f"metadata key '{self.prefix}.{key}' must be a list of integers of at least 0")
        return [int(entry) for entry in value]

    def positive(self, key: str) -> int:
        """The value of ``key``, an integer of at least 1."""
        value = self.integer(key)
        if value < 1:
            self.fail(f"metadata key '{self.prefix}.{key}' must be at least 1")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.fail(f"metadata key '{self.prefix}.{key}' is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.fail(f"metadata key '{self.prefix}.{key}' must be an integer, not {type(value).__name__}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.fail(f"metadata key '{self.prefix}.{key}' is missing")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.fail(f"metadata key '{self.prefix}.{key}' must be a number, not {type(value).__name__}")
        # Stored as float32; the shortest decimal that rounds to it is what the model's author wrote (1e-05, say).
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))
