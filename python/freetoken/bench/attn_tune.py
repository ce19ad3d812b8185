"""Time launch settings of one-query attention: ``python -m freetoken.bench.attn_tune --requests 1 --depths 128 8192``.

For each number of requests and depth the kernel runs with the default settings and with others; each is checked against the
default's output before it is timed. Settings that a GPU has no room for are passed over. The fastest come last.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from freetoken import hardware
from freetoken.bench import cli, figures
from freetoken.errors import StartupError
from freetoken.kernels.attn_decode.config import DecodeConfig, decode_config

BOUND = 1e-2


def parser() -> argparse.ArgumentParser:
    """The command line; heads default to those of Qwen3.5-27B."""
    result = argparse.ArgumentParser(
        prog="python -m freetoken.bench.attn_tune", description=(__doc__ or "").split(":")[0]
    )
    result.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    result.add_argument("--depths", type=int, nargs="+", default=[128, 8192])
    result.add_argument("--heads", type=int, default=24)
    result.add_argument("--kv-heads", type=int, default=4)
    result.add_argument("--head-dim", type=int, default=256)
    result.add_argument("--seconds", type=int, default=240, help="No further settings are tried after this time.")
    result.add_argument("--output", help="Append the figures as JSON lines.")
    return result


def candidates(default: DecodeConfig, depth: int) -> list[DecodeConfig]:
    """The default, then others: first cuts, which need no other kernel of parts, then tiles with the default's cut and half as many
    parts more."""
    splits = (
        sorted({max(1, default.splits * part // 4) for part in (1, 2, 3, 4, 6, 8)}) if depth > default.whole else []
    )
    shares = ((16, 16), (16, 32), (16, 64), (16, 128), (default.whole, default.min_share), (depth, depth))
    cuts = [dataclasses.replace(default, splits=parts) for parts in splits]
    cuts += [dataclasses.replace(default, whole=whole, min_share=share) for whole, share in shares]
    tiles = [dataclasses.replace(default, ahead=steps) for steps in (0, 2, 4)]
    tiles += [
        dataclasses.replace(default, block_n=block, num_warps=warps, num_stages=stages, splits=parts)
        for parts, block, warps, stages in itertools.product(
            sorted({default.splits, default.splits * 3 // 2 if splits else default.splits}),
            (default.block_n // 2, default.block_n, default.block_n * 2),
            (4, 8),
            (2, 3, 4),
        )
        if block >= 16
    ]
    return list(dict.fromkeys([default, *cuts, *tiles]))


class Decodes:
    """One batch over several layers; each call takes the next, so that K and V come from memory where they would in a step."""

    def __init__(self, args: argparse.Namespace, requests: int, depth: int, device: str = "cuda") -> None:
        import torch

        from freetoken.bench.attention_rows import make_batch, uncached_layers
        from freetoken.bench.op_cases import Sizes

        sizes = Sizes(heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim)
        self.layers = uncached_layers(sizes, requests, depth) if device == "cuda" else 1
        self.kv, self.fb, self.q = make_batch(device, sizes, [depth] * requests, [], self.layers)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 132
        self.default = decode_config(
            args.head_dim,
            args.heads // args.kv_heads,
            requests,
            max(depth, sizes.context),
            num_sms,
            num_kv_heads=args.kv_heads,
        )

    def call(self, config: DecodeConfig) -> Callable[[], Any]:
        """A call that goes through the layers in turn, from the first, and gives its output."""
        import torch

        from freetoken.kernels.attn_decode.triton import attn_decode_triton, workspace_size

        batch, heads, head_dim = self.q.shape
        device, kv, fb = self.q.device, self.kv, self.fb
        workspace = torch.empty(workspace_size(batch, heads, head_dim, config.splits), device=device)
        turn, scale = itertools.cycle(range(self.layers)), head_dim**-0.5

        def run() -> Any:
            out, layer = torch.empty_like(self.q), next(turn)
            tables = (fb.page_table, fb.rows, fb.seq_lens)
            attn_decode_triton(self.q, kv.k(layer), kv.v(layer), *tables, out, scale, config, workspace)
            return out

        return run


def tune(decodes: Decodes, requests: int, depth: int, until: float) -> list[dict[str, Any]]:
    """Figures of the settings of one batch, fastest last; after ``until`` on the monotonic clock no other is tried."""
    from freetoken.bench.ops import graph_microseconds
    from freetoken.kernels.checking import relative_rms

    expected, found = None, []
    for index, config in enumerate(candidates(decodes.default, depth)):
        if index and time.monotonic() > until:
            break
        try:
            actual = decodes.call(config)()
        except Exception as error:  # what a launch raises for too much shared memory differs between versions of Triton
            if index == 0:
                raise
            print(f"  passed over {config}: {type(error).__name__}", flush=True)
            continue
        expected = actual if expected is None else expected
        rms = relative_rms(actual, expected)
        if not rms <= BOUND:
            raise StartupError(f"attention with {config} differs from the default by relative RMS {rms:.3g}")
        found.append(
            figures.figure(
                "tune attn_decode",
                model="random inputs",
                device="cuda",
                requests=requests,
                depth=depth,
                **dataclasses.asdict(config),
                default=index == 0,
                us=graph_microseconds(decodes.call(config)),
            )
        )
    return sorted(found, key=lambda row: -row["us"])


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of requests at every depth."""
    names = ("requests", "depths", "heads", "kv_heads", "head_dim", "seconds")
    cli.require_at_least(args, dict.fromkeys(names, 1))
    if args.heads % args.kv_heads:
        raise StartupError(f"--heads must be a multiple of --kv-heads, not {args.heads}")
    if not hardware.probe().usable_gpu:
        raise StartupError(f"settings are timed on a GPU: {hardware.probe().device_reason}")
    import torch

    found: list[dict[str, Any]] = []
    shapes = list(itertools.product(args.requests, args.depths))
    began = time.monotonic()
    with torch.inference_mode():
        for number, (requests, depth) in enumerate(shapes, 1):
            torch.manual_seed(0)
            until = began + args.seconds * number / len(shapes)
            rows = tune(Decodes(args, requests, depth), requests, depth, until)
            default = next(row["us"] for row in rows if row["default"])
            print(f"requests {requests}, depth {depth:,}: default {default:.2f} us of {len(rows)} settings; best last")
            for row in rows[-6:]:
                settings = {field.name: row[field.name] for field in dataclasses.fields(DecodeConfig)}
                print(f"  {row['us']:9.2f} us {settings}", flush=True)
            found += rows
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
