"""Structured output and priorities over HTTP: what reaches the scheduler, and refusals before anything is streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from freetoken.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from server.conftest import Served, serving

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "null"}}, "required": ["z"]}
SCHEMA_PARAM = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


def wrapped(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


def sent(server: Served) -> Grammar | None:
    return server.fake.added[-1].sampling.grammar


def refusal(answer: Any) -> dict[str, Any]:
    """A refusal is JSON with its status, never an event of a stream."""
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json()["error"]
    assert error["message"] and "\n" not in error["message"]
    return error


# --- what is served --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar(kind="json_object")),
        ({"regex": "[ab]+"}, Grammar(kind="regex", text="[ab]+", param="regex")),
        ({"ebnf": 'root ::= "a"'}, Grammar(kind="ebnf", text='root ::= "a"', param="ebnf")),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "regex": None}, None),
        ({"response_format": {"type": "text"}, "regex": "a"}, Grammar(kind="regex", text="a", param="regex")),
    ],
)
def test_chat_and_completions_pass_the_grammar_on(server: Served, fields: Any, expected: Grammar | None) -> None:
    for answer in (server.chat("say:x", **fields), server.complete("say:x", **fields)):
        assert answer.status_code == 200, answer.text
        assert sent(server) == expected


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}, {"strict": None, "description": "d"}])
def test_a_schema_keeps_the_order_of_its_members(server: Served, strict: dict[str, Any]) -> None:
    assert server.chat("say:x", response_format=wrapped(SCHEMA, **strict)).status_code == 200
    grammar = sent(server)
    assert grammar is not None and (grammar.kind, grammar.param) == ("json_schema", SCHEMA_PARAM)
    assert list(json.loads(grammar.text)["properties"]) == ["z", "a"] and json.loads(grammar.text) == SCHEMA


def test_the_openai_client_and_a_stream(server: Served) -> None:
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "say:{}"}],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "{}"
    grammar = sent(server)
    assert grammar is not None and grammar.kind == "json_schema"


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_generate_takes_sglangs_fields(server: Served, schema: Any) -> None:
    answer = server.post("/generate", {"text": "say:x", "sampling_params": {"json_schema": schema}})
    assert answer.status_code == 200
    grammar = sent(server)
    assert grammar is not None and json.loads(grammar.text) == SCHEMA and grammar.param == "json_schema"
    params = [{"regex": "a+"}, {"ebnf": 'start: "a"'}]
    assert server.post("/generate", {"text": ["say:x", "say:y"], "sampling_params": params}).status_code == 200
    kinds = [message.sampling.grammar and message.sampling.grammar.kind for message in server.fake.added[-2:]]
    assert kinds == ["regex", "ebnf"]


def test_every_choice_has_the_grammar(server: Served) -> None:
    assert server.chat("say:x", regex="a+", n=3).status_code == 200
    assert [m.sampling.grammar for m in server.fake.added[-3:]] == [Grammar(kind="regex", text="a+", param="regex")] * 3


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_PARAM),
        ({"response_format": wrapped([])}, SCHEMA_PARAM),
        ({"response_format": wrapped({}, name=5)}, "response_format.json_schema.name"),
        ({"response_format": wrapped({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": wrapped({"type": "strin"})}, SCHEMA_PARAM + ".type"),
        (
            {"response_format": wrapped({"type": "object", "properties": {"a": {"items": {"not": {}}}}})},
            SCHEMA_PARAM + ".properties.a.items.not",
        ),
        ({"response_format": wrapped({"x": "y" * MAX_GRAMMAR_BYTES})}, SCHEMA_PARAM),
        ({"regex": "(a"}, "regex"),
        ({"regex": 5}, "regex"),
        ({"regex": ""}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ],
)
def test_bad_forms_are_refused_by_place(server: Served, fields: Any, param: str, stream: bool) -> None:
    added = len(server.fake.added)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream, **fields}
    error = refusal(server.post_text("/v1/chat/completions", json.dumps(body)))
    assert error["param"] == param
    assert len(server.fake.added) == added
    server.until(server.empty)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"json_schema": '{"type": "strin"}'}, "json_schema.type"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": 5}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "a", "json_schema": "{}"}, "json_schema"),
        ({"regex": ["a"]}, "regex"),
    ],
)
def test_generate_refuses_by_place(server: Served, sampling: Any, param: str) -> None:
    error = refusal(server.post("/generate", {"text": "x", "sampling_params": sampling, "stream": True}))
    assert error["param"] == param
    server.until(server.empty)


def test_the_internal_field_is_none_of_the_clients(server: Served) -> None:
    answer = server.post("/generate", {"text": "say:x", "sampling_params": {"grammar": {"kind": "regex"}}})
    assert refusal(answer)["param"] == "grammar"


# --- priorities ------------------------------------------------------------------------------------------------------


def test_a_priority_needs_the_flag(server: Served) -> None:
    for answer in (
        server.chat("say:x", priority=1),
        server.complete("say:x", priority=-1),
        server.post("/generate", {"text": "x", "priority": 1}),
    ):
        error = refusal(answer)
        assert error["param"] == "priority" and "--enable-priority-scheduling" in error["message"]
    assert server.chat("say:x", priority=0).status_code == 200


def test_a_priority_reaches_the_scheduler() -> None:
    with serving(enable_priority_scheduling=True) as server:
        assert server.chat("say:x", priority=3, n=2).status_code == 200
        assert server.complete(["say:x", "say:y"], priority=-2).status_code == 200
        assert server.post("/generate", {"text": "say:x", "priority": 7}).status_code == 200
        assert server.chat("say:x").status_code == 200
        assert [message.priority for message in server.fake.added] == [3, 3, -2, -2, 7, 0]
        for wrong in (1.5, "high", True, 2**31):
            assert refusal(server.chat("x", priority=wrong))["param"] == "priority"
