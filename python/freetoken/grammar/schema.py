"""JSON schemas as grammars, and the path of what is wrong in one (torch-free).

The library says what it refuses in a schema, not where. The place is found by asking again: the deepest subschema that is
refused alone for the same reason, and in it the keyword without which it is not.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from llguidance import LLMatcher, LLParserLimits

MAX_REASON_CHARS = 300

MAX_DEPTH = 60
"""Nesting of JSON values in a schema; each nested schema is about two."""

PLACE_SECONDS = 0.5
"""Time to find the place of a fault in; after that the path is that found so far."""

WHITESPACE = r"[ ]|\n[ \t]{0,32}"
"""Between two JSON tokens: nothing, one blank, or a line break with its indentation. A model that loses itself in white
space, which JSON allows without end, would fill its budget with it."""

_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-(?:0[13-9]|1[0-2])-\d{{2}}|{_YEAR}-02-(?:[01]\d|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = r"\d{2}:\d{2}:[0-5]\d"
# 253 characters, counted in pieces of 16 that end early at a dot: beside the length of each part, a count of characters
# would have tens of thousands of states.
_HOST = r"(?:[^.]{0,15}\.|[^.]{16}){0,15}[^.]{0,13}"
_NARROWER = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}",
    "date-time": f"^{_DATE}[Tt]{_TIME}",
    "hostname": f"^{_HOST}$",
}

Fault = tuple[str, str]
"""``(path, reason)``; the path is empty or like ``.properties.age.type``."""


_BESIDE = 1e-9
"""How far from an excluded whole number the nearest accepted one lies."""


def _narrow_numbers(schema: dict[str, Any]) -> None:
    """Put an inclusive bound a little further in where a whole number is excluded: the library lets it through when the other bound is
    less than one away. Integers lose nothing by it."""
    for exclusive, inclusive, sign, pick in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound, beside = schema.get(exclusive), schema.get(inclusive)
        if schema.get("type") == "integer" or not _number(bound) or not (beside is None or _number(beside)):
            continue
        if float(bound) % 1 or abs(bound) > 2**20:
            continue
        moved = bound + sign * _BESIDE
        schema[inclusive] = moved if beside is None else pick(moved, beside)
        del schema[exclusive]


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def narrow_formats(schema: Any) -> Any:
    """``schema`` with a pattern beside the formats, and other bounds of numbers, where the library takes values that are none.

    It lets 29 February through in every year, second 60 in every minute, and names of hosts of any length, where RFC 1034
    has 253 characters. Here no second is 60, and the year 0, which RFC 3339 allows and most libraries cannot read, is left
    out too, as are names of more than 16 parts. ``schema`` itself stays as it is.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in _ONE:
        if name in result:
            result[name] = narrow_formats(result[name])
    for name in _LISTS:
        if isinstance(result.get(name), list):
            result[name] = [narrow_formats(part) for part in result[name]]
    for name in _MAPS:
        if isinstance(result.get(name), dict):
            result[name] = {key: narrow_formats(part) for key, part in result[name].items()}
    _narrow_numbers(result)
    form, beside = result.get("format"), result.get("allOf", [])
    if isinstance(form, str) and form in _NARROWER and isinstance(beside, list):
        result["allOf"] = [*beside, {"pattern": _NARROWER[form]}]
    return result


def schema_grammar(text: str) -> str:
    """The library's form of a schema; ``ValueError`` unless it is a JSON object."""
    return str(
        LLMatcher.grammar_from_json_schema(
            json.dumps(narrow_formats(json.loads(text))),
            overrides={"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False},
        )
    )


def check_schema(text: str, limits: LLParserLimits) -> Fault | None:
    """Where and why a schema cannot be served, or ``None``."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return "", f"the schema is not valid JSON: {error}"
    if not isinstance(schema, dict):
        return "", "the schema must be an object"
    if too_deep(schema, MAX_DEPTH):
        return "", f"the schema is nested more than {MAX_DEPTH} levels deep"
    reason = _refusal(schema, limits)
    if reason is None:
        return None
    return _place(schema, reason, lambda part: _refusal(part, limits)), reason


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def too_deep(value: Any, limit: int) -> bool:
    """Whether lists and objects stand ``limit`` deep in each other, or deeper."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


@contextmanager
def no_panic() -> Iterator[None]:
    """A panic of the library as a ``ValueError``: it is about one grammar, and nothing of the library's is left broken."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:  # what Rust's panics become derives from this alone
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise ValueError(f"the grammar library failed: {one_line(str(error))}") from None


def _refusal(schema: Any, limits: LLParserLimits) -> str | None:
    try:
        with no_panic():
            source = schema_grammar(json.dumps(schema))
            failed, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=limits)
    except ValueError as error:
        return one_line(str(error))
    return one_line(messages[0]) if failed else None


def _place(schema: dict[str, Any], reason: str, refusal: Callable[[Any], str | None]) -> str:
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    deadline = time.monotonic() + PLACE_SECONDS

    def same(part: Any) -> bool:
        return time.monotonic() < deadline and refusal(part) == reason

    path, here = "", schema
    while True:
        for step, child in _children(here):
            if isinstance(child, dict) and same({**shared, **child}):
                path, here = path + step, child
                break
        else:
            break
    # Without its type a schema allows everything, so that one would always be to blame.
    for name in sorted(here, key="type".__eq__):
        without = same({**shared, **{key: value for key, value in here.items() if key != name}})
        if time.monotonic() >= deadline:
            break
        if not without:
            return path + _step(name)
    return path


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            for key, child in schema[name].items():
                yield _step(name) + _step(key), child
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            for index, child in enumerate(schema[name]):
                yield f"{_step(name)}[{index}]", child
    for name in _ONE:
        if name in schema:
            yield _step(name), schema[name]


def _step(name: str) -> str:
    plain = name.replace("$", "").replace("_", "").isalnum()
    return f".{name[:60]}" if plain else f"[{json.dumps(name[:60])}]"


_PLAINER = (
    (r"Unimplemented keys: \[(.*)\]", r"keywords that are not supported: \1"),
    (r"oneOf constraints are not supported.*", "oneOf is served only where its parts exclude each other; use anyOf"),
    (r"NoExtension(Bias)?", "no output can satisfy it"),
)


def one_line(message: str) -> str:
    """The library's message without its pictures of the text: the sentence that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    first = lines[0] if lines else "it cannot be compiled"
    sentence = told or first
    for pattern, plain in _PLAINER:
        sentence = re.sub(pattern, plain, sentence)
    return sentence[:MAX_REASON_CHARS]
