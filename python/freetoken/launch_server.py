"""``python -m freetoken.launch_server``: start the scheduler, serve HTTP, and end both in good order (torch-free)."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import uvloop

from freetoken import environ, logs, server_args
from freetoken.environ import EnvironmentValueError
from freetoken.errors import RequestError, StartupError
from freetoken.messages import Channel
from freetoken.server.detokenizer import Tokenizer
from freetoken.server.frontend import Frontend
from freetoken.server.http import build_app
from freetoken.server.lifecycle import HttpServer, Scheduler, give_memory_back, listen, server_address
from freetoken.server.metrics import kernel_table
from freetoken.server.progress import Progress
from freetoken.server_args import Config, ServerArgs
from freetoken.startup import Opened, configure, open_model

log = logging.getLogger("freetoken")

SCHEDULER = "freetoken.scheduler.process:run_scheduler"


def main(
    argv: Sequence[str] | None = None,
    *,
    scheduler: str = SCHEDULER,
    open_checkpoint: Callable[[ServerArgs], Opened] = open_model,
) -> int:
    """Run a server until it is told to stop; the exit code.

    ``scheduler`` names the child's entry as ``module:function``; it is called with the configuration and the channel's
    folder and returns the child's exit code.
    """
    try:
        environ.validate()
        args = server_args.parse(argv)
        logs.set_up(args.log_level, replace=True)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        give_memory_back()
        with listen(args.host, args.port) as listener:
            opened = open_checkpoint(args)
            config = configure(args, opened)
            for name, reason in config.reasons.items():
                log.info("%s = %s: %s", name, getattr(config, name, ""), reason)
            return uvloop.run(_serve(config, opened.tokenizer, listener, scheduler))
    except (StartupError, EnvironmentValueError) as error:
        print(f"freetoken: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _serve(config: Config, tokenizer: Tokenizer, listener: socket.socket, target: str) -> int:
    channel = Channel.create()
    try:
        return await _serve_on(channel, config, tokenizer, listener, target)
    finally:
        channel.remove()


async def _serve_on(
    channel: Channel, config: Config, tokenizer: Tokenizer, listener: socket.socket, target: str
) -> int:
    progress = Progress(sys.stderr)
    frontend = Frontend(config, tokenizer, channel, on_progress=progress.show)
    child = Scheduler(target, config, channel.folder, frontend)
    try:
        frontend.open()
        server = HttpServer(build_app(frontend), frontend)
        frontend.on_fatal = lambda reason: server.leave_soon()
        child.start()
        http = asyncio.ensure_future(server.serve(sockets=[listener]))
        startup = asyncio.ensure_future(_start_up(config, frontend, progress, server_address(listener)))
        await asyncio.wait({http, startup}, return_when=asyncio.FIRST_COMPLETED)
        failure = _failure(startup)
        if failure is not None:
            server.leave_soon()
        await http
        startup.cancel()
        progress.close()
        code = await child.stop(server.interrupted or failure is not None)
        frontend.close()
    finally:
        child.kill()
    if failure is not None:
        raise failure
    if frontend.status.state == "failed":
        raise StartupError(frontend.status.cause)
    if server.interrupted:
        return 128 + server.signals[-1]
    return 1 if code != 0 and frontend.scheduler_ready else 0


def _failure(startup: asyncio.Future[None]) -> BaseException | None:
    return startup.exception() if startup.done() and not startup.cancelled() else None


async def _start_up(config: Config, frontend: Frontend, progress: Progress, address: str) -> None:
    """Wait for the scheduler, warm up, open for clients and say so in one line."""
    limit = float(environ.get("FREETOKEN_LAUNCH_TIMEOUT"))
    try:
        await asyncio.wait_for(frontend.wait_scheduler(), limit)
        if not config.skip_server_warmup:
            await frontend.probe(warm_up=True, tokens=2)
    except asyncio.TimeoutError:
        raise StartupError(f"the scheduler was not ready after {limit:g} seconds (FREETOKEN_LAUNCH_TIMEOUT)") from None
    except RequestError as error:
        raise StartupError(frontend.status.cause or error.message) from None
    # What the start made stays for good, so the collector need not look at it again.
    gc.collect()
    gc.freeze()
    frontend.mark_ready()
    progress.close()
    log.info(ready_line(config, frontend.info, address))


def ready_line(config: Config, info: dict[str, Any], address: str) -> str:
    """Address, model, what fits, and which kernels run, in one line."""
    tokens = info.get("max_total_tokens") or config.max_total_tokens
    running = info.get("max_running_requests") or config.max_running_requests
    fits = f"{tokens:,} KV tokens, " if isinstance(tokens, int) else ""
    kernels = ", ".join(f"{op} {impl}" for op, impl in kernel_table(info))
    return (
        f"ready at {address}: {config.served_model_name} ({config.dtype} on {config.device}), "
        f"{fits}{running} running requests, attention {config.attention_backend}{'; ' if kernels else ''}{kernels}"
    )


if __name__ == "__main__":
    sys.exit(main())
