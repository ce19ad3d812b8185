"""Whether a text is JSON that a schema allows: ``jsonschema`` over exact decimals, formats included.

Over floating point 0.0003 is no multiple of 0.0001. Which formats are judged depends on the packages that
``jsonschema[format-nongpl]`` brings.
"""

from __future__ import annotations

import json
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema

_DIGITS = 5000


def _is_number(_: Any, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_integer(_: Any, value: Any) -> bool:
    return (
        _is_number(_, value) and value == value.to_integral_value()
        if isinstance(value, Decimal)
        else type(value) is int
    )


_Judge = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": _is_number, "integer": _is_integer}
    ),
)


def read(text: str) -> Any:
    """The value of a JSON text, fractions as decimals; ``ValueError`` for what is not JSON."""
    return json.loads(text, parse_float=_number, parse_constant=_refuse)


def _number(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        # An exponent of twenty digits: an infinity, or nothing.
        return Decimal(float(text))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def is_valid(schema: Any, text: str) -> bool:
    """Whether ``text`` is JSON that ``schema`` allows."""
    try:
        value = read(text)
    except ValueError:
        return False
    judge = _Judge(read(json.dumps(schema)), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    with localcontext(Context(prec=_DIGITS, Emax=MAX_EMAX, Emin=MIN_EMIN)):
        return bool(judge.is_valid(value))
