"""What every dialect shares: the pieces an output is split into, holding back possible markers, and reading a call
character by character (torch-free).

A parser is fed text in any pieces and gives out only what later text cannot change; however the text is cut, the pieces
put together are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, Union

log = logging.getLogger(__name__)

MAX_NAME = 256


@dataclass(frozen=True)
class Tool:
    """A function the model may call.

    ``parameters`` is the JSON schema of its arguments, ``param`` the schema's place in the request; with ``strict`` the
    arguments must match it.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    param: str = "tools"

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        about = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.parameters}}


@dataclass
class Text:
    """Text of the answer."""

    text: str


@dataclass
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@dataclass
class CallStart:
    """Call number ``index`` of the answer (from 0) begins: a function the client offers."""

    index: int
    name: str


@dataclass
class CallArguments:
    """More of call ``index``'s arguments: all pieces together are a JSON object, every prefix of them a prefix of it."""

    index: int
    text: str


@dataclass
class CallEnd:
    """The arguments of call ``index`` are whole. A call without this was cut off and must not be run."""

    index: int


Delta = Union[Text, Reasoning, CallStart, CallArguments, CallEnd]


class Parser(Protocol):
    """A dialect at work on one output."""

    def feed(self, text: str) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


class Malformed(Exception):
    """The text is not a call after all."""


def join(deltas: Sequence[Delta]) -> list[Delta]:
    """The same with neighbours of one kind put together and empty ones left out."""
    joined: list[Delta] = []
    last: Text | Reasoning | CallArguments | None = None
    texts: list[str] = []
    for delta in [*deltas, None]:
        if isinstance(delta, Text | Reasoning | CallArguments):
            if not delta.text:
                continue
            if last is not None and type(last) is type(delta) and _index(last) == _index(delta):
                texts.append(delta.text)
                continue
        if last is not None:
            joined.append(replace(last, text="".join(texts)))
            last = None
        if isinstance(delta, CallStart | CallEnd):
            joined.append(delta)
        elif delta is not None:
            last, texts = delta, [delta.text]
    return joined


def _index(delta: Delta) -> int:
    return delta.index if isinstance(delta, CallArguments) else -1


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Position and name of the first marker in ``text``."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else None


def possible_start(text: str, markers: Sequence[str]) -> int:
    """First position from which ``text`` runs into the beginning of a marker; ``len(text)`` if there is none."""
    longest = max(map(len, markers), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(marker.startswith(tail) for marker in markers):
            return at
    return len(text)


Reader = Generator[None, str, str]
"""Reads a call: is sent one character at a time and returns what it has read beyond the call."""


class CallParser:
    """Text up to a marker, a call, text again.

    A dialect names its ``markers`` and reads what follows one in :meth:`read`, a generator over characters. It raises
    :class:`Malformed` (:meth:`fail`) for what is no call. As long as the call has not been begun (:meth:`begin`), its
    text is then given out as it stands; afterwards the call is left without its end, and what follows is text. White
    space between text and a call, and between calls, is dropped.
    """

    markers: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._out: list[Delta] = []
        self._held = ""
        self._blank = ""
        self._reader: Reader | None = None
        self._raw: list[str] = []
        self._shown = False
        self._index = -1
        self._begun = self._whole = False

    # --- for dialects -------------------------------------------------------------------------------------------------

    def read(self, marker: str) -> Reader:
        """Read what follows ``marker``; see :data:`Reader`."""
        raise NotImplementedError

    def begin(self, name: str) -> None:
        """A call of ``name`` is certain."""
        self._index += 1
        self._begun, self._whole = True, False
        self._blank = ""
        self._out.append(CallStart(self._index, name))

    def arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._index, text))

    def again(self, first: str) -> None:
        """Another call follows in the same place; ``first`` is its first character."""
        self._raw, self._begun = [first], False

    def end(self) -> None:
        """The arguments of the call are whole."""
        self._whole = True
        self._out.append(CallEnd(self._index))

    def known(self, name: object) -> str:
        """``name`` if the client offers such a function; :class:`Malformed` otherwise."""
        if not isinstance(name, str) or name not in self.tools:
            self.fail(f"the model called {str(name)[:64]!r}, which is not one of the request's tools")
        return name

    def fail(self, why: str) -> NoReturn:
        """This is no call. Without a reason it was no attempt at one either, and the log says nothing."""
        raise Malformed(why)

    # --- the parser ---------------------------------------------------------------------------------------------------

    def feed(self, text: str) -> list[Delta]:
        """What ``text`` makes certain."""
        while text:
            text = self._read_text(text) if self._reader is None else self._read_call(text)
        out, self._out = self._out, []
        return join(out)

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the output."""
        if self._reader is not None:
            self._reader.close()
            if not self._begun:
                self._warn("the output ends inside a tool call")
                self._give("".join(self._raw))
            elif not self._whole:
                self._warn("the output ends inside a tool call's arguments")
        else:
            self._give(self._held)
        if self._index < 0:
            self._out.append(Text(self._blank))
        out, self._out = self._out, []
        return join(out)

    def starts(self, text: str) -> tuple[int, str] | None:
        """Where in ``text``, which nothing but white space was held back before, a call begins, and by which marker."""
        return find_marker(text, self.markers)

    def _read_text(self, text: str) -> str:
        data = self._held + text
        self._held = ""
        found = self.starts(data)
        if found is not None:
            at, marker = found
            self._give(data[:at])
            self._raw, self._begun, self._whole = [marker], False, False
            self._reader = self.read(marker)
            next(self._reader)
            return data[at + len(marker) :]
        keep = possible_start(data, self.markers)
        self._give(data[:keep])
        self._held = data[keep:]
        return ""

    def _read_call(self, text: str) -> str:
        reader = self._reader
        assert reader is not None
        for at, character in enumerate(text):
            try:
                reader.send(character)
            except StopIteration as stop:
                self._reader = None
                return str(stop.value) + text[at + 1 :]
            except Malformed as error:
                self._reader = None
                self._warn(str(error))
                if not self._begun:
                    self._give("".join(self._raw))
                return text[at:]
            if not self._begun:
                self._raw.append(character)
        return ""

    def _give(self, text: str) -> None:
        """Text of the answer; white space at its end waits for what follows."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        self._shown = self._shown or bool(shown)
        self._out.append(Text(shown))

    def _warn(self, why: str) -> None:
        if why:
            log.warning("malformed tool call: %s", why)


# --- pieces of readers ------------------------------------------------------------------------------------------------


def skip_blank() -> Generator[None, str, str]:
    """Skip white space; the first other character."""
    character = yield
    while character.isspace():
        character = yield
    return character


def expect_one_of(words: Collection[str], first: str) -> Generator[None, str, str]:
    """Read one of ``words`` (none a prefix of another), whose first character is ``first``; :class:`Malformed` if none."""
    read = first
    while read not in words:
        if not any(word.startswith(read) for word in words):
            raise Malformed(f"{read[:40]!r} is not one of {', '.join(sorted(words))}")
        read += yield
    return read


def read_name() -> Generator[None, str, str]:
    """Read up to ``>``: the name in a tag."""
    name = ""
    while (character := (yield)) != ">":
        if character in "<\n" or len(name) >= MAX_NAME:
            raise Malformed("a tag without an end")
        name += character
    return name.strip()
