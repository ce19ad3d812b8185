"""Time launch settings of the products with experts: ``python -m freetoken.bench.moe_tune --bits 8 --tokens 1 64``.

For each number of tokens both products are run, in the way the op would take, with the default settings and with some of the
candidates drawn by ``--seed``; each is checked against the default's output before it is timed. Settings that a GPU has no room
for are passed over. The fastest come last.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from freetoken import hardware
from freetoken.bench import cli, figures
from freetoken.errors import StartupError

PRODUCTS = ("gate_up", "down")
BOUND = 1e-2


def parser() -> argparse.ArgumentParser:
    """The command line; sizes default to those of qwen4_exp."""
    result = argparse.ArgumentParser(
        prog="python -m freetoken.bench.moe_tune", description=(__doc__ or "").split(":")[0]
    )
    result.add_argument("--bits", type=int, nargs="+", choices=(8, 16), default=[8], help="FP8 or bfloat16 weights")
    result.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 2048])
    result.add_argument(
        "--experts", type=int, default=512, help="without the shared one, which every token has besides"
    )
    result.add_argument("--top-k", type=int, default=10)
    result.add_argument("--hidden", type=int, default=2560)
    result.add_argument("--width", type=int, default=640)
    result.add_argument("--limit", type=int, default=24, help="candidates a product, the default among them")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--output", help="Append the figures as JSON lines.")
    return result


def chosen(candidates: Sequence[Any], limit: int, seed: int) -> list[Any]:
    """The default (the first) and ``limit - 1`` of the others."""
    rest = list(candidates[1:])
    return [candidates[0], *random.Random(seed).sample(rest, min(limit - 1, len(rest)))]


class Products:
    """Both products of one layer over several routings; each call takes the next, so that weights come from memory."""

    def __init__(self, args: argparse.Namespace, bits: int, tokens: int, device: str = "cuda") -> None:
        import torch

        from freetoken.bench import moe_rows
        from freetoken.bench.op_cases import Sizes, random
        from freetoken.kernels.moe_gemm import config, triton
        from freetoken.kernels.moe_route.triton import group_by_expert

        sizes = Sizes(experts=args.experts, top_k=args.top_k, moe_hidden=args.hidden, moe_width=args.width)
        stack, hidden, width = args.experts + 1, args.hidden, args.width
        shapes = {"gate_up": (stack, 2 * width, hidden), "down": (stack, hidden, width)}
        self.weights: dict[str, Any] = {
            name: moe_rows._fp8(device, *shape, parts=(width,) if name == "gate_up" else ())
            if bits == 8
            else moe_rows._float(device, torch.bfloat16, *shape)
            for name, shape in shapes.items()
        }
        self.x = random(device, torch.bfloat16, tokens, hidden)
        self.activations = random(device, torch.bfloat16, tokens * (args.top_k + 1), width)
        ids, shares = moe_rows._routings(device, sizes, tokens)
        self.routings = list(zip(ids, shares))
        self.routes = ids[0].numel()
        self.bytes_per_weight = 1 if bits == 8 else 2
        self.by_route = config.route_by_route(tokens, args.top_k + 1, stack)
        self.block_m = config.block_m(self.routes, stack)
        self.groups = [] if self.by_route else [group_by_expert(i, stack, self.block_m) for i in ids]
        self._config, self._triton = config, triton

    def candidates(self, product: str) -> list[Any]:
        """Settings for ``product``, the default first."""
        config, k = self._config, self.weights[product].shape[-1]
        if not self.by_route:
            found: list[Any] = config.candidates_tile(self.block_m, k, 2, gated=product == "gate_up")
            return found
        pick = config.pick_gate_up_route if product == "gate_up" else config.pick_down_route
        found = config.candidates_route(pick(k, self.bytes_per_weight), k)
        return found

    def call(self, product: str, settings: Any) -> Callable[[], Any]:
        """A call that goes through the routings in turn, from the first."""
        turn = itertools.cycle(range(len(self.routings)))
        weight, kernels, gated = self.weights[product], self._triton, product == "gate_up"
        rows = self.x if gated else self.activations
        if not self.by_route:
            return lambda: kernels.tiles(
                rows, self.groups[next(turn)], weight, settings, routes=self.routes, silu=gated
            )
        if gated:
            return lambda: kernels.gate_up_routes(rows, self.routings[next(turn)][0], weight, settings)
        return lambda: kernels.down_routes(rows, self.routings[next(turn)], weight, None, settings)


def tune(args: argparse.Namespace, bits: int, tokens: int, product: str, products: Products) -> list[dict[str, Any]]:
    """Figures of the settings of one product, fastest last."""
    from freetoken.bench.ops import graph_microseconds
    from freetoken.kernels.checking import relative_rms

    expected, found = None, []
    for index, settings in enumerate(chosen(products.candidates(product), args.limit, args.seed)):
        call = products.call(product, settings)
        try:
            actual = call()
        except Exception as error:  # what a launch raises for too much shared memory differs between versions of Triton
            if index == 0:
                raise
            print(f"  passed over {settings}: {type(error).__name__}", flush=True)
            continue
        expected = actual if expected is None else expected
        rms = relative_rms(actual, expected)
        if not rms <= BOUND:
            raise StartupError(f"{product} with {settings} differs from the default by relative RMS {rms:.3g}")
        found.append(
            figures.figure(
                f"tune moe {product}",
                model="random inputs, qwen4_exp geometry",
                device="cuda",
                tokens=tokens,
                bits=bits,
                by_route=products.by_route,
                **dataclasses.asdict(settings),
                default=index == 0,
                us=graph_microseconds(products.call(product, settings)),
            )
        )
    return sorted(found, key=lambda row: -row["us"])


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every product at every number of tokens."""
    cli.require_at_least(args, dict.fromkeys(("tokens", "experts", "top_k", "hidden", "width", "limit"), 1))
    if args.top_k > args.experts:
        raise StartupError(f"--top-k must be at most {args.experts}, not {args.top_k}")
    if not hardware.probe().usable_gpu:
        raise StartupError(f"settings are timed on a GPU: {hardware.probe().device_reason}")
    import torch

    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for bits, tokens in itertools.product(args.bits, args.tokens):
            torch.manual_seed(0)
            products = Products(args, bits, tokens)
            for product in PRODUCTS:
                rows = tune(args, bits, tokens, product, products)
                default = next(row["us"] for row in rows if row["default"])
                best = {key: rows[-1][key] for key in rows[-1] if key.startswith(("block_", "num_", "unroll"))}
                print(
                    f"{product:<8} tokens {tokens:<5} bits {bits:<3} default {default:9.2f} us, best of {len(rows)} "
                    f"{rows[-1]['us']:9.2f} us: {best}",
                    flush=True,
                )
                found += rows
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
