"""The outputs of a chat request split into thoughts, text and calls; what all chat protocols write from (torch-free)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from freetoken.server.generation import GenEvent
from freetoken.server.parsers import (
    MARK_TOKENS,
    NONE,
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
        self._thoughts: dict[int, _Thoughts] = {}

    def feed(self, event: GenEvent) -> list[Delta]:
        """What the event adds to its choice; with the last event, all that was held back."""
        parser = self._parsers.get(event.index)
        if parser is None:
            style = self._style
            parser = self._dialects.parser(style.tools, thinking=event.thinking, separate=style.separate)
            self._parsers[event.index] = parser
            self._thoughts[event.index] = _Thoughts(self._dialects)
        self._thoughts[event.index].count(event.ids)
        deltas = parser.feed(event.text)
        if event.finish is not None:
            deltas = join([*deltas, *parser.finish()])
        shown: list[Delta] = []
        for delta in deltas:
            if self._calls.get(event.index) and not self._style.parallel:
                break
            if isinstance(delta, CallEnd):
                self._calls[event.index] = self._calls.get(event.index, 0) + 1
            if isinstance(delta, Reasoning):
                self._thoughts[event.index].seen = True
            shown.append(delta)
        return shown

    def called(self, index: int) -> bool:
        """Whether choice ``index`` holds a whole call."""
        return self._calls.get(index, 0) > 0

    def reasoning_tokens(self) -> int:
        """Tokens of thoughts of all choices; 0 where thoughts are not set apart."""
        return sum(thoughts.tokens for thoughts in self._thoughts.values() if thoughts.seen)


class _Thoughts:
    """How many tokens of an output are thoughts: those up to the one that completes the end mark, if there are thoughts
    at all."""

    def __init__(self, dialects: Dialects) -> None:
        self.seen = False
        self.tokens = 0
        self._dialects = dialects
        self._before: list[int] = []
        self._ended = dialects.reasoning == NONE or (dialects.thinking_end is None and dialects.decode is None)

    def count(self, ids: Sequence[int]) -> None:
        """The next tokens of the output."""
        if self._ended:
            return
        length = self._dialects.ends_thinking(self._before, ids)
        self._ended = length is not None
        self.tokens += len(ids) if length is None else length
        if self._dialects.thinking_end is None:
            # The mark may be spread over as many tokens as it has characters.
            self._before = [*self._before, *ids][-MARK_TOKENS:]


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


@dataclass
class Block:
    """A run of one kind in an output: ``reasoning``, ``text`` or a ``call`` of ``name``; ``text`` is all of it so far."""

    kind: str
    index: int
    name: str = ""
    text: str = ""
    whole: bool = True


class Blocks:
    """One output as a row of blocks, for protocols that number them."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def feed(self, deltas: Sequence[Delta]) -> Iterator[tuple[str, Block, str]]:
        """What happens to which block: ``start``, ``delta`` (with the text that is added) or ``stop``."""
        for delta in deltas:
            if isinstance(delta, CallEnd):
                if self._open is not None:
                    self._open.whole = True
                yield from self.close()
            elif isinstance(delta, CallStart):
                yield from self._begin(Block("call", len(self.all), delta.name, whole=False))
            else:
                kind = "text" if isinstance(delta, Text) else "reasoning" if isinstance(delta, Reasoning) else "call"
                if self._open is None or self._open.kind != kind:
                    yield from self._begin(Block(kind, len(self.all)))
                assert self._open is not None
                self._open.text += delta.text
                yield "delta", self._open, delta.text

    def _begin(self, block: Block) -> Iterator[tuple[str, Block, str]]:
        yield from self.close()
        self._open = block
        self.all.append(block)
        yield "start", block, ""

    def close(self, cut: bool = False) -> Iterator[tuple[str, Block, str]]:
        """The output is over; ``cut`` off in the block that is open, if one is."""
        block, self._open = self._open, None
        if block is not None:
            block.whole = block.whole and not cut
            yield "stop", block, ""
