"""What a wire format hands to the frontend (:class:`GenSpec`) and what it gets back (:class:`GenEvent`); torch-free."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from freetoken.errors import RequestError
from freetoken.messages import TokenLogprob
from freetoken.sampling_params import SamplingParams
from freetoken.server.parsers.base import Tool


@dataclass(frozen=True)
class ToolChoice:
    """``mode`` is ``auto``, ``none`` or ``required``; with ``name`` it must be that one function. Without ``parallel`` there
    is one call at most."""

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True)
class ChatPrompt:
    """Messages still to be rendered through the chat template.

    A message's content is a string or a list of text parts; ``options`` are extra template variables; ``tools`` are shown
    to the model. ``effort`` (``none`` to ``xhigh``) and ``thinking`` ask for more or less reasoning, ``None`` for what the
    template does on its own; ``effort_param`` is the former's field in the client's request. ``thinking_budget`` is the most
    tokens that thoughts may have.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tools: list[Tool] = field(default_factory=list)
    effort: str | None = None
    effort_param: str = "reasoning_effort"
    thinking: bool | None = None
    thinking_budget: int | None = None

    @property
    def continued(self) -> str | None:
        """The text that the output goes on with, if it does."""
        if not self.continue_final_message:
            return None
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    def num_bytes(self) -> int:
        """UTF-8 bytes of all message texts, a lower bound of what rendering gives."""
        return sum(_content_bytes(message.get("content")) for message in self.messages)


def _content_bytes(content: Any) -> int:
    if isinstance(content, str):
        return len(content) if content.isascii() else len(content.encode("utf-8", "surrogatepass"))
    if isinstance(content, list):
        return sum(_content_bytes(part.get("text")) for part in content)
    return 0


@dataclass(frozen=True)
class Prompt:
    """One prompt: exactly one of ``text``, ``ids`` and ``chat``; ``param`` is its field in the client's request.

    ``tool_choice`` says whether a chat must, may or must not call its tools.
    """

    sampling: SamplingParams
    text: str | None = None
    ids: list[int] | None = None
    chat: ChatPrompt | None = None
    param: str = "prompt"
    tool_choice: ToolChoice = ToolChoice()

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar may have to be compiled: the request's own, or that of tools it must call."""
        must = self.tool_choice.mode == "required" or self.tool_choice.name is not None or not self.tool_choice.parallel
        return self.sampling.grammar is not None or must

    def num_bytes(self) -> int:
        """Bytes of text to tokenise (0 for token ids)."""
        if self.chat is not None:
            return self.chat.num_bytes()
        return _content_bytes(self.text)


@dataclass(frozen=True)
class GenSpec:
    """One client request: each prompt gives ``sampling.n`` choices; choice indices count through all of them.

    ``prompt_only`` asks for the prompt's side alone (``max_tokens`` 0): one token is drawn and not shown. Without
    ``stream`` a choice comes as one event when it ends. Of waiting requests the one with the highest ``priority`` is next.
    """

    rid: str
    prompts: list[Prompt]
    stream: bool = False
    prompt_only: bool = False
    priority: int = 0

    @property
    def num_choices(self) -> int:
        return sum(prompt.sampling.n for prompt in self.prompts)


@dataclass
class GenEvent:
    """What is new for one choice since its last event.

    ``finish`` is ``stop``, ``length``, ``abort`` or ``error`` in the choice's last event, ``matched`` the stop string or
    token id, ``error`` what went wrong. The token counts are totals so far. ``prompt_ids``, ``prompt_logprobs`` and
    ``thinking`` (the prompt has opened a block of thoughts) come with the choice's first event. A matched stop token is in ``ids`` and ``logprobs``; its text is not in ``text``.
    """

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    matched: int | str | None = None
    error: RequestError | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    thinking: bool = False

    def merge(self, later: GenEvent) -> None:
        """Append the next event of the same choice."""
        self.text += later.text
        self.ids += later.ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish, self.matched, self.error = later.finish, later.matched, later.error
        self.prompt_tokens, self.cached_tokens = later.prompt_tokens, later.cached_tokens
        self.completion_tokens = later.completion_tokens

    def shown_logprobs(self) -> list[TokenLogprob]:
        """Logprobs of the tokens whose text is shown: without a matched stop token."""
        entries = self.logprobs or []
        if entries and isinstance(self.matched, int) and entries[-1].id == self.matched:
            return entries[:-1]
        return entries


@dataclass
class Usage:
    """Token counts of a whole client request; a prompt counts once, whatever its ``n``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def wire(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def usage_of(spec: GenSpec, last: dict[int, GenEvent]) -> Usage:
    """Totals over all choices; ``last`` maps a choice index to its latest event."""
    total, index = Usage(), 0
    for prompt in spec.prompts:
        choices = [last[i] for i in range(index, index + prompt.sampling.n) if i in last]
        index += prompt.sampling.n
        if not choices:
            continue
        total.prompt_tokens += choices[0].prompt_tokens
        total.cached_tokens += choices[0].cached_tokens
        if not spec.prompt_only:
            total.completion_tokens += sum(choice.completion_tokens for choice in choices)
    return total


def new_rid(prefix: str) -> str:
    """A fresh request id."""
    return f"{prefix}-{uuid.uuid4().hex}"
