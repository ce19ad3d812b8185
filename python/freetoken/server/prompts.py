"""Prompts as they are sent to the scheduler: rendered, tokenised, checked, and with the grammar their tools ask for
(torch-free). Slow: not for the event loop."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from freetoken.errors import RequestError
from freetoken.grammar.compiler import GrammarCompiler
from freetoken.models import registry
from freetoken.sampling_params import SamplingParams, ThinkingBudget
from freetoken.server import parsers
from freetoken.server.detokenizer import Tokenizer
from freetoken.server.generation import ChatPrompt, GenSpec, Prompt
from freetoken.server.parsers import Dialects
from freetoken.server.prompt_length import encode_bounded, too_long
from freetoken.server.template import ChatTemplate
from freetoken.server.tool_grammar import tool_grammar
from freetoken.server_args import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A prompt ready to be sent. ``thinking`` says that the output begins inside a block of thoughts."""

    ids: list[int]
    thinking: bool
    sampling: SamplingParams


class Prompts:
    """What makes prompts of the client's: the tokenizer, the chat template, and the dialects the model speaks."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.template = ChatTemplate.load(config.chat_template, tokenizer)
        self.dialects = _choose_dialects(config, tokenizer, self.template)
        self._compiler = GrammarCompiler(lambda: tokenizer, config.sample_vocab, config.model.eos_token_ids)

    def shown_ids(self, prompt: Prompt) -> list[int]:
        """Special tokens that the parsers must see."""
        if prompt.chat is None:
            return []
        markers = self.dialects.markers(tools=bool(prompt.chat.tools))
        return [token for mark, token in self.dialects.special.items() if mark in markers]

    def prepare(self, spec: GenSpec) -> list[Prepared]:
        """All prompts of a request. :class:`RequestError` 400 for a bad one."""
        prepared: list[Prepared] = []
        for prompt in spec.prompts:
            ids, thinking = self.ids(prompt)
            sampling = self._constrained(prompt, thinking)
            if sampling.grammar is not None:
                self._compiler.compile(sampling.grammar)
            prepared.append(Prepared(ids, thinking, sampling))
        return prepared

    def _constrained(self, prompt: Prompt, thinking: bool) -> SamplingParams:
        """The sampling of a prompt, with the grammar that its tools ask for, from the end of thinking on."""
        sampling = prompt.sampling
        if prompt.chat is None:
            return sampling
        self._check_ability(prompt.chat)
        grammar = tool_grammar(
            self.dialects.tool_calls, prompt.chat.tools, prompt.tool_choice, self.dialects.special, sampling.grammar
        )
        if grammar is not None and thinking:
            if self.dialects.thinking_end is None:
                raise RequestError(
                    f"{grammar.param} cannot be enforced behind this model's thoughts; turn them off with "
                    'chat_template_kwargs {"enable_thinking": false}',
                    param=grammar.param,
                )
            grammar = msgspec.structs.replace(grammar, after=self.dialects.thinking_end)
        budget = self._budget(prompt.chat, sampling) if thinking else None
        if grammar == sampling.grammar and budget is None:
            return sampling
        return msgspec.structs.replace(sampling, grammar=grammar, thinking_budget=budget)

    def _budget(self, chat: ChatPrompt, sampling: SamplingParams) -> ThinkingBudget | None:
        """When the thoughts must end. A model without a token for their end, or whose output stops at it, has no budget."""
        end = self.dialects.thinking_end
        if chat.thinking_budget is None or end is None:
            return None
        if end >= self.config.sample_vocab or end in sampling.stop_token_ids:
            return None
        return ThinkingBudget(end=end, tokens=chat.thinking_budget)

    def _check_ability(self, chat: ChatPrompt) -> None:
        """:class:`RequestError` for what this model cannot do."""
        code = "unsupported_parameter"
        calls = self.dialects.tool_calls
        if chat.tools and calls == parsers.NONE:
            raise RequestError(
                "tools are not supported: the server was started with --tool-call-parser none", param="tools", code=code
            )
        if chat.tools and self.template is not None and not self.template.knows_tools and calls != "hermes":
            raise RequestError(
                f"tools are not supported: the chat template knows none, and --tool-call-parser {calls} needs one that does",
                param="tools",
                code=code,
            )
        if chat.thinking and self.dialects.reasoning == parsers.NONE:
            raise RequestError("thinking is not supported: this model has none", param="thinking", code=code)

    def ids(self, prompt: Prompt, *, check_length: bool = True) -> tuple[list[int], bool]:
        """Render and tokenise one prompt (slow: not for the event loop): its ids, and whether the output begins inside a
        block of thoughts. :class:`RequestError` 400 for a bad one."""
        thinking = False
        if prompt.ids is not None:
            ids = prompt.ids
        elif prompt.chat is not None:
            if self.template is None:
                raise RequestError(
                    "the model has no chat template: use /v1/completions, or start the server with --chat-template",
                    param="messages",
                    code="no_chat_template",
                )
            text = self.template.render(prompt.chat)
            thinking = self.dialects.leaves_open(text, prompt.chat.continued)
            ids = self._encode(text, False, prompt.param if check_length else None)
        else:
            ids = self._encode(prompt.text or "", True, prompt.param if check_length else None)
        if not check_length:
            return ids, thinking
        if not ids:
            raise RequestError("the prompt is empty", param=prompt.param)
        if len(ids) >= self.config.context_length:
            raise too_long(str(len(ids)), self.config.context_length, prompt.param)
        vocab = self.config.model.vocab_size
        if prompt.ids is not None and not 0 <= min(ids) <= max(ids) < vocab:
            raise RequestError(
                f"token ids must lie between 0 and {vocab - 1}, the model's vocabulary", param=prompt.param
            )
        prompt.sampling.check_vocabulary(vocab)
        return ids, thinking

    def _encode(self, text: str, special: bool, param: str | None) -> list[int]:
        if param is None:
            return self.tokenizer.encode(text, add_special_tokens=special)
        context = self.config.context_length
        return encode_bounded(self.tokenizer, text, special=special, context=context, param=param)


def _choose_dialects(config: Config, tokenizer: Tokenizer, template: ChatTemplate | None) -> Dialects:
    row = registry.find(config.model.architecture)
    dialects, reasons = parsers.choose(
        template.sources if template is not None else "",
        reasoning=config.reasoning_parser,
        tool_calls=config.tool_call_parser,
        by_model=(row.reasoning_parser, row.tool_call_parser),
    )
    for name, chosen in (("reasoning_parser", dialects.reasoning), ("tool_call_parser", dialects.tool_calls)):
        if name in reasons:
            log.info("%s = %s: %s", name, chosen, reasons[name])
    return dialects.with_tokens(tokenizer)
