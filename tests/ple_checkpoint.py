"""Files with the table of a PLE layer in them, for tests of loading and of the ways to hold a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from freetoken.models.ple_config import PleConfig

TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
}


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The file format by hand, in the order given."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def table_tensors(
    config: PleConfig, table: torch.Tensor, shards: int, *, ordinal: int = 0, scale: float | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of one layer by name, shards in the order of their names as text."""
    prefix = f"model.layers.{config.layers[ordinal]}.ple.ple_embedding."
    constants = config.constants(ordinal)
    tensors = {
        f"{prefix}layer_multipliers": torch.tensor(constants.multipliers),
        f"{prefix}ngram_heads_vocab_sizes": torch.tensor(constants.vocab_sizes),
        f"{prefix}ngram_heads_offsets": torch.tensor(constants.offsets),
    }
    parts = {f"{prefix}ngram_embedding.shard_{i}.weight": part for i, part in enumerate(table.chunk(shards))}
    tensors |= {name: parts[name] for name in sorted(parts)}
    if scale is not None:
        tensors[f"{prefix}ngram_embedding.weight_scale"] = torch.tensor(scale)
    return tensors


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> Path:
    """Tensors dealt out to ``files`` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for index in range(files):
        name = f"model-{index + 1:05}-of-{files:05}.safetensors"
        mine: Iterable[str] = names[index::files]
        write_safetensors(folder / name, {key: tensors[key] for key in mine})
        weight_map |= dict.fromkeys(names[index::files], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
