"""Time the settings of ``pq2_gemm`` on this GPU and write its table: ``python -m freetoken.bench.tune_pq2_gemm``.

Every candidate is checked against the reference before it is timed, one call among many of a replayed CUDA graph over weights that
are together larger than the cache. From how many tokens on the dense form is the fastest over all projections is written, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken import hardware
from freetoken.bench import cli, figures, ops, roof
from freetoken.errors import StartupError

SHAPES = {(34816, 5120): 64, (16384, 5120): 48, (14336, 5120): 16, (5120, 17408): 64, (5120, 6144): 64}
"""``(N, K)`` of the 27B's projections, and how many of each a token goes through."""
TOKENS = (32, 64, 256, 1024, 4096)
NEVER = 2**30
GRAPH_CALLS = 20
BOUND = 1e-2
"""Largest relative RMS of bfloat16 outputs against the reference."""


@dataclass(frozen=True)
class Timing:
    """The best of one form at one shape: microseconds a call, and the settings."""

    us: float
    config: Any


class Bench:
    """Inputs of one shape on the device, and calls of every form."""

    def __init__(self, n: int, k: int, tokens: int, device: str, dtype: Any = None) -> None:
        import torch

        from freetoken.bench.op_cases import Sizes
        from freetoken.bench.pq2 import GROUP, random_weight
        from freetoken.kernels.pq2_gemm import triton
        from freetoken.kernels.pq2_gemv.activation import quantise_reference

        self._triton = triton
        copies = -(-Sizes().packed_bytes // (n * k // 4)) if device == "cuda" else 1
        self.weights = [random_weight(n, k, device) for _ in range(copies)]
        self.x = torch.randn(tokens, k, device=device).to(dtype or torch.bfloat16)
        self.activation = quantise_reference(self.x, GROUP)
        self.out = torch.empty(tokens, n, dtype=self.x.dtype, device=device)

    def expected(self, form: str) -> Any:
        """What the reference gives."""
        from freetoken.kernels.pq2_gemv import reference

        if form == "int8":
            return reference.linear(self.activation, self.weights[0], self.out.dtype)
        return reference.float_linear(self.x, self.weights[0], self.out.dtype)

    def call(self, form: str, config: Any) -> Callable[[], Any]:
        """One product into ``out``, by the next of the weights at each call."""
        turn = itertools.cycle(self.weights)
        if form == "dense":
            return lambda: self._triton.dense_linear(self.x, next(turn), self.out, config)
        if form == "int8":
            return lambda: self._triton.int8_linear(self.activation, next(turn), self.out, config)
        return lambda: self._triton.float_linear(self.x, next(turn), self.out, config)


def best_of(
    form: str, bench: Bench, configs: Sequence[Any], timer: Callable[[Callable[[], object]], float], seconds: float
) -> Timing | None:
    """The fastest of ``configs`` that are right; those that fail to launch or are wrong are named and passed over. After
    ``seconds`` no further one is begun."""
    from freetoken.kernels import checking

    expected, found, start = bench.expected(form), None, time.monotonic()
    for config in configs:
        if time.monotonic() - start > seconds:
            print(f"  {form}: out of time before {config}", flush=True)
            break
        call = bench.call(form, config)
        try:
            bench.out.fill_(float("nan"))
            call()
            error = checking.relative_rms(bench.out, expected)
            if not error <= BOUND:
                print(f"  {form}: {config} is wrong, relative RMS {error:.3g}", flush=True)
                continue
            us = timer(call)
        except Exception as problem:  # a setting may ask for more than the GPU has
            print(f"  {form}: {config} does not run: {type(problem).__name__}", flush=True)
            continue
        if found is None or us < found.us:
            found = Timing(us, config)
    return found


def dense_from(times: dict[tuple[str, int, int, int], float], shapes: dict[tuple[int, int], int]) -> int:
    """The smallest measured number of tokens from which on the dense form takes less than ``int8`` over all ``shapes``."""
    first = NEVER
    for tokens in sorted({key[3] for key in times}, reverse=True):
        sums = []
        for form in ("dense", "int8"):
            parts = [count * times.get((form, n, k, tokens), float("inf")) for (n, k), count in shapes.items()]
            sums.append(sum(parts))
        if not sums[0] < sums[1]:
            break
        first = tokens
    return first


def tune(
    shapes: dict[tuple[int, int], int],
    tokens: Sequence[int],
    forms: Sequence[str],
    device: str,
    timer: Callable[[Callable[[], object]], float],
    seconds: float,
    dtype: Any = None,
) -> tuple[Any, dict[tuple[str, int, int, int], Timing]]:
    """A :class:`freetoken.kernels.pq2_gemm.config.Table` of the fastest settings, and the timings by ``(form, n, k, tokens)``."""
    import torch

    from freetoken.kernels import launch
    from freetoken.kernels.pq2_gemm import candidates, m_class, slice_candidates
    from freetoken.kernels.pq2_gemm.config import Table

    capability = launch.capability(torch.device(device))
    timings: dict[tuple[str, int, int, int], Timing] = {}
    for m, (n, k) in itertools.product(tokens, shapes):
        bench = Bench(n, k, m, device, dtype)
        for form in forms:
            dense = form == "dense"
            configs = slice_candidates(n, k, m, capability) if dense else candidates(form, n, k, m, capability)
            best = best_of(form, bench, configs, timer, seconds)
            if best is not None:
                timings[form, n, k, m] = best
                print(f"{form:<6} {m:>5} tokens, {n} x {k}: {best.us:9.1f} us, {best.config}", flush=True)
    settings = {(form, n, k, m_class(m)): best.config for (form, n, k, m), best in timings.items()}
    return Table(dense_from({key: best.us for key, best in timings.items()}, shapes), settings), timings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m freetoken.bench.tune_pq2_gemm", description="Tune pq2_gemm.")
    result.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="Numbers of tokens.")
    result.add_argument("--forms", nargs="+", choices=("int8", "float", "dense"), default=["int8", "float", "dense"])
    result.add_argument("--seconds", type=int, default=20, help="Time for one form of one shape.")
    result.add_argument("--table", help="The table to write; default: where the package looks for this card's.")
    result.add_argument("--output", help="Append the figures as JSON lines.")
    return result


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tune, write the table, and give the best of each form at each shape as figures."""
    if not hardware.probe().usable_gpu:
        raise StartupError(f"ops are timed on a GPU: {hardware.probe().device_reason}")
    cli.require_at_least(args, {"seconds": 1, "tokens": 1})
    import torch

    from freetoken.bench.op_rows_packed import MODEL
    from freetoken.kernels.pq2_gemm import config

    torch.manual_seed(0)
    bandwidth, rate = roof.measure("cuda", "bfloat16")
    with torch.inference_mode():
        table, timings = tune(SHAPES, args.tokens, args.forms, "cuda", _microseconds, float(args.seconds))
    path = Path(args.table) if args.table else config.table_path(torch.cuda.get_device_capability())
    config.write_table(path, torch.cuda.get_device_name(), table)
    print(f"dense form from {table.dense_from} tokens on; wrote {path}")
    found = []
    for (form, n, k, tokens), best in timings.items():
        bound = max(n * k * 17 / 64 / bandwidth, 2.0 * tokens * n * k / rate) * 1e6
        found.append(
            figures.figure(
                f"tuned pq2_gemm, {form}",
                model=f"random inputs, {MODEL} geometry",
                device="cuda",
                tokens=tokens,
                n=n,
                k=k,
                us=best.us,
                tflop_s=2 * tokens * n * k / best.us / 1e6,
                settings=str(best.config),
                roof=bound,
                share=bound / best.us,
            )
        )
    return found


def _microseconds(call: Callable[[], object]) -> float:
    return ops.graph_microseconds(call, GRAPH_CALLS)


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; 1 when there is no GPU."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
