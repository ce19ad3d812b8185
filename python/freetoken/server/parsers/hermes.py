"""Calls as JSON between ``<tool_call>`` and ``</tool_call>``: the form of Hermes models, Qwen2.5 and Qwen3 (torch-free)."""

from __future__ import annotations

from freetoken.server.parsers.base import Reader, skip_blank
from freetoken.server.parsers.json_calls import JsonCallParser

START, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of times."""

    markers = (START,)

    def read(self, marker: str) -> Reader:
        first = yield from skip_blank()
        yield from self.read_calls(first)
        held = ""
        while True:
            character = yield
            held += character
            seen = held.lstrip()
            if seen == END:
                return ""
            if seen in ("{", "["):
                self.again(held)
                yield from self.read_calls(seen)
                held = ""
            elif seen == "}":  # one bracket too many is a common slip
                held = ""
            elif not END.startswith(seen):
                return held
