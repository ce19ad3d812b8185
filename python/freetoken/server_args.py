"""The one table of command-line flags, and the frozen configuration that :mod:`freetoken.resolve` makes of them (torch-free).

Each field of :class:`ServerArgs` is a flag; its metadata is what argparse, ``docs/flags.md`` and ``Engine`` are made from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from freetoken.config_file import read_config_file
from freetoken.errors import StartupError
from freetoken.models.config import ModelConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
REASONING_PARSERS = ("auto", "none", "qwen3")
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "qwen3_coder", "llama3")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flashinfer")
PLE_TABLES = ("auto", "gpu", "pinned", "mmap")


def _flag(
    default: Any, group: str, help: str, *, names: tuple[str, ...] = (), choices: tuple[str, ...] = (), kind: Any = None
) -> Any:
    metadata = {"group": group, "help": help, "names": names, "choices": choices, "kind": kind}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class ServerArgs:
    """Raw arguments as given; ``None`` and ``auto`` are decided by :func:`freetoken.resolve.resolve`."""

    model_path: str | None = _flag(
        None,
        "model",
        "Folder of safetensors or a .gguf file (any part of a split one). Without it, the embedded SmolLM2-135M-Instruct.",
        names=("--model-path", "--model"),
        kind=str,
    )
    tokenizer_path: str | None = _flag(
        None, "model", "Folder or tokenizer.json to use instead of the model's own tokenizer.", kind=str
    )
    load_format: str = _flag(
        "auto",
        "model",
        "How weights are read; `dummy` makes random weights from a config alone, packed where its `quantization_config` says `pq2`.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    served_model_name: str | None = _flag(
        None, "model", "Name in /v1/models and in requests; default: the folder's or file's name.", kind=str
    )
    dtype: str = _flag(
        "auto",
        "model",
        "Type of weights and activations; auto: the checkpoint's on CUDA, float32 on the CPU.",
        choices=DTYPES,
    )
    context_length: int | None = _flag(
        None, "model", "Longest prompt plus output in tokens; default: the model's.", kind=int
    )
    json_model_override_args: str = _flag("{}", "model", "JSON object laid over the model's config.", kind=str)
    chat_template: str | None = _flag(
        None, "model", "Path of a Jinja chat template to use instead of the model's own.", kind=str
    )
    reasoning_parser: str = _flag(
        "auto",
        "model",
        "How thoughts are told from the answer; auto: by the marks in the chat template, else by the model.",
        choices=REASONING_PARSERS,
    )
    tool_call_parser: str = _flag(
        "auto",
        "model",
        "How tool calls are written; auto: by the marks in the chat template, else by the model.",
        choices=TOOL_CALL_PARSERS,
    )
    random_seed: int | None = _flag(
        None, "model", "Seed for requests without one and for dummy weights; default: drawn at start.", kind=int
    )

    host: str = _flag("127.0.0.1", "http", "Address to listen on.")
    port: int = _flag(30000, "http", "Port to listen on.", kind=int)
    api_key: str | None = _flag(
        None, "http", "Key clients must send as a bearer token; guards all but /health and the page at /.", kind=str
    )
    cors_allow_origins: list[str] = _flag(
        [],
        "http",
        "Origins whose pages may call this server from a browser (https://host:port), or `*` for all; default none.",
        kind=str,
    )
    max_request_bytes: int = _flag(
        16 * 2**20, "http", "Largest request body in bytes; a larger one is a 413.", kind=int
    )
    stream_interval: int = _flag(1, "http", "Tokens between streamed events of one request.", kind=int)
    enable_metrics: bool = _flag(True, "http", "Serve Prometheus metrics on /metrics.")
    skip_server_warmup: bool = _flag(
        False, "http", "Report ready without a first request and, on a GPU, without having kernels compiled."
    )
    log_level: str = _flag(
        "info", "http", "Least severe log level shown.", choices=("debug", "info", "warning", "error")
    )
    decode_log_interval: int = _flag(
        40, "http", "Decode steps between two batch lines in the log; 0 for none.", kind=int
    )

    config: str | None = _flag(
        None,
        "operations",
        "YAML file of flags by name (`max-running-requests: 64`); the command line wins, unknown names are refused.",
        kind=str,
    )
    log_requests: str = _flag(
        "access",
        "operations",
        "What the log says of each request: nothing, a line when it ends, also its parameters when it starts, also prompts "
        "and outputs. Only `text` shows what clients wrote.",
        choices=("off", "access", "params", "text"),
    )
    soft_watchdog_timeout: float = _flag(
        60.0, "operations", "Seconds a step may take before the scheduler's stacks are logged; 0 for never.", kind=float
    )
    watchdog_timeout: float | None = _flag(
        None,
        "operations",
        "Seconds a step may take before the server logs all stacks, ends every request with an error and exits; 0 for "
        "never; default 300 on CUDA, never on the CPU.",
        kind=float,
    )
    crash_dump_folder: str | None = _flag(
        None,
        "operations",
        "Folder for a JSON file about each crash: open requests without their text, configuration, last steps, stacks.",
        kind=str,
    )

    device: str = _flag(
        "auto", "memory", "Where the model runs; auto: CUDA where a usable GPU is.", choices=("auto", "cpu", "cuda")
    )
    tp_size: int = _flag(
        1, "memory", "GPUs to shard the model over; only 1 is served so far.", names=("--tp-size", "--tp"), kind=int
    )
    mem_fraction_static: float | None = _flag(
        None,
        "memory",
        "Share of memory for weights and KV cache together: of the GPU's, default 0.88; on the CPU of the memory that is free "
        "at the start, default 0.5.",
        kind=float,
    )
    kv_cache_dtype: str = _flag("auto", "memory", "Type of the KV cache; auto: that of the model.", choices=DTYPES)
    max_total_tokens: int | None = _flag(None, "memory", "KV cache size in tokens; default: what fits.", kind=int)
    page_size: int = _flag(16, "memory", "Tokens a KV page; a power of two from 1 to 256.", kind=int)
    state_cache_gb: float | None = _flag(
        None,
        "memory",
        "Host memory in GB (10^9 bytes) for checkpoints of recurrent state, without which a prefix of such a model is "
        "computed again; 0 for none, default a tenth of the system's memory.",
        kind=float,
    )
    state_checkpoint_interval: int = _flag(
        2048,
        "memory",
        "Prompt tokens between two checkpoints of recurrent state (see --state-cache-gb), rounded down to whole pages.",
        kind=int,
    )

    ple_table: str = _flag(
        "auto",
        "memory",
        "Where the tables of n-gram embeddings are held: GPU memory, page-locked host memory that the GPU reads, or mapped files "
        "whose rows the host fetches; auto: the first of these that has room.",
        choices=PLE_TABLES,
    )

    max_running_requests: int | None = _flag(
        None, "scheduling", "Requests decoded at once; default 256 on CUDA, 32 on the CPU.", kind=int
    )
    max_queued_requests: int = _flag(
        1024, "scheduling", "Requests waiting at most; more are a 503 with Retry-After.", kind=int
    )
    max_queued_tokens: int | None = _flag(
        None, "scheduling", "Prompt tokens waiting at most; default: sixteen contexts, at least 2,097,152.", kind=int
    )
    chunked_prefill_size: int | None = _flag(
        None,
        "scheduling",
        "Tokens of one step while streams are running (decodes included); default 2048 on CUDA, 256 on the CPU.",
        kind=int,
    )
    max_prefill_tokens: int | None = _flag(
        None,
        "scheduling",
        "Tokens of one step while no stream is running; default 8192 on CUDA, 1024 on the CPU.",
        kind=int,
    )
    schedule_policy: str = _flag(
        "fcfs", "scheduling", "Order of the queue: first come, or longest prefix match.", choices=("fcfs", "lpm")
    )
    enable_priority_scheduling: bool = _flag(
        False,
        "scheduling",
        "Serve requests by their `priority`, higher first; one that does not fit takes the place of lower ones.",
    )
    disable_radix_cache: bool = _flag(False, "scheduling", "Do not reuse the KV of shared prefixes.")
    disable_overlap_schedule: bool = _flag(False, "scheduling", "Plan a step only after the one before has ended.")

    attention_backend: str = _flag(
        "auto",
        "kernels",
        "Attention implementation; auto: triton on CUDA, torch elsewhere.",
        choices=ATTENTION_BACKENDS,
    )
    disable_cuda_graph: bool = _flag(False, "kernels", "Run decode steps eagerly.")
    cuda_graph_max_bs: int | None = _flag(
        None, "kernels", "Largest captured decode batch; default: up to 256 and max-running-requests.", kind=int
    )
    cuda_graph_bs: list[int] = _flag(
        [], "kernels", "Captured decode batch sizes; default 1, 2, 4, 8, then every 8.", kind=int
    )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ServerArgs:
        """From keyword arguments (``Engine``); :class:`StartupError` names an unknown one."""
        names = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in names:
                raise StartupError(f"unknown argument {key!r}; docs/flags.md lists them all")
        if isinstance(values.get("config"), str):
            values = {**_from_config_file(values["config"]), **values}
        args = cls(**values)
        for row in dataclasses.fields(cls):
            _check_type(row.name, str(row.type), getattr(args, row.name))
        return args


@dataclass(frozen=True, kw_only=True)
class Config:
    """The resolved configuration. Fields mean what the flag of the same name means, with every ``auto`` decided.

    ``reasoning_parser`` and ``tool_call_parser`` stay ``auto`` until the chat template is known.
    ``max_total_tokens`` stays ``None`` and ``ple_table`` may stay ``auto`` until memory is sized after loading. ``cuda_graph_bs`` is empty when decode runs
    eagerly. ``model_overrides`` is what ``--json-model-override-args`` holds, already laid over ``model``.
    ``sample_vocab`` is the number of ids that may be sampled (the tokenizer's, never above the embedding's rows). ``reasons`` maps a derived field to one clause
    that says why.
    """

    model_path: str
    tokenizer_path: str | None
    load_format: str
    served_model_name: str
    dtype: str
    context_length: int
    chat_template: str | None
    reasoning_parser: str
    tool_call_parser: str
    random_seed: int
    host: str
    port: int
    api_key: str | None
    max_request_bytes: int
    stream_interval: int
    enable_metrics: bool
    skip_server_warmup: bool
    log_level: str
    log_requests: str
    cors_allow_origins: tuple[str, ...]
    decode_log_interval: int
    soft_watchdog_timeout: float
    watchdog_timeout: float
    crash_dump_folder: str | None
    device: str
    tp_size: int
    mem_fraction_static: float
    kv_cache_dtype: str
    max_total_tokens: int | None
    page_size: int
    state_cache_bytes: int
    state_checkpoint_interval: int
    ple_table: str
    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    schedule_policy: str
    priority_scheduling: bool
    radix_cache: bool
    overlap: bool
    attention_backend: str
    cuda_graph_bs: tuple[int, ...]
    model: ModelConfig
    model_overrides: dict[str, Any]
    sample_vocab: int
    reasons: dict[str, str]

    def public(self) -> dict[str, Any]:
        """JSON-ready values for ``/get_server_info``, without the key."""
        values = dataclasses.asdict(self)
        values["api_key"] = "set" if self.api_key else None
        values["model"]["packed"] = self.model.packed and self.model.packed.summary()
        return values


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the list of all flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"freetoken: {message} (--help lists all flags)\n")


def parser() -> argparse.ArgumentParser:
    """The command-line parser made from the table."""
    result = _Parser(prog="python -m freetoken.launch_server", description="Serve a language model over HTTP.")
    groups: dict[str, Any] = {}
    for row in dataclasses.fields(ServerArgs):
        meta = row.metadata
        group = groups.setdefault(meta["group"], result.add_argument_group(meta["group"]))
        names = meta["names"] or ("--" + row.name.replace("_", "-"),)
        if row.type == "bool":
            action = argparse.BooleanOptionalAction if row.default is True else "store_true"
            group.add_argument(*names, dest=row.name, default=row.default, action=action, help=meta["help"])
            continue
        extra: dict[str, Any] = {"type": meta["kind"] or str, "help": meta["help"]}
        if meta["choices"]:
            extra["choices"] = meta["choices"]
        if row.default is dataclasses.MISSING:
            group.add_argument(*names, dest=row.name, default=[], nargs="+", **extra)
        else:
            group.add_argument(*names, dest=row.name, default=row.default, **extra)
    return result


def parse(argv: Sequence[str] | None = None) -> ServerArgs:
    """Parse a command line; a bad one prints a sentence and exits 2. :class:`StartupError` for a bad ``--config`` file."""
    flags = parser()
    args = flags.parse_args(argv)
    if args.config is not None:
        flags.set_defaults(**_from_config_file(args.config))
        args = flags.parse_args(argv)
    return ServerArgs(**vars(args))


def _from_config_file(path: str) -> dict[str, Any]:
    rows = {row.name: row for row in dataclasses.fields(ServerArgs) if row.name != "config"}
    spelled = {name.lstrip("-").replace("-", "_"): row.name for row in rows.values() for name in row.metadata["names"]}
    values = read_config_file(path, rows, spelled)
    for name, value in values.items():
        try:
            _check_type(name, str(rows[name].type), value)
        except StartupError as error:
            raise StartupError(f"--config {path}: {error}") from None
    return values


def model_overrides(args: ServerArgs) -> dict[str, Any]:
    """The object of ``--json-model-override-args``; :class:`StartupError` when it is not one."""
    try:
        values = json.loads(args.json_model_override_args)
    except json.JSONDecodeError as error:
        raise StartupError(f"--json-model-override-args is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise StartupError("--json-model-override-args must be a JSON object")
    return values


_IN_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "list[int]": "a list of whole numbers",
    "list[str]": "a list of texts",
    "NoneType": "empty",
}
"""Types as a person who writes a flag or a YAML file calls them."""


def _check_type(name: str, annotation: str, value: Any) -> None:
    """``annotation`` is that of a field of :class:`ServerArgs`; a whole number will do where a float is asked for."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return
    right_types: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
        "list[int]": (list, tuple),
        "list[str]": (list, tuple),
    }
    right = isinstance(value, right_types[kind]) and (kind == "bool" or not isinstance(value, bool))
    if right and kind.startswith("list"):
        right = all(type(item) is (int if kind == "list[int]" else str) for item in value)
    if not right:
        given = _IN_WORDS.get(type(value).__name__, type(value).__name__)
        raise StartupError(f"argument {name!r} must be {_IN_WORDS[kind]}, not {given}")
