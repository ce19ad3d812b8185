"""Calls written as JSON objects with a name and arguments, shared by the dialects that use them (torch-free)."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from freetoken.server.parsers.base import CallParser
from freetoken.server.parsers.json_scan import JsonScanner, dump

_ARGUMENTS = ("arguments", "parameters")
_FIRST_KEYS = ("name", "type", "id", "function", *_ARGUMENTS)


class JsonCallParser(CallParser):
    """Reads ``{"name": ..., "arguments": {...}}`` (or ``parameters``), and lists of such objects.

    The arguments are passed on as they come once the name is known; where they stand before the name, or inside a string,
    the call is passed on in one piece.
    """

    def read_calls(self, first: str) -> Generator[None, str, None]:
        """Read one object or list of objects whose first character, ``first``, has come."""
        if first not in "{[":
            self.fail("a tool call that is not a JSON object")
        scanner, read = JsonScanner(), _Fields()
        read.add(scanner.feed(first), scanner)
        streaming = False
        while not scanner.done:
            let_through = scanner.feed((yield))
            ended = read.add(let_through, scanner)
            if streaming:
                self.arguments(let_through)
                if scanner.depth == 1:
                    streaming = False
                    self.end()
            elif first == "{" and not self._begun:
                if read.key is not None and read.number == 1 and read.key not in _FIRST_KEYS:
                    self.fail("")
                if ended and read.key == "name":
                    self.known(read.value())
                elif let_through == "{" and scanner.depth == 2 and read.key in _ARGUMENTS and "name" in read.values:
                    self.begin(self.known(read.values["name"]))
                    self.arguments("{")
                    streaming = True
        if not self._begun:
            self._whole_value(read.text())

    def _whole_value(self, text: str) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            self.fail("a tool call in broken JSON")
        calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        if not calls:
            self.fail("an empty list of tool calls")
        for name, arguments in calls:
            self.begin(name)
            self.arguments(arguments)
            self.end()

    def _call(self, value: Any) -> tuple[str, str]:
        """Name and arguments of one call object."""
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict):
            self.fail("a tool call that is not a JSON object")
        name = self.known(value.get("name", value.get("function")))
        arguments: Any = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                self.fail("arguments in broken JSON")
        if not isinstance(arguments, dict):
            self.fail("arguments that are not a JSON object")
        return name, dump(arguments)


class _Fields:
    """Keys and values of the outermost object as they come: ``key`` is the last key read whole, ``number`` counts keys,
    ``values`` holds the strings among the values."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.number = 0
        self.values: dict[str, str] = {}
        self._text: list[str] = []
        self._start = -1
        self._last = ""

    def text(self) -> str:
        return "".join(self._text)

    def value(self) -> str:
        return self._last

    def add(self, text: str, scanner: JsonScanner) -> bool:
        """Take what the scanner let through; whether a string value of the outermost object has just ended."""
        self._text.append(text)
        if scanner.depth != 1:
            return False
        if scanner.in_string:
            if self._start < 0:
                self._start = len(self._text) - 1
            return False
        if self._start < 0:
            return False
        string, self._start = json.loads("".join(self._text[self._start :])), -1
        if scanner.key_ended:
            self.key, self.number = string, self.number + 1
            return False
        self._last = string
        if self.key is not None:
            self.values[self.key] = string
        return True
