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
    matcher = LLMatcher(BYTES, schema_grammar(json.dumps(schema)), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps(value).encode()
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
