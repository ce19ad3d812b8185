"""Calls as bare JSON, with or without ``<|python_tag|>`` before them: the form of Llama 3.1 and later (torch-free)."""

from __future__ import annotations

from freetoken.server.parsers.base import Reader, skip_blank
from freetoken.server.parsers.json_calls import JsonCallParser

TAG = "<|python_tag|>"


class LlamaParser(JsonCallParser):
    """``{"name": ..., "parameters": {...}}``: as the whole answer, or anywhere behind the tag. Several calls are separated
    by semicolons, commas or white space."""

    markers = (TAG,)

    def starts(self, text: str) -> tuple[int, str] | None:
        if not self._shown and self._index < 0 and text.lstrip()[:1] == "{":
            return text.index("{"), "{"
        return super().starts(text)

    def read(self, marker: str) -> Reader:
        first = marker if marker == "{" else (yield from skip_blank())
        yield from self.read_calls(first)
        held = ""
        while True:
            character = yield
            held += character
            if character == "{":
                self.again(held)
                yield from self.read_calls(character)
                held = ""
            elif character not in ";," and not character.isspace():
                return held
