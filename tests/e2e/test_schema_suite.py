"""The official JSON-Schema-Test-Suite: what is served of it, what the masks let through, and what models then write."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from make_tiny_model import make_tiny_model
from run_schemas import Tally, closers, generate_each
from schema_suite import (
    MISSING,
    REFUSED,
    SERVED,
    Case,
    installed,
    optional_cases,
    reasons,
    required_cases,
    served_schemas,
)

from freetoken import Engine
from freetoken.grammar.compiler import parser_limits
from freetoken.grammar.schema import schema_grammar

pytestmark = pytest.mark.skipif(not installed(), reason=MISSING)

BYTES = LLTokenizer("byte")

# Python's, Rust's and so the library's \s does not hold the byte order mark, ECMAScript's does.
TAKEN_ALL_THE_SAME = [(r"optional/ecmascript-regex: ECMA 262 \S matches everything but whitespace", "\ufeff")]

NOT_TAKEN = {
    "members in another order than the schema's": 3,
    "an integer with a decimal point or an exponent": 10,
    "a format that is enforced": 10,
    "a leap second": 8,
    "a rare form of an address": 8,
    "white space of ECMAScript alone": 1,
}
"""Instances that the suite calls valid and the masks keep out: a grammar may allow less than its schema, never more."""


def takes(schema: Any, value: Any) -> bool:
    """Whether the masks let ``value`` through, written as Python writes it."""
    matcher = LLMatcher(BYTES, schema_grammar(json.dumps(schema)), log_level=0, limits=parser_limits())
    text = json.dumps(value, ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def why_not(case: Case, value: Any) -> str:
    file, text = case.name.partition(":")[0], json.dumps(value)
    if file == "format":
        return "a format that is enforced"
    if ":60" in text:
        return "a leap second"
    if file in ("optional/format/email", "optional/format/ipv6"):
        return "a rare form of an address"
    if file == "optional/ecmascript-regex":
        return "white space of ECMAScript alone"
    return (
        "members in another order than the schema's"
        if "{" in text
        else "an integer with a decimal point or an exponent"
    )


def test_what_is_refused() -> None:
    """Every refusal has a reason that is known, and as many schemas are served as ever."""
    faults = [fault for case in required_cases() if (fault := case.fault()) is not None]
    assert Counter(reason for fault in faults for reason in reasons(fault)) == REFUSED
    assert len(served_schemas()) == SERVED == len(required_cases()) - len(faults)


def test_instances_of_the_suite() -> None:
    """No instance that the suite calls invalid gets through the masks; valid ones do, but for known ones."""
    wrong, missing = [], Counter[str]()
    for case in (*required_cases(), *optional_cases()):
        if case.fault() is not None:
            continue
        for value, valid in case.instances:
            taken = takes(case.schema, value)
            if taken and not valid:
                wrong.append((case.name, value))
            elif valid and not taken:
                missing[why_not(case, value)] += 1
    assert wrong == TAKEN_ALL_THE_SAME
    assert missing == NOT_TAKEN


def check(tallies: dict[str, Tally], outputs: int) -> None:
    """All outputs are valid; a limit of tokens may have cut a few, which are none."""
    assert {name: tally.wrong for name, tally in tallies.items() if tally.wrong} == {}
    assert sum(tally.valid + tally.cut for tally in tallies.values()) == outputs
    assert sum(tally.valid for tally in tallies.values()) > 0.9 * outputs


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_tiny_model(tmp_path_factory.mktemp("suite") / "tiny", seed=33, max_position_embeddings=2048)
    with Engine(folder, device="cpu", max_running_requests=32) as engine:
        yield engine


def test_every_schema_holds_at_temperature_one(engine: Engine) -> None:
    schemas = served_schemas()
    check(generate_each(engine, schemas, {name: [n] for n, name in enumerate(schemas)}, closers(engine)), len(schemas))


@pytest.mark.slow
def test_schemas_hold_with_smollm2() -> None:
    chosen = dict(list(served_schemas().items())[4::29])
    with Engine(device="cpu", max_running_requests=8, max_total_tokens=8192) as engine:
        sampling = {**closers(engine), "frequency_penalty": 0.2}
        check(generate_each(engine, chosen, {name: [7] for name in chosen}, sampling), len(chosen))
