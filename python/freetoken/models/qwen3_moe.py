"""Qwen3 with experts: attention of Qwen3, mixture-of-experts blocks in all or some layers."""

from __future__ import annotations

from freetoken.models.qwen3 import Qwen3Model


class Qwen3MoeModel(Qwen3Model):
    """``config.moe`` says which layers have experts; there is no shared one."""
