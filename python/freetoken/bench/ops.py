"""Check one fused op, then time it beside its reference and the roof: ``python -m freetoken.bench.ops OP...``.

Times are of one call inside a replayed CUDA graph of many, so launch costs are those of serving. An op whose check fails
gets no figure. Inputs are the same in every call: those that fit the cache are read from it, and the share may pass 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from freetoken import hardware
from freetoken.bench import cli, figures, roof, uncaptured
from freetoken.errors import FreetokenError, StartupError

if TYPE_CHECKING:
    from freetoken.bench.op_cases import Case

GRAPH_CALLS = 20
REPLAYS, REPLAY_SECONDS = 30, 0.1
EAGER_CALLS, EAGER_SECONDS = 10, 0.2
"""Most calls behind one figure, and the seconds in which as many as fit are enough."""
NAMES = (
    "rms_norm",
    "rope_kv",
    "silu_mul",
    "small_gemm",
    "attn_decode",
    "attn_prefill",
    "sample",
    "token_mask",
    "gdn_conv",
    "gdn_decode",
    "gdn_prefill",
    "gdn_norm",
    "moe_route",
    "moe_gemm",
    "fp8_gemm",
    "ple_hash",
    "ple_gather",
    "ple_mix",
    "hyper_mix",
    "qsa",
    "qsa_pieces",
    "pq2_gemv",
    "pq2_quantise",
    "rotated_norm",
    "rotated_silu",
    "rotated_gated_norm",
    "rotated",
    "pq2_gemm_int8",
    "pq2_gemm_float",
    "pq2_gemm_dense",
)

CHAIN = "pq2_chain"
"""Not an op: all products of a token with two-bit weights, in one graph."""


class OpCheckError(FreetokenError):
    """A fused op and its reference disagree."""


def check(name: str, case: Case) -> float:
    """Run both; the largest relative RMS of an output. :class:`OpCheckError` when they disagree."""
    from freetoken.kernels import checking

    worst = 0.0
    view = case.compared or (lambda outputs: outputs)
    for index, (actual, expected) in enumerate(zip(view(case.fused()), view(case.reference()), strict=True)):
        where = f"{name} {case.shape}, output {index}"
        if case.exact:
            wrong = int((actual != expected).sum())
            if wrong:
                raise OpCheckError(f"{where}: {wrong} of {actual.numel()} values differ from the reference")
            continue
        error = checking.relative_rms(actual, expected)
        limit = checking.RELATIVE_RMS[expected.dtype]
        if not error <= limit:
            raise OpCheckError(f"{where}: relative RMS {error:.3g} is above {limit:.3g}")
        worst = max(worst, error)
    return worst


def repeats_in(budget: float, once: float, most: int) -> int:
    """How often to time what takes ``once`` seconds within ``budget`` seconds: from 5 times to ``most``."""
    return max(5, min(most, int(budget / max(once, 1e-9))))


def graph_microseconds(call: Callable[[], object], calls: int = GRAPH_CALLS) -> float:
    """Median microseconds of one ``call`` among ``calls`` in a replayed CUDA graph."""
    import torch

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    repeats = repeats_in(REPLAY_SECONDS, roof.timer("cuda")(graph.replay, 1), REPLAYS)
    seconds = [roof.timer("cuda")(graph.replay, repeats) for _ in range(3)]
    return statistics.median(seconds) / calls * 1e6


def eager_microseconds(call: Callable[[], object]) -> float:
    """Median microseconds of one eager call: for references that cannot be captured."""
    once = roof.timer("cuda")(call, 1)
    return roof.timer("cuda")(call, repeats_in(EAGER_SECONDS, once, EAGER_CALLS)) * 1e6


def time_case(name: str, case: Case, error: float, bandwidth: float, rate: float) -> dict[str, Any]:
    """The figure of one checked case. ``bandwidth`` is bytes a second, ``rate`` FLOPs a second."""
    us = graph_microseconds(case.fused, case.calls)
    bound_us = max(case.bytes / bandwidth, case.flops / rate) * 1e6
    return figures.figure(
        f"op {name}",
        model=f"random inputs, {case.model} geometry",
        device="cuda",
        **case.shape,
        us=us,
        reference_eager_us=eager_microseconds(case.reference),
        gb_s=case.bytes / us / 1e3,
        tflop_s=case.flops / us / 1e6,
        relative_rms=error,
        roof=bound_us,
        share=bound_us / us,
    )


def add_uncaptured(timed: Sequence[tuple[dict[str, Any], Case]]) -> None:
    """Put into each figure what a call costs outside a graph, fused and by the reference; to be done last of all."""
    costs = iter(uncaptured.measure([call for _, case in timed for call in (case.fused, case.reference)]))
    for figure, case in timed:
        for prefix in ("", "reference_"):
            for key, value in dataclasses.asdict(next(costs)).items():
                figure[prefix + key] = value
        shape = ", ".join(f"{key} {value}" for key, value in case.shape.items())
        print(f"{figure['what'].removeprefix('op '):<18} {shape:<34} outside a graph: {_sides(figure)}", flush=True)


def _sides(figure: dict[str, Any]) -> str:
    """Fused and reference outside a graph, in one line."""
    return "; ".join(
        f"{name} {figure[f'{key}wall_us']:.2f} us of wall time, GPU busy {figure[f'{key}busy_us']:.2f} us, "
        f"{figure[f'{key}launches']:g} launches"
        for name, key in (("fused", ""), ("reference", "reference_"))
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m freetoken.bench.ops", description="Check and time fused ops.")
    result.add_argument("op", nargs="+", choices=(*NAMES, CHAIN, "all"))
    result.add_argument("--tune", action="store_true", help="Tune the settings of pq2_gemv first, and write its table.")
    result.add_argument("--tune-seconds", type=int, default=150, help="Time for --tune, about (default: %(default)s).")
    result.add_argument("--tune-tokens", type=int, nargs="+", help="Classes of token counts to tune (default: all).")
    result.add_argument("--tune-copy", help="Write the table to this path as well.")
    result.add_argument("--output", help="Append the figures as JSON lines.")
    return result


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case of the named ops. A red check raises after the other ops have run; their figures are printed."""
    if not hardware.probe().usable_gpu:
        raise StartupError(f"ops are timed on a GPU: {hardware.probe().device_reason}")
    import torch

    from freetoken.bench.op_cases import Sizes
    from freetoken.bench.op_rows import OPS

    cli.require_at_least(args, {"tune_seconds": 1})
    names = (*NAMES, CHAIN) if "all" in args.op else tuple(dict.fromkeys(args.op))
    bandwidth, rate = roof.measure("cuda", "bfloat16")
    found: list[dict[str, Any]] = []
    red: list[str] = []
    outside: list[tuple[dict[str, Any], Case]] = []
    if args.tune or CHAIN in names:
        found += _chain(args, bandwidth, CHAIN in names)
    for name in (name for name in names if name != CHAIN):
        torch.manual_seed(0)
        try:
            with torch.inference_mode():
                cases = OPS[name]("cuda", Sizes())
                errors = [check(name, case) for case in cases]
                timed = [time_case(name, *pair, bandwidth, rate) for pair in zip(cases, errors)]
        except FreetokenError as error:
            red.append(str(error))
            continue
        for figure, case in zip(timed, cases):
            shape = ", ".join(f"{key} {value}" for key, value in case.shape.items())
            print(
                f"{name:<18} {shape:<34} {figure['us']:9.2f} us, reference {figure['reference_eager_us']:9.2f} us eager, "
                f"roof {figure['roof']:8.2f} us ({figure['share']:.1%})",
                flush=True,
            )
            if case.uncaptured:
                outside.append((figure, case))
        found += timed
    if outside:
        with torch.inference_mode():
            add_uncaptured(outside)
    if CHAIN in names or "pq2_gemv" in names:
        from freetoken.bench import pq2

        print("\n".join(pq2.summary(found)), flush=True)
    if red:
        if args.output:
            figures.append(args.output, found)
        raise OpCheckError("; ".join(red))
    return found


def _chain(args: argparse.Namespace, bandwidth: float, timed: bool) -> list[dict[str, Any]]:
    """Tune where asked for, and time the chain of products."""
    import torch

    from freetoken.bench import pq2
    from freetoken.kernels.pq2_gemv.configs import CLASSES

    classes = tuple(args.tune_tokens or CLASSES)
    if unknown := set(classes) - set(CLASSES):
        raise StartupError(f"--tune-tokens {min(unknown)}: the classes are {', '.join(map(str, CLASSES))}")
    torch.manual_seed(0)
    with torch.inference_mode():
        chain = pq2.Chain.random(pq2.model_order())
        found = pq2.tune(chain, args.tune_seconds, args.tune_copy, classes) if args.tune else []
        found += pq2.chain_figures(chain, bandwidth) if timed else []
    del chain
    torch.cuda.empty_cache()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; 1 when a check is red."""
    return cli.entry(parser().parse_args(argv), run)


if __name__ == "__main__":
    cli.leave(main())
