"""The registry stays free of torch until a model is built."""

from __future__ import annotations

import subprocess
import sys

import pytest

from freetoken.errors import StartupError
from freetoken.models.registry import MODELS, ModelEntry, find
from freetoken.server.parsers import REASONING, TOOL_CALLS
from freetoken.server_args import REASONING_PARSERS, TOOL_CALL_PARSERS

LOOK = """
import sys
from freetoken.kernels import dispatch
from freetoken.models import registry
assert registry.find("LlamaForCausalLM").class_name == "LlamaModel"
dispatch.table("cpu")
assert "torch" not in sys.modules and "transformers" not in sys.modules, "torch was imported"
"""


def test_lookup_and_dispatch_import_no_torch() -> None:
    environ = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", LOOK], env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.architecture)
def test_every_row_names_parsers_that_there_are(entry: ModelEntry) -> None:
    assert entry.reasoning_parser in ("none", *REASONING) and entry.tool_call_parser in ("none", *TOOL_CALLS)


def test_flags_name_the_parsers_that_there_are() -> None:
    assert ("auto", "none", *REASONING) == REASONING_PARSERS
    assert ("auto", "none", *TOOL_CALLS) == TOOL_CALL_PARSERS


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.architecture)
def test_every_row_names_a_class(entry: object) -> None:
    from freetoken.models.decoder import DecoderModel

    assert issubclass(find(entry.architecture).load_class(), DecoderModel)


def test_unknown_architecture() -> None:
    with pytest.raises(StartupError, match="'MambaForCausalLM' is not served; served: LlamaForCausalLM"):
        find("MambaForCausalLM")
