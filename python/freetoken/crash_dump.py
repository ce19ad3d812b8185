"""A JSON file about a crash, and the stacks of all threads (torch-free).

Writing one is the last thing a failing process does, so nothing here raises: a folder that cannot be written costs the
file and one line in the log, no more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import threading
import time
import traceback
from datetime import datetime, timezone
from typing import Any

import msgspec

import freetoken
from freetoken.sampling_params import SamplingParams
from freetoken.server_args import Config

log = logging.getLogger(__name__)

MAX_REQUESTS = 2000
"""Open requests described at most; their number is always there."""


def stacks() -> dict[str, list[str]]:
    """Lines of the stack of every Python thread of this process, by thread name and id, innermost last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": traceback.format_list(traceback.extract_stack(frame))
        for ident, frame in sys._current_frames().items()
    }


def stacks_text() -> str:
    """:func:`stacks` for a log."""
    return "\n".join(f"thread {name}:\n{''.join(lines)}" for name, lines in stacks().items())


def numbers_of(sampling: SamplingParams) -> dict[str, Any]:
    """The values that differ from the defaults and are numbers or switches: none of them is text that a client wrote."""
    values = msgspec.to_builtins(sampling)
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float)}


def write(
    config: Config,
    process: str,
    reason: str,
    requests: list[dict[str, Any]],
    **more: Any,
) -> str | None:
    """Write ``<folder>/freetoken-crash-<time>-<process>-<pid>.json`` and return its path.

    ``process`` is ``server`` or ``scheduler``; ``requests`` describes the open ones; ``more`` is laid over the file's
    top level. ``None`` without ``--crash-dump-folder`` and when the file could not be written, which is logged.
    """
    folder = config.crash_dump_folder
    if folder is None:
        return None
    now = datetime.now(timezone.utc)
    name = f"freetoken-crash-{now:%Y%m%dT%H%M%S}-{process}-{os.getpid()}.json"
    path, draft = os.path.join(folder, name), os.path.join(folder, f".{name}.part")
    try:
        content = {
            "reason": reason,
            "process": process,
            "time": now.isoformat(timespec="seconds"),
            "monotonic": time.monotonic(),
            "versions": {"freetoken": freetoken.__version__, "python": platform.python_version()},
            "platform": platform.platform(),
            "num_open_requests": len(requests),
            "open_requests": requests[:MAX_REQUESTS],
            **more,
            "stacks": stacks(),
            "config": config.public(),
        }
        text = json.dumps(content, default=str, indent=1)
        os.makedirs(folder, exist_ok=True)
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except Exception as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        log.error("the crash dump %s could not be written: %s", path, error)
        return None
    log.error("a crash dump is in %s", path)
    return path
