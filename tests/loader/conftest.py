"""Tiny checkpoints, and the real one where its package is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model

from freetoken.errors import StartupError
from freetoken.loader.demo import demo_model_path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama GGUF of q8_0 matrices (do not modify it)."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return make_tiny_model(path, format="gguf", quant="q8_0", num_layers=1, extra_vocab=5)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3 folder of two shards (do not modify it)."""
    return make_tiny_model(tmp_path_factory.mktemp("folder") / "tiny", arch="qwen3", shards=2, quant="bf16")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of the SmolLM2 GGUF; skips where the demo package is absent."""
    try:
        return demo_model_path()
    except StartupError as error:
        pytest.skip(str(error))
