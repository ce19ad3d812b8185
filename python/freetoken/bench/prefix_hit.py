"""Time to the first token of a prompt whose long prefix was seen before: ``python -m freetoken.bench.prefix_hit``.

Every round takes a new random prefix and three prompts that share it and part after it. The first is cold. The second finds
what the cache kept of the first: all pages, and in models with recurrent state the deepest checkpoint before the border
where they part. The third finds that border itself, which the second has left a checkpoint at.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from freetoken.bench import cli, figures
from freetoken.errors import StartupError
from freetoken.server_args import parser as server_parser

if TYPE_CHECKING:
    from freetoken import Engine

_OWN = ("prefix_len", "suffix_len", "output_len", "rounds", "output", "label", "seed")
VISITS = ("cold", "first hit", "next hit")


def parser() -> argparse.ArgumentParser:
    """The server's flags and the benchmark's own."""
    result = server_parser()
    result.prog = "python -m freetoken.bench.prefix_hit"
    result.description = "Compare the time to the first token with and without a cached prefix."
    add = result.add_argument_group("benchmark").add_argument
    add("--prefix-len", type=int, default=8192, help="Tokens that the prompts of a round share.")
    add("--suffix-len", type=int, default=64, help="Tokens of a prompt behind the prefix.")
    add("--output-len", type=int, default=4, help="Tokens generated a prompt.")
    add("--rounds", type=int, default=5, help="Prefixes, after one that is not counted.")
    add("--seed", type=int, default=1)
    add("--output", help="Append the figure as a JSON line.")
    add("--label", help="What the model is, for the figure; default: its served name.")
    return result


def check(args: argparse.Namespace) -> None:
    """Refuse values that cannot work, with :class:`StartupError`."""
    cli.require_at_least(args, {"prefix_len": 1, "suffix_len": 2, "output_len": 1, "rounds": 1})
    if args.disable_radix_cache:
        raise StartupError("--disable-radix-cache leaves no prefix to hit")


def first_token(engine: Engine, ids: list[int], output_len: int) -> tuple[float, int]:
    """Seconds to the first token of ``ids``, and how many of them came from the cache; the answer is read to its end."""
    sampling = {"max_new_tokens": output_len, "temperature": 0.0, "ignore_eos": True}
    start = time.perf_counter()
    seconds, cached = 0.0, 0
    results: Any = engine.generate(input_ids=ids, sampling_params=sampling, stream=True)
    for result in results:
        seconds = seconds or time.perf_counter() - start
        cached = result["meta_info"]["cached_tokens"]
    return seconds, cached


def visits(engine: Engine, args: argparse.Namespace, rng: random.Random) -> list[tuple[float, int]]:
    """One round: what :func:`first_token` says of each of :data:`VISITS`."""
    vocab = engine.config.sample_vocab

    def draw(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    prefix = draw(args.prefix_len)
    # Suffixes that part at their first token, whatever else they hold.
    heads = rng.sample(range(vocab), len(VISITS))
    return [first_token(engine, [*prefix, head, *draw(args.suffix_len - 1)], args.output_len) for head in heads]


def to_figure(
    rounds: Sequence[Sequence[tuple[float, int]]], engine: Engine, args: argparse.Namespace
) -> dict[str, Any]:
    """Medians over the rounds; ``of_cold`` is the later hit's time over the cold one."""
    cold, first, later = (statistics.median(r[i][0] for r in rounds) for i in range(len(VISITS)))
    return figures.figure(
        "prefix hit",
        model=args.label or engine.config.served_model_name,
        device=engine.config.device,
        dtype=engine.config.dtype,
        prefix_tokens=args.prefix_len,
        suffix_tokens=args.suffix_len,
        rounds=len(rounds),
        cold_ms=cold * 1e3,
        first_hit_ms=first * 1e3,
        ms=later * 1e3,
        first_hit_cached=min(r[1][1] for r in rounds),
        cached_tokens=min(r[2][1] for r in rounds),
        of_cold=later / cold,
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure; prints a line and returns the figure."""
    from freetoken import Engine

    check(args)
    rng = random.Random(args.seed)
    with Engine(**cli.server_values(args, _OWN)) as engine:
        visits(engine, args, rng)  # compiles kernels
        rounds = [visits(engine, args, rng) for _ in range(args.rounds)]
        result = to_figure(rounds, engine, args)
    print(
        f"prefix of {args.prefix_len}: cold {result['cold_ms']:.1f} ms, first hit {result['first_hit_ms']:.1f} ms "
        f"({result['first_hit_cached']} cached), later {result['ms']:.1f} ms ({result['cached_tokens']} cached), "
        f"{result['of_cold']:.1%} of cold"
    )
    return [result]


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
