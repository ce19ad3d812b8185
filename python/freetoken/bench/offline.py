"""Throughput of ``Engine`` on random prompts or a file, without HTTP: ``python -m freetoken.bench.offline``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from freetoken.bench import cli, figures
from freetoken.bench.datasets import file_prompts, random_prompts
from freetoken.errors import StartupError
from freetoken.server_args import parser as server_parser

_OWN = ("num_prompts", "input_len", "output_len", "range_ratio", "dataset_path", "output", "label", "seed")


def parser() -> argparse.ArgumentParser:
    """The server's flags and the benchmark's own."""
    result = server_parser()
    # All prompts are queued at once, however many there are.
    result.set_defaults(max_queued_requests=sys.maxsize, max_queued_tokens=sys.maxsize)
    result.prog = "python -m freetoken.bench.offline"
    result.description = "Measure the throughput of Engine."
    add = result.add_argument_group("benchmark").add_argument
    add("--num-prompts", type=int, help="Prompts; default 64, or all of a file.")
    add("--input-len", type=int, default=256, help="Tokens of a random prompt.")
    add("--output-len", type=int, default=128, help="Tokens generated a prompt.")
    add("--range-ratio", type=float, default=1.0, help="Lengths are uniform in [ratio * len, len]; 1 is exact.")
    add("--dataset-path", help="Prompt file instead of random ids: .jsonl, or a prompt a line.")
    add("--seed", type=int, default=1)
    add("--output", help="Append the figure as a JSON line.")
    add("--label", help="What the model is, for the figure; default: its served name.")
    return result


def check(args: argparse.Namespace) -> None:
    """Refuse values that cannot work, with :class:`StartupError`."""
    cli.require_at_least(args, {"num_prompts": 1, "input_len": 1, "output_len": 1})
    if not 0 < args.range_ratio <= 1:
        raise StartupError(f"--range-ratio must be above 0 and at most 1, not {args.range_ratio:g}")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Generate for all prompts at once; prints the rate and returns the figure."""
    from freetoken import Engine

    check(args)
    with Engine(**cli.server_values(args, _OWN)) as engine:
        config = engine.config
        if args.dataset_path:
            prompts = file_prompts(args.dataset_path, count=args.num_prompts, output_len=args.output_len)
        else:
            prompts = random_prompts(
                args.num_prompts or 64,
                input_len=args.input_len,
                output_len=args.output_len,
                vocab_size=config.sample_vocab,
                range_ratio=args.range_ratio,
                seed=args.seed,
            )
        ids = [p.content if isinstance(p.content, list) else engine.tokenizer.encode(p.content) for p in prompts]
        sampling = [{"max_new_tokens": p.output_len, "temperature": 0.0, "ignore_eos": True} for p in prompts]
        engine.generate(input_ids=[ids[0][1:] or ids[0]], sampling_params={"max_new_tokens": 8, "ignore_eos": True})
        start = time.perf_counter()
        results: Any = engine.generate(input_ids=ids, sampling_params=sampling)
        seconds = time.perf_counter() - start
    read = sum(result["meta_info"]["prompt_tokens"] for result in results)
    cached = sum(result["meta_info"]["cached_tokens"] for result in results)
    written = sum(result["meta_info"]["completion_tokens"] for result in results)
    result = figures.figure(
        "offline",
        model=args.label or config.served_model_name,
        device=config.device,
        requests=len(prompts),
        input_tokens=read,
        cached_tokens=cached,
        output_tokens=written,
        dtype=config.dtype,
        seconds=seconds,
        tok_s=written / seconds,
        total_tok_s=(read + written) / seconds,
        request_s=len(prompts) / seconds,
    )
    print(
        f"{len(prompts)} requests in {seconds:.2f} s: {result['tok_s']:,.1f} output tok/s, "
        f"{result['total_tok_s']:,.1f} tok/s in all, {cached} prompt tokens from the prefix cache"
    )
    return [result]


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
