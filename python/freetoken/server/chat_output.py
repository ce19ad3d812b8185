"""The outputs of a chat request split into thoughts, text and calls; what all chat protocols write from (torch-free)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from freetoken.server.generation import GenEvent
from freetoken.server.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Delta,
    Dialects,
    OutputParser,
    Reasoning,
    Text,
    Tool,
    join,
)


@dataclass(frozen=True)
class ChatStyle:
    """How the client wants its outputs split.

    ``tools`` may be called, one call at most without ``parallel``; thoughts are set apart if ``separate``.
    """

    tools: tuple[Tool, ...] = ()
    parallel: bool = True
    separate: bool = True


def new_call_id(prefix: str) -> str:
    """A fresh id for a call."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


class ChatOutputs:
    """The choices of one request, each with a parser of its own."""

    def __init__(self, dialects: Dialects, style: ChatStyle) -> None:
        self._dialects, self._style = dialects, style
        self._parsers: dict[int, OutputParser] = {}
        self._calls: dict[int, int] = {}

    def feed(self, event: GenEvent) -> list[Delta]:
        """What the event adds to its choice; with the last event, all that was held back."""
        parser = self._parsers.get(event.index)
        if parser is None:
            style = self._style
            parser = self._dialects.parser(style.tools, thinking=event.thinking, separate=style.separate)
            self._parsers[event.index] = parser
        deltas = parser.feed(event.text)
        if event.finish is not None:
            deltas = join([*deltas, *parser.finish()])
        shown: list[Delta] = []
        for delta in deltas:
            if self._calls.get(event.index) and not self._style.parallel:
                break
            if isinstance(delta, CallEnd):
                self._calls[event.index] = self._calls.get(event.index, 0) + 1
            shown.append(delta)
        return shown

    def called(self, index: int) -> bool:
        """Whether choice ``index`` holds a whole call."""
        return self._calls.get(index, 0) > 0


@dataclass
class Call:
    """A call with its arguments as JSON text; ``whole`` unless it was cut off."""

    name: str
    arguments: str = ""
    whole: bool = False


@dataclass
class Answer:
    """A whole output: thoughts, text and calls."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> Answer:
        answer = cls()
        for delta in deltas:
            if isinstance(delta, Text):
                answer.text += delta.text
            elif isinstance(delta, Reasoning):
                answer.reasoning += delta.text
            elif isinstance(delta, CallStart):
                answer.calls.append(Call(delta.name))
            elif isinstance(delta, CallArguments):
                answer.calls[delta.index].arguments += delta.text
            else:
                answer.calls[delta.index].whole = True
        return answer
