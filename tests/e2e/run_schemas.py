"""Generate from every schema at temperature 1 with many seeds, and validate what comes out.

    python tests/e2e/run_schemas.py --seeds 200
    python tests/e2e/run_schemas.py --suite --model tiny --seeds 200 --output FIGURES.jsonl

prints a line a schema and exits 1 if any output is not valid. The schemas are our own or, with ``--suite``, those of the official
JSON-Schema-Test-Suite that are served. ``--model`` is a path, ``tiny`` (a random Qwen3 made on the spot), ``tiny-real`` (the same with
the published Qwen3.5 vocabulary); without it, it is the embedded SmolLM2. ``--share`` divides the seeds among the schemas.

Most schemas of the suite do not bound their strings, lists and objects, and a random model ends them as rarely as it draws
any other token. ``--closers 0.05`` gives the tokens of closing marks and those that end the output a logit bias, by which
each kind is a twentieth of a flat distribution. A trained model may repeat a digit for ever; ``--frequency-penalty 0.2`` ends
that. Both move odds only: what may be drawn at all is up to the masks alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / folder) for folder in ("python", "tests", "scripts")]

from make_tiny_model import make_tiny_model  # noqa: E402
from real_vocabulary import make_real_qwen_folder  # noqa: E402
from schema_cases import SCHEMAS  # noqa: E402
from schema_judge import is_valid  # noqa: E402
from schema_suite import MISSING, installed, required_cases, served_schemas  # noqa: E402

from freetoken import Engine  # noqa: E402
from freetoken.bench import figures  # noqa: E402

MAX_NEW_TOKENS = 400
CLOSING = b'"]}'
PROMPT = "<|im_start|>user\nWrite JSON for the schema {}<|im_end|>\n<|im_start|>assistant\n"
AT_ONCE = 1024
"""Outputs of one call at least: towards the end of a call few are left to run side by side."""

LABELS = {
    None: "SmolLM2-135M-Instruct",
    "tiny": "tiny random Qwen3",
    "tiny-real": "tiny random Qwen3 with the Qwen3.5 vocabulary",
}


@dataclass
class Tally:
    """Outputs of one schema: how many are valid, how many the limit of tokens cut, the texts that are wrong, and all."""

    valid: int = 0
    cut: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    def add(self, schema: Any, answer: Mapping[str, Any]) -> None:
        """Count one output."""
        text, finish = answer["text"], answer["meta_info"]["finish_reason"]
        self.tokens += answer["meta_info"]["completion_tokens"]
        self.texts.add(text)
        self.cut += finish["type"] == "length"
        if finish["type"] == "stop" and is_valid(schema, text):
            self.valid += 1
        elif finish["type"] != "length":
            self.wrong.append(f"{finish['type']}: {text}")


def closers(engine: Engine, share: float = 0.05) -> dict[str, Any]:
    """Sampling parameters by which closing marks, and ends, are each ``share`` of a flat distribution over the vocabulary."""
    size = engine.config.sample_vocab
    ends = [token for token in engine.config.model.eos_token_ids if token < size]
    pieces = ((token, engine.tokenizer.token_bytes(token)) for token in range(size))
    marks = [token for token, piece in pieces if piece and not piece.strip(CLOSING)]

    def bias(tokens: Sequence[int]) -> dict[int, float]:
        return dict.fromkeys(tokens, math.log(share / (1 - share) * (size - len(tokens)) / len(tokens)))

    return {"logit_bias": bias(marks) | bias(ends)}


def generate_each(
    engine: Engine,
    schemas: Mapping[str, Any],
    seeds: Mapping[str, Sequence[int]],
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, Tally]:
    """One output of each schema for each of its seeds, all in one batch, and a tally for each schema."""
    fixed = {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS, **(sampling or {})}
    wishes = [{**fixed, "json_schema": schemas[name], "seed": seed} for name in schemas for seed in seeds[name]]
    told = {name: {key: value for key, value in schemas[name].items() if key != "$schema"} for name in schemas}
    prompts = [PROMPT.format(json.dumps(told[name])) for name in schemas for _ in seeds[name]]
    answers = iter(engine.generate(prompts, wishes))
    tallies = {name: Tally() for name in schemas}
    for name, tally in tallies.items():
        for answer in itertools.islice(answers, len(seeds[name])):
            tally.add(schemas[name], answer)
    return tallies


def generate(engine: Engine, schema: dict[str, Any], seeds: Sequence[int], **sampling: Any) -> Tally:
    """One output of one schema for each seed."""
    return generate_each(engine, {"": schema}, {"": seeds}, sampling)[""]


def model_path(name: str | None, folder: Path) -> Path | str | None:
    """The checkpoint of ``--model``, made in ``folder`` where it has to be made."""
    if name == "tiny":
        return make_tiny_model(folder / "tiny", arch="qwen3", seed=33, max_position_embeddings=8192)
    return make_real_qwen_folder(folder / "tiny") if name == "tiny-real" else name


def run(engine: Engine, args: argparse.Namespace, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Generate, print a line for each schema, and give the counts."""
    names = list(schemas)
    share = len(names) if args.share else 1
    at_once = -(-AT_ONCE * share // args.seeds)
    sampling = {"max_new_tokens": args.max_new_tokens, "frequency_penalty": args.frequency_penalty}
    sampling |= closers(engine, args.closers) if args.closers else {}
    total, texts, started = Tally(), 0, time.monotonic()
    for first in range(0, len(names), at_once):
        part = {name: schemas[name] for name in names[first : first + at_once]}
        seeds = {name: range(n if args.share else 0, args.seeds, share) for n, name in enumerate(part, first)}
        for name, tally in generate_each(engine, part, seeds, sampling).items():
            total.valid, total.cut = total.valid + tally.valid, total.cut + tally.cut
            total.tokens, texts = total.tokens + tally.tokens, texts + len(tally.texts)
            total.wrong += tally.wrong
            print(
                f"{name}: {tally.valid} of {len(seeds[name])} valid, {tally.cut} cut by the limit, "
                f"{len(tally.texts)} different, {tally.tokens} tokens",
                flush=True,
            )
            for text in tally.wrong[:3]:
                print(f"    {text[:300]!r}")
    counts = {"schemas": len(names), "seeds": args.seeds, "outputs": total.valid + total.cut + len(total.wrong)}
    counts |= {
        "valid": total.valid,
        "wrong": len(total.wrong),
        "cut": total.cut,
        "different": texts,
        "tokens": total.tokens,
    }
    return {**counts, "took_s": time.monotonic() - started}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", help="a path, tiny or tiny-real; default: the embedded SmolLM2")
    result.add_argument(
        "--suite", action="store_true", help="the schemas of the JSON-Schema-Test-Suite that are served"
    )
    result.add_argument("--seeds", type=int, default=200)
    result.add_argument("--share", action="store_true", help="divide the seeds among the schemas")
    result.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    result.add_argument("--closers", type=float, default=0.0, help="share of closing marks in a flat distribution")
    result.add_argument("--frequency-penalty", type=float, default=0.0)
    result.add_argument("--concurrency", type=int, default=32)
    result.add_argument("--output", help="file to append a figure to")
    result.add_argument("--model-label", help="name of the model in the figure")
    return result


def main() -> int:
    args = parser().parse_args()
    if args.suite and not installed():
        sys.exit(MISSING)
    schemas = served_schemas() if args.suite else SCHEMAS
    with tempfile.TemporaryDirectory() as folder:
        path = model_path(args.model, Path(folder))
        # Room for all to grow to their limit behind the longest prompt.
        room = args.concurrency * (args.max_new_tokens + 1024)
        with Engine(path, max_running_requests=args.concurrency, max_total_tokens=room) as engine:
            device = engine.config.device
            counts = run(engine, args, schemas)
    print("  ".join(f"{key} {value:.0f}" for key, value in counts.items()))
    if args.output:
        what = "schemas of the JSON-Schema-Test-Suite" if args.suite else "schemas"
        label = args.model_label or LABELS.get(args.model, args.model)
        asked = {"temperature": 1.0, "max_new_tokens": args.max_new_tokens, "closers": args.closers}
        asked |= {"frequency_penalty": args.frequency_penalty} if args.frequency_penalty else {}
        refused = {"refused_schemas": len(required_cases()) - len(schemas)} if args.suite else {}
        figures.append(args.output, [figures.figure(what, model=label, device=device, **asked, **refused, **counts)])
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
