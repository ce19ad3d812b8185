"""Grammars that make a model call tools, in the dialect it speaks (torch-free).

Written in llguidance's Lark dialect, for :class:`~freetoken.sampling_params.Grammar` of the kind ``lark``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from freetoken.errors import RequestError
from freetoken.grammar.compiler import parser_limits
from freetoken.grammar.schema import WHITESPACE, check_schema, narrow_formats, no_panic
from freetoken.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from freetoken.server.generation import ToolChoice
from freetoken.server.parsers import hermes, qwen3_coder
from freetoken.server.parsers.base import Tool
from freetoken.server.parsers.schema_types import allowed_types

PARAM = "tool_choice"
_REMEMBERED_CHARS = 16384
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")


def tool_grammar(
    dialect: str, tools: Sequence[Tool], choice: ToolChoice, special: Mapping[str, int], answer: Grammar | None = None
) -> Grammar | None:
    """What the output must match, or ``None`` where it is free.

    A call that is asked for is the whole output, and its arguments match the tool's schema. One that may come is governed
    if a tool is strict, if there may be only one call, or if the rest must match ``answer``. ``special`` has the ids of the
    marks that are special tokens. :class:`RequestError` names the schema of a strict tool that cannot be enforced.
    """
    required = choice.mode == "required"
    named = [tool for tool in tools if choice.name in (None, tool.name)]
    if not named or not (required or answer is not None or not choice.parallel or any(tool.strict for tool in named)):
        return answer
    rules = _Rules(dialect, special, enforce=required)
    rules.calls(named)
    one = f"{rules.opening} call".strip()
    more = f" ({rules.separator} {one})*" if choice.parallel else ""
    if required:
        rules.add("start", f'("\\n\\n")? {one}{more}')
    elif answer is not None:
        rules.add("start", f'("\\n\\n")? ({one}{more} | answer)')
        rules.add("answer", f"%json {_json(_answer_schema(answer, dialect))}")
    else:
        rules.free_text(more)
    text = rules.text()
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise RequestError("the schemas of the tools are too large to be enforced together", param="tools")
    return Grammar(kind="lark", text=text, param=answer.param if answer is not None else PARAM)


def _answer_schema(answer: Grammar, dialect: str) -> dict[str, Any]:
    # A call that is a bare object could not be told from an answer that is one.
    if dialect == "llama3" or answer.kind not in ("json_object", "json_schema"):
        raise RequestError(f"{answer.param} cannot be combined with tools; set tool_choice to none", param=answer.param)
    if answer.kind == "json_object":
        return _ANY_OBJECT
    fault = check_schema(answer.text, parser_limits())
    if fault is not None:
        raise RequestError(
            f"{answer.param}{fault[0]}: {fault[1]}", param=answer.param + fault[0], code="invalid_grammar"
        )
    schema: dict[str, Any] = json.loads(answer.text)
    return schema


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any], lenient: bool = False) -> str:
    return json.dumps({**narrow_formats(schema), "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}})


class _Rules:
    """The rules of one grammar. With ``enforce`` the arguments of all tools match their schemas, otherwise those of strict
    ones."""

    def __init__(self, dialect: str, special: Mapping[str, int], enforce: bool) -> None:
        self._dialect, self._enforce = dialect, enforce
        self._special = special
        self._lines: list[str] = []
        tagged = dialect in ("hermes", "qwen3_coder")
        self.opening = self._mark(hermes.START) if tagged else ""
        self.separator = _quote("\n" if tagged else "; ")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def add(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def _mark(self, mark: str) -> str:
        return f"<[{self._special[mark]}]>" if mark in self._special else _quote(mark)

    def free_text(self, more: str) -> None:
        """Text, and then perhaps a call and ``more``."""
        if not self.opening:
            self.add("start", f"FREE | call{more}")
            self.add("FREE", r"/\s*([^\s{](?s:.*))?/")
        elif hermes.START in self._special:
            self.add("start", f"FREE | FREE? {self.opening} call{more}")
            self.add("FREE", "/(?s:.+)/")
        else:
            self.add("start", f"FREE | before call{more}")
            self.add(f"before[suffix={_quote(hermes.START)}]", "/(?s:.*)/")
            self.add("FREE", f"/(?s:.*)/ & ~/(?s:.*){hermes.START}(?s:.*)/")

    def calls(self, tools: Sequence[Tool]) -> None:
        """The rule ``call``: a call of any of ``tools``, without its opening mark."""
        write = {"hermes": self._hermes, "qwen3_coder": self._tags, "llama3": self._llama}[self._dialect]
        for index, tool in enumerate(tools):
            self.add(f"call{index}", write(index, tool))
        self.add("call", " | ".join(f"call{index}" for index in range(len(tools))))

    def _hermes(self, index: int, tool: Tool) -> str:
        head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
        return f"{_quote(head)} {self._arguments(index, tool)} {_quote(chr(125) + chr(10))} {self._mark(hermes.END)}"

    def _llama(self, index: int, tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.name)}, "parameters": '
        return f"{_quote(head)} {self._arguments(index, tool)} {_quote('}')}"

    def _arguments(self, index: int, tool: Tool) -> str:
        schema = {"type": "object", **tool.parameters} if self._enforce or tool.strict else _ANY_OBJECT
        if tool.strict:
            _check(schema, tool)
        elif not _compiles(schema):
            schema = _ANY_OBJECT
        self.add(f"arguments{index}", f"%json {_json(schema, lenient=not tool.strict)}")
        return f"arguments{index}"

    def _tags(self, index: int, tool: Tool) -> str:
        """Parameters stand in the schema's order, those that are not required may be missing."""
        if tool.strict:
            _check({"type": "object", **tool.parameters}, tool)
        enforce = self._enforce or tool.strict
        properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
        parts = []
        for number, (name, schema) in enumerate(properties.items() if isinstance(properties, dict) else ()):
            if any(character in "<>\n" for character in name):
                continue
            rule = f"parameter{index}_{number}"
            head = _quote(f"{qwen3_coder.PARAMETER}{name}>\n")
            self.add(rule, f"{head} {self._value(f'value{index}_{number}', schema, tool.parameters)}")
            needed = enforce and isinstance(required, list) and name in required
            parts.append(rule if needed else f"{rule}?")
        head = _quote(f"\n{qwen3_coder.FUNCTION}{tool.name}>\n")
        tail = _quote(f"{qwen3_coder.FUNCTION_END}\n")
        return " ".join([head, *parts, tail, self._mark(qwen3_coder.END)])

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any]) -> str:
        """A value and the tag that ends it: one of the allowed strings, any text, or JSON."""
        end = f"\n{qwen3_coder.PARAMETER_END}\n"
        types = allowed_types(schema, root)
        choices = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            self.add(rule, " | ".join(map(_quote, choices)))
            return f"{rule} {_quote(end)}"
        whole = {**{name: root[name] for name in _DEFINITIONS if name in root}, **schema} if types else {}
        if not types or "string" in types or not _compiles(whole):
            self.add(f"{rule}[suffix={_quote(end)}]", "/(?s:.*)/")
            return rule
        self.add(rule, f"%json {_json(whole, lenient=True)}")
        return f"{rule} {_quote(end)}"


def _check(schema: dict[str, Any], tool: Tool) -> None:
    fault = check_schema(json.dumps(schema), parser_limits())
    if fault is not None:
        where = tool.param + fault[0]
        raise RequestError(f"{where}: {fault[1]}", param=where, code="invalid_grammar")


def _compiles(schema: Mapping[str, Any]) -> bool:
    """Whether a schema can be enforced, keywords that the library does not know left aside."""
    text = json.dumps(schema)
    return _compiles_text(text) if len(text) > _REMEMBERED_CHARS else _remembered(text)


def _compiles_text(text: str) -> bool:
    try:
        with no_panic():
            source = LLMatcher.grammar_from_json_schema(text, overrides={"lenient": True})
            failed, _ = LLMatcher.validate_grammar_with_warnings(source, None, limits=parser_limits())
    except ValueError:
        return False
    return not failed


# Agents send the same tools with every request.
_remembered = functools.lru_cache(maxsize=512)(_compiles_text)
