"""The prefix-hit benchmark on a tiny hybrid model: what it counts, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model

from freetoken.bench import figures, prefix_hit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("prefix_hit") / "tiny",
        arch="qwen3_5",
        num_layers=4,
        max_position_embeddings=1024,
        seed=5,
    )


def test_hits_are_of_the_whole_prefix(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    arguments = ["--prefix-len", "256", "--suffix-len", "9", "--rounds", "2", "--page-size", "16", "--label", "tiny"]
    assert prefix_hit.main(["--model-path", str(model), *arguments, "--output", str(output)]) == 0
    (figure,) = figures.read(output)
    assert figure["what"] == "prefix hit" and figure["model"] == "tiny" and figure["rounds"] == 2
    # The first hit resumes at a checkpoint of the cold prompt, the next at the border that the first found.
    assert 0 <= figure["first_hit_cached"] <= 256 and figure["cached_tokens"] == 256
    assert figure["of_cold"] == pytest.approx(figure["ms"] / figure["cold_ms"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--suffix-len", "1"], "--suffix-len"),
        (["--rounds", "0"], "--rounds"),
        (["--disable-radix-cache"], "--disable"),
    ],
)
def test_refusals(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prefix_hit.main(arguments) == 1
    assert name in capsys.readouterr().err
