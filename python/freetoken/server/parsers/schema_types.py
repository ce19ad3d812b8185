"""Which JSON types a schema allows, and text turned into a value of one of them (torch-free)."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_MAX_DEPTH = 16
_MAX_LITERAL = 65536
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def allowed_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types of the values that ``schema`` (a part of ``root``, where its references point) may describe; empty where
    it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    found: set[str] = set()
    declared = schema.get("type")
    for kind in declared if isinstance(declared, list) else [declared]:
        if isinstance(kind, str) and kind in TYPES:
            found.add(kind)
    if not found:
        for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            found.add(type_of(value))
        for name in ("anyOf", "oneOf", "allOf"):
            for part in _list(schema.get(name)):
                found |= allowed_types(part, root, depth + 1)
        if isinstance(schema.get("$ref"), str):
            found |= allowed_types(_resolve(schema["$ref"], root), root, depth + 1)
    if found and schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the document points at (RFC 6901); ``None`` for any other."""
    if not reference.startswith("#/"):
        return root if reference == "#" else None
    place: Any = root
    for part in reference[2:].split("/"):
        if not isinstance(place, Mapping):
            return None
        place = place.get(part.replace("~1", "/").replace("~0", "~"))
    return place


def property_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types of the argument ``name`` of a function whose arguments ``schema`` describes; string if it does not say."""
    properties = schema.get("properties")
    described = properties.get(name) if isinstance(properties, Mapping) else None
    if described is None:
        described = schema.get("additionalProperties")
    return allowed_types(described, schema) or frozenset({"string"})


def type_of(value: Any) -> str:
    """The JSON type of a decoded value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "array" if isinstance(value, list) else "object"


def convert(text: str, types: frozenset[str]) -> Any:
    """``text`` as a value of one of ``types``; the text itself when it cannot be read as one."""
    bare = text.strip()
    for read in (_from_json, _from_word, _from_literal):
        found, value = read(bare)
        if found and _fits(value, types):
            return int(value) if isinstance(value, float) and "number" not in types else value
    return text


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = type_of(value)
    if kind == "integer":
        return bool(types & {"integer", "number"})
    if kind == "number":
        return "number" in types or ("integer" in types and value.is_integer())
    return kind in types and kind != "string"


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _from_json(text: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False, None


def _from_word(text: str) -> tuple[bool, Any]:
    word = text.lower()
    return word in _WORDS, _WORDS.get(word)


def _from_literal(text: str) -> tuple[bool, Any]:
    """Lists and dictionaries as Python writes them, which models do too."""
    if len(text) > _MAX_LITERAL or text[:1] not in ("[", "{"):
        return False, None
    try:
        value = ast.literal_eval(text)
        return isinstance(value, list | dict), json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None
