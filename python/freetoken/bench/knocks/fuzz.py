"""Requests made from an OpenAPI document: valid ones, ones that are a little wrong, and bodies that are no bodies (torch-free).

Everything is drawn from a seeded generator, so the number of a request and the seed bring it back.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote

Schema = dict[str, Any]
JSON_TYPE = "application/json"

TEXTS = (
    "", "a", "hello", "0", "-1", "null", "true", " ", "\n", "\t\r\n", "\x00", "\x1b[31m", "é", "日本語", "👩‍👩‍👧", "\u202eabc",
    "\ufeff", "\u2028", "<|im_start|>", "<|im_end|>", "<think>", "{{ 7 * 7 }}", "{% for x in y %}", "../../etc/passwd",
    "data: [DONE]\n\n", "%s%n", "'; --", '"', "\\", "\\u0000", "NaN", "a" * 300, "é" * 200, "the cat sat on the mat " * 20,
)  # fmt: skip
NAMES = ("f", "get_weather", "a-b.c:d/e", "x" * 128)
"""Values for the one pattern the document has, that of names."""
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    0.5,
    -0.5,
    1e-9,
    1.5,
    100,
    255,
    256,
    1023,
    65536,
    2**31 - 1,
    2**31,
    2**53,
    -(2**31),
    2**63,
    1e30,
)
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    2**63,
    2**70,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [{}],
    "é" * 50,
)
_DEPTH = 4
_LONGEST_LIST = 4


@dataclass
class Request:
    """One HTTP request. ``path`` is quoted, ``body`` is ``None`` for none."""

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """For a report, cut."""
        body = "" if self.body is None else f" {self.body[:1500]!r}"
        return f"{self.method} {self.path[:300]}{body}"


class Maker:
    """Values for schemas."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def value(self, schema: Schema, depth: int = 0) -> Any:
        """A value that ``schema`` allows (for the keywords that our document uses)."""
        rng = self.rng
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            most = min(schema.get("maxItems", _LONGEST_LIST), _LONGEST_LIST)
            return [self.value(schema["items"], depth + 1) for _ in range(rng.randint(schema.get("minItems", 0), most))]
        if kind == "string":
            if "pattern" in schema:
                return rng.choice(NAMES)
            text = self.text()[: schema.get("maxLength", 10_000)]
            return text or "x" * schema.get("minLength", 0)
        if kind == "boolean":
            return rng.random() < 0.5
        if kind in ("integer", "number"):
            return self._number(schema, whole=kind == "integer")
        return copy.deepcopy(rng.choice(ODD))

    def text(self) -> str:
        return "".join(self.rng.choice(TEXTS) for _ in range(self.rng.choice((1, 1, 1, 2, 3))))

    def _number(self, schema: Schema, *, whole: bool) -> float:
        low: Any = schema.get("minimum", schema.get("exclusiveMinimum", -1e6))
        high: Any = schema.get("maximum", 1e6)
        rng = self.rng
        if whole:
            near = min(high, low + 8)
            if rng.random() < 0.05:
                return rng.randint(int(low), int(high))
            return int(rng.choice((low, near, rng.randint(int(low), int(near)))))
        found = rng.choice((low, high, rng.uniform(low, high), min(high, low + 1)))
        return float(high if found == schema.get("exclusiveMinimum") else found)

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        rng, made = self.rng, {}
        required = list(schema.get("required", ()))
        if "oneOf" in schema:
            required += rng.choice(schema["oneOf"])["required"]
        for name, inner in schema.get("properties", {}).items():
            others = any(name in way["required"] for way in schema.get("oneOf", ()))
            if name in required or (depth < _DEPTH and not others and rng.random() < 0.2):
                made[name] = self.value(inner, depth + 1)
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            for _ in range(rng.randint(0, 3)):
                made[str(rng.choice((0, 1, 2, 3, 5, 5, 300, 70_000, "x")))] = self.value(extra, depth + 1)
        return made

    def spoil(self, value: Any) -> Any:
        """``value`` with one thing in it changed: a part replaced, taken away, doubled or added."""
        rng = self.rng
        if isinstance(value, dict) and value and rng.random() < 0.95:
            name = rng.choice(list(value))
            act = rng.random()
            if act < 0.15:
                del value[name]
            elif act < 0.25:
                value[self.text()] = value[name]
            else:
                value[name] = self.spoil(value[name])
            return value
        if isinstance(value, list) and value and rng.random() < 0.7:
            index = rng.randrange(len(value))
            if rng.random() < 0.2:
                return value * rng.choice((2, 5, 50))
            value[index] = self.spoil(value[index])
            return value
        if isinstance(value, int | float) and rng.random() < 0.5:
            return rng.choice(NUMBERS)
        if isinstance(value, str) and rng.random() < 0.5:
            return self.text() * rng.choice((1, 1, 10, 100))
        return copy.deepcopy(rng.choice(ODD))


@dataclass
class Route:
    """An operation of the document that the fuzzer calls."""

    method: str
    path: str
    schema: Schema | None

    @property
    def generates(self) -> bool:
        return self.schema is not None and bool(
            {"prompt", "messages", "text", "input"} & set(self.schema["properties"])
        )


def routes(document: dict[str, Any], skip: tuple[str, ...] = ()) -> list[Route]:
    """The operations of an OpenAPI document, those of the paths in ``skip`` left out."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path in skip or method not in ("get", "post"):
                continue
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get(JSON_TYPE, {}).get("schema") if content else None
            if schema is not None and "properties" not in schema:
                schema = {**schema, "properties": {}}
            found.append(Route(method.upper(), path, schema))
    return found


def _short(body: Any) -> Any:
    """The same request for a few tokens at most, so that twenty thousand of them end."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"):
            if type(body.get(name)) is int and body[name] > 4:
                body[name] = 1 + body[name] % 4
        if not {"max_tokens", "max_completion_tokens", "max_output_tokens", "sampling_params"} & set(body):
            body["max_output_tokens" if "input" in body else "max_tokens"] = 2
        inner = body.get("sampling_params")
        if isinstance(inner, dict):
            inner["max_new_tokens"] = 2
        if type(body.get("n")) is int and body["n"] > 4:
            body["n"] = 1 + body["n"] % 4
    return body


def fuzzed(document: dict[str, Any], model: str, seed: int, skip: tuple[str, ...] = ()) -> Iterator[Request]:
    """Endless requests over every route: about half valid, the others wrong in a place or two, a few on wrong paths."""
    rng = Random(seed)
    maker = Maker(rng)
    table = routes(document, skip)
    bodies = [route for route in table if route.schema is not None]
    while True:
        route = rng.choice(bodies) if rng.random() < 0.85 else rng.choice(table)
        path = "/".join(quote(maker.text(), safe="") if "{" in part else part for part in route.path.split("/"))
        if rng.random() < 0.02:
            path += "/" + quote(maker.text(), safe="")
        if rng.random() < 0.1:
            path += f"?{quote(maker.text(), safe='')}={quote(maker.text(), safe='')}"
        method = (
            route.method if rng.random() < 0.98 else rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"))
        )
        body: bytes | None = None
        if route.schema is not None:
            value = maker.value(route.schema)
            if isinstance(value, dict) and "model" in value:
                value["model"] = model if rng.random() < 0.9 else maker.text()
            if route.generates:
                value = _short(value)
            for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
                value = maker.spoil(value)
            body = encode(value)
        elif rng.random() < 0.1:
            body = encode(maker.value({}))
        yield Request(method, path, body, _headers(rng, maker))


def encode(value: Any) -> bytes:
    """JSON as a careless client writes it: NaN and Infinity are words, and nothing is escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _headers(rng: Random, maker: Maker) -> dict[str, str]:
    headers = {"Content-Type": JSON_TYPE}
    draw = rng.random()
    if draw < 0.03:
        headers["Content-Type"] = rng.choice(
            ("text/plain", "", "multipart/form-data", "application/x-www-form-urlencoded")
        )
    elif draw < 0.06:
        headers["Accept"] = rng.choice(("text/html", "*/*;q=0", "x"))
    elif draw < 0.09:
        headers["Authorization"] = rng.choice(("Bearer", "Bearer x", "Basic eA=="))
    elif draw < 0.12:
        headers["X-Odd"] = quote(maker.text())
    return headers


def malformed(document: dict[str, Any], seed: int, skip: tuple[str, ...] = ()) -> Iterator[Request]:
    """Endless bodies none of which is a request: no JSON, no object, a required field missing or of the wrong type."""
    rng = Random(seed)
    maker = Maker(rng)
    table = [route for route in routes(document, skip) if route.schema is not None and route.schema.get("required")]
    while True:
        route = rng.choice(table)
        schema = route.schema or {}
        value = maker.value(schema)
        kind = rng.randrange(5)
        if kind == 0:
            body = bytes(rng.randrange(256) for _ in range(rng.randint(1, 200)))
            # A digit alone, say, would be JSON.
            body = b"\xff" + body
        elif kind == 1:
            whole = encode(value)
            body = whole[: rng.randrange(len(whole) - 1)]
        elif kind == 2:
            body = encode(rng.choice(([], [value], None, True, 5, "text", [[1]])))
        elif kind == 3:
            name = rng.choice(schema["required"])
            value.pop(name)
            body = encode(value)
        else:
            name = rng.choice(schema["required"])
            numeric = schema["properties"][name].get("type") in ("integer", "number")
            value[name] = rng.choice(
                ("text", True, {}, [None]) if numeric else (5, 1.5, True, {}, {"a": 1}, [None], [[None]])
            )
            body = encode(value)
        yield Request("POST", route.path, body, {"Content-Type": JSON_TYPE})
