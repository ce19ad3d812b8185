"""Time launch settings of the decode step of Gated DeltaNet: ``python -m freetoken.bench.gdn_tune --requests 1 64``.

Each setting is checked against the reference before it is timed, at the heads of Qwen3.5-27B. The fastest come last.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from freetoken import hardware
from freetoken.bench import cli, figures
from freetoken.errors import StartupError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m freetoken.bench.gdn_tune", description=(__doc__ or "").split(":")[0]
    )
    result.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    result.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128], help="Rows of a head's state a program.")
    result.add_argument("--warps", type=int, nargs="+", default=[4, 8, 16], help="Warps a program.")
    result.add_argument("--output", help="Append the figures as JSON lines.")
    return result


def tune(device: str, args: argparse.Namespace, sizes: Any, bandwidth: float) -> list[dict[str, Any]]:
    """Figures of each setting that was asked for and that a GPU has registers for, at each number of requests; fastest last."""
    from freetoken.bench import ops
    from freetoken.bench.gdn_rows import gdn_decode_cases
    from freetoken.kernels.gdn_decode import candidates, pick_config

    width = sizes.linear_width
    asked = [c for c in candidates(width, width) if c.block_v in args.rows and c.num_warps in args.warps]
    # States are settled here, and then nothing is brought to the cache ahead.
    settings = list(dict.fromkeys(dataclasses.replace(config, prefetch=True) for config in asked))
    if not settings:
        raise StartupError(f"no setting has {args.rows} rows and {args.warps} warps")
    found = []
    for config in settings:
        for case in gdn_decode_cases(device, dataclasses.replace(sizes, linear_batches=tuple(args.requests)), config):
            error = ops.check("gdn_decode", case)
            us = ops.graph_microseconds(case.fused) if device == "cuda" else 0.0
            chosen = pick_config(width, width, case.shape["requests"] * sizes.linear_heads)
            found.append(
                figures.figure(
                    "tune gdn_decode",
                    model="random inputs, Qwen3.5-27B geometry",
                    device=device,
                    **case.shape,
                    rows=config.block_v,
                    warps=config.num_warps,
                    default=(chosen.block_v, chosen.num_warps) == (config.block_v, config.num_warps),
                    us=us,
                    relative_rms=error,
                    roof=case.bytes / bandwidth * 1e6,
                    share=case.bytes / bandwidth * 1e6 / us if us else 0.0,
                )
            )
    return sorted(found, key=lambda row: (row["requests"], -row["us"]))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every setting at every number of requests."""
    cli.require_at_least(args, dict.fromkeys(("requests", "rows", "warps"), 1))
    if not hardware.probe().usable_gpu:
        raise StartupError(f"settings are timed on a GPU: {hardware.probe().device_reason}")
    import torch

    from freetoken.bench import roof
    from freetoken.bench.op_cases import Sizes

    torch.manual_seed(0)
    with torch.inference_mode():
        found = tune("cuda", args, Sizes(), roof.measure("cuda", "bfloat16")[0])
    for row in found:
        print(
            f"requests {row['requests']:3} rows {row['rows']:4} warps {row['warps']:3} {row['us']:9.2f} us "
            f"{row['share']:6.1%}{' default' if row['default'] else ''}",
            flush=True,
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
