"""Measure a running server as its clients see it: ``python -m freetoken.bench.serving`` (torch-free).

Works against any server with OpenAI completions or SGLang's ``/generate``; token counts come from the server's usage,
times from this process's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from freetoken.bench import cli, figures, report
from freetoken.bench.client import BACKENDS, Target, send
from freetoken.bench.datasets import Prompt, file_prompts, random_prompts, shared_prefix_prompts
from freetoken.bench.extra import aiohttp
from freetoken.bench.report import Outcome
from freetoken.errors import StartupError

_POSITIVE = (
    "num_prompts",
    "max_concurrency",
    "vocab_size",
    "random_input_len",
    "random_output_len",
    "gsp_num_groups",
    "gsp_prompts_per_group",
    "gsp_prefix_len",
    "gsp_question_len",
    "gsp_output_len",
)
DATASETS = ("random", "generated-shared-prefix", "file")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m freetoken.bench.serving", description=__doc__.split("\n")[0])
    add = result.add_argument
    add("--base-url", help="Server address; default http://HOST:PORT.")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--api-key", help="Sent as a bearer token.")
    add("--backend", choices=tuple(BACKENDS), default="completions", help="Which endpoint is asked.")
    add("--model", help="Model name in requests; default: what /v1/models says.")
    add("--dataset-name", choices=DATASETS, default="random")
    add("--dataset-path", help="Prompt file: .jsonl with 'prompt' (text or ids), or a prompt a line.")
    add("--num-prompts", type=int, help="Requests; default 100, or all of a file.")
    add("--random-input-len", type=int, default=512, help="Prompt tokens.")
    add("--random-output-len", type=int, default=128, help="Output tokens, also for a file without its own.")
    add("--random-range-ratio", type=float, default=1.0, help="Lengths are uniform in [ratio * len, len]; 1 is exact.")
    add("--gsp-num-groups", type=int, default=8, help="Shared prefixes.")
    add("--gsp-prompts-per-group", type=int, default=8, help="Questions a prefix.")
    add("--gsp-prefix-len", type=int, default=1024, help="Tokens of a shared prefix.")
    add("--gsp-question-len", type=int, default=128, help="Tokens of a question.")
    add("--gsp-output-len", type=int, default=128, help="Output tokens.")
    add("--vocab-size", type=int, help="Random ids are below this; default: what /get_server_info says.")
    add("--request-rate", type=float, default=float("inf"), help="Poisson arrivals a second; default: all at once.")
    add("--max-concurrency", type=int, help="Requests in flight at most.")
    add("--warmup-requests", type=int, default=1, help="Requests sent before the clock starts.")
    add("--flush-cache", action="store_true", help="Empty the server's prefix cache before the clock starts.")
    add("--disable-ignore-eos", action="store_true", help="Let the model end its output.")
    add("--temperature", type=float, default=0.0)
    add("--extra-request-body", default="{}", help="JSON object laid over every request.")
    add("--seed", type=int, default=1)
    add("--timeout", type=float, default=3600.0, help="Seconds a request may take.")
    add("--disable-tqdm", action="store_true", help="No progress bar.")
    add("--output-file", help="Append the run as one JSON line.")
    add("--label", help="What is served, for the JSON line; default: the model's name.")
    return result


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Refuse flags that cannot work, with :class:`StartupError`; returns the parsed ``--extra-request-body``."""
    cli.require_at_least(args, dict.fromkeys(_POSITIVE, 1) | {"warmup_requests": 0})
    if not args.request_rate > 0:
        raise StartupError(f"--request-rate must be above 0, not {args.request_rate:g}")
    if not 0 < args.random_range_ratio <= 1:
        raise StartupError(f"--random-range-ratio must be above 0 and at most 1, not {args.random_range_ratio:g}")
    if args.dataset_name == "file" and not args.dataset_path:
        raise StartupError("--dataset-name file needs --dataset-path")
    if args.backend == "chat" and args.dataset_name != "file":
        raise StartupError("--backend chat takes text; use --dataset-name file, or --backend completions for ids")
    try:
        extra = json.loads(args.extra_request_body)
    except json.JSONDecodeError as error:
        raise StartupError(f"--extra-request-body is not valid JSON: {error}") from None
    if not isinstance(extra, dict):
        raise StartupError("--extra-request-body must be a JSON object")
    return extra


def make_prompts(args: argparse.Namespace, vocab_size: int) -> list[Prompt]:
    """The prompts the flags ask for."""
    if args.dataset_name == "file":
        return file_prompts(args.dataset_path, count=args.num_prompts, output_len=args.random_output_len)
    if args.dataset_name == "random":
        return random_prompts(
            args.num_prompts or 100,
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            vocab_size=vocab_size,
            range_ratio=args.random_range_ratio,
            seed=args.seed,
        )
    prompts = shared_prefix_prompts(
        groups=args.gsp_num_groups,
        prompts_per_group=args.gsp_prompts_per_group,
        prefix_len=args.gsp_prefix_len,
        question_len=args.gsp_question_len,
        output_len=args.gsp_output_len,
        vocab_size=vocab_size,
        seed=args.seed,
    )
    return prompts[: args.num_prompts]


async def drive(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Prompt],
    *,
    request_rate: float = float("inf"),
    max_concurrency: int | None = None,
    seed: int = 1,
    progress: bool = True,
) -> tuple[list[Outcome], float]:
    """Send all prompts and wait for them: ``(outcomes in order of sending, seconds)``.

    With a finite ``request_rate`` the gaps between arrivals are exponential; ``max_concurrency`` holds requests back that
    would be too many at once.
    """
    rng = random.Random(seed)
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    bar = tqdm(total=len(prompts), unit="req", disable=not progress, file=sys.stderr)

    async def one(prompt: Prompt) -> Outcome:
        async with gate:
            outcome = await send(session, target, prompt)
        bar.update()
        return outcome

    start = time.perf_counter()
    due, tasks = start, []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if request_rate != float("inf"):
            due += rng.expovariate(request_rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    outcomes = await asyncio.gather(*tasks)
    bar.close()
    return outcomes, max((o.ended for o in outcomes), default=start) - start


async def _get_json(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise StartupError(f"{url} answered {response.status}")
            found = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise StartupError(f"{url} cannot be read: {error or type(error).__name__}") from None
    return found if isinstance(found, dict) else {}


def _find(tree: Any, key: str) -> Any:
    """First value of ``key`` in nested dictionaries, outermost first."""
    level = [tree]
    while level:
        inner: list[Any] = []
        for node in level:
            if key in node:
                return node[key]
            inner += [value for value in node.values() if isinstance(value, dict)]
        level = inner
    return None


async def _server_facts(session: aiohttp.ClientSession, args: argparse.Namespace, base: str) -> tuple[str, int, str]:
    """``(model name, ids that random prompts may use, device or its name)``."""
    model = args.model
    if model is None:
        models = (await _get_json(session, f"{base}/v1/models")).get("data") or [{}]
        model = str(models[0].get("id", "default"))
    needs_ids = args.dataset_name != "file"
    info: dict[str, Any] = {}
    try:
        info = await _get_json(session, f"{base}/get_server_info")
    except StartupError:
        if needs_ids and args.vocab_size is None:
            raise StartupError("the server has no /get_server_info; say --vocab-size for random ids") from None
    vocab = args.vocab_size or _find(info, "sample_vocab") or _find(info, "vocab_size")
    if needs_ids and not isinstance(vocab, int):
        raise StartupError("the server does not tell its vocabulary; say --vocab-size for random ids")
    device = _find(info, "device")
    known = isinstance(device, str) and device.lower() != "cpu"
    return model, int(vocab or 0), device if known else "cpu"


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark the flags describe and return its figure (see :mod:`freetoken.bench.figures`)."""
    extra = check(args)
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        model, vocab, device = await _server_facts(session, args, base)
        prompts = make_prompts(args, vocab)
        target = Target(base, args.backend, model, not args.disable_ignore_eos, args.temperature, extra)
        await _warm_up(session, target, prompts, args.warmup_requests)
        if args.flush_cache:
            async with session.post(f"{base}/flush_cache") as response:
                if response.status != 200:
                    raise StartupError(f"/flush_cache answered {response.status}: {(await response.text())[:200]}")
        outcomes, seconds = await drive(
            session,
            target,
            prompts,
            request_rate=args.request_rate,
            max_concurrency=args.max_concurrency,
            seed=args.seed,
            progress=not args.disable_tqdm,
        )
    concurrency = min(args.max_concurrency or len(prompts), len(prompts))
    return figures.figure(
        "serving http",
        model=args.label or model,
        device=device,
        backend=args.backend,
        dataset=args.dataset_name,
        requests=len(prompts),
        max_concurrency=concurrency,
        request_rate=None if args.request_rate == float("inf") else args.request_rate,
        mean_input_len=_mean_input(outcomes),
        mean_output_len=sum(p.output_len for p in prompts) / len(prompts),
        **report.report(outcomes, seconds, concurrency),
    )


def _mean_input(outcomes: Sequence[Outcome]) -> float:
    lengths = [o.prompt_tokens for o in outcomes if o.error is None]
    return sum(lengths) / len(lengths) if lengths else 0.0


async def _warm_up(session: aiohttp.ClientSession, target: Target, prompts: Sequence[Prompt], count: int) -> None:
    """Requests before the clock starts, at most 32 tokens long each; :class:`StartupError` when the first one fails.

    Their prompts are the run's own with the first id or character dropped, so that they do not warm the prefix cache.
    """
    short = [Prompt(p.content[1:] or p.content, min(32, p.output_len)) for p in prompts[:count]]
    done = await asyncio.gather(*(send(session, target, prompt) for prompt in short))
    for outcome in done:
        if outcome.error is not None:
            raise StartupError(f"the warm-up request failed: {outcome.error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; 0 when every request ended properly."""
    args = parser().parse_args(argv)
    try:
        cli.require_writable(args, "output_file")
        result = asyncio.run(run(args))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.text(result))
    if args.output_file:
        figures.append(args.output_file, [result])
    return 0 if result["failed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
