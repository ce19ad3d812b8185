"""Mixed traffic for a while: shared prefixes, streams, aborts, several outputs, schemas where they are served (torch-free)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from freetoken.bench.knocks.parts import Trial

SYSTEMS = tuple(
    f"You are helper number {number}. " + "Answer in few words. Be kind and exact. " * 12 for number in range(4)
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
_SAMPLE_SECONDS = 10.0


class Soak:
    """The traffic, and what came of it. ``counts`` has a number for each kind of request."""

    def __init__(self, trial: Trial, tokens: int) -> None:
        self._trial = trial
        self._tokens = tokens
        self._rng = Random(trial.seed)
        self._number = 0
        self._schemas = False
        self.counts: Counter[str] = Counter()

    async def probe_schemas(self) -> None:
        """Whether the server serves ``response_format``; where it does, its answers must be valid."""
        body = {**self._chat("x"), **self._format(), "max_tokens": 64}
        async with self._trial.session.post(self._trial.target.url + "/v1/chat/completions", json=body) as answer:
            self._schemas = answer.status == 200
            await answer.read()

    def _chat(self, text: str) -> dict[str, Any]:
        system = SYSTEMS[self._rng.randrange(len(SYSTEMS))]
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]}

    def _format(self) -> dict[str, Any]:
        return {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        }

    def _draw(self) -> tuple[str, str, dict[str, Any]]:
        """Kind, path and body of the next request."""
        rng = self._rng
        self._number += 1
        text = f"{rng.randrange(50)} " + "rain " * rng.randrange(1, 30)
        sampling = {"temperature": rng.choice((0, 0.7, 1.0)), "max_tokens": rng.randint(1, self._tokens)}
        if rng.random() < 0.3:
            sampling["seed"] = rng.randrange(1000)
        kind = rng.choice(("chat", "stream", "stream", "leave", "many", "stop", "logprobs", "long", "schema"))
        chat = "/v1/chat/completions"
        if kind == "schema" and self._schemas:
            return kind, chat, {**self._chat(text), **self._format(), **sampling, "max_tokens": 64}
        if kind == "stream":
            return kind, chat, {**self._chat(text), **sampling, "stream": True}
        if kind == "leave":
            return (
                kind,
                "/v1/completions",
                {"prompt": text, **sampling, "max_tokens": 5000, "stream": True, "ignore_eos": True},
            )
        if kind == "many":
            return kind, chat, {**self._chat(text), **sampling, "n": rng.randint(2, 4)}
        if kind == "stop":
            return kind, "/v1/completions", {"prompt": text, **sampling, "stop": ["a", "the"]}
        if kind == "logprobs":
            return kind, chat, {**self._chat(text), **sampling, "logprobs": True, "top_logprobs": 3}
        if kind == "long":
            return (
                kind,
                "/v1/completions",
                {"prompt": f"{self._number} " + "word " * rng.randrange(50, 150), **sampling},
            )
        return "chat", chat, {**self._chat(text), **sampling}

    async def one(self) -> None:
        """One request of a kind drawn; ``AssertionError`` for an answer that is not as it should be."""
        kind, path, body = self._draw()
        async with self._trial.session.post(self._trial.target.url + path, json=body) as answer:
            if kind == "leave":
                await answer.content.readany()
                answer.close()
            else:
                text = await answer.text()
                assert answer.status == 200, f"{kind} is answered {answer.status}: {text[:300]}"
                self._check(kind, text)
        self.counts[kind] += 1

    def _check(self, kind: str, text: str) -> None:
        if kind == "stream":
            assert text.endswith("data: [DONE]\n\n") and '"error"' not in text, f"a stream ends in {text[-200:]!r}"
        elif kind == "schema":
            choice = json.loads(text)["choices"][0]
            if choice["finish_reason"] == "stop":
                found = json.loads(choice["message"]["content"])
                assert set(found) == {"name", "ok"} and type(found["ok"]) is bool, found

    async def run(self, seconds: float, sample: Callable[[float], None]) -> None:
        """Traffic for so long; ``sample`` is called every ten seconds with those that have passed."""
        began = time.monotonic()

        async def worker() -> None:
            while time.monotonic() - began < seconds:
                await self.one()

        async def sampler() -> None:
            while True:
                await asyncio.sleep(_SAMPLE_SECONDS)
                sample(time.monotonic() - began)

        sampling = asyncio.ensure_future(sampler())
        try:
            await asyncio.gather(*(worker() for _ in range(self._trial.concurrency)))
        finally:
            sampling.cancel()


async def soaking(trial: Trial, seconds: float, tokens: int, slack_gb: float) -> dict[str, Any]:
    """Mixed traffic for ``seconds`` after a warm-up of a tenth of that, at most two minutes: memory and free pages as after
    the warm-up."""
    soak = Soak(trial, tokens)
    await soak.probe_schemas()
    samples: list[float] = []
    await soak.run(min(120.0, seconds / 10), lambda _: None)
    await trial.target.settle(trial.session)
    before = trial.target.rss()
    soak.counts.clear()
    await soak.run(seconds, lambda _: samples.append(trial.target.rss()))
    await trial.target.settle(trial.session)
    after = trial.target.rss()
    assert after - before <= slack_gb, f"memory grew from {before:.3f} to {after:.3f} GB in {seconds:g} seconds"
    kinds = {f"requests_{kind}": count for kind, count in sorted(soak.counts.items())}
    most = max([before, after, *samples])
    return {"requests": soak.counts.total(), **kinds, "warm_gb": before, "end_gb": after, "most_gb": most}
