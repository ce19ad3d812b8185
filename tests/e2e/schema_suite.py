"""The official JSON-Schema-Test-Suite (draft 2020-12), and which of its schemas are served.

The suite travels in the source distribution of ``jsonschema``; ``scripts/setup.sh`` unpacks it into the environment. The
subset that is generated from follows from a rule: every schema of the suite's required part and of its formats that is not
refused. How many are, and for which keyword, is in ``REFUSED``, so that the subset cannot shrink unseen.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.grammar.compiler import parser_limits
from freetoken.grammar.schema import Fault, check_schema

DRAFT = Path(sys.prefix) / "share" / "json-schema-suite" / "tests" / "draft2020-12"
MISSING = "the JSON-Schema-Test-Suite is not in this environment; scripts/setup.sh fetches it"

SERVED = 174
REFUSED = {
    "unevaluatedProperties": 42,
    "unevaluatedItems": 27,
    "another document": 22,
    "format without a grammar": 20,
    "contains": 18,
    "if": 18,
    "then": 13,
    "$dynamicRef": 12,
    "else": 11,
    "not": 11,
    "minContains": 9,
    "overlapping oneOf": 8,
    "propertyNames": 8,
    "dependentSchemas": 7,
    "maxContains": 7,
    "count with a decimal point": 6,
    "uniqueItems": 6,
    "$dynamicAnchor": 5,
    "nothing satisfies it": 5,
    "dependentRequired": 4,
    "overlapping patternProperties": 3,
    "true or false": 2,
    "long multipleOf": 1,
}
"""Reasons of refusals and how many of the other schemas each is given for; some are refused for several."""

_REASONS = {
    "the schema must be an object": "true or false",
    "schema is false": "nothing satisfies it",
    "oneOf is served only": "overlapping oneOf",
    "Resource": "another document",
    "Unknown format": "format without a grammar",
    "are not disjoint": "overlapping patternProperties",
    "Expected positive integer": "count with a decimal point",
    "has too many digits": "long multipleOf",
}


@dataclass(frozen=True)
class Case:
    """One schema of the suite and the instances that come with it, as ``(value, is_valid)``."""

    name: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]

    def fault(self) -> Fault | None:
        """Where and why the schema is refused, ``None`` if it is served."""
        return check_schema(json.dumps(self.schema), parser_limits())


def reasons(fault: Fault) -> list[str]:
    """The keywords that a refusal names, or what else it says; ``LookupError`` for a reason that is not known here."""
    told = fault[1]
    if told.startswith("keywords that are not supported: "):
        return re.findall(r'"([^"]+)"', told)
    return [next(name for part, name in _REASONS.items() if part in told)]


def installed() -> bool:
    """Whether the suite is there."""
    return DRAFT.is_dir()


def required_cases() -> list[Case]:
    """The required part of the suite, and the formats, which are asserted here."""
    return [*_cases(DRAFT), *_cases(DRAFT / "optional" / "format")]


def optional_cases() -> list[Case]:
    """The rest: what the specification leaves open, other drafts, and ECMAScript's regular expressions."""
    return list(_cases(DRAFT / "optional"))


def served_schemas() -> dict[str, dict[str, Any]]:
    """The subset to generate from, by name."""
    return {case.name: case.schema for case in required_cases() if case.fault() is None}


def _cases(folder: Path) -> Iterator[Case]:
    for file in sorted(folder.glob("*.json")):
        where = file.relative_to(DRAFT).with_suffix("")
        for group in json.loads(file.read_text(encoding="utf-8")):
            instances = tuple((test["data"], test["valid"]) for test in group["tests"])
            yield Case(f"{where}: {group['description']}", group["schema"], instances)
