"""Qwen3.5 with experts (``qwen3_5_moe`` in transformers), text only: the mixers of Qwen3.5, a mixture-of-experts block in every layer."""

from __future__ import annotations

from freetoken.models.qwen3_5 import Qwen35Model


class Qwen35MoeModel(Qwen35Model):
    """Every layer has experts and a shared one."""
