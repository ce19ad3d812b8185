"""Write a tiny random Llama, Qwen3, Qwen3.5 (also with experts) or qwen4_exp checkpoint with a tokenizer: a folder of safetensors, or a GGUF file (or its parts).

    python scripts/make_tiny_model.py OUT --arch qwen3 --format safetensors --shards 2
    python scripts/make_tiny_model.py OUT.gguf --arch llama --format gguf --quant q4_0
    python scripts/make_tiny_model.py OUT.gguf --arch qwen3_5 --format gguf --quant pq2_0 --hadamard 128 --gdn-v-grouped \\
        --hidden-size 128 --intermediate-size 256 --linear-value-dim 32 --num-layers 4 --head-dim 32
    python scripts/make_tiny_model.py OUT.gguf --arch qwen4_exp --format gguf --quant q8_0 --table-quant iq4_nl \\
        --expert-size 32 --shared-size 64 --hyper-rank 32 --ple-width 128
    python scripts/make_tiny_model.py OUT.gguf --full-size

The weights are noise, scaled so that the largest logits stand well apart. The tokenizer is a byte-level BPE trained on a
few lines of text, with a ChatML template. ``--full-size`` writes a random file of the geometry and sizes of the published 27B model in
PQ2_0 instead (7.2 GB), for measuring speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_checks import TinyModelError, check_spec, default_layers
from tiny_qwen4_exp import table_tensors
from tiny_spec import (
    ARCHITECTURES,
    CHAT_TEMPLATE,
    FLOAT_QUANTS,
    QUANTS,
    SPECIAL_TOKENS,
    TRAINING_TEXT,
    TinyModel,
    hf_config,
    random_weights,
    train_tokenizer,
)

from freetoken.errors import StartupError
from freetoken.loader.names import FP8_BLOCK, expected_tensors, scale_name, scale_shape
from freetoken.models.parse import parse_hf_config

__all__ = [
    "CHAT_TEMPLATE",
    "QUANTS",
    "SPECIAL_TOKENS",
    "TRAINING_TEXT",
    "TinyModel",
    "make_tiny_model",
    "random_weights",
]

FP8_LARGEST = 448.0


def quantise_fp8(weights: dict[str, torch.Tensor], config: dict[str, Any], stacked: bool) -> dict[str, torch.Tensor]:
    """The same with the linear layers that ``config`` says are FP8 in that type, each followed by its block scales."""
    expected = expected_tensors(parse_hf_config(config, None, "tiny"), stacked=stacked)
    result: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if scale_name(name) not in expected:
            result[name] = value
            continue
        rows, columns = value.shape[-2:]
        scale = torch.empty(scale_shape(tuple(value.shape)))
        data = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
        for row in range(0, rows, FP8_BLOCK):
            for column in range(0, columns, FP8_BLOCK):
                block = (..., slice(row, row + FP8_BLOCK), slice(column, column + FP8_BLOCK))
                largest = value[block].float().abs().amax((-2, -1), keepdim=True)
                scale[(..., row // FP8_BLOCK, column // FP8_BLOCK)] = largest[..., 0, 0] / FP8_LARGEST
                data[block] = (value[block].float() / largest * FP8_LARGEST).to(torch.float8_e4m3fn)
        result[name], result[scale_name(name)] = data, scale
    return result


def published_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same as in a checkpoint with a vision tower, with some tensors of it and of multi-token prediction."""
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    renamed["model.visual.blocks.0.norm1.weight"] = torch.ones(16)
    renamed["model.visual.patch_embed.proj.bias"] = torch.ones(16)
    renamed["mtp.fc.weight"] = torch.ones(8, 16)
    return renamed


def write_safetensors(folder: Path, spec: TinyModel, quant: str = "f32", shards: int = 1) -> Path:
    """Write a folder that transformers and freetoken both load; returns ``folder``."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[quant]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(spec)
    config = hf_config(spec, tokenizer.get_vocab_size() + spec.extra_vocab, str(dtype).removeprefix("torch."))
    weights = {
        name: torch.from_numpy(value).to(dtype) for name, value in random_weights(config, spec.seed, spec.stacked)
    }
    weights = quantise_fp8(weights, config, spec.stacked) if spec.fp8 else weights
    if spec.arch == "qwen4_exp":
        weights |= table_tensors(config, spec.table_shards, spec.seed, dtype)
    weights = published_names(weights) if spec.vision else weights
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = names[shard::shards]
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    if shards > 1:
        total = sum(value.numel() * value.element_size() for value in weights.values())
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": spec.max_position_embeddings,
        },
    )
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def make_tiny_model(
    path: str | Path, *, format: str = "safetensors", quant: str = "f32", shards: int = 1, **options: Any
) -> Path:
    """Write a checkpoint at ``path`` (a folder, or a ``.gguf`` file) and return it, or the first of several ``.gguf`` parts; ``options`` are those of
    :class:`TinyModel`, without ``num_layers`` as many as the architecture needs. :class:`TinyModelError` or
    :class:`~freetoken.errors.StartupError` says in a sentence what does not fit."""
    options.setdefault("num_layers", default_layers(options.get("arch", TinyModel.arch), options.get("layer_pattern")))
    spec = TinyModel(**options)
    check_spec(spec, format, shards)
    if format == "gguf":
        from tiny_gguf import write_gguf  # needs the gguf package

        return write_gguf(Path(path), spec, quant, shards)
    if quant not in FLOAT_QUANTS:
        raise TinyModelError(f"--quant {quant} needs --format gguf")
    return write_safetensors(Path(path), spec, quant, shards)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint.")
    parser.add_argument("path", type=Path, help="folder, or .gguf file, to write")
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument("--quant", choices=QUANTS, default="f32", help="block types need --format gguf")
    parser.add_argument("--shards", type=int, default=1, help="files to spread the weights over")
    parser.add_argument("--full-size", action="store_true", help="a random 27B in PQ2_0; all other options are ignored")
    for field in dataclasses.fields(TinyModel):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        elif field.name == "num_layers":
            parser.add_argument(flag, type=int, help="default 2, or 4 where every fourth has full attention")
        elif field.name == "rope_scaling":
            parser.add_argument(flag, type=json.loads, help="JSON object, as in config.json")
        else:
            choices = tuple(ARCHITECTURES) if field.name == "arch" else None
            kind = type(field.default) if field.default is not None else str
            parser.add_argument(flag, type=kind, default=field.default, choices=choices)
    args = parser.parse_args(argv)
    options = {name: value for name, value in vars(args).items() if value is not None}
    try:
        if options.pop("full_size"):
            from full_gguf import write_full_size

            print(write_full_size(args.path))
        else:
            print(make_tiny_model(**options))
    except (StartupError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
