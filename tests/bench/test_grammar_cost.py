"""The cost of structured output: a small batch with and without, through the real runner."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from make_tiny_model import make_tiny_model

from freetoken.bench import grammar, one_batch, summary
from freetoken.errors import StartupError


def test_a_batch_with_a_schema_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny", seed=2)
    line = f"--model {model} --device cpu --output-len 10 --repeats 1 --no-roof --compare-grammar 2x5 --shape 1x3 2x5"
    found = one_batch.run(one_batch.parser().parse_args(line.split()))
    assert [f["what"] for f in found[5:]] == ["grammar decode"]
    figure = found[-1]
    assert (figure["what"], figure["requests"], figure["tokens"]) == ("grammar decode", 2, 10)
    assert figure["ratio"] == pytest.approx(figure["ms"] / figure["plain_ms"]) and figure["fill_us"] > 0
    assert "with a JSON schema" in capsys.readouterr().out
    assert summary.lines([figure])[0].startswith("grammar decode: ")


@pytest.mark.parametrize(
    ("word", "message"),
    [("3x5", "3x5 is none of the shapes"), ("3", "--compare-grammar must be like 64x1024, not '3'")],
)
def test_shapes_that_are_not_run(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert one_batch.main(["--model", "/nowhere", "--shape", "2x5", "--compare-grammar", word]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_no_output_reaches_the_end_of_the_schema(tokens: int) -> None:
    schema = json.loads(grammar.schema(tokens).text)
    jsonschema.Draft202012Validator.check_schema(schema)
    item = {"name": "", "kind": "place", "score": 0, "count": 0, "note": ""}
    jsonschema.validate([item] * schema["minItems"], schema)
    assert schema["minItems"] * grammar.TOKENS_AN_ITEM > tokens


def test_an_output_that_ends_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", seed=2)
    monkeypatch.setattr(grammar, "schema", lambda tokens: grammar.Grammar(kind="regex", text="a{3}"))
    line = f"--model {model} --device cpu --shape 1x5 --output-len 8 --repeats 1 --no-roof --compare-grammar"
    with pytest.raises(StartupError, match="ended"):
        one_batch.run(one_batch.parser().parse_args(line.split()))
