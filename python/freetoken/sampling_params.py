"""What the client asked for: validated once, immutable, the same object everywhere (torch-free)."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from freetoken.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_N = 64
MAX_GRAMMAR_BYTES = 256 << 10
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "ebnf", "lark")
# SGLang's sampling parameters that name a grammar by its text; json_schema is JSON text or an object.
_GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf")


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must match from its first token to its end.

    ``kind`` is ``json_object`` (any JSON object; ``text`` is empty), ``json_schema`` (``text`` is the schema as JSON),
    ``regex`` (Rust's syntax, anchored at both ends, its classes those of ASCII), ``ebnf`` (llama.cpp's GBNF with the rule ``root``, or Lark with the
    rule ``start``) or ``lark`` (llguidance's Lark dialect with the rule ``start``). ``param`` is the client's field, which
    errors name. With ``after`` the output is free up to and including the first token of that id, and the grammar governs
    what comes behind it (the end of thinking, say); the output cannot end before it.
    """

    kind: str
    text: str = ""
    param: str = "response_format"
    after: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise _bad(self.param, f"a grammar must be of a kind in {', '.join(GRAMMAR_KINDS)}")
        if not isinstance(self.text, str) or (self.text == "") != (self.kind == "json_object"):
            raise _bad(self.param, f"{self.param} must be a text that is not empty")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise _bad(self.param, f"{self.param} holds half a surrogate pair, which is not a character") from None
        if size > MAX_GRAMMAR_BYTES:
            raise _bad(self.param, f"{self.param} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
        _integer(self.param, self.after, 0, 2**31 - 1, optional=True)


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output begins with thoughts of at most ``tokens`` tokens: the last of them is ``end``, if it did not come before."""

    end: int
    tokens: int

    def __post_init__(self) -> None:
        _integer("thinking_budget", self.end, 0, 2**31 - 1)
        _integer("thinking_budget", self.tokens, 1, 2**31 - 1)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's sampling contract, in SGLang's names.

    ``max_new_tokens`` ``None`` means up to the context length. ``temperature`` 0 is greedy (ties go to the lower id).
    ``top_k`` -1 or 0 keeps the whole vocabulary. ``logprobs`` ``None`` returns none, 0 the chosen token's alone, k > 0
    the k most likely beside it; ``prompt_logprobs`` likewise for the prompt. ``seed`` ``None`` lets the server choose.

    ``thinking_budget`` ends thoughts that the prompt has opened, and a ``grammar`` with ``after`` begins there.
    ``grammar`` constrains the output. It decides when the output may end: below ``min_new_tokens``, and with
    ``ignore_eos``, stop tokens are left out while the grammar allows anything else.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_masks(self) -> bool:
        """Whether some tokens must not be drawn at some places."""
        return self.grammar is not None or self.thinking_budget is not None

    def __post_init__(self) -> None:
        _integer("max_new_tokens", self.max_new_tokens, 1, None, optional=True)
        _integer("min_new_tokens", self.min_new_tokens, 0, None)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _bad(
                "min_new_tokens", f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}"
            )
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _bad("top_p", "top_p must be above 0 and at most 1")
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0)
        if self.repetition_penalty == 0.0:
            raise _bad("repetition_penalty", "repetition_penalty must be above 0")
        _integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        _integer("n", self.n, 1, MAX_N)
        _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"{name} must be a boolean")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise _bad("grammar", "grammar must be a Grammar")
        if self.thinking_budget is not None and not isinstance(self.thinking_budget, ThinkingBudget):
            raise _bad("thinking_budget", "thinking_budget must be a ThinkingBudget")
        if self.thinking_budget is not None and self.thinking_budget.end in self.stop_token_ids:
            raise _bad("thinking_budget", "a token that ends the output cannot end the thoughts before it")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise _bad("stop", "stop must be a string or a list of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _bad("stop", f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        if any(s == "" for s in self.stop):
            raise _bad("stop", "stop strings must not be empty")
        if any(len(s) > MAX_STOP_STRING_CHARS for s in self.stop):
            raise _bad("stop", f"a stop string is longer than {MAX_STOP_STRING_CHARS} characters")
        if not isinstance(self.stop_token_ids, tuple):
            raise _bad("stop_token_ids", "stop_token_ids must be a list of token ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _bad("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise _bad("logit_bias", "logit_bias must map token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _bad(
                "logit_bias", f"logit_bias holds {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed"
            )
        for token, value in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", value, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise :class:`RequestError` when an id named here lies outside ``[0, vocab_size)``."""
        after = () if self.grammar is None or self.grammar.after is None else (self.grammar.after,)
        end = () if self.thinking_budget is None else (self.thinking_budget.end,)
        named = (("logit_bias", self.logit_bias or {}), ("stop_token_ids", self.stop_token_ids), ("grammar", after))
        for name, ids in (*named, ("thinking_budget", end)):
            for token in ids:
                if token >= vocab_size:
                    raise _bad(name, f"{name} names token id {token}, but the vocabulary has {vocab_size} ids")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from SGLang-style keys; lists become tuples, ``logit_bias`` keys may be decimal strings, and one of
        ``json_schema`` (JSON text or an object), ``regex`` and ``ebnf`` becomes the ``grammar``.

        Raises :class:`RequestError` naming the first unknown or bad key.
        """
        known = dict(values)
        grammar = _grammar_field(known)
        if grammar is not None:
            known["grammar"] = grammar
        for key in known:
            if key not in cls.__struct_fields__:
                raise RequestError(f"unknown sampling parameter {key!r}", param=key, code="unknown_parameter")
        stop = known.get("stop", ())
        known["stop"] = (
            ()
            if stop is None
            else (stop,)
            if isinstance(stop, str)
            else _as_tuple("stop", stop, "a string or a list of strings")
        )
        ids = known.get("stop_token_ids", ())
        known["stop_token_ids"] = () if ids is None else _as_tuple("stop_token_ids", ids, "a list of token ids")
        if known.get("logit_bias") is not None:
            known["logit_bias"] = _bias_keys(known["logit_bias"])
        return cls(**known)

    @classmethod
    def from_sglang(cls, values: dict[str, Any], defaults: dict[str, float]) -> SamplingParams:
        """As :meth:`from_dict`, over the checkpoint's ``defaults`` and with SGLang's ``return_logprob`` and
        ``top_logprobs_num`` (which become ``logprobs``).
        """
        if not isinstance(values, dict):
            raise _bad("sampling_params", "sampling_params must be an object")
        merged = {**defaults, **values}
        wanted, top = merged.pop("return_logprob", None), merged.pop("top_logprobs_num", None)
        if wanted is not None and not isinstance(wanted, bool):
            raise _bad("return_logprob", "return_logprob must be a boolean")
        _integer("top_logprobs_num", top, 0, MAX_TOP_LOGPROBS, optional=True)
        if wanted:
            merged.setdefault("logprobs", top or 0)
        return cls.from_dict(merged)

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of choice ``index`` of ``n``: one sequence, with a seed of its own where a seed was given."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else _wrap_seed(self.seed + index)
        return msgspec.structs.replace(self, n=1, seed=seed)


def _wrap_seed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _bad(param: str, message: str) -> RequestError:
    return RequestError(message, param=param)


def _as_tuple(name: str, value: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _bad(name, f"{name} must be {what}")
    return tuple(value)


def schema_text(schema: Any, param: str) -> str:
    """A JSON schema given as JSON text, or as what was read from it, as JSON text."""
    if isinstance(schema, str):
        return schema
    try:
        # Python's encoder keeps the order of keys, which is the order of a generated object's members.
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _bad(param, f"{param} must be a JSON schema") from None


def _grammar_field(values: dict[str, Any]) -> Grammar | None:
    """Take SGLang's grammar fields out of ``values``."""
    given = {name: values.pop(name) for name in _GRAMMAR_FIELDS if name in values}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return None
    if len(named) > 1 or values.get("grammar") is not None:
        other = named[1] if len(named) > 1 else "grammar"
        raise _bad(named[0], f"{named[0]} and {other} exclude each other")
    name = named[0]
    text = schema_text(given[name], name) if name == "json_schema" else given[name]
    return Grammar(kind=name, text=text, param=name)


def _bias_keys(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _bad("logit_bias", "logit_bias must map token ids to numbers")
    result: dict[int, float] = {}
    for key, number in value.items():
        if isinstance(key, str):
            if not (key.isascii() and key.isdigit()):
                raise _bad("logit_bias", f"logit_bias key {key[:40]!r} is not a token id")
            key = int(key[:20])
        result[key] = number
    return result


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, f"{name} must be a number")
    if not low <= value <= high:
        raise _bad(name, f"{name} must lie between {low:g} and {high:g}, not {value!r}"[:200])


def _integer(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and abs(value) >= 2**63 and (high is None or isinstance(value, float)):
        # As a float: how JSON readers hand on an integer that is too large.
        raise _bad(name, f"{name} is out of range: it must be between {low} and {2**63 - 1 if high is None else high}")
    if not number or isinstance(value, float):
        raise _bad(name, f"{name} must be an integer")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise _bad(name, f"{name} must be {bounds}, not {value!r}"[:200])
