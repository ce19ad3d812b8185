"""Calls as ``<function=...>`` and ``<parameter=...>`` tags: the form of Qwen3-Coder and Qwen3.5 (torch-free)."""

from __future__ import annotations

import json
from collections.abc import Generator

from freetoken.server.parsers.base import CallParser, Reader, expect_one_of, read_name, skip_blank
from freetoken.server.parsers.json_scan import dump
from freetoken.server.parsers.schema_types import convert, property_types

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_STRING = frozenset({"string"})
_MAX_HELD = 256


class QwenCoderParser(CallParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``; the outer tags may be
    missing.

    A value is text without the line breaks next to its tags. The tool's schema says what it stands for: strings are passed
    on as they come, values of other types in one piece. ``</parameter>`` ends a value only where another parameter or the
    end of the function follows, so that a value may hold it.
    """

    markers = (START, FUNCTION)

    def read(self, marker: str) -> Reader:
        if marker == START:
            first = yield from skip_blank()
            yield from expect_one_of((FUNCTION,), first)
        name = self.known((yield from read_name()))
        schema = self.tools[name].parameters
        separator = "{"
        tag = yield from expect_one_of((PARAMETER, FUNCTION_END), (yield from skip_blank()))
        self.begin(name)
        while tag == PARAMETER:
            key = yield from read_name()
            self.arguments(f"{separator}{dump(key)}: ")
            separator = ", "
            tag = yield from self._value(property_types(schema, key))
        self.arguments("{}" if separator == "{" else "}")
        self.end()
        return (yield from self._tail())

    def _value(self, types: frozenset[str]) -> Generator[None, str, str]:
        """Read a value and the tag behind it, which is given back."""
        text = _Value(self, streamed=types == _STRING)
        held = ""
        first = yield
        if first != "\n":
            held = first
        while True:
            while (tag := _ending(held)) is None:
                text.add(held[0])
                held = held[1:]
            if tag:
                break
            held += yield
        if text.streamed:
            self.arguments('"')
        else:
            self.arguments(dump(convert("".join(text.parts), types)))
        return tag

    def _tail(self) -> Reader:
        held = ""
        while True:
            held += yield
            seen = held.lstrip()
            if seen == END:
                return ""
            if not END.startswith(seen):
                return held


class _Value:
    """A value as it comes: passed on escaped if ``streamed``, collected in ``parts`` otherwise."""

    def __init__(self, parser: QwenCoderParser, streamed: bool) -> None:
        self.streamed = streamed
        self.parts: list[str] = []
        self._parser = parser
        if streamed:
            parser.arguments('"')

    def add(self, character: str) -> None:
        if self.streamed:
            self._parser.arguments(json.dumps(character, ensure_ascii=False)[1:-1])
        else:
            self.parts.append(character)


def _ending(held: str) -> str | None:
    """The tag behind a value if ``held`` is the whole end of it, empty if it may become one, ``None`` if it cannot."""
    rest = held.removeprefix("\n")
    if len(rest) <= len(PARAMETER_END):
        return "" if PARAMETER_END.startswith(rest) else None
    if not rest.startswith(PARAMETER_END) or len(rest) > _MAX_HELD:
        return None
    tag = rest[len(PARAMETER_END) :].lstrip()
    if tag in (PARAMETER, FUNCTION_END):
        return tag
    return "" if PARAMETER.startswith(tag) or FUNCTION_END.startswith(tag) else None
