"""Time pieces of prompts behind an indexer, kernel by kernel, and settings of their attention: ``python -m freetoken.bench.qsa_tune``.

For each depth of the text, with queries that choose independently and with some that choose alike, each setting is checked against
the default's output before it is timed. Settings that a GPU has no room for are passed over. The fastest come last.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from freetoken import hardware
from freetoken.bench import cli, figures
from freetoken.errors import StartupError

BOUND = 1e-2
"""Largest relative RMS between the outputs of two settings."""
CALLS = 4
KERNELS = ("score", "bounds", "list", "attend")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m freetoken.bench.qsa_tune", description=(__doc__ or "").split(":")[0]
    )
    result.add_argument("--tokens", type=int, default=2048, help="of the piece (default: %(default)s)")
    result.add_argument("--depths", type=int, nargs="+", default=[2048, 6144, 14336], help="of its first token")
    result.add_argument("--output", help="Append the figures as JSON lines.")
    return result


class Setting:
    """The kernels of one piece with one setting, on the outputs of those before them."""

    def __init__(self, piece: Any, config: Any) -> None:
        import torch

        from freetoken.kernels.qsa import pieces
        from freetoken.kernels.qsa.plan import plan_pieces

        geometry, (table, rows), q = piece.config, piece.where, piece.q
        plan = plan_pieces((piece.tokens,), (piece.length,), 0, geometry, config, q.device)
        if len(plan.parts) > 1:
            raise StartupError(f"{piece.tokens} tokens at the end of {piece.length} are more than one part")
        (part,), page = plan.parts, piece.pools.page_size
        self.out = torch.empty_like(q)
        scores = pieces.score(piece.index_q, piece.pools, table, rows, plan, part, geometry)
        bounds = pieces.bounds(scores, piece.positions, geometry)
        listed = pieces.list_tokens(scores, bounds, table, rows, page, plan, part, geometry)
        tiles = plan.tiles[part.attend]
        self.listed = listed[2]
        self.calls: dict[str, Callable[[], Any]] = {
            "score": lambda: pieces.score(piece.index_q, piece.pools, table, rows, plan, part, geometry),
            "bounds": lambda: pieces.bounds(scores, piece.positions, geometry),
            "list": lambda: pieces.list_tokens(scores, bounds, table, rows, page, plan, part, geometry),
            "attend": lambda: pieces.attend(q, piece.pools, tiles, listed, config, piece.scale, self.out),
        }


def tune(piece: Any, depth: int, alike: bool) -> list[dict[str, Any]]:
    """Figures of the default's kernels, then of all settings of attention, the fastest last."""
    from freetoken.bench.ops import graph_microseconds
    from freetoken.kernels import launch
    from freetoken.kernels.checking import relative_rms
    from freetoken.kernels.qsa.plan import piece_candidates

    group, capability = piece.heads // piece.kv_heads, launch.capability(piece.q.device) or (8, 0)
    configs = piece_candidates(piece.width, group, piece.config.head_dim, piece.q.dtype, capability)
    common = {"model": "random inputs, qwen4_exp geometry", "device": "cuda", "tokens": piece.tokens, "depth": depth}
    common["alike"] = alike
    found: list[dict[str, Any]] = []
    expected = None
    for index, config in enumerate(configs):
        try:
            setting = Setting(piece, config)
            setting.calls["attend"]()
        except Exception as error:  # too much shared memory: its class is not the same in all versions of Triton
            if index == 0:
                raise
            print(f"  passed over {config}: {type(error).__name__}", flush=True)
            continue
        expected = setting.out if expected is None else expected
        rms = relative_rms(setting.out, expected)
        if not rms <= BOUND:
            raise StartupError(f"attention with {config} differs from the default by relative RMS {rms:.3g}")
        for kernel in KERNELS if index == 0 else KERNELS[2:]:
            us = graph_microseconds(setting.calls[kernel], CALLS)
            row = {**common, **dataclasses.asdict(config), "default": index == 0, "us": us}
            row["listed"] = float(setting.listed.double().mean())
            found.append(figures.figure(f"tune qsa piece {kernel}", **row))
    return sorted(found, key=lambda row: -row["us"])


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every depth, with both kinds of queries."""
    cli.require_at_least(args, {"tokens": 1, "depths": 0})
    if not hardware.probe().usable_gpu:
        raise StartupError(f"settings are timed on a GPU: {hardware.probe().device_reason}")
    import torch

    from freetoken.bench.qwen4_exp_rows import Piece

    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for depth, alike in itertools.product(args.depths, (False, True)):
            torch.manual_seed(0)
            rows = tune(Piece("cuda", torch.bfloat16, args.tokens, depth, alike), depth, alike)
            print(f"{args.tokens} tokens at {depth}, {'alike' if alike else 'independent'}:", flush=True)
            for row in rows:
                setting = {key: row[key] for key in ("queries", "block_m", "block_n", "num_warps", "num_stages")}
                print(
                    f"  {row['what'].split()[-1]:<7} {row['us']:9.2f} us, {row['listed']:8.0f} listed tokens a tile, "
                    f"{'default' if row['default'] else '':<7} {setting}",
                    flush=True,
                )
            found.extend(rows)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
