"""JSON read character by character: every prefix let through is a prefix of a valid document (torch-free)."""

from __future__ import annotations

import json
from typing import Any

from freetoken.server.parsers.base import Malformed

_BLANK = " \t\n\r"
_OPEN = {"{": "}", "[": "]"}
_ESCAPES = '"\\/bfnrt'
_LITERALS = ("true", "false", "null")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
# Where in a number we are -> (kind of the next character -> where then); those in _WHOLE may be the end.
_NUMBER = {
    "minus": {"0": "zero", "1": "digits"},
    "zero": {".": "point", "e": "exp"},
    "digits": {"0": "digits", "1": "digits", ".": "point", "e": "exp"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "exp"},
    "exp": {"-": "sign", "0": "power", "1": "power"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_WHOLE = frozenset({"zero", "digits", "fraction", "power"})


def _number_kind(character: str) -> str:
    if character in "123456789":
        return "1"
    return {"E": "e", "+": "-"}.get(character, character)


class JsonScanner:
    """One JSON value (RFC 8259).

    :meth:`feed` takes a character and gives what to let through: the character itself, or, inside strings, the escape of
    a control character, which models write out raw. ``depth`` counts the brackets open after it; ``in_string`` says
    whether a string is; ``done`` whether the value is whole. Top-level numbers and literals are not read.
    """

    def __init__(self) -> None:
        self.done = False
        self.in_string = False
        self._closers: list[str] = []
        self._expect = "value"
        self._is_key = False
        self._escape = ""
        self._number = ""
        self._literal = ""

    @property
    def depth(self) -> int:
        return len(self._closers)

    def feed(self, character: str) -> str:
        """:class:`Malformed` when no JSON value goes on like this."""
        if self.in_string:
            return self._string(character)
        if self._number:
            step = _NUMBER[self._number].get(_number_kind(character))
            if step is not None:
                self._number = step
                return character
            if self._number not in _WHOLE:
                raise Malformed("a broken number in JSON")
            self._number = ""
            self._value_ended()
        elif self._literal:
            if character != self._literal[0]:
                raise Malformed("a broken word in JSON")
            self._literal = self._literal[1:]
            if not self._literal:
                self._value_ended()
            return character
        if self.done or character not in _BLANK:
            self._structure(character)
        return character

    def _string(self, character: str) -> str:
        if self._escape:
            return self._escaped(character)
        if character == "\\":
            self._escape = "\\"
        elif character == '"':
            self.in_string = False
            if self._is_key:
                self._expect = "colon"
            else:
                self._value_ended()
        elif character < " ":
            return _CONTROL.get(character, f"\\u{ord(character):04x}")
        return character

    def _escaped(self, character: str) -> str:
        if self._escape == "\\":
            if character == "u":
                self._escape = "uuuu"
            elif character in _ESCAPES:
                self._escape = ""
            else:
                raise Malformed("a broken escape in JSON")
        elif character in "0123456789abcdefABCDEF":
            self._escape = self._escape[1:]
        else:
            raise Malformed("a broken escape in JSON")
        return character

    def _structure(self, character: str) -> None:
        expect = self._expect
        if self.done:
            raise Malformed("text after a JSON value")
        if character == '"' and expect in ("key", "key or end"):
            self.in_string = self._is_key = True
        elif expect in ("value", "value or end") and self._value(character):
            return
        elif character == ":" and expect == "colon":
            self._expect = "value"
        elif character == "," and expect == "comma or end":
            self._expect = "key" if self._closers[-1] == "}" else "value"
        elif self._closers and character == self._closers[-1] and expect.endswith("or end"):
            self._closers.pop()
            self._value_ended()
        else:
            raise Malformed("broken JSON")

    def _value(self, character: str) -> bool:
        if character in _OPEN:
            self._closers.append(_OPEN[character])
            self._expect = "key or end" if character == "{" else "value or end"
        elif not self._closers:
            raise Malformed("neither an object nor a list")
        elif character == '"':
            self.in_string, self._is_key = True, False
        elif character == "-" or character in "0123456789":
            self._number = "minus" if character == "-" else "zero" if character == "0" else "digits"
        elif word := next((word for word in _LITERALS if word[0] == character), ""):
            self._literal = word[1:]
        else:
            return False
        return True

    def _value_ended(self) -> None:
        self._expect = "comma or end"
        self.done = not self._closers

    @property
    def key_ended(self) -> bool:
        """Whether the last thing read is a key."""
        return self._expect == "colon" and not self.in_string

    @property
    def closable(self) -> bool:
        """Whether nothing but brackets is missing: not after a comma or a colon, nor inside a string or a word."""
        if self.in_string or self._literal:
            return False
        return self._number in _WHOLE if self._number else self._expect.endswith("or end")

    def closing(self) -> str:
        """The brackets that are missing."""
        return "".join(reversed(self._closers))


def complete_object(text: str) -> str:
    """The JSON object that ``text`` is the beginning of, as far as it goes, without a string that is cut off; ``{}`` when it
    is none."""
    scanner, cut = JsonScanner(), 0
    try:
        for at, character in enumerate(text):
            scanner.feed(character)
            if scanner.closable:
                cut = at + 1
    except Malformed:
        pass
    scanner = JsonScanner()
    read = "".join([scanner.feed(character) for character in text[:cut]])
    return read + scanner.closing() if read.lstrip()[:1] == "{" else "{}"


def dump(value: Any) -> str:
    """JSON of ``value``, in clear characters unless it holds half a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
