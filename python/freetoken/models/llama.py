"""Llama and the checkpoints that share its layout."""

from __future__ import annotations

from freetoken.models.decoder import DecoderModel


class LlamaModel(DecoderModel):
    """Llama 2 and 3, SmolLM2 and the like: no head norms."""
