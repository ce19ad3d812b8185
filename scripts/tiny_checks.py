"""What a tiny checkpoint cannot be, said before a file is written."""

from __future__ import annotations

import dataclasses

from tiny_spec import HYBRIDS, LAYER_LETTERS, MIXTURES, SHARED, TABLE_QUANTS, TinyModel, hf_config

from freetoken.loader.gguf_tokenizer import PRE_TOKENIZERS
from freetoken.models.parse import parse_hf_config

MAY_BE_ZERO = ("extra_vocab", "hadamard", "mtp", "seed")


class TinyModelError(ValueError):
    """A checkpoint that cannot be made; ``str(error)`` is one sentence."""


def default_layers(arch: str, layer_pattern: str | None) -> int:
    """Layers where nobody says how many: those of the pattern, else 4 where every fourth has full attention, else 2."""
    if arch in HYBRIDS:
        return len(layer_pattern) if layer_pattern else 4
    return 2


def check_spec(spec: TinyModel, format: str, shards: int) -> None:
    """Raise :class:`TinyModelError`, or the :class:`~freetoken.errors.StartupError` of the configuration, for what does not fit."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        least = 0 if field.name in MAY_BE_ZERO else 1
        if isinstance(field.default, int) and not isinstance(field.default, bool) and value < least:
            raise TinyModelError(f"{_flag(field.name)} must be at least {least}, not {value}")
    if shards < 1:
        raise TinyModelError(f"--shards must be at least 1, not {shards}")
    if spec.num_heads % spec.num_kv_heads:
        raise TinyModelError(f"--num-heads {spec.num_heads} is not a multiple of --num-kv-heads {spec.num_kv_heads}")
    if spec.family() not in PRE_TOKENIZERS:
        raise TinyModelError(f"--pre must be one of {', '.join(PRE_TOKENIZERS)}, not {spec.pre!r}")
    if set(spec.layer_pattern or "") - set(LAYER_LETTERS):
        raise TinyModelError(f"--layer-pattern is made of {' and '.join(LAYER_LETTERS)}, not {spec.layer_pattern!r}")
    for name in ("dense_layers", "ple_layers"):
        value = getattr(spec, name)
        if not all(part.isdecimal() for part in value.split(",") if part):
            raise TinyModelError(f"{_flag(name)} must be numbers with commas between them, not {value!r}")
    if spec.rope_scaling is not None and not (isinstance(spec.rope_scaling, dict) and "rope_type" in spec.rope_scaling):
        raise TinyModelError("--rope-scaling must be a JSON object with a rope_type")
    if spec.arch in MIXTURES and spec.top_k > spec.num_experts:
        raise TinyModelError(f"--top-k {spec.top_k} is more than --num-experts {spec.num_experts}")
    if spec.hadamard & (spec.hadamard - 1):
        raise TinyModelError(f"--hadamard must be a power of two, not {spec.hadamard}")
    if spec.table_quant is not None and spec.table_quant not in TABLE_QUANTS:
        raise TinyModelError(f"--table-quant must be one of {', '.join(TABLE_QUANTS)}, not {spec.table_quant!r}")
    if format == "gguf":
        _check_gguf(spec)
    parse_hf_config(hf_config(spec, spec.tokenizer_vocab + spec.extra_vocab), None, "tiny")


def _check_gguf(spec: TinyModel) -> None:
    """What GGUF files have no keys for."""
    if spec.fp8:
        raise TinyModelError("--format gguf is without --fp8")
    if spec.hadamard and spec.arch in MIXTURES:
        raise TinyModelError(f"--hadamard is not for --arch {spec.arch}")
    if spec.arch == "qwen3_moe" and (spec.sparse_step != 1 or spec.dense_layers):
        raise TinyModelError("--format gguf has experts in every layer, without --sparse-step and --dense-layers")
    if spec.arch == "qwen4_exp" and spec.output_gate != "sigmoid":
        raise TinyModelError("--format gguf has no --output-gate but sigmoid")
    if spec.arch == "qwen4_exp" and "," in spec.ple_layers:
        raise TinyModelError(f"--format gguf holds one n-gram table, but --ple-layers is {spec.ple_layers!r}")


def check_rows(spec: TinyModel, quant: str, block: int) -> None:
    """Raise :class:`TinyModelError` unless rows of all matrices are whole blocks of ``quant``, ``block`` elements each, and of the
    rotation."""
    mlp = (
        ("--expert-size", spec.expert_size)
        if spec.arch in MIXTURES
        else ("--intermediate-size", spec.intermediate_size)
    )
    widths = dict([("--hidden-size", spec.hidden_size), mlp])
    widths["--num-heads times --head-dim"] = spec.num_heads * spec.head_dim
    if spec.arch in HYBRIDS and "l" in (spec.layer_pattern or "l"):
        widths["--linear-value-heads times --linear-value-dim"] = spec.linear_value_heads * spec.linear_value_dim
    if spec.arch in SHARED:
        widths["--shared-size"] = spec.shared_size
    if spec.arch == "qwen4_exp":
        widths["--hyper-rank"] = spec.hyper_rank
        widths["--ple-width"] = spec.ple_width
    for name, width in widths.items():
        if width % block:
            raise TinyModelError(f"--quant {quant} needs rows of a multiple of {block}, but {name} is {width}")
        if spec.hadamard and width % spec.hadamard:
            raise TinyModelError(f"--hadamard {spec.hadamard} does not divide {name}, which is {width}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
