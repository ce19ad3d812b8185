"""OpenAI's chat and completions requests: JSON body to :class:`GenSpec` (torch-free).

Fields follow https://platform.openai.com/docs/api-reference/chat/create and ``/completions/create``, with the common
extensions of open servers. A field the protocol defines and this server does not serve is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.errors import RequestError
from freetoken.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from freetoken.server.chat import read_chat_prompt, read_tool_choice, read_tools
from freetoken.server.chat_output import ChatStyle
from freetoken.server.generation import GenSpec, Prompt, new_rid
from freetoken.server.response_format import GRAMMAR_FIELDS, read_grammar
from freetoken.server.wire import (
    SAMPLING_FIELDS,
    SamplingReader,
    StreamOptions,
    boolean,
    check_model,
    integer,
    mapping,
    read_priority,
    refuse_unserved,
    string,
    token_ids,
    warn_unknown,
)
from freetoken.server_args import Config

MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16

# Neutral values beside null.
_UNSERVED_BOTH: dict[str, tuple[Any, ...]] = {
    "json_schema": (),
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "lora_path": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
}
_UNSERVED_CHAT: dict[str, tuple[Any, ...]] = {
    **_UNSERVED_BOTH,
    "functions": (),
    "function_call": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning": (),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "documents": ([],),
}
_UNSERVED_COMPLETIONS: dict[str, tuple[Any, ...]] = {**_UNSERVED_BOTH, "suffix": ("",)}
# Labels with no bearing on the output.
_LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_COMMON = {
    *SAMPLING_FIELDS,
    *_LABELS,
    "metadata",
    *GRAMMAR_FIELDS,
    "model",
    "max_tokens",
    "logprobs",
    "stream",
    "stream_options",
    "rid",
    "priority",
}
_CHAT_KNOWN = {
    *_COMMON,
    *_UNSERVED_CHAT,
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "separate_reasoning",
}
_COMPLETIONS_KNOWN = {*_COMMON, *_UNSERVED_COMPLETIONS, "prompt", "echo"}


@dataclass
class WireRequest:
    """A request as read: what to generate, and how the client wants it shown.

    ``chat`` says how to split a chat's answer, and is ``None`` for plain completions. ``logprobs`` says whether to show
    any, ``echo`` puts the prompt first.
    """

    spec: GenSpec
    chat: ChatStyle | None
    options: StreamOptions
    logprobs: bool
    echo: bool = False


def read_chat(body: Mapping[str, Any], config: Config) -> WireRequest:
    """A body of ``/v1/chat/completions``; :class:`RequestError` names the field at fault."""
    check_model(body, config.served_model_name)
    refuse_unserved(body, _UNSERVED_CHAT)
    warn_unknown(body, _CHAT_KNOWN, "/v1/chat/completions")
    options = StreamOptions.read(body)
    reader = _sampling(body, config)
    most = integer(body, "max_completion_tokens", 1, MAX_TOKENS)
    name = "max_completion_tokens" if most is not None else "max_tokens"
    if most is None:
        most = integer(body, "max_tokens", 1, MAX_TOKENS)
    reader.set("max_new_tokens", most, name)
    logprobs = boolean(body, "logprobs", False)
    top = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not logprobs and top > 0:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if logprobs:
        reader.set("logprobs", top or 0, "top_logprobs")
    tools = read_tools(body)
    choice = read_tool_choice(body, tools)
    offered = [] if choice.mode == "none" else tools
    style = ChatStyle(tuple(offered), choice.parallel, boolean(body, "separate_reasoning", True))
    prompt = Prompt(reader.build(), chat=read_chat_prompt(body, offered), param="messages", tool_choice=choice)
    spec = GenSpec(_rid(body, "chatcmpl"), [prompt], options.stream, priority=read_priority(body, config))
    return WireRequest(spec, style, options, logprobs)


def read_completion(body: Mapping[str, Any], config: Config) -> WireRequest:
    """A body of ``/v1/completions``; :class:`RequestError` names the field at fault."""
    check_model(body, config.served_model_name)
    refuse_unserved(body, _UNSERVED_COMPLETIONS)
    warn_unknown(body, _COMPLETIONS_KNOWN, "/v1/completions")
    options = StreamOptions.read(body)
    reader = _sampling(body, config)
    most = integer(body, "max_tokens", 0, MAX_TOKENS)
    echo = boolean(body, "echo", False)
    if most == 0 and not echo:
        raise RequestError("max_tokens 0 gives nothing unless echo is true", param="max_tokens")
    reader.set("max_new_tokens", DEFAULT_COMPLETION_TOKENS if most is None else max(most, 1), "max_tokens")
    top = integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None:
        reader.set("logprobs", top, "logprobs")
        if echo:
            reader.set("prompt_logprobs", top, "logprobs")
    prompts = _prompts(body.get("prompt"), reader.build())
    priority = read_priority(body, config)
    spec = GenSpec(_rid(body, "cmpl"), prompts, options.stream, prompt_only=most == 0, priority=priority)
    return WireRequest(spec, None, options, top is not None, echo)


def _sampling(body: Mapping[str, Any], config: Config) -> SamplingReader:
    for label in ("user", "safety_identifier", "prompt_cache_key"):
        string(body, label)
    mapping(body, "metadata")
    reader = SamplingReader(config.model.sampling_defaults)
    reader.read(body)
    grammar = read_grammar(body)
    if grammar is not None:
        reader.set("grammar", grammar, "response_format")
    return reader


def _rid(body: Mapping[str, Any], prefix: str) -> str:
    rid = string(body, "rid")
    if rid is None:
        return new_rid(prefix)
    if not 0 < len(rid) <= 200:
        raise RequestError("rid must have between 1 and 200 characters", param="rid")
    return rid


def _prompts(value: Any, sampling: SamplingParams) -> list[Prompt]:
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return [_text_prompt(value, sampling)]
    if not isinstance(value, list):
        raise RequestError(
            "prompt must be a string, a list of strings, token ids or lists of token ids", param="prompt"
        )
    if not value:
        raise RequestError("the prompt is empty", param="prompt")
    if type(value[0]) is int:
        return [Prompt(sampling, ids=token_ids(value, "prompt"))]
    if isinstance(value[0], str):
        if not all(isinstance(item, str) for item in value):
            raise RequestError("prompt must not mix strings with anything else", param="prompt")
        return [_text_prompt(item, sampling) for item in value]
    return [Prompt(sampling, ids=token_ids(item, "prompt")) for item in value]


def _text_prompt(text: str, sampling: SamplingParams) -> Prompt:
    if not text:
        raise RequestError("the prompt is empty", param="prompt")
    return Prompt(sampling, text=text)
