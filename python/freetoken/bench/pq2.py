"""The products of a whole token with two-bit weights: timed as one chain, and the settings of the kernels tuned in it.

A chain is every matrix product of one decoded token of the Qwen3.5-27B geometry in the order of the model, in one CUDA graph, over
weights that no cache holds. Settings that are best for one product alone need not be best in the chain, so tuning times each
candidate alone first and the best few of every shape in the chain afterwards.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from freetoken.bench import figures, roof
from freetoken.bench.op_cases import Sizes
from freetoken.kernels import checking, launch
from freetoken.kernels.pq2_gemv import PQ2Config, PQ2Weight, Quantised, candidates, pick_config, reference
from freetoken.kernels.pq2_gemv import triton as product
from freetoken.kernels.pq2_gemv.configs import CLASSES, forget_tables, read_table, table_path, write_table
from freetoken.kernels.pq2_gemv.quantiser import quantise
from freetoken.kernels.pq2_gemv.weight import INTERLEAVE

Shape = tuple[int, int]
Settings = dict[Shape, PQ2Config]
LAYERS, ATTENTION_EVERY = 64, 4
SHAPES = GATE_UP, DOWN, GDN_IN, ATTENTION_IN, OUT, HEAD = Sizes().packed_shapes
"""``(N, K)`` of the projections, merged by common input: the two of the feed-forward, what the two mixers take and give, the head."""
NOTICEABLE = 0.998
"""What a setting must bring the chain down to, to be preferred: replays differ by about as much."""
GROUP = 128
MODEL = "random weights, Qwen3.5-27B geometry"


def model_order(layers: int = LAYERS, shapes: tuple[Shape, ...] = SHAPES) -> list[Shape]:
    """The shapes of a token's products, first to last: 257 of them in the 27B."""
    gate_up, down, gdn_in, attention_in, out, head = shapes
    order: list[Shape] = []
    for layer in range(layers):
        order += [attention_in if layer % ATTENTION_EVERY == ATTENTION_EVERY - 1 else gdn_in, out, gate_up, down]
    return [*order, head]


def random_weight(n: int, k: int, device: str, group: int = GROUP) -> PQ2Weight:
    """Codes in all four values, scales such that outputs are of the size of inputs; interleaved as a model's are."""
    codes = torch.randint(0, 256, (n, k // 4), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.5) / k**0.5
    return PQ2Weight(codes, scales.half(), group, interleaved=n % INTERLEAVE == 0)


def graph_of(calls: Callable[[], object]) -> Any:
    """A CUDA graph of ``calls``, which runs once before it is captured."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        calls()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph


def replay_ms(graph: Any, repeats: int) -> float:
    """Median milliseconds of a replay."""
    return roof.timer("cuda")(graph.replay, repeats) * 1e3


@dataclass
class Chain:
    """Weights of a whole token in model order and one activation for each width and number of tokens."""

    weights: list[PQ2Weight]
    inputs: dict[tuple[int, int], tuple[torch.Tensor, Quantised]] = field(default_factory=dict)

    @classmethod
    def random(cls, order: Iterable[Shape]) -> Chain:
        """Random weights of these shapes on the GPU."""
        return cls([random_weight(n, k, "cuda") for n, k in order])

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)

    def input(self, tokens: int, k: int) -> tuple[torch.Tensor, Quantised]:
        """An activation of this size, in bfloat16 and quantised."""
        if (tokens, k) not in self.inputs:
            x = torch.randn(tokens, k, device="cuda").bfloat16()
            self.inputs[tokens, k] = (x, quantise(x, GROUP, tiles=tokens > 1))
        return self.inputs[tokens, k]

    def run(self, tokens: int, settings: Settings, quantisers: bool) -> None:
        """Every product once; ``settings`` are by shape. With ``quantisers`` each product's input is quantised before it."""
        for weight in self.weights:
            x, activation = self.input(tokens, weight.in_features)
            config = settings[weight.out_features, weight.in_features]
            if quantisers:
                activation = quantise(x, GROUP, tiles=tokens > 1)
            product.linear(activation, weight, torch.bfloat16, config=config)

    def ms(self, tokens: int, settings: Settings, *, quantisers: bool = False, repeats: int = 10) -> float:
        """Median milliseconds of a replay of the chain."""
        return replay_ms(graph_of(lambda: self.run(tokens, settings, quantisers)), repeats)


def shipped(tokens: int, shapes: Iterable[Shape] = SHAPES) -> Settings:
    """The settings that the package uses here."""
    capability = launch.capability(torch.device("cuda", torch.cuda.current_device()))
    return {(n, k): pick_config(n, k, tokens, capability) for n, k in shapes}


def chain_figures(chain: Chain, bandwidth: float, token_counts: Iterable[int] = (1, 8, 32)) -> list[dict[str, Any]]:
    """The chain with the shipped settings: as launched in serving, launched plainly, and with quantisers between."""
    found = []
    bound = chain.nbytes / bandwidth * 1e3
    for tokens in token_counts:
        settings = shipped(tokens)
        for early, quantisers in ((True, False), (False, False), (True, True)):
            before = launch.EARLY_LAUNCH
            launch.EARLY_LAUNCH = early
            try:
                ms = chain.ms(tokens, settings, quantisers=quantisers, repeats=30)
            finally:
                launch.EARLY_LAUNCH = before
            found.append(
                figures.figure(
                    "pq2 chain",
                    model=MODEL,
                    device="cuda",
                    tokens=tokens,
                    products=len(chain.weights),
                    early_launch=early,
                    quantisers=quantisers,
                    ms=ms,
                    gb_s=chain.nbytes / ms / 1e6,
                    roof=bound,
                    share=bound / ms,
                )
            )
    return found


def _compile(job: tuple[PQ2Config, int, int]) -> tuple[tuple[PQ2Config, int, int], int]:
    """In a process of its own: compile for the card here; bytes spilled by a thread, -1 where it does not compile."""
    config, k, tokens = job
    try:
        early = launch.early(torch.empty(1, device="cuda"))
        kernel = product.compile_only(config, 1024, k, tokens, GROUP, GROUP, torch.bfloat16, early)
        kernel._init_handles()
        return job, int(kernel.n_spills)
    except Exception as error:
        print(f"  {config} at K {k} does not compile here: {str(error)[:200]}", flush=True)
        return job, -1


def compile_all(jobs: Iterable[tuple[PQ2Config, int, int]], seconds: float) -> set[tuple[PQ2Config, int, int]]:
    """Those of the jobs (settings, K, tokens) that compiled in time without spilling; the compiler's cache holds them."""
    workers = max(1, min(16, (os.cpu_count() or 2) - 1))
    good = set()
    pool = futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        for done in futures.as_completed([pool.submit(_compile, job) for job in jobs], timeout=seconds):
            job, spilled = done.result()
            if spilled == 0:
                good.add(job)
    except futures.TimeoutError:
        print(f"  compiling stopped after {seconds:.0f} s", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return good


def alone_us(config: PQ2Config, weights: list[PQ2Weight], activation: Quantised, expected: torch.Tensor) -> float:
    """Microseconds of one product among those with every weight in a graph; infinite where it does not run, or where the product
    with the first weight is not ``expected``."""
    try:
        actual = product.linear(activation, weights[0], torch.bfloat16, config=config)
        error = checking.relative_rms(actual, expected)
        if not error <= checking.RELATIVE_RMS[torch.bfloat16]:
            print(f"  {config} is WRONG at {tuple(weights[0].codes.shape)}: relative RMS {error:.3g}", flush=True)
            return float("inf")

        def calls() -> None:
            for weight in weights:
                product.linear(activation, weight, torch.bfloat16, config=config)

        return replay_ms(graph_of(calls), 5) / len(weights) * 1e3
    except RuntimeError as error:
        print(f"  {config} does not run here: {str(error)[:200]}", flush=True)
        return float("inf")


@dataclass
class Tuning:
    """One tuning session: a chain, a deadline and what has been found by ``(N, K, class)``."""

    chain: Chain
    deadline: float
    capability: tuple[int, int] | None = None
    keep: int = 4
    found: dict[tuple[int, int, int], PQ2Config] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def alone(self, tokens: int, compiled: set[tuple[PQ2Config, int, int]]) -> dict[Shape, list[PQ2Config]]:
        """The best few settings of each shape by its own time, best first."""
        ranked: dict[Shape, list[PQ2Config]] = {}
        for shape in SHAPES:
            n, k = shape
            weights = [w for w in self.chain.weights if (w.out_features, w.in_features) == shape][:60]
            while sum(weight.nbytes for weight in weights) > 2 * Sizes().packed_bytes and len(weights) > 1:
                weights.pop()
            activation = self.chain.input(tokens, k)[1]
            expected = reference.linear(activation, weights[0], torch.bfloat16)
            times: dict[PQ2Config, float] = {}
            for config in candidates(n, k, tokens, self.capability):
                if (config, k, tokens) in compiled and not self.late():
                    times[config] = alone_us(config, weights, activation, expected)
            best = [config for config in sorted(times, key=lambda c: times[c]) if times[config] < float("inf")]
            ranked[shape] = best[: self.keep] or candidates(n, k, tokens, self.capability)[:1]
            if best:
                gb_s = weights[0].nbytes / times[best[0]] / 1e3
                own = {key: value for key, value in vars(best[0]).items() if value}
                self._log("pq2 tuned alone", tokens=tokens, n=n, k=k, **own, us=times[best[0]], gb_s=gb_s)
                print(
                    f"  {tokens:2} tokens {n:6} x {k:5} alone {times[best[0]]:7.2f} us {gb_s:6.0f} GB/s {best[0]}",
                    flush=True,
                )
        return ranked

    def in_chain(self, tokens: int, ranked: dict[Shape, list[PQ2Config]], rounds: int) -> float:
        """Settle each shape in turn on what makes the chain fastest; milliseconds of the chain then."""
        settings = {shape: configs[0] for shape, configs in ranked.items()}
        best = self.chain.ms(tokens, settings)
        print(f"  {tokens:2} tokens: chain {best:.3f} ms with the best of each alone", flush=True)
        self._log("pq2 tuning", tokens=tokens, settings="best of each alone", ms=best)
        for _round in range(rounds):
            before = dict(settings)
            for shape in sorted(SHAPES, key=lambda s: -s[0] * s[1]):
                for config in ranked[shape]:
                    if config == settings[shape] or self.late():
                        continue
                    ms = self.chain.ms(tokens, {**settings, shape: config})
                    if ms < NOTICEABLE * best:
                        best, settings[shape] = ms, config
            if settings == before:
                break
        print(f"  {tokens:2} tokens: chain {best:.3f} ms tuned in it", flush=True)
        self._log("pq2 tuning", tokens=tokens, settings="tuned in the chain", ms=best)
        self.found |= {(n, k, tokens): config for (n, k), config in settings.items()}
        return best

    def _log(self, what: str, **values: Any) -> None:
        self.log.append(figures.figure(what, model=MODEL, device="cuda", **values))


def tune(
    chain: Chain, seconds: float, path: str | None = None, classes: tuple[int, ...] = CLASSES
) -> list[dict[str, Any]]:
    """Tune ``classes`` of token counts within about ``seconds`` and write the table of this card; the figures of the way there.

    The table lies in the package and is used from now on; ``path`` is for a copy. Settings of an earlier table stay where the
    time was not enough to find others.
    """
    capability = launch.capability(torch.device("cuda", torch.cuda.current_device()))
    assert capability is not None
    target = table_path(capability)
    session = Tuning(chain, time.monotonic() + seconds, capability)
    jobs = dict.fromkeys(
        (config, k, tokens) for tokens in classes for n, k in SHAPES for config in candidates(n, k, tokens, capability)
    )
    print(f"compiling {len(jobs)} kernels", flush=True)
    compiled = compile_all(jobs, seconds * 0.45)
    print(f"  {len(compiled)} of {len(jobs)} compiled without spills", flush=True)
    for tokens in classes:
        if session.late():
            break
        session.in_chain(tokens, session.alone(tokens, compiled), rounds=2 if tokens == 1 else 1)
    earlier = read_table(target) if target.exists() else {}
    for place in (target, *([Path(path)] if path else ())):
        write_table(place, figures.card("cuda"), earlier | session.found)
        print(f"settings written to {place}", flush=True)
    forget_tables()
    return session.log


def summary(found: list[dict[str, Any]]) -> list[str]:
    """The products' figures as a short table, shapes by token counts: microseconds and share of the roof; then the chains."""
    rows = {(item["n"], item["k"], item["tokens"]): item for item in found if item["what"] == "op pq2_gemv"}
    lines = []
    shown = [tokens for tokens in (1, 2, 4, 8, 16, 32) if any(key[2] == tokens for key in rows)]
    if rows:
        lines.append(f"{'us (share)':>15} " + " ".join(f"{f'M={tokens}':>14}" for tokens in shown))
    for n, k in dict.fromkeys((n, k) for n, k, _ in rows):
        cells = [(rows[n, k, tokens]["us"], rows[n, k, tokens]["share"]) for tokens in shown]
        lines.append(f"{n:>7} x {k:>5} " + " ".join(f"{us:7.2f} ({share:4.0%})" for us, share in cells))
    for item in found:
        if item["what"] == "pq2 chain":
            how = "early launch" if item["early_launch"] else "plain launch"
            extra = ", with quantisers" if item["quantisers"] else ""
            lines.append(
                f"chain of {item['products']} products, {item['tokens']} tokens, {how}{extra}: {item['ms']:.3f} ms "
                f"({item['share']:.0%} of {item['roof']:.3f} ms)"
            )
    return lines
