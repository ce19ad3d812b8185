"""Milliseconds of prefill and of a decode step for one batch, without HTTP: ``python -m freetoken.bench.one_batch``.

The batch goes straight to the model runner: graphs, kernels and overlap are the server's (step N + 1 is launched before
step N is collected), the scheduler's planning and the wire are left out. Prompts are random ids, pages are scattered as
in a server that has run for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetoken.bench import cli, figures, roof, summary
from freetoken.errors import StartupError
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler.request import Req, ScheduleBatch, Slice, StepResult
from freetoken.server_args import Config, ServerArgs
from freetoken.server_args import parser as server_parser

if TYPE_CHECKING:
    from freetoken.runner.model_runner import ModelRunner

WARMUP_STEPS = 4
SHORTEST_OUTPUT = WARMUP_STEPS + 2

Launched = tuple[ScheduleBatch, Any]
"""A step and the runner's handle of it."""


@dataclass
class Timing:
    """One measured batch. ``prefill_s`` covers all prompts, ``steps_s`` are the times between collected decode steps,
    ``wall_s`` the time of all ``len(steps_s)`` of them; ``outputs`` are the ids each request drew."""

    prefill_s: float
    prefill_steps: int
    steps_s: list[float]
    wall_s: float
    outputs: list[list[int]]

    @property
    def step_s(self) -> float:
        return self.wall_s / len(self.steps_s)


class BatchDriver:
    """Builds the batches of one group of equal requests and runs them on ``runner``; greedy without ``sampling``."""

    def __init__(
        self,
        runner: ModelRunner,
        config: Config,
        prompts: Sequence[Sequence[int]],
        output_len: int,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.sampling = sampling or SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
        self.runner = runner
        self.config = config
        self.output_len = output_len
        self.step = 0
        self.reqs = [self._request(row, list(ids)) for row, ids in enumerate(prompts)]
        self._give_pages()

    def _request(self, row: int, ids: list[int]) -> Req:
        return Req(
            rid=f"bench-{row}",
            ids=ids,
            prompt_len=len(ids),
            sampling=self.sampling,
            max_new_tokens=self.output_len,
            stop_ids=frozenset(),
            seed=row,
            row=row,
        )

    def _give_pages(self) -> None:
        size = self.runner.page_size
        free = list(range(1, self.runner.num_pages))
        random.Random(0).shuffle(free)
        for req in self.reqs:
            need = -(-(req.prompt_len + self.output_len) // size)
            if need > len(free):
                raise StartupError(
                    f"{len(self.reqs)} requests of {req.prompt_len} + {self.output_len} tokens do not fit into the "
                    f"{(self.runner.num_pages - 1) * size} tokens of KV cache; lower --batch-size or --input-len"
                )
            req.pages = free[:need]
            del free[:need]

    def _batch(self, decodes: list[Slice], prefills: list[Slice], new_rows: list[Req]) -> ScheduleBatch:
        self.step += 1
        return ScheduleBatch(self.step, decodes, prefills, new_rows)

    def prefill_batches(self) -> list[ScheduleBatch]:
        """The prompts in pieces of at most ``max_prefill_tokens`` a step, in order, as an idle server would run them."""
        batches: list[ScheduleBatch] = []
        pieces: list[Slice] = []
        room = self.config.max_prefill_tokens
        for req in self.reqs:
            done = 0
            while done < req.prompt_len:
                length = min(room, req.prompt_len - done)
                pieces.append(Slice(req, done, length, decode=False, sample=done + length == req.prompt_len))
                done, room = done + length, room - length
                if room == 0:
                    batches.append(self._batch([], pieces, [s.req for s in pieces if s.start == 0]))
                    pieces, room = [], self.config.max_prefill_tokens
        if pieces:
            batches.append(self._batch([], pieces, [s.req for s in pieces if s.start == 0]))
        return batches

    def decode_batch(self, index: int) -> ScheduleBatch:
        """Decode step ``index``: it reads output ``index`` of every request and draws output ``index + 1``."""
        slices = [
            Slice(req, req.prompt_len + index, 1, decode=True, sample=True, out_index=index + 1) for req in self.reqs
        ]
        return self._batch(slices, [], [])

    def _launch(self, batch: ScheduleBatch) -> Launched:
        handle = self.runner.launch(batch)
        for s in batch.slices:
            s.req.computed = s.start + s.length
            s.req.in_flight += s.sample
        return batch, handle

    def draw(self, launched: Launched) -> None:
        """Called when all steps before ``launched`` have been collected."""

    def drawn(self, req: Req, token: int) -> None:
        """An output token of ``req`` has reached the host."""
        req.in_flight -= 1
        req.ids.append(token)

    def _collect(self, launched: Launched) -> None:
        batch, handle = launched
        result: StepResult = self.runner.collect(handle)
        for s, token in zip(batch.sampled, result.ids):
            self.drawn(s.req, token)

    def _run(self, batches: Sequence[ScheduleBatch]) -> list[float]:
        """Launch all with one step of overlap; returns the time after each step's collection."""
        stamps: list[float] = []
        waiting = None
        for batch in batches:
            launched = self._launch(batch)
            if waiting is not None:
                self._collect(waiting)
                stamps.append(time.perf_counter())
            self.draw(launched)
            waiting = launched
        if waiting is not None:
            self._collect(waiting)
            stamps.append(time.perf_counter())
        return stamps

    def run(self) -> Timing:
        """Prefill, then ``output_len - 1`` decode steps, of which the first few are not timed, nor is the last: it is collected without a
        launch before that, so where a launch takes longer than a step its time is not that of the others."""
        prefills = self.prefill_batches()
        start = time.perf_counter()
        prefill_s = self._run(prefills)[-1] - start
        stamps = self._run([self.decode_batch(index) for index in range(self.output_len - 1)])
        ends = stamps[:-1]
        timed = ends[min(WARMUP_STEPS, len(ends) - 2) :]
        steps = [b - a for a, b in itertools.pairwise(timed)]
        outputs = [req.ids[req.prompt_len :] for req in self.reqs]
        return Timing(prefill_s, len(prefills), steps, timed[-1] - timed[0], outputs)


def random_ids(config: Config, requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of random ids below the sampled vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(config.sample_vocab) for _ in range(tokens)] for _ in range(requests)]


def median_run(timings: Sequence[Timing]) -> Timing:
    """The run with the median decode step: one whole run, so that its numbers belong together."""
    return sorted(timings, key=lambda t: t.step_s)[(len(timings) - 1) // 2]


def to_figures(
    timings: Sequence[Timing],
    config: Config,
    *,
    label: str,
    requests: int,
    input_len: int,
    output_len: int,
    roofs: tuple[float, float] | None,
    graph: bool,
) -> list[dict[str, Any]]:
    """The prefill and the decode figure of one shape."""
    model = config.model
    chosen = median_run(timings)
    prefill_s = statistics.median(t.prefill_s for t in timings)
    flops = roof.prefill_flops(model, requests=requests, tokens=input_len)
    depth = input_len + output_len / 2
    step_bytes = roof.decode_bytes(
        model, requests=requests, depth=depth, dtype=config.dtype, kv_dtype=config.kv_cache_dtype
    )
    shape = {"requests": requests, "dtype": config.dtype, "attention": config.attention_backend}
    prefill: dict[str, Any] = {
        "what": "prefill one_batch",
        **shape,
        "tokens": input_len,
        "steps": chosen.prefill_steps,
        "ms": prefill_s * 1e3,
        "tok_s": requests * input_len / prefill_s,
        "tflop": flops / 1e12,
        "tflop_s": flops / prefill_s / 1e12,
    }
    decode: dict[str, Any] = {
        "what": "decode one_batch",
        **shape,
        "depth": input_len,
        "tokens": output_len,
        "graph": graph,
        "ms": chosen.step_s * 1e3,
        "ms_median": statistics.median(chosen.steps_s) * 1e3,
        "tok_s": requests / chosen.step_s,
        "gb": step_bytes / 1e9,
        "gb_s": step_bytes / chosen.step_s / 1e9,
    }
    if roofs is not None:
        bandwidth, rate = roofs
        prefill |= {"roof": rate / 1e12, "share": flops / prefill_s / rate}
        decode |= {"roof": bandwidth / 1e9, "share": step_bytes / chosen.step_s / bandwidth}
    return [figures.figure(f.pop("what"), model=label, device=config.device, **f) for f in (prefill, decode)]


def parser() -> argparse.ArgumentParser:
    """The server's flags and the benchmark's own."""
    result = server_parser()
    result.prog = "python -m freetoken.bench.one_batch"
    result.description = "Time prefill and decode of one batch without HTTP."
    add = result.add_argument_group("benchmark").add_argument
    add("--batch-size", type=int, nargs="+", default=[1], help="Requests decoded at once; several are run in turn.")
    add("--input-len", type=int, nargs="+", default=[128], help="Prompt tokens, which is the depth decode starts at.")
    add("--shape", nargs="+", default=[], metavar="BxL", help="Batch x length pairs instead of the two above.")
    add("--output-len", type=int, default=64, help="Tokens drawn a request.")
    add("--repeats", type=int, default=3, help="Runs of each shape; the one with the median decode step is reported.")
    add("--output", help="Append the figures as JSON lines.")
    add("--label", help="What the model is, for the figures; default: its served name.")
    add("--no-roof", action="store_true", help="Do not measure bandwidth and matmul rate.")
    add("--eager-too", action="store_true", help="Run each shape a second time without graphs.")
    add("--compare-transformers", action="store_true", help="Run transformers' generate on the same weights as well.")
    add(
        "--compare-grammar",
        nargs="*",
        metavar="BxL",
        help="Time decode under a JSON schema as well, in pairs with and without: these of the shapes, or all of them.",
    )
    return result


_OWN = (
    "batch_size",
    "shape",
    "input_len",
    "output_len",
    "repeats",
    "output",
    "label",
    "no_roof",
    "eager_too",
    "compare_transformers",
    "compare_grammar",
)


def check(args: argparse.Namespace) -> None:
    """Refuse values that cannot work, with :class:`StartupError`."""
    cli.require_at_least(args, {"batch_size": 1, "input_len": 1, "output_len": SHORTEST_OUTPUT, "repeats": 1})
    if args.compare_transformers and args.load_format == "dummy":
        raise StartupError("--compare-transformers needs real weights, not --load-format dummy")
    if unknown := set(_pairs("--compare-grammar", args.compare_grammar or ())) - set(shapes(args)):
        raise StartupError("--compare-grammar {}x{} is none of the shapes".format(*min(unknown)))


def _pairs(flag: str, words: Sequence[str]) -> list[tuple[int, int]]:
    pairs = []
    for text in words:
        match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
        if match is None:
            raise StartupError(f"{flag} must be like 64x1024, not {text!r}")
        pairs.append((int(match[1]), int(match[2])))
    return pairs


def grammar_shapes(args: argparse.Namespace) -> list[tuple[int, int]]:
    """The shapes of ``--compare-grammar``: all where it names none."""
    return _pairs("--compare-grammar", args.compare_grammar) or shapes(args)


def shapes(args: argparse.Namespace) -> list[tuple[int, int]]:
    """``(requests, prompt tokens)`` to run: those of ``--shape``, else every batch size at every length."""
    pairs = _pairs("--shape", args.shape)
    return pairs or [(size, length) for length in args.input_len for size in args.batch_size]


def graph_choices(args: argparse.Namespace) -> tuple[bool, ...]:
    """How each shape is run: with the runner's graphs, and with ``--eager-too`` without."""
    return (True, False) if args.eager_too else (True,)


@contextlib.contextmanager
def graphs_set(runner: ModelRunner, on: bool) -> Iterator[None]:
    """``runner`` as it is, or (``on`` false) launching kernel by kernel as if it had no graphs."""
    graphs = runner.graphs
    try:
        runner.graphs = graphs if on else None
        yield
    finally:
        runner.graphs = graphs


def server_args(args: argparse.Namespace, own: Sequence[str] = _OWN) -> ServerArgs:
    """The server's part of the arguments (all but ``own``), with sizes that these batches need where none was given."""
    result = ServerArgs(**cli.server_values(args, own))
    pairs = shapes(args)
    largest, longest = max(p[0] for p in pairs), max(p[1] for p in pairs) + args.output_len
    result.max_running_requests = result.max_running_requests or largest
    result.context_length = result.context_length or longest
    if result.max_total_tokens is None:
        size = result.page_size
        result.max_total_tokens = max(count * -(-(length + args.output_len) // size) * size for count, length in pairs)
    if result.state_cache_gb is None:
        # Nothing is ever restored here, and page-locking what is the default takes seconds.
        result.state_cache_gb = 0.0
    result.cuda_graph_bs = result.cuda_graph_bs or sorted({count for count, _ in pairs})
    return result


def progress(phase: str, done: int, total: int, unit: str) -> None:
    """A line of progress on a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r{phase}: {done:,} of {total:,} {unit}\033[K", end="" if done < total else "\n", file=sys.stderr)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every shape the flags ask for; prints each figure as it comes and returns all of them."""
    from freetoken.runner.model_runner import ModelRunner
    from freetoken.startup import prepare

    check(args)
    config, tokenizer = prepare(server_args(args))
    label = args.label or config.served_model_name
    roofs = None if args.no_roof else roof.measure(config.device, config.dtype)
    runner = ModelRunner(config, progress)
    held = runner.loaded_bytes / 1e9
    found = [figures.figure("memory after loading", model=label, device=config.device, dtype=config.dtype, gb=held)]
    print(f"{held:.2f} GB held after loading, before any KV cache", flush=True)

    def replays() -> int:
        return sum(runner.graph_counts()[0].values())

    for (requests, input_len), graphs in itertools.product(shapes(args), graph_choices(args)):
        before = replays()
        with graphs_set(runner, graphs):
            timings = [
                BatchDriver(runner, config, random_ids(config, requests, input_len, seed), args.output_len).run()
                for seed in range(args.repeats + 1)
            ]
        pair = to_figures(
            timings[1:],  # the first run compiles kernels
            config,
            label=label,
            requests=requests,
            input_len=input_len,
            output_len=args.output_len,
            roofs=roofs,
            graph=replays() > before,
        )
        found += pair
        print(*map(summary.one_batch_line, pair), sep="\n", flush=True)
    if args.compare_transformers:
        from freetoken.bench.compare import compare_transformers

        found += compare_transformers(runner, config, args, label)
    if args.compare_grammar is not None:
        from freetoken.bench.grammar import compare_grammar

        found += compare_grammar(runner, config, tokenizer, args, label)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
