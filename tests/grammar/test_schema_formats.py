"""Dates, times and names of hosts of constrained output can exist, whatever stands beside them in the schema."""

from __future__ import annotations

import json
from datetime import date, datetime
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from freetoken.grammar.compiler import parser_limits
from freetoken.grammar.schema import check_schema, narrow_formats, schema_grammar

BYTES = LLTokenizer("byte")


def takes(schema: dict[str, Any], value: Any) -> bool:
    return takes_text(schema, json.dumps(value))


def takes_text(schema: dict[str, Any], written: str) -> bool:
    matcher = LLMatcher(BYTES, schema_grammar(json.dumps(schema)), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    text = written.encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def exists(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@pytest.mark.parametrize(
    "year", ["0000", "0001", "0004", "0100", "0400", "1900", "2000", "2023", "2024", "2096", "2100"]
)
def test_days_are_those_of_the_calendar(year: str) -> None:
    for month in range(14):
        for day in (0, 1, 28, 29, 30, 31, 32):
            text = f"{year}-{month:02}-{day:02}"
            assert takes({"format": "date"}, text) == exists(text), text


@pytest.mark.parametrize(
    ("second", "taken"), [("00", True), ("59", True), ("59.5", True), ("60", False), ("61", False)]
)
def test_a_minute_has_sixty_seconds(second: str, taken: bool) -> None:
    assert takes({"format": "time"}, f"23:59:{second}Z") == taken
    assert takes({"format": "date-time"}, f"2024-02-29T23:59:{second}-08:00") == taken
    assert not takes({"format": "date-time"}, f"2023-02-29T23:59:{second}-08:00")
    assert datetime.fromisoformat("2024-02-29T23:59:59-08:00")


@pytest.mark.parametrize(
    ("parts", "taken"),
    [
        ([63, 63, 63, 61], True),
        ([63, 63, 63, 62], False),
        ([64], False),
        ([1] * 16, True),
        ([15] * 16, False),
        ([15] * 15 + [13], True),
        ([31] * 7 + [10], True),
        ([1] * 128, False),
        ([5, 0, 3], False),
    ],
)
def test_names_of_hosts_have_an_end(parts: list[int], taken: bool) -> None:
    assert takes({"format": "hostname"}, ".".join("a" * part for part in parts)) == taken


WHEN = {"type": "string", "format": "date"}


@pytest.mark.parametrize(
    ("schema", "wrap"),
    [
        ({"type": "object", "properties": {"d": WHEN}}, lambda day: {"d": day}),
        ({"type": "array", "items": {"anyOf": [WHEN, {"type": "null"}]}}, lambda day: [None, day]),
        ({"$ref": "#/$defs/day", "$defs": {"day": WHEN}}, lambda day: day),
        ({**WHEN, "pattern": "^20"}, lambda day: day),
        ({**WHEN, "allOf": [{"pattern": "^20"}]}, lambda day: day),
        ({"type": "object", "properties": {"format": WHEN}}, lambda day: {"format": day}),
    ],
)
def test_dates_exist_wherever_they_stand(schema: dict[str, Any], wrap: Any) -> None:
    before = json.dumps(schema)
    assert takes(schema, wrap("2024-02-29")) and not takes(schema, wrap("2023-02-29"))
    assert json.dumps(schema) == before


def test_other_schemas_stay_as_they_are() -> None:
    plain = {"enum": [{"format": "date"}], "properties": {"format": {"const": "date"}}, "allOf": 3, "format": ["date"]}
    assert narrow_formats(plain) == plain
    assert takes({"const": {"format": "date"}}, {"format": "date"})
    assert check_schema('{"format": "date", "allOf": 3}', parser_limits()) is not None


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.25", "0.00001"], ["0", "0.0", "-0", "0.51"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25"], ["0", "0.5"]),
        ({"exclusiveMinimum": 10, "maximum": 10.01}, ["10.005", "10.01"], ["10", "10.0", "10.02"]),
        ({"minimum": -0.1, "exclusiveMaximum": 0}, ["-0.05", "-0.1"], ["0", "-0", "-0.2"]),
        ({"minimum": 1, "exclusiveMinimum": 1, "maximum": 1.5}, ["1.25"], ["1", "1.0"]),
        ({"exclusiveMinimum": 0.5}, ["0.75", "1", "7"], ["0.5", "0"]),
        ({"exclusiveMinimum": 3}, ["4", "3.5"], ["3", "2"]),
    ],
)
def test_excluded_numbers_are_not_let_through(bounds: dict[str, float], good: list[str], bad: list[str]) -> None:
    for kind in ({"type": "number"}, {}):
        schema = {**kind, **bounds}
        assert [text for text in good if not takes_text(schema, text)] == []
        assert [text for text in bad if takes_text(schema, text)] == []
    whole = {"type": "integer", **bounds}
    assert narrow_formats(whole) == whole
