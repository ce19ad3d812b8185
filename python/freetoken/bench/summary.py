"""Figures as short lines for a terminal, and all in one file: ``python -m freetoken.bench.summary FILE... [--json CHECK]`` (torch-free).

A serving figure stands beside the decode rate that ``one_batch`` reached with as many requests at the same depth, when
the files hold one: what HTTP, scheduling and detokenising cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from freetoken.bench import figures


def one_batch_line(figure: dict[str, Any]) -> str:
    """A prefill or decode figure of ``one_batch``."""
    decode = figure["what"].startswith("decode")
    shape = f"batch {figure['requests']:>3}, " + (
        f"depth {figure['depth']:>6}" if decode else f"{figure['tokens']:>6} tokens each"
    )
    text = f"{figure['what']:<18} {shape:<28} {figure['ms']:>10.3f} ms {figure['tok_s']:>11.1f} tok/s"
    if "share" in figure:
        rate, unit = (figure["gb_s"], "GB/s") if decode else (figure["tflop_s"], "TFLOP/s")
        text += f" {rate:>9.4g} of {figure['roof']:.4g} {unit} ({figure['share']:.1%})"
    return text


def matching_decode(serving: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest ``one_batch`` decode of the same model with as many requests, the nearest in depth."""
    found = [
        f
        for f in others
        if f["what"] == "decode one_batch"
        and f["model"] == serving["model"]
        and f["requests"] == serving["max_concurrency"]
    ]
    if not found:
        return None
    distance = min(abs(f["depth"] - serving["mean_input_len"]) for f in found)
    return [f for f in found if abs(f["depth"] - serving["mean_input_len"]) == distance][-1]


def serving_line(figure: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """A serving figure, compared with ``one_batch`` where that is possible."""
    shape = f"{figure['max_concurrency']:>3} streams, {figure['mean_input_len']:.0f} in, {figure['mean_output_len']:.0f} out"
    text = f"{figure['what']:<18} {shape:<28} {figure['output_tok_s']:>10.1f} tok/s in all"
    rate, base = figure["decode_tok_s"], matching_decode(figure, others)
    if rate is not None:
        text += f", {rate:.1f} while all decode"
        if base is not None:
            text += f" ({rate / base['tok_s'] - 1:+.1%} against one_batch at depth {base['depth']})"
    if figure["failed"]:
        text += f", {figure['failed']} FAILED"
    return text


def ab_line(figure: dict[str, Any]) -> str:
    """A metric of an experiment of ``ab``."""
    return (
        f"{figure['what']} {figure['b']} against {figure['a']}, {figure['metric']}: {figure['b_value']:.4g} against "
        f"{figure['a_value']:.4g}, ratio {figure['ratio']:.4f} ({figure['low']:.4f} to {figure['high']:.4f}), noise "
        f"±{figure['noise']:.2%}: {figure['verdict']}"
    )


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """One line a figure, in order; kinds without a form of their own show their plain values."""
    result = []
    for figure in found:
        if figure["what"] in ("prefill one_batch", "decode one_batch"):
            result.append(one_batch_line(figure))
        elif figure["what"] == "serving http":
            result.append(serving_line(figure, found))
        elif figure["what"].startswith("ab "):
            result.append(ab_line(figure))
        else:
            values = {k: v for k, v in figure.items() if k not in figures.CONTEXT and isinstance(v, int | float | str)}
            shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
            result.append(f"{figure['what']}: {shown}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of all files; 1 when one cannot be read, or ``--json`` not be written."""
    found: list[dict[str, Any]] = []
    parser = argparse.ArgumentParser(prog="python -m freetoken.bench.summary", description="Print figures as lines.")
    parser.add_argument("files", nargs="*", help="JSON lines that the benchmarks wrote.")
    parser.add_argument("--json", help="Write card, driver, versions, commit and all figures to this file.")
    parser.add_argument("--groups", nargs="*", default=[], help="What was run, for that file.")
    parser.add_argument("--failed", nargs="*", default=[], help="What of it failed, for that file.")
    parser.add_argument("--seconds", type=int, help="How long that took, for that file.")
    args = parser.parse_args(argv)
    try:
        for path in args.files:
            found += figures.read(path)
        if args.json:
            figures.write_check(args.json, found, groups=args.groups, failed=args.failed, seconds=args.seconds)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if found:
        print(*lines(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
