"""What structured output costs a decode step: the same batch with a JSON schema and without, in alternating pairs."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from freetoken.bench import figures
from freetoken.bench.one_batch import BatchDriver, Launched, grammar_shapes, random_ids
from freetoken.errors import StartupError
from freetoken.grammar.compiler import GrammarCompiler
from freetoken.sampling_params import Grammar, SamplingParams
from freetoken.scheduler.grammar import Grammars
from freetoken.scheduler.request import Status
from freetoken.server_args import Config

if TYPE_CHECKING:
    from freetoken.loader.tokenizer import Tokenizer
    from freetoken.runner.model_runner import ModelRunner

TOKENS_AN_ITEM = 8
"""Every item of the schema below takes at least this many tokens, so that no output comes to its end."""


def schema(output_len: int) -> Grammar:
    """A list of records with what tool calls and extractions are made of: free and bounded text, numbers, choices."""
    record = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "organisation"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "count": {"type": "integer"},
            "note": {"type": "string"},
        },
        "required": ["name", "kind", "score", "count", "note"],
        "additionalProperties": False,
    }
    items = {"type": "array", "items": record, "minItems": output_len // TOKENS_AN_ITEM + 1}
    return Grammar(kind="json_schema", text=json.dumps(items))


class GrammarDriver(BatchDriver):
    """The batch under a grammar, its draws enqueued as the scheduler does: after the step before has been collected."""

    def __init__(
        self,
        runner: ModelRunner,
        config: Config,
        prompts: Sequence[Sequence[int]],
        output_len: int,
        sampling: SamplingParams,
        grammars: Grammars,
    ) -> None:
        super().__init__(runner, config, prompts, output_len, sampling)
        self.grammars = grammars
        self.fill_s: list[float] = []
        for req in self.reqs:
            req.status = Status.RUNNING
            grammars.attach(req)
            if not grammars.ready(req):
                raise StartupError("the benchmark's schema is not compiled")

    def draw(self, launched: Launched) -> None:
        batch, handle = launched
        if not batch.masked:
            return
        start = time.perf_counter()
        pieces = [batch.sampled[place] for place in batch.masked]
        masks, ended = self.grammars.fill([s.req for s in pieces], [s.out_index for s in pieces])
        self.fill_s.append(time.perf_counter() - start)
        if ended:
            raise StartupError(f"the benchmark's schema cannot be followed: {ended[0][1].message}")
        self.runner.draw(handle, masks)

    def drawn(self, req: Any, token: int) -> None:
        super().drawn(req, token)
        finish = self.grammars.finish(req, token)
        if finish is not None:
            raise StartupError(f"an output under the benchmark's schema ended ({finish.kind}); lower --output-len")


def compare_grammar(
    runner: ModelRunner, config: Config, tokenizer: Tokenizer, args: argparse.Namespace, label: str
) -> list[dict[str, Any]]:
    """Every shape of ``--compare-grammar``, ``--repeats`` pairs each; prints a line each and returns the figures."""
    compiler = GrammarCompiler(lambda: tokenizer, config.sample_vocab, config.model.eos_token_ids)
    grammar, grammars = schema(args.output_len), Grammars(compiler)
    compiler.compile(grammar)
    plain = SamplingParams(max_new_tokens=args.output_len, temperature=1.0, seed=0, ignore_eos=True)
    masked = SamplingParams(max_new_tokens=args.output_len, temperature=1.0, seed=0, ignore_eos=True, grammar=grammar)
    found: list[dict[str, Any]] = []
    for requests, input_len in grammar_shapes(args):
        plain_ms: list[float] = []
        masked_ms: list[float] = []
        fill_us: list[float] = []
        for pair in range(args.repeats + 1):
            prompts = random_ids(config, requests, input_len, 2000 + pair)
            without = BatchDriver(runner, config, prompts, args.output_len, plain).run()
            driver = GrammarDriver(runner, config, prompts, args.output_len, masked, grammars)
            timing = driver.run()
            if pair:  # the first pair compiles kernels
                plain_ms.append(without.step_s * 1e3)
                masked_ms.append(timing.step_s * 1e3)
                fill_us.append(statistics.mean(driver.fill_s) * 1e6)
        ours, base = statistics.median(masked_ms), statistics.median(plain_ms)
        found.append(
            figures.figure(
                "grammar decode",
                model=label,
                device=config.device,
                requests=requests,
                depth=input_len,
                tokens=args.output_len,
                dtype=config.dtype,
                vocabulary=config.sample_vocab,
                ms=ours,
                plain_ms=base,
                ratio=ours / base,
                fill_us=statistics.median(fill_us),
            )
        )
        print(
            f"batch {requests:>3}, depth {input_len:>6}: {ours:8.3f} ms a step with a JSON schema, {base:8.3f} without "
            f"({100 * (ours / base - 1):+.1f} %); masks filled in {statistics.median(fill_us):.0f} us",
            flush=True,
        )
    return found
