"""Chat templates: Jinja in a sandbox, with the variables and functions that published templates expect (torch-free).

The conventions (block trimming, ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, the
``generation`` block) are those of Hugging Face's chat templates.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freetoken.errors import RequestError, StartupError
from freetoken.server.detokenizer import Tokenizer
from freetoken.server.generation import ChatPrompt

_CUT = "\x02freetoken-continue\x03"
_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"})


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


class ChatTemplate:
    """A template compiled once. :class:`StartupError` when it does not compile."""

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the chat template does not compile: {error}") from None
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._knows_developer = "developer" in source

    @classmethod
    def load(cls, path: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
        """From ``--chat-template`` if given, else the tokenizer's own; ``None`` when there is neither."""
        source = tokenizer.chat_template
        if path is not None:
            try:
                with open(path, encoding="utf-8") as file:
                    source = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise StartupError(f"--chat-template {path} cannot be read: {error}") from None
        return cls(source, tokenizer.bos_token, tokenizer.eos_token) if source else None

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt text. :class:`RequestError` (400) when the template refuses the messages."""
        for name in prompt.options:
            if name in _RESERVED:
                raise RequestError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")
        messages = prompt.messages
        if not self._knows_developer:
            messages = [m if m["role"] != "developer" else {**m, "role": "system"} for m in messages]
        if prompt.continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _CUT}]
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=prompt.add_generation_prompt,
                **self._tokens,
                **prompt.options,
            )
        except _TemplateRefusal as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise RequestError(
                f"the chat template cannot render these messages: {str(error)[:300]}", param="messages"
            ) from None
        return self._cut(text) if prompt.continue_final_message else text

    @staticmethod
    def _cut(text: str) -> str:
        head, found, _ = text.rpartition(_CUT)
        if not found:
            raise RequestError(
                "the chat template does not show the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return head
