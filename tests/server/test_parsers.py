"""Dialects of reasoning and tool calls: what they read, what they give up on, and that cutting the text changes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.server import parsers
from freetoken.server.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Delta,
    Dialects,
    Reasoning,
    Text,
    Tool,
    join,
    think,
)
from freetoken.server.parsers.base import Malformed
from freetoken.server.parsers.json_scan import JsonScanner, complete_object
from freetoken.server.parsers.schema_types import allowed_types, convert, property_types

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "rate": {"type": "number"},
        "tags": {"type": "array"},
        "where": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"place": {"type": "object"}},
}
TOOLS = [Tool("weather", "", SCHEMA), Tool("now")]
DIALECTS = ("hermes", "qwen3_coder", "llama3")


def parse(dialect: str, pieces: Sequence[str] | str, *, thinking: bool = False, separate: bool = True) -> list[Delta]:
    parser = Dialects("qwen3", dialect).parser(TOOLS, thinking=thinking, separate=separate)
    deltas: list[Delta] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        deltas += parser.feed(piece)
    return join([*deltas, *parser.finish()])


def shape(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thoughts, text, and the whole calls with decoded arguments."""
    names = {delta.index: delta.name for delta in deltas if isinstance(delta, CallStart)}
    arguments = {delta.index: delta.text for delta in deltas if isinstance(delta, CallArguments)}
    return (
        "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        "".join(delta.text for delta in deltas if isinstance(delta, Text)),
        [(names[d.index], json.loads(arguments[d.index])) for d in deltas if isinstance(d, CallEnd)],
    )


# --- thoughts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thinking", "thoughts", "answer"),
    [
        ("<think>\nhm, so\n</think>\n\nYes.", False, "hm, so", "Yes."),
        ("hm, so\n</think>\n\nYes.", True, "hm, so", "Yes."),
        ("\nno end in sight \n", True, "no end in sight", ""),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        (" \n<think></think>\nYes.", False, "", "Yes."),
        ("\n\nYes.\n", False, "", "\n\nYes.\n"),
        ("<thin", False, "", "<thin"),
        ("a </thin", True, "a </thin", ""),
        ("</think>Yes.", True, "", "Yes."),
        ("Yes.</think>", False, "", "Yes.</think>"),
    ],
)
def test_thoughts(text: str, thinking: bool, thoughts: str, answer: str) -> None:
    parser = Dialects("qwen3").parser([], thinking=thinking)
    assert shape(join([*parser.feed(text), *parser.finish()]))[:2] == (thoughts, answer)


def test_thoughts_in_the_text_are_left_as_they_are() -> None:
    for text, thinking in (("<think>\n a \n</think>\n\nb <tool", False), (" a \n</think>\n\nb ", True), ("a ", True)):
        assert parse("hermes", text, thinking=thinking, separate=False) == [Text(text)]


def test_calls_inside_thoughts_are_thoughts() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for separate in (True, False):
        deltas = parse("hermes", f"say {call}?</think>{call}", thinking=True, separate=separate)
        assert [delta for delta in deltas if isinstance(delta, CallStart)] == [CallStart(0, "now")]
        assert isinstance(deltas[0], Reasoning if separate else Text) and call in deltas[0].text


def test_whether_the_prompt_opens_the_block() -> None:
    assert think.leaves_open("<|im_start|>assistant\n<think>\n")
    assert not think.leaves_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.leaves_open("what does <think> mean?<|im_end|>\n<|im_start|>assistant\n")
    assert think.leaves_open("...", "<think>so far")
    assert not think.leaves_open("...", "<think>so far</think> well")


# --- calls ------------------------------------------------------------------------------------------------------------

HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Bern", "days": 2}}'
BERN = ("weather", {"city": "Bern", "days": 2})


@pytest.mark.parametrize(
    ("dialect", "text", "answer", "calls"),
    [
        ("hermes", HERMES_CALL, "", [BERN]),
        ("hermes", f"I look.\n\n{HERMES_CALL}\n{HERMES_CALL}\n", "I look.", [BERN, BERN]),
        ("hermes", f"{HERMES_CALL}\nThat is all.", "\nThat is all.", [BERN]),
        ("hermes", HERMES_CALL.removesuffix("</tool_call>"), "", [BERN]),
        ("hermes", HERMES_CALL.replace("}}", "}}}"), "", [BERN]),
        ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', "", [("weather", {"days": 1})]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
        ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', "", [("now", {})] * 2),
        ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', "", [("now", {})] * 2),
        ("hermes", '<tool_call>{"function": {"name": "now", "arguments": {}}}</tool_call>', "", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\ty</tool_call>\n"}}</tool_call>', "",
         [("now", {"a": "x\ty</tool_call>\n"})]),
        ("qwen3_coder", XML_CALL, "", [BERN]),
        ("qwen3_coder", f"I look.\n\n{XML_CALL}\n{XML_CALL}\n", "I look.", [BERN, BERN]),
        ("qwen3_coder", XML_CALL.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), "", [BERN]),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", "", [("now", {})]),
        ("qwen3_coder", XML_CALL.replace("Bern", 'a\n"b"\n</parameter>\n\\ é'), "",
         [("weather", {"city": 'a\n"b"\n</parameter>\n\\ é', "days": 2})]),
        ("qwen3_coder", XML_CALL.replace("\nBern\n", ""), "", [("weather", {"city": "", "days": 2})]),
        ("qwen3_coder", XML_CALL.replace("Bern", "\nBern\n"), "", [("weather", {"city": "\nBern\n", "days": 2})]),
        ("qwen3_coder", XML_CALL.replace("\n2\n", "soon"), "", [("weather", {"city": "Bern", "days": "soon"})]),
        ("llama3", LLAMA_CALL, "", [BERN]),
        ("llama3", f"<|python_tag|>{LLAMA_CALL}", "", [BERN]),
        ("llama3", f"I look. <|python_tag|>{LLAMA_CALL}", "I look.", [BERN]),
        ("llama3", f"{LLAMA_CALL}; {LLAMA_CALL}\n{LLAMA_CALL}", "", [BERN] * 3),
        ("llama3", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", {})]),
        ("llama3", f"{LLAMA_CALL} done", " done", [BERN]),
    ],
)  # fmt: skip
def test_calls(dialect: str, text: str, answer: str, calls: list[tuple[str, Any]]) -> None:
    deltas = parse(dialect, text)
    assert shape(deltas)[1:] == (answer, calls)
    assert [d.index for d in deltas if isinstance(d, CallStart)] == list(range(len(calls)))
    assert shape(parse(dialect, f"<think>a</think>\n\n{text}"))[2] == calls


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{oops"}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
        ("hermes", "<tool_call>now()</tool_call> and more"),
        ("hermes", '<tool_call>{"name": "now", "argum'),
        ("hermes", '<tool_call>{"name": "now"'),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", "  <tool_call"),
        ("hermes", '<tool_call>{"a": ' + "[" * 20_000),
        ("qwen3_coder", "<tool_call><function=delete></function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\nBern</function></tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<function=wea\nther>"),
        ("qwen3_coder", "a <function=weather"),
        ("llama3", '{"name": "delete", "parameters": {}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", f"Look: {LLAMA_CALL}"),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", "{not json"),
    ],
)
def test_what_is_no_call_is_text(dialect: str, text: str) -> None:
    assert parse(dialect, text) == [Text(text)]


def test_a_malformed_call_is_warned_about_and_the_next_one_is_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        deltas = parse("hermes", f'<tool_call>{{"name": "delete"}}</tool_call>\n{HERMES_CALL}')
    assert shape(deltas)[1:] == ('<tool_call>{"name": "delete"}</tool_call>', [BERN])
    assert "'delete'" in caplog.text
    assert shape(parse("hermes", f"<tool_call>{HERMES_CALL}"))[1:] == ("<tool_call>", [BERN])


@pytest.mark.parametrize(
    ("dialect", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Be', '{"city": "Be'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": tru!}}', '{"city": tru'),
        ("qwen3_coder", "<function=weather><parameter=city>\nBe", '{"city": "Be'),
        ("qwen3_coder", "<function=weather><parameter=city>Be</parameter>", '{"city": "Be'),
        ("qwen3_coder", "<function=weather><parameter=city>Be</parameter><parameter=days>1", '{"city": "Be", "days": '),
    ],
)
def test_a_call_that_is_cut_off_has_no_end(dialect: str, text: str, arguments: str) -> None:
    deltas = parse(dialect, text)
    assert deltas[:2] == [CallStart(0, "weather"), CallArguments(0, arguments)]
    assert not any(isinstance(delta, CallEnd) for delta in deltas)


def test_arguments_come_while_they_are_written() -> None:
    for dialect, text in (("hermes", HERMES_CALL), ("qwen3_coder", XML_CALL), ("llama3", LLAMA_CALL)):
        parser = Dialects("none", dialect).parser(TOOLS, thinking=False)
        seen = ""
        for character in text[: text.index("Bern") + 3]:
            seen += "".join(d.text for d in parser.feed(character) if isinstance(d, CallArguments))
        assert seen.endswith('"city": "Ber')


# --- any cut gives the same -------------------------------------------------------------------------------------------

_FRAGMENTS = st.sampled_from(
    [
        "<think>", "</think>", "\n", " ", "\n\n", "Hello", "é🙂", "<tool_call>", "</tool_call>", "<function=weather>",
        "<function=", "</function>", "<parameter=city>", "<parameter=days>", "<parameter=", "</parameter>", "<|python_tag|>",
        '{"name": "weather", "arguments": ', '{"name": "now", "parameters": {}}', '{"city": "Bern"', ', "days": 2', "}", "]",
        "[", '"', "\\", "<", ">", "3.5e-7", "true", ";", HERMES_CALL, XML_CALL, LLAMA_CALL, '"tags": [1, "a\\u00e9"]',
    ]
)  # fmt: skip


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(_FRAGMENTS, max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=120, deadline=None)
@given(case=cut_texts(), thinking=st.booleans(), separate=st.booleans())
def test_any_cut_gives_the_same(dialect: str, case: tuple[str, list[str]], thinking: bool, separate: bool) -> None:
    text, pieces = case
    whole = parse(dialect, text, thinking=thinking, separate=separate)
    assert parse(dialect, pieces, thinking=thinking, separate=separate) == whole
    assert parse(dialect, list(text), thinking=thinking, separate=separate) == whole
    calls: dict[int, str] = {}
    for delta in whole:
        if isinstance(delta, CallStart):
            assert delta.index == len(calls) and delta.name in ("weather", "now")
            calls[delta.index] = ""
        elif isinstance(delta, CallArguments):
            calls[delta.index] += delta.text
        elif isinstance(delta, CallEnd):
            assert isinstance(json.loads(calls[delta.index]), dict)
    for arguments in calls.values():
        assert isinstance(json.loads(complete_object(arguments)), dict)
    if not calls and separate is False:
        assert "".join(delta.text for delta in whole if isinstance(delta, Text)) == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(value=st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4), ascii_only=st.booleans())
def test_scanner_takes_all_json_and_completes_every_prefix(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    scanner = JsonScanner()
    assert "".join(map(scanner.feed, text)) == text and scanner.done
    for end in range(len(text)):
        assert isinstance(json.loads(complete_object(text[:end])), dict)
    assert json.loads(complete_object(text)) == value


@pytest.mark.parametrize(
    "text",
    ["{,", "{1", '{"a" 1', '{"a":}', '{"a":1,}', "[1,]", "[01", "[1.]", "[+1", "[nul}", '["\\x"]', "[1e]", "{}}", "1"],
)
def test_scanner_stops_at_broken_json(text: str) -> None:
    scanner = JsonScanner()
    with pytest.raises(Malformed):
        for character in text:
            scanner.feed(character)


def test_what_a_cut_object_still_says() -> None:
    assert json.loads(complete_object('{"a": "par')) == {}
    assert json.loads(complete_object('{"a": "part", "b": "c')) == {"a": "part"}
    assert json.loads(complete_object('{"a": 1, "b')) == {"a": 1}
    assert json.loads(complete_object('{"a": [1, {"b": 12')) == {"a": [1, {"b": 12}]}
    assert complete_object("") == complete_object("[1") == "{}"


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "5", "5"), ("days", "5", 5), ("days", "5.0", 5), ("days", "five", "five"), ("exact", "True", True),
        ("exact", "false", False), ("rate", "1e3", 1000.0), ("rate", "2", 2), ("tags", '["a", 1]', ["a", 1]),
        ("tags", "['a', None]", ["a", None]), ("where", '{"lat": 46.9}', {"lat": 46.9}), ("where", "{'a': {1}}", "{'a': {1}}"),
        ("note", "null", None), ("note", "hello", "hello"), ("note", "5", "5"), ("other", "5", "5"), ("rate", "NaN", "NaN"),
        ("days", "9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_values_have_the_types_of_the_schema(name: str, text: str, value: Any) -> None:
    types = property_types(SCHEMA, name)
    got = text if types == {"string"} else convert(text, types)
    assert got == value and type(got) is type(value)


def test_types_of_schemas() -> None:
    assert allowed_types({"enum": [1, "a", None]}, {}) == {"integer", "string", "null"}
    assert allowed_types({"type": ["integer", "null"]}, {}) == {"integer", "null"}
    assert allowed_types({"type": "integer", "nullable": True}, {}) == {"integer", "null"}
    assert allowed_types({"$ref": "#"}, {"$ref": "#"}) == frozenset()
    assert allowed_types({"$ref": "#/a/b"}, {"a": []}) == frozenset()
    assert property_types({"additionalProperties": {"type": "integer"}}, "x") == {"integer"}
    assert property_types({"properties": 5}, "x") == {"string"}


# --- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "reasoning", "tool_calls"),
    [
        ("... <tool_call>\n<function=x>\n<parameter=y> ... </think>", "qwen3", "qwen3_coder"),
        ("... <tool_call> ... </think>", "qwen3", "hermes"),
        ("... <tool_call> ...", "row", "hermes"),
        ("... <|python_tag|> ...", "row", "llama3"),
        ("plain", "row", "row"),
    ],
)
def test_dialects_are_chosen_by_the_template_then_the_registry(template: str, reasoning: str, tool_calls: str) -> None:
    chosen, reasons = parsers.choose(template, reasoning="auto", tool_calls="auto", by_model=("row", "row"))
    assert chosen == Dialects(reasoning, tool_calls) and set(reasons) == {"reasoning_parser", "tool_call_parser"}
    forced, reasons = parsers.choose(template, reasoning="none", tool_calls="llama3", by_model=("row", "row"))
    assert forced == Dialects("none", "llama3") and not reasons


def test_markers_that_must_be_seen() -> None:
    dialects = Dialects("qwen3", "llama3")
    assert dialects.markers(tools=False) == ("<think>", "</think>")
    assert dialects.markers(tools=True) == ("<think>", "</think>", "<|python_tag|>")
    assert Dialects().markers(tools=True) == ()
