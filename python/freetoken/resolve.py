"""Raw arguments, facts of the machine and a model -> the frozen configuration (torch-free).

:func:`resolve` is pure: the same arguments, facts and model give the same :class:`~freetoken.server_args.Config`, and every value
it derived carries its reason in ``Config.reasons``.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from freetoken.errors import StartupError
from freetoken.hardware import Facts
from freetoken.models.config import ModelConfig
from freetoken.server_args import Config, ServerArgs, model_overrides


def graph_buckets(largest: int) -> tuple[int, ...]:
    """Decode batch sizes to capture up to ``largest``: 1, 2, 4, then every 8, and ``largest`` itself."""
    sizes = [size for size in (1, 2, 4) if size <= largest] + list(range(8, largest + 1, 8))
    return tuple(sorted({*sizes, largest}))


class _Resolver:
    """Collects derived values together with their reasons."""

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.reasons: dict[str, str] = {}

    def pick(self, name: str, given: Any, derived: Any, why: str) -> Any:
        if given is not None and given != "auto":
            return given
        self.reasons[name] = why
        return derived


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if not value >= low or (high is not None and value > high):
        bounds = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise StartupError(f"--{name.replace('_', '-')} must be {bounds}, not {value}")


def _check_values(args: ServerArgs) -> None:
    for row in dataclasses.fields(args):
        choices, value = row.metadata["choices"], getattr(args, row.name)
        if choices and value not in choices:
            raise StartupError(f"--{row.name.replace('_', '-')} must be one of {', '.join(choices)}, not {value!r}")
    _check_range("port", args.port, 0, 65535)
    if args.api_key == "":
        raise StartupError("--api-key is empty, which guards nothing; give a key, or leave the flag out")
    for name in ("max_queued_requests", "max_request_bytes", "stream_interval", "tp_size", "state_checkpoint_interval"):
        _check_range(name, getattr(args, name), 1, None)
    for name in ("decode_log_interval", "soft_watchdog_timeout", "watchdog_timeout"):
        if getattr(args, name) is not None:
            _check_range(name, getattr(args, name), 0, None)
    for origin in args.cors_allow_origins:
        if not re.fullmatch(r"\*|null|https?://[^/\s,?#]+", origin):
            raise StartupError(f"--cors-allow-origins must be * or like https://host:port, not {origin!r}")
    for name in (
        "context_length",
        "max_total_tokens",
        "max_running_requests",
        "max_queued_tokens",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "cuda_graph_max_bs",
    ):
        if getattr(args, name) is not None:
            # A context or a pool of one token has no room for an output.
            _check_range(name, getattr(args, name), 2 if name in ("context_length", "max_total_tokens") else 1, None)
    if args.page_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        raise StartupError(f"--page-size must be a power of two from 1 to 256, not {args.page_size}")
    if args.mem_fraction_static is not None and not 0.05 <= args.mem_fraction_static <= 0.98:
        raise StartupError(f"--mem-fraction-static must be from 0.05 to 0.98, not {args.mem_fraction_static:g}")
    if args.state_cache_gb is not None and not 0 <= args.state_cache_gb <= 1e6:
        raise StartupError(f"--state-cache-gb must be from 0 to 1000000, not {args.state_cache_gb:g}")
    for size in args.cuda_graph_bs:
        _check_range("cuda_graph_bs", size, 1, 4096)
    if args.tp_size != 1:
        raise StartupError(f"--tp-size {args.tp_size}: only 1 is served so far")


def resolve(
    args: ServerArgs, facts: Facts, model: ModelConfig, *, model_path: str, seed: int, tokenizer_size: int | None = None
) -> Config:
    """Decide every ``auto``.

    ``facts`` describes the machine, ``model`` the checkpoint, ``model_path`` where it lies, ``seed`` is used when
    ``--random-seed`` was not given, ``tokenizer_size`` is the number of ids the tokenizer knows. Raises :class:`StartupError` for a value out of range or a combination that cannot
    work.
    """
    _check_values(args)
    r = _Resolver(args)
    device = r.pick("device", args.device, "cuda" if facts.usable_gpu else "cpu", facts.device_reason)
    if device == "cuda" and not facts.usable_gpu:
        raise StartupError(f"--device cuda: {facts.device_reason}")
    cuda = device == "cuda"
    dtype = r.pick(
        "dtype",
        args.dtype,
        model.dtype if cuda else "float32",
        f"the checkpoint says {model.dtype}" if cuda else "fastest exact type on the CPU",
    )
    backend = r.pick("attention_backend", args.attention_backend, "triton" if cuda else "torch", f"default on {device}")
    if backend != "torch" and not cuda:
        raise StartupError(f"--attention-backend {backend} needs CUDA; use torch on the CPU")
    context = r.pick(
        "context_length", args.context_length, model.max_position_embeddings, "the checkpoint's max_position_embeddings"
    )
    if context > model.max_position_embeddings:
        raise StartupError(
            f"--context-length {context} is above the model's {model.max_position_embeddings}; raise max_position_embeddings with --json-model-override-args if you mean it"
        )
    running = r.pick("max_running_requests", args.max_running_requests, 256 if cuda else 32, f"default on {device}")
    chunk = r.pick("chunked_prefill_size", args.chunked_prefill_size, 2048 if cuda else 256, f"default on {device}")
    prefill = r.pick(
        "max_prefill_tokens", args.max_prefill_tokens, max(chunk, 8192 if cuda else 1024), f"default on {device}"
    )
    overlap = cuda and not args.disable_overlap_schedule
    if not cuda:
        r.reasons["overlap"] = "the CPU runs a step while it is launched, so there is nothing to overlap"
    graphs = _graph_sizes(args, cuda, running, r)
    return Config(
        model_path=model_path,
        tokenizer_path=args.tokenizer_path,
        load_format=args.load_format,
        served_model_name=args.served_model_name or model.name,
        dtype=dtype,
        context_length=context,
        chat_template=args.chat_template,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        random_seed=r.pick("random_seed", args.random_seed, seed, "drawn at start"),
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        max_request_bytes=args.max_request_bytes,
        stream_interval=args.stream_interval,
        enable_metrics=args.enable_metrics,
        skip_server_warmup=args.skip_server_warmup,
        log_level=args.log_level,
        log_requests=args.log_requests,
        cors_allow_origins=tuple(args.cors_allow_origins),
        decode_log_interval=args.decode_log_interval,
        soft_watchdog_timeout=args.soft_watchdog_timeout,
        watchdog_timeout=r.pick(
            "watchdog_timeout", args.watchdog_timeout, 300.0 if cuda else 0.0, f"default on {device}"
        ),
        crash_dump_folder=args.crash_dump_folder,
        device=device,
        tp_size=args.tp_size,
        mem_fraction_static=r.pick(
            "mem_fraction_static", args.mem_fraction_static, 0.88 if cuda else 0.5, f"default on {device}"
        ),
        kv_cache_dtype=r.pick("kv_cache_dtype", args.kv_cache_dtype, dtype, "the model's type"),
        max_total_tokens=args.max_total_tokens,
        page_size=args.page_size,
        state_cache_bytes=int(
            r.pick(
                "state_cache_bytes",
                None if args.state_cache_gb is None else args.state_cache_gb * 1e9,
                facts.memory_bytes // 10,
                "a tenth of the system's memory",
            )
        ),
        state_checkpoint_interval=max(1, args.state_checkpoint_interval // args.page_size) * args.page_size,
        ple_table=args.ple_table,
        max_running_requests=running,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=r.pick(
            "max_queued_tokens",
            args.max_queued_tokens,
            max(16 * context, 2**21),
            "sixteen contexts, at least 2,097,152",
        ),
        chunked_prefill_size=chunk,
        max_prefill_tokens=max(prefill, chunk),
        schedule_policy=args.schedule_policy,
        priority_scheduling=args.enable_priority_scheduling,
        radix_cache=not args.disable_radix_cache,
        overlap=overlap,
        attention_backend=backend,
        cuda_graph_bs=graphs,
        model=model,
        model_overrides=model_overrides(args),
        sample_vocab=min(model.vocab_size, tokenizer_size or model.vocab_size),
        reasons=r.reasons,
    )


def _graph_sizes(args: ServerArgs, cuda: bool, running: int, r: _Resolver) -> tuple[int, ...]:
    if not cuda or args.disable_cuda_graph:
        r.reasons["cuda_graph_bs"] = "--disable-cuda-graph" if cuda else "no CUDA graphs on the CPU"
        return ()
    if args.cuda_graph_bs:
        return tuple(sorted(set(args.cuda_graph_bs)))
    largest = r.pick(
        "cuda_graph_max_bs", args.cuda_graph_max_bs, min(256, running), "up to 256 and max-running-requests"
    )
    r.reasons["cuda_graph_bs"] = f"1, 2, 4, then every 8 up to {largest}"
    return graph_buckets(largest)
