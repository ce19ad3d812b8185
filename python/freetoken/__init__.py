"""freetoken: a serving runtime for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from freetoken.engine import Engine
    from freetoken.sampling_params import SamplingParams

__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from freetoken.engine import Engine

        return Engine
    if name == "SamplingParams":
        from freetoken.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'freetoken' has no attribute {name!r}")
