"""What a request says about the form of its output, read into a grammar (torch-free).

``response_format`` follows https://platform.openai.com/docs/guides/structured-outputs; ``regex`` and ``ebnf`` are SGLang's
extensions of the same requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.errors import RequestError
from freetoken.sampling_params import Grammar, schema_text
from freetoken.server.wire import boolean, mapping, string

GRAMMAR_FIELDS = ("response_format", "regex", "ebnf")
_KINDS = ("text", "json_object", "json_schema")


def read_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """The grammar a body asks for with one of :data:`GRAMMAR_FIELDS`; :class:`RequestError` names the field at fault."""
    grammars = [_response_format(body)]
    grammars += [
        Grammar(kind=name, text=text, param=name)
        for name in ("regex", "ebnf")
        if (text := string(body, name)) is not None
    ]
    given = [grammar for grammar in grammars if grammar is not None]
    if len(given) > 1:
        raise RequestError(
            f"{given[0].param.partition('.')[0]} and {given[1].param} exclude each other", param=given[1].param
        )
    return given[0] if given else None


def _response_format(body: Mapping[str, Any]) -> Grammar | None:
    value = mapping(body, "response_format")
    if body.get("response_format") is None:
        return None
    kind = value.get("type")
    if kind not in _KINDS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_KINDS)}",
            param="response_format.type",
            code="unsupported_parameter" if kind == "structural_tag" else "invalid_value",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_object")
    return _json_schema(value.get("json_schema"))


def _json_schema(given: Any) -> Grammar:
    where = "response_format.json_schema"
    if not isinstance(given, dict):
        raise RequestError(f"{where} must be an object with a schema", param=where)
    try:
        string(given, "name")
        string(given, "description")
        # The output keeps to the schema whether strict is set or not.
        boolean(given, "strict", False)
    except RequestError as error:
        raise RequestError(f"{where}.{error.message}", param=f"{where}.{error.param}") from None
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.schema must be a JSON schema, which is an object", param=f"{where}.schema")
    return Grammar(kind="json_schema", text=schema_text(schema, f"{where}.schema"), param=f"{where}.schema")
