"""How long a server takes to start, and the first prompts of it: ``python -m freetoken.bench.start``.

It starts twice, first with an empty folder for compiled kernels and then with that folder as the first start left it. Each time prompts of random
ids arrive one by one, twice over: what the first of a length takes longer than the second is what a client waits for a kernel to compile.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from freetoken import environ
from freetoken.bench import cli, figures
from freetoken.bench.own_server import own_server, post
from freetoken.errors import StartupError
from freetoken.server_args import ServerArgs
from freetoken.server_args import parser as server_parser
from freetoken.startup import prepare

CACHES = ("empty", "full")
LENGTHS = (128, 17, 200, 500, 1000, 2000)


def parser() -> argparse.ArgumentParser:
    """The benchmark's own; all else goes to the server."""
    result = argparse.ArgumentParser(
        prog="python -m freetoken.bench.start",
        description="Time a server's start and its first prompts, with an empty cache of kernels and a full one.",
        epilog="Arguments behind -- go to the server.",
    )
    add = result.add_argument
    add(
        "--prompt-lens",
        type=int,
        nargs="+",
        help="Tokens of the prompts, in order of arrival; default: six that the context holds.",
    )
    add("--label", help="What the model is, for the figures; default: its served name.")
    add("--output", help="Append the figures as JSON lines.")
    add("words", nargs="*", help=argparse.SUPPRESS)
    return result


def _answer_ms(base: str, rng: random.Random, vocab: int, tokens: int) -> float:
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    ids = [rng.randrange(vocab) for _ in range(tokens)]
    start = time.perf_counter()
    post(f"{base}/generate", {"input_ids": ids, "sampling_params": sampling})
    return (time.perf_counter() - start) * 1e3


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both starts; prints a line each and returns the figures."""
    cli.require_at_least(args, {"prompt_lens": 1})
    config, _ = prepare(ServerArgs(**vars(server_parser().parse_args(args.words))))
    lengths = args.prompt_lens or [length for length in LENGTHS if length < config.context_length]
    if (longest := max(lengths, default=0)) >= config.context_length:
        raise StartupError(f"--prompt-lens {longest} leaves no room in a context of {config.context_length} tokens")
    words = ["--log-level", "warning", *args.words]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment = environ.for_child({"TRITON_CACHE_DIR": folder})
        for seed, cache in enumerate(CACHES):
            rng = random.Random(seed)
            with own_server(words, environment) as (base, seconds):
                first, again = (
                    [_answer_ms(base, rng, config.sample_vocab, length) for length in lengths] for _ in range(2)
                )
            print(f"{cache} cache of kernels: ready after {seconds:.1f} s")
            for length, one, two in zip(lengths, first, again):
                print(f"  {length:,} tokens: {one:,.0f} ms, then {two:,.0f} ms")
            found.append(
                figures.figure(
                    "server start",
                    model=args.label or config.served_model_name,
                    device=config.device,
                    dtype=config.dtype,
                    cache=cache,
                    warm_up=config.device == "cuda" and not config.skip_server_warmup,
                    ready_s=seconds,
                    prompts=" ".join(map(str, lengths)),
                    first_ms=sum(first),
                    again_ms=sum(again),
                    worst_ms=max(one - two for one, two in zip(first, again)),
                )
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
