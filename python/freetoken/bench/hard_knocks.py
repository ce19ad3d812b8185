"""``python -m freetoken.bench.hard_knocks``: knock at a server, and see that it stands as before (torch-free).

Without ``--base-url`` it starts a server of its own from the further flags, with its books checked after every step, and
looks at the memory of its processes. After each part nothing may be held, all pages must be free once the cache is
flushed, memory must be where it was, and an honest request must get the answer it always got. Exit code 1 says that one
of these failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from freetoken.bench import cli, figures
from freetoken.bench.extra import aiohttp
from freetoken.bench.knocks import parts, soak
from freetoken.bench.knocks.target import Target
from freetoken.errors import StartupError

PARTS = ("fuzz", "malformed", "vanish", "slow", "huge", "queue", "soak")
WARM_UP = 0.3
"""Share of the long parts that is done before memory is looked at, and all of those whose peak is what counts: arenas,
caches and buffers take their size from what comes."""
Part = Callable[[parts.Trial], Awaitable[dict[str, Any]]]


def parser() -> argparse.ArgumentParser:
    """The command line; flags it does not know are the server's."""
    result = argparse.ArgumentParser(prog="python -m freetoken.bench.hard_knocks", description=__doc__)
    result.add_argument("--base-url", help="A running server, instead of one of our own.")
    result.add_argument("--pid", type=int, help="Process of the server at --base-url, to look at its memory.")
    result.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1], help="What to do, in this order.")
    result.add_argument("--fuzz", type=int, default=20_000, help="Requests drawn from the OpenAPI document.")
    result.add_argument("--malformed", type=int, default=5_000, help="Bodies that are no requests.")
    result.add_argument("--vanish", type=int, default=1_000, help="Clients that leave.")
    result.add_argument("--slow", type=int, default=32, help="Clients that do not read.")
    result.add_argument("--slow-tokens", type=int, default=500, help="Tokens of each of their streams.")
    result.add_argument("--huge-mb", type=float, default=10.0, help="Size of a huge prompt.")
    result.add_argument("--huge-copies", type=int, default=3, help="Huge prompts of each kind.")
    result.add_argument("--queue", type=int, default=4_000, help="Requests at once.")
    result.add_argument("--soak-seconds", type=float, default=1200.0, help="Length of the soak, after its warm-up.")
    result.add_argument("--soak-tokens", type=int, default=48, help="Longest output in the soak.")
    result.add_argument("--concurrency", type=int, default=16, help="Requests at once in fuzz, malformed and soak.")
    result.add_argument("--slack-mb", type=float, default=48.0, help="Growth of memory that is no leak.")
    result.add_argument("--seed", type=int, default=0, help="Of everything drawn.")
    result.add_argument("--output", help="File to append the figures to.")
    result.add_argument("--model-label", help="Name of the model in the figures; default: the served name.")
    return result


def _parts(args: argparse.Namespace, scale: float = 1.0) -> dict[str, Part]:
    """Each part; the long ones at ``scale`` of their size."""

    def some(count: int) -> int:
        return max(4, int(count * scale))

    slack = args.slack_mb / 1000
    return {
        "fuzz": lambda t: parts.fuzzing(t, some(args.fuzz)),
        "malformed": lambda t: parts.malformed(t, some(args.malformed)),
        "vanish": lambda t: parts.vanishing(t, args.vanish),
        "slow": lambda t: parts.dawdling(t, args.slow, args.slow_tokens),
        "huge": lambda t: parts.huge(t, args.huge_mb, args.huge_copies),
        "queue": lambda t: parts.queueing(t, args.queue),
        "soak": lambda t: soak.soaking(t, args.soak_seconds * scale, args.soak_tokens, slack),
    }


async def knock(args: argparse.Namespace, target: Target) -> list[dict[str, Any]]:
    """Run the parts and give a figure for each; ``AssertionError`` names the part and what it found."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await target.wait_ready(session)
        facts = await target.info(session)
        wanted = await target.honest(session)
        trial = parts.Trial(target, session, args.concurrency, args.seed)
        full, small = _parts(args), _parts(args, WARM_UP)
        found = []
        for name in args.parts:
            if name != "soak":
                # The soak has a warm-up of its own.
                await small[name](trial)
                await target.settle(session)
            before, began = target.rss(), time.monotonic()
            try:
                counted = await full[name](trial)
                assert target.alive(), "the server has ended"
                assert await target.honest(session) == wanted, "an honest request gets another answer than before"
                await target.settle(session)
                after = target.rss()
                assert after - before <= args.slack_mb / 1000 or name == "soak", (
                    f"memory grew from {before:.3f} to {after:.3f} GB"
                )
            except (AssertionError, aiohttp.ClientError, OSError, TimeoutError) as error:
                raise AssertionError(
                    f"{name}: {error or type(error).__name__}\n{target.log_tail()}".rstrip()
                ) from error
            values = {"before_gb": before, "after_gb": after} if target.pid is not None and name != "soak" else {}
            found.append(_figure(args, facts, name, counted, {**values, "took_s": time.monotonic() - began}))
            print(
                " ".join(f"{key} {_short(value)}" for key, value in {"part": name, **counted, **values}.items()),
                flush=True,
            )
        return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figure(
    args: argparse.Namespace, facts: dict[str, Any], name: str, counted: dict[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
    device = "cuda" if facts["args"]["device"] == "cuda" else "cpu"
    label = args.model_label or facts["args"]["served_model_name"]
    return figures.figure(f"hard knocks {name}", model=label, device=device, seed=args.seed, **counted, **values)


def run(args: argparse.Namespace, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Start the server if need be, knock, and stop it; :class:`StartupError` says what did not hold."""
    target = Target(args.base_url.rstrip("/"), args.pid) if args.base_url else Target.start(flags)
    code = 0
    try:
        found = asyncio.run(knock(args, target))
    except AssertionError as error:
        raise StartupError(str(error)) from None
    finally:
        code = target.stop()
    if code != 0:
        raise StartupError(f"the server ended with exit code {code}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args, flags = parser().parse_known_args(argv)
    if args.base_url and flags:
        print(f"error: {flags[0]} is a flag of the server, which --base-url says is running already", file=sys.stderr)
        return 2
    return cli.entry(args, lambda given: run(given, flags))


if __name__ == "__main__":
    sys.exit(main())
