"""Qwen3 dense."""

from __future__ import annotations

from freetoken.models.decoder import DecoderModel


class Qwen3Model(DecoderModel):
    """Qwen3 dense: query and key heads are normalised before the rotation (``qk_norm``)."""
