"""Structured output in the scheduler: masks, ends, retraction and aborts, with overlap and without."""

from __future__ import annotations

import json
import threading
from typing import Any
from unittest import mock

import pytest
from fake_runner import COMPILER, EOS, TEXT, VOCAB, CharTokenizer, Harness, make_compiler, make_config, open_ids

from freetoken.errors import RequestError
from freetoken.grammar import compiler as compiling
from freetoken.grammar import schema
from freetoken.grammar.compiler import GrammarCompiler
from freetoken.messages import AddRequest
from freetoken.sampling_params import Grammar, SamplingParams, ThinkingBudget
from freetoken.scheduler import grammar as grammars
from freetoken.scheduler.grammar import Grammars
from freetoken.scheduler.request import Req, Status

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PERSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA), param="p")


def regex(text: str, after: int | None = None) -> Grammar:
    return Grammar(kind="regex", text=text, param="regex", after=after)


def text_of(ids: list[int]) -> str:
    return "".join(TEXT[token] for token in ids if token != EOS)


def ids_of(text: str) -> list[int]:
    return CharTokenizer().encode(text, False)


def running(grammar: Grammar, compiler: GrammarCompiler = COMPILER, **sampling: Any) -> tuple[Grammars, Req]:
    """A request as the scheduler has it while it runs."""
    compiler.compile(grammar)
    keeper = Grammars(compiler)
    params = SamplingParams(grammar=grammar, **sampling)
    stops = frozenset((*(() if params.ignore_eos else compiler.eos_ids), *params.stop_token_ids))
    req = Req("r", [1], 1, params, 100, stops, 0, status=Status.RUNNING)
    keeper.attach(req)
    assert keeper.ready(req)
    return keeper, req


def allowed(keeper: Grammars, req: Req, index: int = 0) -> set[str]:
    masks, ended = keeper.fill([req], [index])
    assert ended == []
    return {"<end>" if token == EOS else TEXT[token] for token in open_ids(masks[0])}


def take(keeper: Grammars, req: Req, text: str) -> None:
    for token in ids_of(text):
        assert keeper.finish(req, token) is None


# --- one request -----------------------------------------------------------------------------------------------------


def test_masks_follow_the_output() -> None:
    keeper, req = running(regex("ab[cd]e?"))
    assert allowed(keeper, req) == {"a"}
    take(keeper, req, "ab")
    assert allowed(keeper, req) == {"c", "d"}
    take(keeper, req, "d")
    assert allowed(keeper, req) == {"e", "<end>"}
    finish = keeper.finish(req, ids_of("e")[0])
    assert finish is not None and (finish.kind, finish.matched) == ("stop", None)


def test_the_end_token_ends() -> None:
    keeper, req = running(regex("a+"))
    take(keeper, req, "aa")
    finish = keeper.finish(req, EOS)
    assert finish is not None and (finish.kind, finish.matched) == ("stop", EOS)


def test_ignore_eos_goes_on_while_it_can() -> None:
    keeper, req = running(regex("a{1,2}"), ignore_eos=True)
    take(keeper, req, "a")
    assert allowed(keeper, req) == {"a"}
    finish = keeper.finish(req, ids_of("a")[0])
    assert finish is not None and finish.kind == "stop"


def test_minimum_length_and_stop_tokens() -> None:
    b = ids_of("b")[0]
    keeper, req = running(regex("[ab]{1,9}"), min_new_tokens=3, stop_token_ids=(b,))
    assert allowed(keeper, req, 0) == {"a"}
    take(keeper, req, "aa")
    assert allowed(keeper, req, 2) == {"a"}
    take(keeper, req, "a")
    assert allowed(keeper, req, 3) == {"a", "b", "<end>"}
    finish = keeper.finish(req, b)
    assert finish is not None and (finish.kind, finish.matched) == ("stop", b)


def test_the_grammar_wins_over_the_minimum_length() -> None:
    b = ids_of("b")[0]
    keeper, req = running(regex("ab"), min_new_tokens=5, stop_token_ids=(b,))
    take(keeper, req, "a")
    assert allowed(keeper, req, 1) == {"b"}


def test_free_until_a_token_has_come() -> None:
    dot = ids_of(".")[0]
    keeper, req = running(regex("a?b", after=dot), stop_token_ids=(ids_of("c")[0],))
    everything = set(TEXT) - {"\0", "c"}
    assert allowed(keeper, req) == everything
    take(keeper, req, "hello")
    assert allowed(keeper, req) == everything
    take(keeper, req, ".")
    assert allowed(keeper, req) == {"a", "b"}


@pytest.mark.parametrize("eos", [(), (EOS, 9)])
def test_models_with_no_end_token_and_with_two(eos: tuple[int, ...]) -> None:
    keeper, req = running(regex("ab?"), make_compiler(eos))
    take(keeper, req, "a")
    masks, ended = keeper.fill([req], [1])
    assert set(open_ids(masks[0])) == {*ids_of("b"), *eos} and ended == []


def test_nothing_but_an_end_that_cannot_be_drawn_ends_the_request() -> None:
    keeper, req = running(regex("()"), make_compiler(()))
    masks, ended = keeper.fill([req], [0])
    assert [(r, f.kind) for r, f in ended] == [(req, "stop")]
    assert len(open_ids(masks[0])) == VOCAB


def test_a_token_out_of_the_grammar_is_an_error() -> None:
    keeper, req = running(regex("ab"))
    finish = keeper.finish(req, ids_of("z")[0])
    assert finish is not None
    assert (finish.kind, finish.status, finish.code, finish.param) == ("error", 400, "grammar_failed", "regex")
    assert "\n" not in (finish.message or "")


def test_masks_that_cannot_be_made_end_one_request_alone() -> None:
    keeper, broken = running(regex("ab"))
    broken.constraint.matcher.consume_token(ids_of("z")[0])  # type: ignore[union-attr]
    other = running(regex("cd"))[1]
    masks, ended = keeper.fill([broken, other], [0, 0])
    assert [(r, f.code) for r, f in ended] == [(broken, "grammar_failed")]
    assert open_ids(masks[1]) == ids_of("c")


@pytest.mark.parametrize("threads", [1, 3])
def test_many_masks_at_once_are_those_of_each_alone(threads: int) -> None:
    texts = ["a+b", "[a-f]{3}", "x", "(yes|no)", "[0-9]+"]
    pairs = [running(regex(text)) for text in texts]
    alone = [open_ids(keeper.fill([req], [0])[0][0]) for keeper, req in pairs]
    ended = running(regex("a"))[1]
    ended.status = Status.FINISHED
    pairs[0][0]._fill_threads = threads
    masks, _ = pairs[0][0].fill([*(req for _, req in pairs), ended], [0] * 6)
    assert [open_ids(mask) for mask in masks] == [*alone, list(range(VOCAB))]


def whole(grammar: Grammar, text: str) -> bool:
    """Whether ``text`` is a whole sentence of a grammar."""
    matcher = COMPILER.compile(grammar).deep_copy()
    ids = ids_of(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (r"\d{2}-\w+", "12-a_9", "1a-b"),
        ("^ab$", "ab", "xab"),
        (r"a\.b", "a.b", "axb"),
        ('[{}"]+', '{"}', "{a}"),
        (r"[^\d]x?", "ax", "1x"),
    ],
)
def test_expressions_match_from_end_to_end(text: str, inside: str, outside: str) -> None:
    assert whole(regex(text), inside) and not whole(regex(text), outside)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ('root ::= "a" [0-9]{2,3} | b\nb ::= ("x" | "y")+ "."?', "xyx.", "xa"),
        ('root ::= "a" [0-9]{2,3} | b\nb ::= ("x" | "y")+ "."?', "a123", "a1"),
        ('root ::= item ("," item)* # a list\nitem ::= [^,]+\n', "a,bc,d", "a,,b"),
        ('root ::= "[" root "]" | "e"', "[[e]]", "[[e]"),
        ('start: A ("," A)*\nA: /x+/', "x,xxx", "x,"),
    ],
)
def test_gbnf_and_lark(text: str, inside: str, outside: str) -> None:
    grammar = Grammar(kind="ebnf", text=text, param="ebnf")
    assert whole(grammar, inside) and not whole(grammar, outside)


class SpecialTokenizer(CharTokenizer):
    """Reads the end token where its name is written out."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        before, found, behind = text.partition("[end]")
        ids = super().encode(before, add_special_tokens)
        return [*ids, EOS, *self.encode(behind, add_special_tokens)] if found else ids

    def token_bytes(self, token: int) -> bytes:
        return b"[end]" if token == EOS else super().token_bytes(token)


class BlankTokenizer(CharTokenizer):
    """Puts a blank in front of every text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return super().encode(" " + text, add_special_tokens)


@pytest.mark.parametrize("kind", [CharTokenizer, SpecialTokenizer, BlankTokenizer])
@pytest.mark.parametrize("text", ["ab[end]cd", "[end]", "plain text"])
def test_text_that_is_forced_is_spelled_in_characters(kind: type[CharTokenizer], text: str) -> None:
    pattern = text.replace("[", r"\[").replace("]", r"\]")
    keeper, req = running(regex(pattern), GrammarCompiler(kind, VOCAB, (EOS,)))
    for at, character in enumerate(text):
        assert allowed(keeper, req) == {character}
        finish = keeper.finish(req, ids_of(character)[0])
        assert (finish is not None) == (at == len(text) - 1)
    assert finish is not None and finish.matched is None


# --- compiling -------------------------------------------------------------------------------------------------------


def test_the_cache_is_bounded_and_keeps_the_latest() -> None:
    compiler = make_compiler()
    with mock.patch.object(compiling, "CACHE_GRAMMARS", 3):
        for letter in "abcda":
            compiler.compile(regex(letter))
            compiler.kept(regex("a"))
        assert [letter for letter in "abcd" if compiler.kept(regex(letter))] == ["a", "c", "d"]
    with mock.patch.object(compiling, "CACHE_TEXT_BYTES", 31):
        compiler.compile(regex("x" * 30))
        assert [text for text in ("a", "c", "d", "x" * 30) if compiler.kept(regex(text))] == ["d", "x" * 30]


def test_kept_refusals_name_the_field_of_each_request() -> None:
    compiler = make_compiler()
    for name in ("one", "two"):
        with pytest.raises(RequestError) as caught:
            compiler.compile(Grammar(kind="json_schema", text='{"properties": {"q": {"type": "x"}}}', param=name))
        assert caught.value.param == f"{name}.properties.q.type" and caught.value.status == 400
    assert compiler.kept(Grammar(kind="json_schema", text='{"properties": {"q": {"type": "x"}}}')) is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_waits_for_its_grammar_and_lets_others_pass(overlap: bool) -> None:
    gate = threading.Event()
    compiler = make_compiler()
    build = compiler._build

    def slow(grammar: Grammar) -> Any:
        assert gate.wait(20)
        return build(grammar)

    compiler._build = slow  # type: ignore[method-assign]
    h = Harness(make_config(overlap=overlap))
    h.scheduler.grammars = Grammars(compiler)
    h.add("slow", [1, 2], grammar=PERSON, max_new_tokens=60)
    h.add("fast", [3, 4], max_new_tokens=5)
    for _ in range(12):
        h.step()
    assert h.finish("fast") is not None and "slow" not in h.outputs and h.scheduler.has_work
    gate.set()
    h.run()
    h.check_text("slow")


def test_a_bad_grammar_gets_one_error_and_others_go_on() -> None:
    h = Harness(make_config())
    h.add("bad", [1, 2], grammar=regex("(a"), max_new_tokens=5)
    h.add("good", [1, 2], grammar=regex("[a-c]{4}"), max_new_tokens=5)
    h.run()
    finish = h.finish("bad")
    assert (finish.kind, finish.status, finish.code, finish.param) == ("error", 400, "invalid_grammar", "regex")
    h.check_text("good")


def test_waiting_for_a_grammar_ends() -> None:
    gate = threading.Event()
    compiler = make_compiler()
    compiler._build = lambda grammar: gate.wait(20)  # type: ignore[assignment, return-value, method-assign]
    now = [0.0]
    h = Harness(make_config(), clock=lambda: now[0])
    h.scheduler.grammars = Grammars(compiler, lambda: now[0])
    h.add("r", [1], grammar=PERSON)
    h.step()
    now[0] = grammars.COMPILE_SECONDS + 1
    h.step()
    gate.set()
    assert (h.finish("r").status, h.finish("r").code) == (503, "grammar_timeout")
    assert not h.scheduler.has_work


def test_without_grammars_a_request_for_one_is_refused() -> None:
    h = Harness(make_config())
    h.scheduler.grammars = None
    h.add("r", [1], grammar=PERSON)
    h.run()
    assert (h.finish("r").kind, h.finish("r").param) == ("error", "p")


# --- the step loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocks", [None, 8])
def test_texts_are_those_of_each_alone(overlap: bool, blocks: int | None) -> None:
    h = Harness(make_config(overlap=overlap, chunked_prefill_size=8), state_blocks=blocks)
    stem = [(3 * i) % VOCAB for i in range(20)]
    given = [PERSON, regex("[a-z]{2,9}"), None, regex("(ab|cd)+e", after=ids_of(".")[0]), PERSON, None]
    for i, grammar in enumerate(given):
        h.add(f"r{i}", [*stem, i], seed=i, grammar=grammar, max_new_tokens=40, ignore_eos=i == 5)
    h.run()
    for i, grammar in enumerate(given):
        h.check_text(f"r{i}")
        if grammar is PERSON:
            value = json.loads(text_of(h.ids(f"r{i}")))
            assert isinstance(value["a"], int) and value["b"] in ("x", "y")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [64, 9])
def test_thoughts_end_at_their_budget(overlap: bool, pages: int) -> None:
    """With a grammar behind them and without, beside requests that have no budget, and through retractions."""
    h = Harness(make_config(overlap=overlap), num_pages=pages)
    dot = ids_of(".")[0]
    for i in range(8):
        grammar = regex("[a-f]{3,5}", after=dot) if i % 2 else None
        budget = ThinkingBudget(end=dot, tokens=1 + 3 * i) if i != 4 else None
        limit = {} if i % 2 else {"ignore_eos": True}
        h.add(f"r{i}", [i + 1] * 5, seed=i, grammar=grammar, thinking_budget=budget, max_new_tokens=30, **limit)
    h.run()
    assert (h.scheduler.stats().retractions > 0) == (pages == 9)
    for i in range(8):
        h.check_text(f"r{i}")
        if i != 4:
            assert dot in h.ids(f"r{i}")[: 1 + 3 * i]
        if i % 2:
            assert h.finish(f"r{i}").kind == "stop"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_budget_costs_one_masked_step(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap))
    draws: list[int] = []
    draw = h.runner.draw
    h.runner.draw = lambda handle, masks: (draws.append(handle), draw(handle, masks))  # type: ignore[method-assign]
    h.add("r", [1, 2, 3], thinking_budget=ThinkingBudget(end=ids_of(".")[0], tokens=6), max_new_tokens=20)
    h.run()
    assert len(draws) == 1
    h.check_text("r")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_retracted_request_goes_on_where_it_was(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap, page_size=1), num_pages=41)
    for i in range(3):
        h.add(f"r{i}", [i + 1] * 4, seed=i, grammar=regex("[a-f]{25}"), max_new_tokens=30)
    h.run()
    assert h.scheduler.stats().retractions > 0
    for i in range(3):
        h.check_text(f"r{i}")
        assert h.finish(f"r{i}").kind == "stop" and len(h.ids(f"r{i}")) == 25


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_at_every_step(overlap: bool) -> None:
    for at in range(8):
        h = Harness(make_config(overlap=overlap))
        for i in range(3):
            h.add(f"r{i}", [1, 2, 3], seed=i, grammar=regex("[a-f]{9}") if i else None, max_new_tokens=20)
        for _ in range(at):
            h.step()
        h.scheduler.abort("r1")
        h.run()
        for i in range(3):
            h.check_text(f"r{i}")


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request_whose_mask_fails_does_not_stop_the_others(overlap: bool) -> None:
    h = Harness(make_config(overlap=overlap))
    for i in range(3):
        h.add(f"r{i}", [1, 2, 3], seed=i, grammar=regex("[a-f]{9}"), max_new_tokens=20)
    h.step()
    h.step()
    matcher = h.scheduler.live["r1"].constraint.matcher  # type: ignore[union-attr]
    assert not matcher.consume_token(ids_of("z")[0])
    h.run()
    assert h.finish("r1").code == "grammar_failed"
    for i in (0, 2):
        h.check_text(f"r{i}")


def test_a_constrained_step_is_launched_before_the_one_before_is_waited_for() -> None:
    h = Harness(make_config(overlap=True))
    seen: list[str] = []
    for name in ("launch", "collect", "draw"):
        call = getattr(h.runner, name)
        setattr(h.runner, name, lambda *a, name=name, call=call: (seen.append(name), call(*a))[1])
    h.add("r", [1, 2, 3], grammar=regex("[a-f]{4}"), max_new_tokens=9)
    h.run()
    assert seen == ["launch", "draw"] + ["launch", "collect", "draw"] * 4 + ["collect"]
    h.check_text("r")


def test_the_sender_may_name_a_token_outside_the_vocabulary() -> None:
    h = Harness(make_config())
    h.scheduler.add(AddRequest("r", [1], SamplingParams(grammar=regex("a", after=VOCAB))))
    h.run()
    assert h.outputs["r"][0].finish is not None and h.outputs["r"][0].finish.param == "grammar"


PANIC = type("PanicException", (BaseException,), {})("no entry\nat line 3")


@pytest.mark.parametrize(("fault", "status"), [(RuntimeError("lost"), 500), (PANIC, 400)])
def test_faults_while_compiling_end_one_request(
    fault: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "regex_to_lark", mock.Mock(side_effect=fault))
    h = Harness(make_config())
    h.scheduler.grammars = Grammars(make_compiler())
    h.add("bad", [1], grammar=regex("a"))
    h.add("good", [1], max_new_tokens=4)
    h.run()
    assert (h.finish("bad").kind, h.finish("bad").status, h.finish("bad").param) == ("error", status, "regex")
    h.check_text("good")


def test_a_panic_over_a_schema_is_a_refusal_and_an_interrupt_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    library = mock.Mock(validate_grammar_with_warnings=mock.Mock(side_effect=PANIC))
    monkeypatch.setattr(schema, "LLMatcher", library)
    path, reason = schema.check_schema('{"type": "object"}', compiling.parser_limits()) or ("", "")
    assert (path, reason) == ("", "the grammar library failed: no entry")
    library.validate_grammar_with_warnings.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        schema.check_schema("{}", compiling.parser_limits())
