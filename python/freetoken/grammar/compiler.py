"""A :class:`~freetoken.sampling_params.Grammar` compiled by llguidance, or refused with the place at fault.

The HTTP process compiles on its tokeniser threads before it sends a request, so that a bad schema is a 400 before anything
is streamed; the scheduler compiles the same text again on its own thread. Both keep what they compiled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from freetoken.errors import RequestError
from freetoken.grammar.schema import check_schema, no_panic, one_line, schema_grammar
from freetoken.sampling_params import Grammar

CACHE_GRAMMARS = 64
"""Grammars kept compiled. A service uses a handful, and each may grow to tens of megabytes of lexer states."""

CACHE_TEXT_BYTES = 4 << 20
"""Text of all kept grammars together."""


def parser_limits() -> LLParserLimits:
    """What one grammar may cost. The library counts work, not time, so that a refusal does not depend on the machine.

    Building a lexer is cut at about 20 ms, a step's mask at about 15 ms of lexing, and the lexer's states, of one to two
    kB each, at 20,000. Its errors do not quote the grammar, which may be private.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Tokenizer(Protocol):
    """What compiling needs of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]: ...
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes: ...


class _Vocabulary:
    """The library's view of a tokenizer: the bytes of every id, which ids are no text, and how text is cut into ids.

    The library asks for the last where a grammar forces the text, to keep the model's own way of spelling it.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # One id more than can be drawn: the end of the output where the model has no token for it.
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)] + [b""]
        self._special = {token for token in {*tokenizer.special_ids, *eos_ids} if token < vocab_size}
        self.special_token_ids = sorted(self._special)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id: int | None = None
        self.trie = LLTokenizer(self, eos_token=list(eos_ids))  # type: ignore[arg-type]

    def __call__(self, text: str | bytes) -> list[int]:
        given = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids = self._tokenizer.encode(given, False)
        spelled = all(0 <= token < len(self.tokens) and token not in self._special for token in ids)
        if spelled and b"".join(self.tokens[token] for token in ids) == given.encode():
            return ids
        # Special tokens written out in the text, a blank that the tokenizer puts in front, or a character it does not know.
        return self.trie.greedy_tokenize(given)


class GrammarCompiler:
    """Compiles grammars over one vocabulary and keeps the latest. Safe to use from several threads.

    ``load`` gives the tokenizer, ``vocab_size`` is the number of ids that can be drawn, ``eos_ids`` are the model's
    end-of-sequence tokens. Nothing is loaded or built before the first grammar comes.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(token for token in eos_ids if token < vocab_size)
        self.mask_words = (vocab_size + 1 + 31) // 32
        """int32 words of one token mask; bit ``i % 32`` of word ``i // 32`` is id ``i``."""
        self._load = load
        self._vocabulary: LLTokenizer | None = None
        self._building = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], LLMatcher | tuple[str, str]] = OrderedDict()
        self._text_bytes = 0

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the start of ``grammar``; copy it, never advance it.

        Raises :class:`RequestError` 400 whose ``param`` is the grammar's field, with the path into a schema behind it.
        """
        found = self._find(grammar)
        if found is None:
            found = self._build(grammar)
            self._keep((grammar.kind, grammar.text), found)
        if isinstance(found, LLMatcher):
            return found
        path, reason = found
        where = grammar.param + path
        raise RequestError(f"{where}: {reason}", param=where, code="invalid_grammar")

    def kept(self, grammar: Grammar) -> LLMatcher | None:
        """As :meth:`compile` for a grammar that is kept compiled, ``None`` for any other. Takes no time."""
        found = self._find(grammar)
        return found if isinstance(found, LLMatcher) else None

    def _find(self, grammar: Grammar) -> LLMatcher | tuple[str, str] | None:
        key = (grammar.kind, grammar.text)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: tuple[str, str], built: LLMatcher | tuple[str, str]) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = built
            self._text_bytes += len(key[1])
            while len(self._kept) > CACHE_GRAMMARS or self._text_bytes > CACHE_TEXT_BYTES:
                (_, text), _ = self._kept.popitem(last=False)
                self._text_bytes -= len(text)

    def _build(self, grammar: Grammar) -> LLMatcher | tuple[str, str]:
        """The matcher, or the path and the reason of a refusal."""
        try:
            if grammar.kind in ("json_object", "json_schema"):
                # Faults are found without a vocabulary, where a place can be named.
                fault = check_schema(grammar.text, parser_limits()) if grammar.text else None
                if fault is not None:
                    return fault
            with no_panic():
                matcher = LLMatcher(self._build_vocabulary(), _source(grammar), log_level=0, limits=parser_limits())
                if not matcher.is_error():
                    # The first mask costs most: much of what it works out stays with the grammar for all that use it.
                    matcher.compute_bitmask()
        except ValueError as error:
            return "", one_line(str(error))
        if matcher.is_error():
            return "", one_line(matcher.get_error())
        return matcher

    def _build_vocabulary(self) -> LLTokenizer:
        with self._building:
            if self._vocabulary is None:
                eos = self.eos_ids or (self.vocab_size,)
                self._vocabulary = _Vocabulary(self._load(), self.vocab_size, eos).trie
            return self._vocabulary


def _source(grammar: Grammar) -> str:
    """The library's form of a grammar; ``ValueError`` for one that cannot be read."""
    if grammar.kind in ("json_object", "json_schema"):
        return schema_grammar(grammar.text or '{"type":"object"}')
    text = grammar.text
    if grammar.kind == "regex":
        # Python's and JSON's readers disagree with Rust's about which digits and letters Unicode has.
        text = f"start: /{regex_to_lark(text, 'dws')}/"
    elif grammar.kind == "ebnf" and "::=" in text:
        text = _lark_of_gbnf(text)
    return str(LLMatcher.grammar_from_lark(text))


def _lark_of_gbnf(text: str) -> str:
    """llama.cpp's GBNF as Lark; ``ValueError`` says where it cannot be read."""
    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises whatever its parser stumbles over
        raise ValueError(f"not a grammar that can be read: {error}") from None
    return lark
