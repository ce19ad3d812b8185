"""Random histories of the scheduler: every text is that of the request alone, and the books add up after every step."""

from __future__ import annotations

from typing import Any
from unittest import mock

from fake_runner import Harness, make_config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from freetoken.sampling_params import Grammar
from freetoken.scheduler import policy

# The last one fits nothing but the token that ends a request.
GRAMMARS = [
    Grammar(kind="json_schema", text='{"type": "object", "properties": {"a": {"enum": ["x", 12]}}, "required": ["a"]}'),
    Grammar(kind="regex", text="[a-z]{0,30}"),
    Grammar(kind="regex", text="(ab|cd)+", after=3),
    Grammar(kind="lark", text='start: "[" start "]" | /[a-f]/'),
    Grammar(kind="regex", text="()"),
]
STEM = [(7 * i * i + 3 * i) % 50 for i in range(48)]


class SchedulerHistory(RuleBasedStateMachine):
    """Adds, aborts, steps and flushes in any order; at the end everything runs out and is compared."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        chunk=st.sampled_from([1, 7, 64]),
        prefill=st.sampled_from([64, 128]),
        order=st.sampled_from(["fcfs", "lpm"]),
        pool=st.sampled_from([64, 96, 400]),
        rows=st.integers(1, 5),
        flags=st.fixed_dictionaries(
            {name: st.booleans() for name in ("overlap", "disable_radix_cache", "enable_priority_scheduling")}
        ),
        start=st.sampled_from([0.0, policy.RATIO_START]),
        shared=st.sampled_from([2, policy.SHARED_PREFIX_TOKENS]),
        blocks=st.sampled_from([None, 0, 1, 3, 50]),
        gap=st.sampled_from([1, 8]),
        interval=st.sampled_from([1, 16, 2048]),
    )
    def start(
        self,
        page_size: int,
        chunk: int,
        prefill: int,
        order: str,
        pool: int,
        rows: int,
        flags: dict[str, Any],
        start: float,
        shared: int,
        blocks: int | None,
        gap: int,
        interval: int,
    ) -> None:
        self.patches = [
            mock.patch.object(policy, "RATIO_START", start),
            mock.patch.object(policy, "RATIO_FLOOR", min(start, policy.RATIO_FLOOR)),
            mock.patch.object(policy, "SHARED_PREFIX_TOKENS", shared),
            mock.patch.object(policy, "MAX_BYPASS", 2),
            mock.patch.object(policy, "CHECKPOINT_TOKENS", gap),
            mock.patch.object(policy, "CHECKPOINT_SHARE", 1),
        ]
        for patch in self.patches:
            patch.start()
        config = make_config(
            page_size=page_size,
            chunked_prefill_size=chunk,
            max_prefill_tokens=prefill,
            schedule_policy=order,
            state_checkpoint_interval=interval,
            **flags,
        )
        self.harness = Harness(config, num_pages=pool // page_size + 1, max_rows=rows, state_blocks=blocks)
        self.count = 0

    @rule(
        stem=st.integers(0, 48),
        tail=st.lists(st.integers(0, 49), max_size=6),
        new=st.one_of(st.none(), st.integers(1, 40)),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, 49), max_size=3),
        least=st.integers(0, 3),
        scored=st.booleans(),
        grammar=st.sampled_from([None, None, *GRAMMARS]),
        priority=st.integers(-1, 2),
    )
    def add(
        self,
        stem: int,
        tail: list[int],
        new: int | None,
        ignore_eos: bool,
        stops: list[int],
        least: int,
        scored: bool,
        grammar: Grammar | None,
        priority: int,
    ) -> None:
        self.harness.add(
            f"r{self.count}",
            STEM[:stem] + tail or [1],
            priority if self.harness.config.priority_scheduling else 0,
            grammar=grammar,
            max_new_tokens=new,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stops),
            min_new_tokens=least if new is None else min(least, new),
            prompt_logprobs=0 if scored else None,
        )
        self.count += 1

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.count)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        self.harness.scheduler.abort(f"r{which % self.count}")
        self.harness.scheduler.check()

    @rule()
    def abort_all(self) -> None:
        self.harness.scheduler.abort(None)
        self.harness.scheduler.check()

    @rule()
    def flush(self) -> None:
        idle = not self.harness.scheduler.live and not self.harness.scheduler.flights
        assert self.harness.scheduler.flush_cache() == idle
        self.harness.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        try:
            self.harness.run()
            for i in range(self.count):
                self.harness.check_text(f"r{i}")
                self.check_prompt_logprobs(f"r{i}")
            scheduler = self.harness.scheduler
            assert scheduler.flush_cache() and scheduler.pages.used_count == scheduler.rows.used_count == 0
            assert scheduler.prefix.checkpoints.blocks.used_count == 0
        finally:
            for patch in self.patches:
                patch.stop()

    def check_prompt_logprobs(self, rid: str) -> None:
        request, outputs = self.harness.requests[rid], self.harness.outputs[rid]
        if request.sampling.prompt_logprobs is not None and outputs[0].ids:
            assert [entry.id for entry in outputs[0].prompt_logprobs or []] == request.ids
            assert outputs[0].cached_tokens == 0


TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
