"""Structured output through the real scheduler, runner and sampler: every way to serve, and with every other wish."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import make_tiny_model
from rig import Answer, Rig
from run_schemas import generate, is_valid
from schema_cases import REFUSED, SCHEMAS, closed
from ways import WAYS, random_prompts

from freetoken import Engine
from freetoken.errors import RequestError
from freetoken.loader.demo import demo_model_path
from freetoken.sampling_params import Grammar
from freetoken.scheduler import policy

REGEX = r"([A-Z][a-z]{1,4} ){3,6}\."
PERSON = closed("name", "tags", name={"type": "string", "maxLength": 8}, tags={"type": "array", "maxItems": 3})
PERSON["properties"]["tags"]["items"] = {"enum": ["a", "bb", 3]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("structured") / "tiny", seed=33)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, device="cpu", page_size=4, max_total_tokens=4096, random_seed=1) as engine:
        yield engine


def refused(call: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.status == 400 and "\n" not in str(caught.value)
    return caught.value


# --- ways to serve ---------------------------------------------------------------------------------------------------

WISHES: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"regex": REGEX, "logprobs": 2},
    {},
    {"json_schema": PERSON, "top_k": 5, "top_p": 0.9, "presence_penalty": 1.0},
    {"regex": REGEX, "min_new_tokens": 12, "ignore_eos": True},
    {"json_schema": PERSON, "temperature": 0.0, "prompt_logprobs": 0},
]


def serve(path: Path, every: int, **options: Any) -> tuple[Rig, list[Answer]]:
    rig = Rig(path, **options)
    answers = []
    for index, prompt in enumerate(random_prompts(12, longest=30)):
        wish = {"temperature": 1.0, "seed": index, "ignore_eos": False, "max_new_tokens": 150}
        if not WISHES[index % 6]:
            wish |= {"max_new_tokens": 24, "ignore_eos": True}
        answers.append(rig.add(prompt, **{**wish, **WISHES[index % 6]}))
        for _ in range(every):
            rig.step()
    rig.run()
    return rig, answers


def check(rig: Rig, answers: list[Answer]) -> None:
    for index, answer in enumerate(answers):
        wish = WISHES[index % 6]
        text = rig.tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert answer.finish is not None
        assert answer.finish.kind == ("stop" if wish else "length"), (index, text)
        if "json_schema" in wish:
            assert is_valid(PERSON, text), (index, text)
        elif wish:
            assert re.fullmatch(REGEX, text), (index, text)
        if "logprobs" in wish:
            assert [entry.id for entry in answer.logprobs or []] == answer.ids


CHOSEN = (
    "one batch",
    "longest prefix first",
    "overlap, chunks of 7",
    "overlap, retraction",
    "graphs, overlap",
    "graphs, overlap, retraction",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_outputs_match_in_every_way_of_serving(
    folder: Path, name: str, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    way = WAYS[name]
    if "retraction" in name:
        # Admits by the prompts alone, so that memory runs out under the outputs.
        monkeypatch.setattr(policy, "RATIO_START", 0.0)
        monkeypatch.setattr(policy, "RATIO_FLOOR", 0.0)
    rig, answers = serve(folder, way.every, **way.options)
    if "retraction" in name:
        assert rig.retractions > 0
    check(rig, answers)
    # A draw may turn on the last bit of a sum, which depends on the batch.
    assert sum(answer.ids != ids for answer, ids in zip(answers, plain)) <= 1


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return [answer.ids for answer in serve(folder, 2)[1]]


# --- schemas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_hold_at_temperature_one(engine: Engine, name: str) -> None:
    tally = generate(engine, SCHEMAS[name], range(2))
    assert tally.wrong == [] and tally.valid > 0


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_that_are_not_served_name_the_place(engine: Engine, name: str) -> None:
    schema, path = REFUSED[name]
    error = refused(lambda: engine.generate("a", {"json_schema": schema}))
    assert (error.param, error.code) == ("json_schema" + path, "invalid_grammar")
    assert error.message.startswith(error.param + ": ")


@pytest.mark.slow
def test_schemas_hold_with_smollm2() -> None:
    with Engine(demo_model_path(), device="cpu", max_total_tokens=4096) as engine:
        tally = generate(engine, SCHEMAS["one of apart"], range(3))
        assert tally.wrong == [] and tally.valid > 0


# --- other grammars --------------------------------------------------------------------------------------------------


def test_json_object_regex_gbnf_and_lark(engine: Engine) -> None:
    cases = [
        ({"regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"ebnf": 'root ::= greeting " " [a-z]{2,5}\ngreeting ::= "hi" | "yo"'}, "(hi|yo) [a-z]{2,5}"),
        ({"ebnf": 'start: A "," A\nA: /x+[01]/'}, "x+[01],x+[01]"),
        ({"grammar": Grammar(kind="lark", text='start: "<call>" %json {"const": 5} "</call>"')}, "<call>5</call>"),
    ]
    for wish, expected in cases:
        for answer in engine.generate(["a", "b"], {**wish, "max_new_tokens": 200}):
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            assert re.fullmatch(expected, answer["text"]), answer["text"]
    wish = {"grammar": Grammar(kind="json_object"), "max_new_tokens": 60, "n": 4}
    for answer in engine.generate("a", wish):
        assert answer["text"].startswith("{")
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert isinstance(json.loads(answer["text"]), dict)


def test_special_tokens_written_out_in_a_grammar_are_text(engine: Engine) -> None:
    end = engine.tokenizer.eos_token
    assert end and engine.tokenizer.token_id(end) in engine.config.model.eos_token_ids
    answer = engine.generate("a", {"json_schema": {"const": f"x{end}y"}, "max_new_tokens": 60})
    assert json.loads(answer["text"]) == f"x{end}y"
    assert not set(answer["output_ids"][:-1]) & set(engine.config.model.eos_token_ids)


@pytest.mark.parametrize(
    ("field", "text"),
    [("regex", "(a"), ("regex", "a(?=b)"), ("ebnf", "root ::= ("), ("ebnf", "start: nothing"), ("regex", "")],
)
def test_bad_grammars_name_their_field(engine: Engine, field: str, text: str) -> None:
    assert refused(lambda: engine.generate("a", {field: text})).param == field


def test_two_grammars_exclude_each_other(engine: Engine) -> None:
    refused(lambda: engine.generate("a", {"regex": "a", "ebnf": 'root ::= "a"'}))


def test_a_grammar_after_a_token(engine: Engine) -> None:
    dot = engine.tokenizer.encode(".", add_special_tokens=False)[0]
    wish = {
        "grammar": Grammar(kind="regex", text="[0-9]{4}", after=dot),
        "max_new_tokens": 3000,
        "logit_bias": {dot: 6},
    }
    (answer,) = engine.generate(["a"], wish)
    rest = answer["text"].partition(".")[2]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert re.fullmatch("[0-9]{4}", rest) and engine.config.model.eos_token_ids[0] not in answer["output_ids"]


# --- together with what else a request may ask --------------------------------------------------------------------------


def test_streamed_pieces_are_those_of_the_whole(engine: Engine) -> None:
    wish = {"json_schema": PERSON, "seed": 4, "max_new_tokens": 200}
    whole = engine.generate("a", wish)
    pieces = list(engine.generate("a", wish, stream=True))
    assert isinstance(whole, dict) and pieces[-1]["text"] == whole["text"] and len(pieces) > 5
    assert is_valid(PERSON, whole["text"])


def test_choices_of_one_prompt_each_follow_the_grammar(engine: Engine) -> None:
    answers = engine.generate("the same prompt", {"json_schema": PERSON, "n": 6, "seed": 1, "max_new_tokens": 200})
    assert len({answer["text"] for answer in answers}) > 3
    assert all(is_valid(PERSON, answer["text"]) for answer in answers)


def test_stop_strings_and_limits_cut_the_output(engine: Engine) -> None:
    cut = engine.generate("a", {"regex": "[a-f]{30}STOP[a-f]{30}", "stop": ["STOP"], "max_new_tokens": 99})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP"} and len(cut["text"]) == 30
    short = engine.generate("a", {"regex": "[a-f]{30}", "max_new_tokens": 3})
    assert short["meta_info"]["finish_reason"]["type"] == "length"


def test_end_tokens_come_where_the_grammar_allows_them(engine: Engine) -> None:
    end = engine.config.model.eos_token_ids[0]
    eager = {"logit_bias": {end: 100}, "max_new_tokens": 40}
    answer = engine.generate("a", {**eager, "regex": "[a-f]{6,9}"})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert re.fullmatch("[a-f]{6,9}", answer["text"]) and answer["output_ids"][-1] == end
    longer = engine.generate("a", {**eager, "regex": "[a-f]{6,90}", "min_new_tokens": 20})
    assert len(longer["output_ids"]) > 20
    onwards = engine.generate("a", {**eager, "regex": "[a-f]{6,12}", "ignore_eos": True})
    assert len(onwards["text"]) == 12 and end not in onwards["output_ids"]


def test_greedy_and_penalties_stay_within(engine: Engine) -> None:
    for wish in ({"temperature": 0}, {"repetition_penalty": 3.0, "temperature": 0}, {"frequency_penalty": 2.0}):
        answer = engine.generate("a", {"regex": "(ab|cd){4,6}", "max_new_tokens": 60, **wish})
        assert re.fullmatch("(ab|cd){4,6}", answer["text"])


def test_a_cached_prefix_and_a_grammar(engine: Engine) -> None:
    prompt = "A prompt long enough to fill a few pages of the cache, so that it is found again. " * 2
    first = engine.generate(prompt, {"regex": REGEX, "seed": 9, "max_new_tokens": 90})
    again = engine.generate(prompt, {"regex": REGEX, "seed": 9, "max_new_tokens": 90})
    assert again["meta_info"]["cached_tokens"] > first["meta_info"]["cached_tokens"]
    assert again["text"] == first["text"] and re.fullmatch(REGEX, again["text"])


def test_dropping_a_stream_frees_everything(engine: Engine) -> None:
    stream = engine.generate(["a"] * 3, {"json_schema": PERSON, "max_new_tokens": 200}, stream=True)
    next(stream)
    stream.close()
    while engine._scheduler.has_work:
        engine._scheduler.step()
    engine._scheduler.check()


def test_priorities_of_the_engine(folder: Path, engine: Engine) -> None:
    assert refused(lambda: engine.generate("a", {"max_new_tokens": 1}, priority=1)).param == "priority"
    assert refused(lambda: engine.generate("a", priority="high")).param == "priority"
    flags = {"device": "cpu", "max_total_tokens": 512, "max_running_requests": 1, "enable_priority_scheduling": True}
    with Engine(folder, **flags) as ranked:
        low = ranked.generate("a", {"regex": "[a-f]{30}", "max_new_tokens": 60, "seed": 1}, stream=True)
        next(low)
        high = ranked.generate("b", {"regex": "[a-f]{5}", "max_new_tokens": 60}, priority=1)
        assert ranked._scheduler.stats().retractions == 1 and len(high["text"]) == 5
        *_, last = low
        assert len(last["text"]) == 30
