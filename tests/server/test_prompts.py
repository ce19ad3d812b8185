"""Prompts on their way to the scheduler: marks that must be seen, grammars behind thoughts, and what a model cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from freetoken.errors import RequestError
from freetoken.sampling_params import Grammar, SamplingParams
from freetoken.server.generation import ChatPrompt, GenSpec, Prompt, ToolChoice
from freetoken.server.parsers import Dialects, Tool
from freetoken.server.prompts import Prepared, Prompts
from server.fakes import CHATML, ByteTokenizer, make_config
from server.templates import LLAMA3, QWEN3, QWEN35

TAG, THINK_END = 303, 304
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
NOW = Tool("now", "", {"type": "object", "properties": {}})


class MarkedTokenizer(ByteTokenizer):
    """With a special token for Llama's tag and a plain one for the end of thinking."""

    size = 305
    special_ids = frozenset({*ByteTokenizer.special_ids, TAG})

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        head, found, tail = text.partition("</think>")
        ids = super().encode(head, add_special_tokens)
        return [*ids, THINK_END, *self.encode(tail, False)] if found else ids

    def token_bytes(self, token: int) -> bytes:
        return {TAG: b"<|python_tag|>", THINK_END: b"</think>"}.get(token) or super().token_bytes(token)


def prompts(template: str, tokenizer: type[ByteTokenizer] = MarkedTokenizer, **flags: Any) -> Prompts:
    return Prompts(make_config(**flags), tokenizer(template))


def prepared(made: Prompts, sampling: SamplingParams | None = None, **fields: Any) -> Prepared:
    choice = fields.pop("tool_choice", ToolChoice())
    prompt = Prompt(sampling or SamplingParams(), chat=ChatPrompt(USER, **fields), tool_choice=choice)
    return made.prepare(GenSpec("x", [prompt]))[0]


def test_dialects_know_their_tokens() -> None:
    dialects = prompts(LLAMA3, tool_call_parser="llama3").dialects
    assert dialects.special == {"<|python_tag|>": TAG} and dialects.thinking_end is None
    dialects = prompts(QWEN35).dialects
    assert dialects == Dialects("qwen3", "qwen3_coder", {}, THINK_END)


def test_special_marks_are_shown_where_they_are_looked_for() -> None:
    made = prompts(LLAMA3, tool_call_parser="llama3")
    assert made.shown_ids(Prompt(SamplingParams(), chat=ChatPrompt(USER, tools=[NOW]))) == [TAG]
    assert made.shown_ids(Prompt(SamplingParams(), chat=ChatPrompt(USER))) == []
    assert made.shown_ids(Prompt(SamplingParams(), text="x")) == []


def test_a_grammar_waits_for_the_end_of_open_thoughts() -> None:
    form = SamplingParams(grammar=Grammar(kind="json_object"))
    for sampling, fields in ((form, {}), (None, {"tools": [NOW], "tool_choice": ToolChoice("required")})):
        opened = prepared(prompts(QWEN35), sampling, **fields)
        assert opened.thinking and opened.sampling.grammar.after == THINK_END
        for made, more in ((prompts(QWEN35), {"thinking": False}), (prompts(QWEN3), {})):
            closed = prepared(made, sampling, **fields, **more)
            assert not closed.thinking and closed.sampling.grammar.after is None
        with pytest.raises(RequestError, match="behind this model's thoughts"):
            prepared(prompts(QWEN35, ByteTokenizer), sampling, **fields)
    assert prepared(prompts(QWEN35)).sampling.grammar is None


def test_what_a_model_cannot_do() -> None:
    for made, fields, param in (
        (prompts(QWEN35, tool_call_parser="none"), {"tools": [NOW]}, "tools"),
        (prompts(CHATML, tool_call_parser="llama3"), {"tools": [NOW]}, "tools"),
        (prompts(CHATML), {"thinking": True}, "thinking"),
        (prompts(CHATML), {"effort": "low"}, "reasoning_effort"),
    ):
        with pytest.raises(RequestError) as caught:
            prepared(made, **fields)
        assert caught.value.param == param and caught.value.code == "unsupported_parameter"
    assert prepared(prompts(CHATML), tools=[NOW]).ids
