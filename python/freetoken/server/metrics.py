"""Prometheus metrics of one server, in a registry of its own (torch-free).

Histograms join two monotonic stamps of this process only; gauges of the scheduler are its latest snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from freetoken.messages import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "freetoken:"
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ITL = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_E2E = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class _SchedulerCollector(Collector):
    """Reads the latest :class:`SchedulerStats` when scraped."""

    def __init__(self) -> None:
        self.stats = SchedulerStats()

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        for name, text, value in (
            ("num_running_reqs", "Requests being decoded or prefilled.", stats.running),
            ("num_queue_reqs", "Requests waiting in the scheduler.", stats.queued),
            ("num_used_tokens", "KV cache tokens held by running requests.", stats.used_tokens),
            ("token_usage", "Share of the KV cache held by running requests.", _share(stats)),
            ("max_total_num_tokens", "KV cache tokens there are.", stats.total_tokens),
            ("num_cached_tokens", "KV cache tokens that the prefix cache alone holds.", stats.cached_pool_tokens),
            ("gen_throughput", "Output tokens a second, as the scheduler measured last.", stats.gen_throughput),
            ("decode_step_seconds", "Mean of the last steps without prompt tokens.", stats.decode_step_ms / 1000),
            ("prefill_step_seconds", "Mean of the last steps with prompt tokens.", stats.prefill_step_ms / 1000),
            ("state_slots_used", "Rows of per-request state in use.", stats.rows_used),
            ("state_slots", "Rows of per-request state there are.", stats.rows_total),
            (
                "state_checkpoint_bytes",
                "Host memory holding checkpoints of recurrent state.",
                stats.state_blocks_used * stats.state_block_bytes,
            ),
            (
                "state_checkpoint_capacity_bytes",
                "Host memory for checkpoints of recurrent state.",
                stats.state_blocks_total * stats.state_block_bytes,
            ),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value=value)
        for name, text, count in (
            ("num_steps", "Steps launched.", stats.steps),
            ("num_retractions", "Requests put back for want of KV memory.", stats.retractions),
            ("state_checkpoint_hits", "Prefix hits that restored a checkpoint.", stats.state_hits),
            ("state_checkpoint_evictions", "Checkpoints given up for newer ones.", stats.state_evictions),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=count)
        replays = CounterMetricFamily(
            _PREFIX + "graph_replays", "Decode steps replayed from a CUDA graph.", labels=["bucket"]
        )
        for bucket, count in stats.graph_replays.items():
            replays.add_metric([bucket], count)
        yield replays
        yield CounterMetricFamily(
            _PREFIX + "graph_misses", "Decode steps that no graph covered.", value=stats.graph_misses
        )


def _share(stats: SchedulerStats) -> float:
    return stats.used_tokens / stats.total_tokens if stats.total_tokens else 0.0


class Metrics:
    """All metrics of one server. Methods may be called from any thread."""

    def __init__(self) -> None:
        # A sample of the start of each counter and histogram doubles the page and serves no dashboard.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._scheduler = _SchedulerCollector()
        self.registry.register(self._scheduler)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens taken from the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens.")
        self.requests = self._counter("num_requests", "Sequences accepted.")
        self.aborted = self._counter("num_aborted_requests", "Sequences ended by the client or by an abort call.")
        self.refused = self._counter("num_refused_requests", "Requests refused because the queue was full.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two tokens of one sequence.", _ITL)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _E2E)
        self.queue = self._histogram("queue_time_seconds", "Waiting in the scheduler before the first step.", _TTFT)
        self._kernels = Gauge(
            _PREFIX + "kernel_path", "1 for the implementation in use.", ["op", "impl"], registry=self.registry
        )
        self._hits = Gauge(
            _PREFIX + "cache_hit_rate", "Cached share of all prompt tokens so far.", registry=self.registry
        )
        self._prompt = self._cached = 0

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)

    def set_stats(self, stats: SchedulerStats) -> None:
        """Keep the scheduler's latest snapshot."""
        self._scheduler.stats = stats

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    def set_kernels(self, info: Mapping[str, Any]) -> None:
        """``kernel_path`` from the scheduler's ready info: ``kernels`` maps an op to its implementation, or to an object
        with ``impl``, or is a list of objects with ``op`` and ``impl``."""
        for op, impl in kernel_table(info):
            self._kernels.labels(op=op, impl=impl).set(1)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the prompt of a sequence whose first output came."""
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(cached_tokens)
        self._prompt += prompt_tokens
        self._cached += cached_tokens
        self._hits.set(self.hit_rate)

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens so far."""
        return self._cached / self._prompt if self._prompt else 0.0

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)


def kernel_table(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(op, implementation)`` pairs of the scheduler's ready info, in its order."""
    kernels = info.get("kernels")
    if isinstance(kernels, Mapping):
        return [
            (str(op), str(impl.get("impl", "")) if isinstance(impl, Mapping) else str(impl))
            for op, impl in kernels.items()
        ]
    if isinstance(kernels, list):
        return [(str(row.get("op", "")), str(row.get("impl", ""))) for row in kernels if isinstance(row, Mapping)]
    return []
