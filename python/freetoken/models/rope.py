"""Rotary embedding tables for the scalings of published checkpoints.

Parameter names are those of ``rope_scaling`` in a Hugging Face ``config.json``. Sources: linear interpolation
(arXiv 2306.15595), dynamic NTK scaling (Qwen and Llama community), YaRN (arXiv 2309.00071), the wavelength-dependent
scaling of Llama 3.1, and the ``rope_freqs`` tensor of GGUF files.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from freetoken.errors import StartupError
from freetoken.models.config import ModelConfig

TABLE_BLOCK = 2**18
"""Positions whose angles are worked out at once, so that a long table needs no more than its own memory."""


def _number(scaling: dict[str, Any], name: str, default: float | None = None) -> float:
    value = scaling.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = scaling.get("rope_type", scaling.get("type"))
        raise StartupError(f"rope_scaling of type {kind!r} needs a number in {name!r}, not {value!r}")
    return float(value)


def _powers(base: float, size: int) -> torch.Tensor:
    """``base^(2i / size)`` for i below size / 2, float32."""
    return base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)


def _llama3(plain: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    context = _number(scaling, "original_max_position_embeddings")
    if high == low:
        raise StartupError("rope_scaling of type 'llama3' needs a high_freq_factor above low_freq_factor")
    wavelength = 2 * math.pi / plain
    share = (context / wavelength - low) / (high - low)
    blended = (1 - share) * plain / factor + share * plain
    kept = torch.where(wavelength < context / high, plain, blended)
    return torch.where(wavelength > context / low, plain / factor, kept)


def _dynamic_base(base: float, size: int, scaling: dict[str, Any], config: ModelConfig, max_positions: int) -> float:
    """The larger base that stretches the trained context to ``max_positions``."""
    factor, trained = _number(scaling, "factor"), config.max_position_embeddings
    stretch = factor * max(max_positions, trained) / trained - (factor - 1)
    return float(base * stretch ** (size / (size - 2)))


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(_number(scaling, "mscale")) / temperature(_number(scaling, "mscale_all_dim"))
    return temperature(1.0)


def _yarn(base: float, size: int, scaling: dict[str, Any], config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often within the trained context are kept, slow ones interpolated, with a linear ramp between."""
    trained = _number(scaling, "original_max_position_embeddings", config.max_position_embeddings)
    factor = _number(scaling, "factor", config.max_position_embeddings / trained)

    def dimension(turns: float) -> float:
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(_number(scaling, "beta_fast", 32.0))
    high = dimension(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - interpolated
    powers = _powers(base, size)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_attention_factor(scaling, factor)


def _explicit(plain: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    factors = torch.tensor(scaling.get("factors", ()), dtype=torch.float32)
    if factors.shape != plain.shape or not bool((factors > 0).all()):
        raise StartupError(
            f"rope_scaling of type 'factors' needs {plain.numel()} positive divisors, not {factors.numel()}"
        )
    return plain / factors


def frequencies(config: ModelConfig, rotary_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Angles per position ``[rotary_dim / 2]`` float32 on the CPU, and the factor on cosines and sines.

    :class:`StartupError` for a scaling type that is not known or lacks a parameter.
    """
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    base = config.rope_theta
    if kind == "yarn":
        return _yarn(base, rotary_dim, scaling, config)
    if kind == "dynamic":
        base = _dynamic_base(base, rotary_dim, scaling, config, max_positions)
    plain = 1.0 / _powers(base, rotary_dim)
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return plain / _number(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "factors":
        return _explicit(plain, scaling), _number(scaling, "attention_factor", 1.0)
    raise StartupError(f"rope_scaling of type {kind!r} is not known; known: default, linear, dynamic, llama3, yarn")


def rotary_table(
    config: ModelConfig, max_positions: int, device: torch.device | str, *, rotary_dim: int | None = None
) -> torch.Tensor:
    """``[max_positions, R]`` float32: R/2 cosines, then R/2 sines, of every position. R defaults to the head width.

    For dynamic scaling the base is that of a sequence of ``max_positions``.
    """
    size = config.head_dim if rotary_dim is None else rotary_dim
    angles_per_position, factor = frequencies(config, size, max_positions)
    table = torch.empty(max_positions, size, device=device)
    for start in range(0, max_positions, TABLE_BLOCK):
        positions = torch.arange(start, min(start + TABLE_BLOCK, max_positions), dtype=torch.float32)
        angles = positions[:, None] * angles_per_position[None, :]
        block = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        table[start : start + TABLE_BLOCK].copy_(block)
    return table
