"""The small JSON behind the page's live view (torch-free)."""

from __future__ import annotations

from typing import Any

import freetoken
from freetoken.server.frontend import Frontend
from freetoken.server.metrics import kernel_table
from freetoken.server_args import Config

_LONGEST_VALUE = 200


def live_view(frontend: Frontend) -> dict[str, Any]:
    """What the server does now, from the scheduler's latest snapshot: nobody is asked, nothing is waited for.

    Token counts are tokens, ``_ms`` milliseconds, ``tok_s`` output tokens a second, ``bytes`` bytes. ``checkpoints`` is
    ``None`` for a model without recurrent state, ``loading`` unless the model is loading.
    """
    stats, status = frontend.stats, frontend.status
    checkpoints = None
    if stats.state_block_bytes:
        checkpoints = {
            "used": stats.state_blocks_used,
            "total": stats.state_blocks_total,
            "bytes": stats.state_blocks_used * stats.state_block_bytes,
            "hits": stats.state_hits,
            "evictions": stats.state_evictions,
        }
    loading = {"phase": status.phase, "done": status.done, "total": status.total, "unit": status.unit}
    return {
        "version": freetoken.__version__,
        "status": status.state,
        "reason": status.reason,
        "loading": loading if status.state == "loading" else None,
        "model": frontend.config.served_model_name,
        "running": stats.running,
        "queued": stats.queued,
        "tok_s": round(stats.gen_throughput, 2),
        "decode_step_ms": round(stats.decode_step_ms, 3),
        "prefill_step_ms": round(stats.prefill_step_ms, 3),
        "steps": stats.steps,
        "kv": {"used": stats.used_tokens, "cached": stats.cached_pool_tokens, "total": stats.total_tokens},
        "rows": {"used": stats.rows_used, "total": stats.rows_total},
        "checkpoints": checkpoints,
        "cache_hit_rate": round(frontend.metrics.hit_rate, 4),
        "graph_replays": sum(stats.graph_replays.values()),
        "graph_misses": stats.graph_misses,
        "retractions": stats.retractions,
        "kernels": _kernels(frontend.info),
        "flags": flags_in_use(frontend.config),
    }


def _kernels(info: dict[str, Any]) -> list[dict[str, str]]:
    rows = info.get("kernels")
    whys = (
        {row.get("op"): row.get("why", "") for row in rows if isinstance(row, dict)} if isinstance(rows, list) else {}
    )
    return [{"op": op, "impl": impl, "why": str(whys.get(op, ""))} for op, impl in kernel_table(info)]


def flags_in_use(config: Config) -> dict[str, Any]:
    """The resolved configuration's plain values by name; lists as text, long values cut, the key never."""
    shown: dict[str, Any] = {}
    for name, value in config.public().items():
        if isinstance(value, list | tuple):
            value = ", ".join(map(str, value))
        if isinstance(value, dict) or value is None or value == "":
            continue
        shown[name] = value[:_LONGEST_VALUE] if isinstance(value, str) else value
    return shown
