"""Chat templates: Jinja in a sandbox, with the variables and functions that published templates expect (torch-free).

The conventions (block trimming, ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, the
``generation`` block) are those of Hugging Face's chat templates.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freetoken.errors import RequestError, StartupError
from freetoken.server import tool_prompt
from freetoken.server.detokenizer import Tokenizer
from freetoken.server.generation import ChatPrompt

_CUT = "\x02freetoken-continue\x03"
_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"})
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
TOOL_USE = "tool_use"


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by a template's own ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}`` marks assistant text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise(message: str) -> None:
    raise _TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A template compiled once, and the one for conversations with tools where the model has its own.

    ``sources`` is the text of all of them. :class:`StartupError` when one does not compile.
    """

    def __init__(
        self, source: str, bos_token: str | None, eos_token: str | None, named: Mapping[str, str] | None = None
    ) -> None:
        tool_use = (named or {}).get(TOOL_USE)
        self.sources = source + (tool_use or "")
        self._plain = _Compiled(source, bos_token, eos_token)
        self._tool_use = _Compiled(tool_use, bos_token, eos_token) if tool_use is not None else self._plain

    @classmethod
    def load(cls, path: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
        """From ``--chat-template`` if given, else the tokenizer's own; ``None`` when there is neither."""
        source, named = tokenizer.chat_template, getattr(tokenizer, "named_templates", None)
        if path is not None:
            named = None
            try:
                with open(path, encoding="utf-8") as file:
                    source = file.read()
            except OSError as error:
                raise StartupError(f"--chat-template {path} cannot be read: {error.strerror or error}") from None
            except UnicodeDecodeError:
                raise StartupError(f"--chat-template {path} cannot be read: it is not UTF-8") from None
        return cls(source, tokenizer.bos_token, tokenizer.eos_token, named) if source else None

    @property
    def knows_tools(self) -> bool:
        """Whether a template shows tools to the model by itself."""
        return "tools" in self._tool_use.variables

    @property
    def switches_thinking(self) -> bool:
        """Whether reasoning can be turned on and off."""
        return any(name in self._plain.variables for name in _THINKING_SWITCHES)

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt text. :class:`RequestError` (400) when the template refuses the messages."""
        return (self._tool_use if prompt.tools else self._plain).render(prompt)


class _Compiled:
    """One template. ``variables`` are the names it asks for."""

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        environment = _environment()
        try:
            self.variables = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartupError(f"the chat template does not compile: {error}") from None
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._knows_developer = "developer" in source
        self._takes_parts = self._shows_parts()

    def _shows_parts(self) -> bool:
        """Whether the template reads a list of text parts itself, found out by rendering one."""
        parts = [{"type": "text", "text": "\x02one\x03"}, {"type": "text", "text": "\x02two\x03"}]
        try:
            text = self._run([{"role": "user", "content": parts}], add_generation_prompt=True)
        except RequestError:
            return False
        return all(part["text"] in text for part in parts) and "'type'" not in text and '"type"' not in text

    def render(self, prompt: ChatPrompt) -> str:
        options = self._options(prompt)
        messages = [self._adapted(message) for message in prompt.messages]
        if prompt.continue_final_message:
            messages[-1] = {**messages[-1], "content": _marked(messages[-1]["content"])}
        if "tools" in self.variables:
            tools = [tool.shown() for tool in prompt.tools] or None
        else:
            tools, messages = None, tool_prompt.as_text(messages, prompt.tools)
        text = self._run(messages, add_generation_prompt=prompt.add_generation_prompt, tools=tools, **options)
        return _before_mark(text) if prompt.continue_final_message else text

    def _run(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        try:
            return self._template.render(messages=messages, **self._tokens, **variables)
        except _TemplateRefusal as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RequestError(
                f"the chat template cannot render these messages: {str(error)[:300]}", param="messages"
            ) from None

    def _options(self, prompt: ChatPrompt) -> dict[str, Any]:
        """The request's variables, and its wish for more or less reasoning as the variable the template has for it."""
        for name in prompt.options:
            if name in _RESERVED:
                raise RequestError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")
        options = dict(prompt.options)
        switch = next((name for name in _THINKING_SWITCHES if name in self.variables), None)
        if prompt.thinking is not None and switch is not None:
            options.setdefault(switch, prompt.thinking)
        if prompt.effort is not None:
            if _EFFORT in self.variables:
                options.setdefault(_EFFORT, prompt.effort)
            if switch is not None:
                options.setdefault(switch, prompt.effort != "none")
            if _EFFORT not in self.variables and switch is None:
                raise RequestError(
                    f"{prompt.effort_param} is not supported: the model's chat template has no switch for it",
                    param=prompt.effort_param,
                    code="unsupported_parameter",
                )
        return options

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """With the role and the form of content that the template knows."""
        if message["role"] == "developer" and not self._knows_developer:
            message = {**message, "role": "system"}
        if isinstance(message["content"], list) and not self._takes_parts:
            message = {**message, "content": "\n".join(part["text"] for part in message["content"])}
        return message


def _marked(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + _CUT
    *first, last = content or [{"type": "text", "text": ""}]
    return [*first, {**last, "text": last["text"] + _CUT}]


def _before_mark(text: str) -> str:
    head, found, _ = text.rpartition(_CUT)
    if not found:
        raise RequestError(
            "the chat template does not show the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return head
