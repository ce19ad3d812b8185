"""Generate from every schema at temperature 1 with many seeds, and validate what comes out.

``python tests/e2e/run_schemas.py --seeds 200 [--model PATH]`` prints a line a schema and exits 1 if any output is not valid;
without a model it is the embedded SmolLM2. ``--share`` gives each schema only its part of the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from schema_cases import SCHEMAS

from freetoken import Engine

MAX_NEW_TOKENS = 400


@dataclass
class Tally:
    """Outputs of one schema: how many are valid, how many the limit of tokens cut, the texts that are wrong, and all."""

    valid: int = 0
    cut: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """Whether ``text`` is JSON that ``schema`` allows, formats included."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    checker = jsonschema.FormatChecker()
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value))


def generate(engine: Engine, schema: dict[str, Any], seeds: Sequence[int], **sampling: Any) -> Tally:
    """One output for each seed, all in one batch."""
    wishes = [
        {"json_schema": schema, "temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS, "seed": seed, **sampling}
        for seed in seeds
    ]
    prompt = f"JSON for the schema {json.dumps(schema)}:\n"
    tally = Tally()
    for answer in engine.generate([prompt] * len(wishes), wishes):
        assert isinstance(answer, dict)
        text, finish = answer["text"], answer["meta_info"]["finish_reason"]
        tally.tokens += answer["meta_info"]["completion_tokens"]
        tally.texts.add(text)
        # Names of properties have no bound in a schema, so that a model may spend all its tokens on one.
        tally.cut += finish["type"] == "length"
        if finish["type"] == "stop" and is_valid(schema, text):
            tally.valid += 1
        elif finish["type"] != "length":
            tally.wrong.append(f"{finish['type']}: {text}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--share", action="store_true", help="divide the seeds among the schemas")
    args = parser.parse_args()
    failed = outputs = cut = 0
    started = time.monotonic()
    with Engine(args.model, max_running_requests=32) as engine:
        for number, (name, schema) in enumerate(SCHEMAS.items()):
            seeds = range(number, args.seeds, len(SCHEMAS)) if args.share else range(args.seeds)
            tally = generate(engine, schema, seeds)
            failed += len(tally.wrong)
            outputs += len(seeds)
            cut += tally.cut
            print(
                f"{name}: {tally.valid} of {len(seeds)} valid, {tally.cut} cut by the limit, {len(tally.texts)} different, "
                f"{tally.tokens} tokens",
                flush=True,
            )
            for text in tally.wrong[:3]:
                print(f"    {text[:300]!r}")
    print(
        f"{outputs - failed - cut} of {outputs} valid, {cut} cut, {failed} wrong in {time.monotonic() - started:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
