"""Dialects of reasoning and of tool calls: which there are, which one a model speaks, and a parser for one output
(torch-free).

A dialect is chosen by the operator, else by the marks in the chat template, else by the model's row in the registry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from freetoken.server.detokenizer import Tokenizer
from freetoken.server.parsers import hermes, llama, qwen3_coder, think
from freetoken.server.parsers.base import (
    CallArguments,
    CallEnd,
    CallParser,
    CallStart,
    Delta,
    Parser,
    Reasoning,
    Text,
    Tool,
    join,
)

__all__ = [
    "MARK_TOKENS",
    "NONE",
    "REASONING",
    "TOOL_CALLS",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Delta",
    "Dialects",
    "OutputParser",
    "Parser",
    "Reasoning",
    "Text",
    "Tool",
    "choose",
    "join",
]

NONE = "none"
TOOL_CALLS: dict[str, type[CallParser]] = {
    "hermes": hermes.HermesParser,
    "qwen3_coder": qwen3_coder.QwenCoderParser,
    "llama3": llama.LlamaParser,
}
REASONING: dict[str, type[think.ThinkParser]] = {"qwen3": think.ThinkParser}
MARK_TOKENS = max(len(parser.markers[1]) for parser in REASONING.values())
"""Most tokens that the end of thoughts can be spread over."""


@dataclass(frozen=True)
class Dialects:
    """What the served model speaks: names of :data:`REASONING` and :data:`TOOL_CALLS`, or ``none``.

    ``special`` maps the marks that are special tokens to their ids; ``thinking_end`` is the id of the token that ends the
    thoughts, ``None`` if they end with several; ``decode`` gives the text of ids.
    """

    reasoning: str = NONE
    tool_calls: str = NONE
    special: Mapping[str, int] = field(default_factory=dict)
    thinking_end: int | None = None
    decode: Callable[[list[int]], str] | None = field(default=None, compare=False, repr=False)

    def with_tokens(self, tokenizer: Tokenizer) -> Dialects:
        """The same, knowing the tokens of the marks."""
        marks = self.markers(tools=True)
        texts = {tokenizer.token_text(token): token for token in tokenizer.special_ids}
        end = tokenizer.encode(REASONING[self.reasoning].markers[1], False) if self.reasoning != NONE else []
        return replace(
            self,
            special={mark: texts[mark] for mark in marks if mark in texts},
            thinking_end=end[0] if len(end) == 1 else None,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        )

    def ends_thinking(self, before: Sequence[int], ids: Sequence[int]) -> int | None:
        """How many of ``ids`` it takes to complete the mark that ends thoughts, ``None`` if they do not; ``before`` are the
        last :data:`MARK_TOKENS` ids before them, which do not complete it."""
        if self.thinking_end is not None:
            return ids.index(self.thinking_end) + 1 if self.thinking_end in ids else None
        if self.reasoning == NONE or self.decode is None:
            return None
        mark, together, decode = REASONING[self.reasoning].markers[1], [*before, *ids], self.decode
        if mark not in decode(together):
            return None
        lengths = range(1, len(ids))
        return 1 + bisect_left(lengths, True, key=lambda length: mark in decode(together[: len(before) + length]))

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Marks that must reach the parser even where they are special tokens."""
        found = REASONING[self.reasoning].markers if self.reasoning != NONE else ()
        return (*found, *TOOL_CALLS[self.tool_calls].markers) if tools and self.tool_calls != NONE else found

    def leaves_open(self, prompt: str, continued: str | None) -> bool:
        """Whether an output begins inside a block of thoughts, by the end of its rendered prompt; see
        :func:`think.leaves_open`."""
        return self.reasoning != NONE and think.leaves_open(prompt, continued)

    def parser(self, tools: Sequence[Tool], *, thinking: bool, separate: bool = True) -> OutputParser:
        """For one output. ``thinking`` says that the prompt has opened a block of thoughts; without ``separate`` they
        stay in the text, as the model writes them."""
        thoughts = REASONING[self.reasoning](thinking, not separate) if self.reasoning != NONE else None
        calls = TOOL_CALLS[self.tool_calls](tools) if tools and self.tool_calls != NONE else None
        return OutputParser(thoughts, calls, separate)


def choose(
    template: str, *, reasoning: str, tool_calls: str, by_model: tuple[str, str] = (NONE, NONE)
) -> tuple[Dialects, dict[str, str]]:
    """The dialects, and a clause for each that says why.

    ``template`` is the source of all chat templates of the model, ``reasoning`` and ``tool_calls`` what the operator chose
    (``auto`` for neither), ``by_model`` the registry's row.
    """
    reasons: dict[str, str] = {}

    def pick(name: str, given: str, marked: str | None, row: str) -> str:
        if given != "auto":
            return given
        reasons[name] = "marks in the chat template" if marked else "the model's row in the registry"
        return marked or row

    return (
        Dialects(
            pick("reasoning_parser", reasoning, _marked_reasoning(template), by_model[0]),
            pick("tool_call_parser", tool_calls, _marked_tool_calls(template), by_model[1]),
        ),
        reasons,
    )


def _marked_reasoning(template: str) -> str | None:
    return "qwen3" if think.END in template else None


def _marked_tool_calls(template: str) -> str | None:
    if qwen3_coder.FUNCTION in template and qwen3_coder.PARAMETER in template:
        return "qwen3_coder"
    if hermes.START in template:
        return "hermes"
    if llama.TAG in template or ("tool_calls" in template and '"parameters": ' in template):
        return "llama3"
    return None


class OutputParser:
    """The thoughts of one output, then its text and calls."""

    def __init__(self, thoughts: Parser | None, calls: Parser | None, separate: bool = True) -> None:
        self._thoughts, self._calls, self._separate = thoughts, calls, separate

    def feed(self, text: str) -> list[Delta]:
        """Pieces that ``text`` makes certain."""
        return join(self._split(self._thoughts.feed(text) if self._thoughts is not None else [Text(text)]))

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the output."""
        rest = self._split(self._thoughts.finish()) if self._thoughts is not None else []
        return join([*rest, *(self._calls.finish() if self._calls is not None else ())])

    def _split(self, deltas: Sequence[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Reasoning):
                found.append(delta if self._separate else Text(delta.text))
            elif isinstance(delta, Text) and self._calls is not None:
                found += self._calls.feed(delta.text)
            else:
                found.append(delta)
        return found
