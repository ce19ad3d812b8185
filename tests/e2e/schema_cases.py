"""Schemas to generate from, keyword by keyword in the order of the JSON Schema specification, and ones that are refused.

Every schema bounds its instances but for the names of free properties, so that a model that draws at random comes to an
end.
"""

from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 6}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties, of which ``required`` must be there, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "several types": {"type": ["boolean", "null"]},
    "enum": {"enum": ["red", "green", 12, None, ["nested", {"deep": True}]]},
    "const": {"const": {"kind": "fixed", "of": [1, 2.5, None]}},
    "string length": {"type": "string", "minLength": 2, "maxLength": 5},
    "string pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern anywhere": {"type": "string", "pattern": "^.{0,3}ab.{0,3}$"},
    "integer range": {"type": "integer", "minimum": -20, "maximum": 137},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    "number range": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "array items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"enum": ["a", "b"]}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "tuple and rest": {"type": "array", "prefixItems": [{"const": 1}], "items": WORD, "minItems": 2, "maxItems": 3},
    "closed object": closed("a", a=WORD, b={"type": "boolean"}),
    "only optional": closed(x={"type": "null"}, y={"type": "boolean"}),
    "typed rest": {
        "type": "object",
        "properties": {"id": {"enum": [1, 2]}},
        "additionalProperties": {"type": "boolean"},
        "required": ["id"],
        "maxProperties": 3,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "nested": closed(
        "user", user=closed("name", "tags", name=WORD, tags={"type": "array", "items": WORD, "maxItems": 2})
    ),
    "any of": {"anyOf": [{"type": "boolean"}, closed("n", n={"enum": [1, 2, 3]}), {"const": "neither"}]},
    "one of apart": {
        "oneOf": [closed("kind", "v", kind={"const": "a"}, v={"type": "boolean"}), closed("kind", kind={"const": "b"})]
    },
    "all of": {
        "type": "object",
        "allOf": [{"properties": {"a": {"type": "boolean"}}}, {"required": ["a"]}],
        "additionalProperties": False,
        "properties": {"a": True},
    },
    "reference": {**closed("p", "q", p={"$ref": "#/$defs/point"}, q={"$ref": "#/$defs/point"})}
    | {"$defs": {"point": closed("x", "y", x={"enum": [0, 1]}, y={"enum": [0, 1]})}},
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": closed(
                "leaf", leaf={"type": "boolean"}, left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}
            )
        },
    },
    "date": {"type": "string", "format": "date"},
    "date and time": {"type": "string", "format": "date-time", "maxLength": 30},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "notes that say nothing": {"type": "boolean", "title": "T", "description": "d", "default": 3, "examples": [1]},
    "property names to escape": closed(
        'a"b', "c\\d", **{'a"b': {"type": "boolean"}, "c\\d": {"type": "null"}, "é": WORD}
    ),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": (closed("a", a={"type": "strin"}), ".properties.a.type"),
    "not": ({"type": "array", "items": {"not": {"type": "null"}}}, ".items.not"),
    "if": ({"if": {"type": "integer"}, "then": {"minimum": 3}}, ".if"),
    "unique items": (closed("a", a={"type": "array", "uniqueItems": True}), ".properties.a.uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "null"}}, ".contains"),
    "property names": ({"type": "object", "propertyNames": {"maxLength": 3}}, ".propertyNames"),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    "overlapping one of": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf"),
    "dangling reference": (closed("a", a={"$ref": "#/$defs/none"}), ".properties.a.$ref"),
    "bad pattern": (closed("a b", **{"a b": {"type": "string", "pattern": "(x"}}), '.properties["a b"].pattern'),
    "bad keyword value": ({"anyOf": [{}, {"type": "object", "required": "a"}]}, ".anyOf[1].required"),
    "unknown format": ({"$defs": {"f": {"type": "string", "format": "nope"}}, "$ref": "#/$defs/f"}, ".$defs.f.format"),
    "nothing satisfies it": ({"type": "integer", "minimum": 3, "maximum": 2}, ".minimum"),
}
