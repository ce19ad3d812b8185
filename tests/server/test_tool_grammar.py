"""Grammars of tool calls: what they let through is read back as calls, and nothing else comes through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freetoken.errors import RequestError
from freetoken.grammar.compiler import GrammarCompiler
from freetoken.sampling_params import Grammar
from freetoken.server.generation import ToolChoice
from freetoken.server.parsers import CallEnd, CallStart, Dialects, Text, Tool, join
from freetoken.server.tool_grammar import tool_grammar
from server.fakes import EOS, ByteTokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "sky": {"enum": ["blue", "grey"]},
        "days": {"type": "integer"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}
WEATHER, NOW = Tool("weather", "", SCHEMA), Tool("now", "", {"type": "object", "properties": {}})
STRICT = Tool("weather", "", SCHEMA, strict=True)
DIALECTS = ("hermes", "qwen3_coder", "llama3")
REQUIRED, ONE = ToolChoice("required"), ToolChoice("required", parallel=False)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = ByteTokenizer()
    return GrammarCompiler(lambda: tokenizer, tokenizer.size, (EOS,))


def takes(compiler: GrammarCompiler, grammar: Grammar | None, text: str) -> bool:
    """Whether ``text`` is a whole sentence of the grammar."""
    assert grammar is not None
    matcher = compiler.compile(grammar).deep_copy()
    return all(matcher.consume_token(token) for token in text.encode()) and matcher.is_accepting()


def call(dialect: str, name: str, **arguments: Any) -> str:
    if dialect == "hermes":
        return (
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        )
    if dialect == "llama3":
        return f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def names(dialect: str, text: str) -> list[str]:
    """The calls that the dialect's parser reads, nothing but calls."""
    parser = Dialects("none", dialect).parser([WEATHER, NOW], thinking=False)
    deltas = join([*parser.feed(text), *parser.finish()])
    assert not any(isinstance(delta, Text) for delta in deltas)
    assert sum(isinstance(delta, CallEnd) for delta in deltas) == sum(isinstance(delta, CallStart) for delta in deltas)
    return [delta.name for delta in deltas if isinstance(delta, CallStart)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_required(dialect: str, compiler: GrammarCompiler) -> None:
    grammar = tool_grammar(dialect, [WEATHER, NOW], REQUIRED, {})
    good = call(dialect, "weather", city='B "é"', days=2)
    full = call(dialect, "weather", city="B", sky="grey", days=2, where={"lat": 4.5})
    separator = "; " if dialect == "llama3" else "\n"
    for text, called in (
        (good, ["weather"]),
        (full, ["weather"]),
        ("\n\n" + good, ["weather"]),
        (call(dialect, "now"), ["now"]),
        (separator.join([good, call(dialect, "now")]), ["weather", "now"]),
    ):
        assert takes(compiler, grammar, text), text
        assert names(dialect, text) == called
    for text in (
        "",
        "Well.",
        f"Well. {good}",
        good[:-1],
        call(dialect, "weather", city="B"),
        call(dialect, "weather", city="B", days="two"),
        call(dialect, "weather", city="B", sky="green", days=2),
        call(dialect, "weather", city="B", days=2, more=1),
        call(dialect, "delete"),
    ):
        assert not takes(compiler, grammar, text), text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_call_and_a_named_one(dialect: str, compiler: GrammarCompiler) -> None:
    good, now = call(dialect, "weather", city="B", days=2), call(dialect, "now")
    separator = "; " if dialect == "llama3" else "\n"
    one = tool_grammar(dialect, [WEATHER, NOW], ONE, {})
    assert takes(compiler, one, good) and not takes(compiler, one, separator.join([good, now]))
    named = tool_grammar(dialect, [WEATHER, NOW], ToolChoice("required", "weather"), {})
    assert takes(compiler, named, good) and not takes(compiler, named, now)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_free_text_before_a_strict_or_single_call(dialect: str, compiler: GrammarCompiler) -> None:
    good, bad = call(dialect, "weather", city="B", days=2), call(dialect, "weather", city="B")
    before = "" if dialect == "llama3" else "I look.\n"
    strict = tool_grammar(dialect, [STRICT, NOW], ToolChoice(), {})
    assert takes(compiler, strict, before + good) and takes(compiler, strict, "Hello <there>.")
    assert not takes(compiler, strict, before + bad)
    single = tool_grammar(dialect, [WEATHER, NOW], ToolChoice(parallel=False), {})
    assert takes(compiler, single, before + good) and takes(compiler, single, "Hello.")
    separator = "; " if dialect == "llama3" else "\n"
    assert not takes(compiler, single, before + good + separator + good)
    assert tool_grammar(dialect, [WEATHER, NOW], ToolChoice(), {}) is None
    assert tool_grammar(dialect, [], ToolChoice(parallel=False), {}) is None


@pytest.mark.parametrize("dialect", ["hermes", "qwen3_coder"])
def test_an_answer_in_a_form_or_a_call(dialect: str, compiler: GrammarCompiler) -> None:
    form = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = Grammar(kind="json_schema", text=json.dumps(form), param="response_format")
    grammar = tool_grammar(dialect, [WEATHER], ToolChoice(), {}, answer)
    assert takes(compiler, grammar, '{"a": 1}') and takes(compiler, grammar, call(dialect, "weather", city="B", days=2))
    assert not takes(compiler, grammar, '{"b": 1}') and not takes(compiler, grammar, "Hello.")
    assert tool_grammar(dialect, [], ToolChoice(), {}, answer) is answer
    assert takes(compiler, tool_grammar(dialect, [WEATHER], ToolChoice(), {}, Grammar(kind="json_object")), '{"z": []}')
    # A call that is asked for leaves no room for an answer.
    required = tool_grammar(dialect, [WEATHER], REQUIRED, {}, answer)
    assert not takes(compiler, required, '{"a": 1}')


def test_marks_that_are_special_tokens(compiler: GrammarCompiler) -> None:
    # 301 and 302 stand for the marks here.
    special = {"<tool_call>": 301, "</tool_call>": EOS}
    body = b'\n{"name": "now", "arguments": {}}\n'
    for choice, before in ((ONE, b""), (ToolChoice(parallel=False), b"Well."), (ToolChoice(parallel=False), b"")):
        grammar = tool_grammar("hermes", [NOW], choice, special)
        assert grammar is not None
        matcher = compiler.compile(grammar).deep_copy()
        assert all(matcher.consume_token(token) for token in [*before, 301, *body, EOS])


def test_schemas_that_cannot_be_enforced(compiler: GrammarCompiler) -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(RequestError) as caught:
        tool_grammar(
            "hermes", [Tool("f", "", odd, strict=True, param="tools[0].function.parameters")], ToolChoice(), {}
        )
    assert caught.value.param == "tools[0].function.parameters.properties.a.not" and caught.value.status == 400
    # A tool that is not strict is called all the same.
    for dialect in DIALECTS:
        grammar = tool_grammar(dialect, [Tool("f", "", odd)], ONE, {})
        assert takes(compiler, grammar, call(dialect, "f", a="5"))
    with pytest.raises(RequestError, match="cannot be combined"):
        tool_grammar("hermes", [NOW], ToolChoice(), {}, Grammar(kind="regex", text="a", param="regex"))
    with pytest.raises(RequestError, match="cannot be combined"):
        tool_grammar("llama3", [NOW], ToolChoice(), {}, Grammar(kind="json_object"))
    with pytest.raises(RequestError, match="too large"):
        large = {"enum": [f"{number:05}" * 20 for number in range(3000)]}
        tool_grammar("qwen3_coder", [Tool("f", "", {"properties": {"a": large}})], ONE, {})


def test_parameters_that_tags_cannot_write(compiler: GrammarCompiler) -> None:
    tool = Tool("f", "", {"properties": {"a>b": {"type": "string"}, "c": 5, "d": {"type": "string"}}, "required": "d"})
    grammar = tool_grammar("qwen3_coder", [tool], ONE, {})
    assert takes(compiler, grammar, call("qwen3_coder", "f", c="x", d="y")) and takes(
        compiler, grammar, call("qwen3_coder", "f")
    )


@pytest.mark.parametrize("dialect", ["hermes", "llama3"])
def test_dates_of_arguments_exist(compiler: GrammarCompiler, dialect: str) -> None:
    day = Tool("day", "", {"properties": {"on": {"type": "string", "format": "date"}}, "required": ["on"]})
    grammar = tool_grammar(dialect, [day], REQUIRED, {})
    assert takes(compiler, grammar, call(dialect, "day", on="2024-02-29"))
    assert not takes(compiler, grammar, call(dialect, "day", on="2023-02-29"))
