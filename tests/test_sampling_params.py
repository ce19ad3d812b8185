"""Sampling parameters: every accepted value is in its documented range, every refusal names its field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken import sampling_params as sp
from freetoken.errors import RequestError
from freetoken.sampling_params import Grammar, SamplingParams, ThinkingBudget

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
}
ABOVE_ZERO = {"top_p", "repetition_penalty"}
INTEGERS: dict[str, tuple[int, int | None, bool]] = {
    "max_new_tokens": (1, None, True),
    "min_new_tokens": (0, None, False),
    "top_k": (-1, None, False),
    "seed": (-(2**63), 2**63 - 1, True),
    "n": (1, sp.MAX_N, False),
    "logprobs": (0, sp.MAX_TOP_LOGPROBS, True),
    "prompt_logprobs": (0, sp.MAX_TOP_LOGPROBS, True),
}


def refused(**values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict(values)
    error = caught.value
    assert error.status == 400
    assert error.param in error.message
    assert len(error.message) < 400
    assert "\n" not in error.message
    return error


@pytest.mark.parametrize("name", RANGES)
@given(value=st.floats(allow_nan=True, allow_infinity=True) | st.floats(-3, 3))
def test_numbers_are_accepted_exactly_in_range(name: str, value: float) -> None:
    low, high = RANGES[name]
    if math.isfinite(value) and low <= value <= high and not (name in ABOVE_ZERO and value == 0):
        assert getattr(SamplingParams.from_dict({name: value}), name) == value
    else:
        assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", INTEGERS)
@given(value=st.integers() | st.integers(-5, 100))
def test_integers_are_accepted_exactly_in_range(name: str, value: int) -> None:
    low, high, _ = INTEGERS[name]
    if low <= value <= (2**63 - 1 if high is None else high):
        values = {name: value} | ({"max_new_tokens": value} if name == "min_new_tokens" and value else {})
        assert getattr(SamplingParams.from_dict(values), name) == value
    else:
        assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1e30, 10**30, float("inf")])
def test_integers_too_large_for_json_are_out_of_range(name: str, value: Any) -> None:
    assert "must be between" in refused(**{name: value}).message


def test_stop_says_what_it_may_be() -> None:
    assert refused(stop=5).message == "stop must be a string or a list of strings"
    assert refused(stop_token_ids="a").message == "stop_token_ids must be a list of token ids"


@pytest.mark.parametrize("name", [*RANGES, *INTEGERS])
@pytest.mark.parametrize("value", ["1", True, [1], {"a": 1}, object()])
def test_wrong_types_name_the_field(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", [*RANGES, *INTEGERS])
def test_null_only_where_it_means_something(name: str) -> None:
    optional = name in INTEGERS and INTEGERS[name][2]
    if optional:
        assert getattr(SamplingParams.from_dict({name: None}), name) is None
    else:
        assert refused(**{name: None}).param == name


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "no_stop_trim"])
@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_booleans_are_booleans(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


def test_integers_written_as_floats_are_refused() -> None:
    assert refused(max_new_tokens=3.0).param == "max_new_tokens"


def test_minimum_above_maximum() -> None:
    assert refused(min_new_tokens=5, max_new_tokens=4).param == "min_new_tokens"
    assert SamplingParams(min_new_tokens=4, max_new_tokens=4).min_new_tokens == 4


def test_stop_forms() -> None:
    assert SamplingParams.from_dict({"stop": "END"}).stop == ("END",)
    assert SamplingParams.from_dict({"stop": ["a", "b"]}).stop == ("a", "b")
    assert SamplingParams.from_dict({"stop": None}).stop == ()
    assert SamplingParams.from_dict({"stop_token_ids": [1, 2]}).stop_token_ids == (1, 2)
    assert SamplingParams.from_dict({"stop_token_ids": None}).stop_token_ids == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", ["x"] * (sp.MAX_STOP_STRINGS + 1)),
        ("stop", "x" * (sp.MAX_STOP_STRING_CHARS + 1)),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", list(range(sp.MAX_STOP_TOKEN_IDS + 1))),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", {None: 1}),
        ("logit_bias", {str(2**40): 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", dict.fromkeys(range(sp.MAX_LOGIT_BIAS + 1), 0)),
    ],
)
def test_bad_stops_and_biases(name: str, value: Any) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["x"] * sp.MAX_STOP_STRINGS),
        ("stop", "x" * sp.MAX_STOP_STRING_CHARS),
        ("stop_token_ids", list(range(sp.MAX_STOP_TOKEN_IDS))),
        ("logit_bias", dict.fromkeys(range(sp.MAX_LOGIT_BIAS), 0)),
    ],
)
def test_limits_themselves_are_allowed(name: str, value: Any) -> None:
    SamplingParams.from_dict({name: value})


def test_bias_keys_may_be_decimal_strings() -> None:
    assert SamplingParams.from_dict({"logit_bias": {"12": 1, 13: -2.5}}).logit_bias == {12: 1, 13: -2.5}


@given(st.text(min_size=1, max_size=30))
def test_unknown_keys_are_named(name: str) -> None:
    if name in SamplingParams.__struct_fields__:
        return
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({name: 1})
    assert caught.value.param == name
    assert caught.value.code == "unknown_parameter"


def test_vocabulary_bounds() -> None:
    params = SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(4,))
    params.check_vocabulary(10)
    for size, param in ((9, "logit_bias"), (4, "logit_bias")):
        with pytest.raises(RequestError) as caught:
            params.check_vocabulary(size)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop_token_ids=(4,)).check_vocabulary(4)
    assert caught.value.param == "stop_token_ids"


def test_derived_properties() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams(top_k=2).greedy
    assert not SamplingParams().needs_penalties
    for name in ("presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.1}).needs_penalties
    assert SamplingParams(repetition_penalty=1.1).needs_penalties


def test_immutable() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


def test_decoding_validates_too() -> None:
    data = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(RequestError, match="temperature"):
        msgspec.msgpack.decode(data, type=SamplingParams)


# --- grammars --------------------------------------------------------------------------------------------------------


def test_sglangs_grammar_fields_become_a_grammar() -> None:
    schema = {"z": 1, "a": [None, "é"]}
    by_object = SamplingParams.from_dict({"json_schema": schema}).grammar
    assert by_object == Grammar(kind="json_schema", text='{"z":1,"a":[null,"é"]}', param="json_schema")
    assert SamplingParams.from_dict({"json_schema": by_object.text}).grammar == by_object
    assert SamplingParams.from_dict({"regex": "a+"}).grammar == Grammar(kind="regex", text="a+", param="regex")
    assert SamplingParams.from_dict({"ebnf": "x", "regex": None, "json_schema": None}).grammar.param == "ebnf"
    assert SamplingParams.from_dict({"regex": None}).grammar is None
    one = SamplingParams.from_dict({"regex": "a", "n": 2, "seed": 1})
    assert one.for_choice(1).grammar == one.grammar
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=SamplingParams) == one


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"regex": ""}, "regex"),
        ({"regex": 5}, "regex"),
        ({"ebnf": ["a"]}, "ebnf"),
        ({"json_schema": ""}, "json_schema"),
        ({"json_schema": {"x": float("nan")}}, "json_schema"),
        ({"json_schema": {"x": "\ud800"}}, "json_schema"),
        ({"json_schema": {"x": {1}}}, "json_schema"),
        ({"regex": "x" * (sp.MAX_GRAMMAR_BYTES + 1)}, "regex"),
        ({"regex": "é" * (sp.MAX_GRAMMAR_BYTES // 2 + 1)}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "regex"),
        ({"regex": "a", "grammar": Grammar(kind="json_object")}, "regex"),
        ({"grammar": "a"}, "grammar"),
    ],
)
def test_bad_grammar_fields_are_named(values: dict[str, Any], param: str) -> None:
    assert refused(**values).param == param


def test_thinking_budgets() -> None:
    budget = ThinkingBudget(end=7, tokens=20)
    assert SamplingParams(thinking_budget=budget, n=2).for_choice(1).thinking_budget == budget
    assert SamplingParams(thinking_budget=budget).needs_masks and not SamplingParams().needs_masks
    bad: list[Any] = [{"end": -1, "tokens": 1}, {"end": 1, "tokens": 0}, {"end": 1, "tokens": True}]
    for fields in bad:
        with pytest.raises(RequestError) as caught:
            ThinkingBudget(**fields)
        assert caught.value.param == "thinking_budget"
    for sampling in ({"thinking_budget": 3}, {"thinking_budget": budget, "stop_token_ids": (7,)}):
        with pytest.raises(RequestError):
            SamplingParams(**sampling)
    with pytest.raises(RequestError):
        SamplingParams(thinking_budget=budget).check_vocabulary(7)


def test_grammars_themselves() -> None:
    for values in ({"kind": "xml", "text": "a"}, {"kind": "json_object", "text": "a"}, {"kind": "lark"}):
        with pytest.raises(RequestError):
            Grammar(**values)
    with pytest.raises(RequestError) as caught:
        SamplingParams(grammar=Grammar(kind="regex", text="a", after=99)).check_vocabulary(99)
    assert caught.value.param == "grammar"
    with pytest.raises(RequestError):
        Grammar(kind="regex", text="a", after=-1)
