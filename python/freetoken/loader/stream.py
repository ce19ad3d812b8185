"""Weights as a stream of (canonical name, CPU tensor), one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from freetoken.loader.checkpoint import Checkpoint
from freetoken.loader.names import FP8_BLOCK, keeps_float32, scale_name
from freetoken.loader.safetensors import FP8_DTYPE, StoredTensor
from freetoken.models.config import ModelConfig

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8_DTYPE: torch.float8_e4m3fn,
}


def stream_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``checkpoint`` under its Hugging Face name, as a new CPU tensor of ``dtype``.

    Those that a model keeps in float32 are yielded in it, those that it holds in FP8 as they are stored. A tied ``lm_head.weight`` is not yielded. Files are mapped and only one tensor is held here at a time. After each
    tensor ``progress`` gets the stored bytes read so far and ``checkpoint.total_bytes``.
    """
    done = 0
    for name, tensor, nbytes in _gguf(checkpoint, dtype) if checkpoint.gguf else _safetensors(checkpoint, dtype):
        yield name, tensor
        del tensor
        done += nbytes
        if progress is not None:
            progress(done, checkpoint.total_bytes)


class _Files:
    """Stored tensors of mapped files, of which only the last is kept open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._data: np.memmap | None = None

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """The tensor in its stored type; a view of the file where its place allows."""
        if self._path != stored.path or self._data is None:
            # Copy-on-write, so that torch gets a writable buffer; nothing is ever written to it.
            self._path, self._data = stored.path, np.memmap(stored.path, dtype=np.uint8, mode="c")
        source = torch.from_numpy(self._data[stored.offset : stored.offset + stored.nbytes])
        if stored.offset % 8:
            source = source.clone()
        return source.view(_TORCH_DTYPES[stored.dtype]).view(stored.shape)


def _safetensors(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, int]]:
    files, others = _Files(), _Files()
    for name, stored in checkpoint.stored.items():
        source = files.read(stored)
        scale = checkpoint.scales.get(scale_name(name))
        kind = torch.float32 if keeps_float32(name, checkpoint.model) else dtype
        if scale is not None:
            yield name, _dequantise(source, others.read(scale)).to(kind), stored.nbytes
        elif source.dtype == torch.float8_e4m3fn:
            yield name, source.clone(), stored.nbytes
        else:
            yield name, torch.empty(stored.shape, dtype=kind).copy_(source), stored.nbytes


def _dequantise(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 ``[..., N, K]`` times the scale of each block of 128 x 128, in float32."""
    rows, columns = tensor.shape[-2:]
    wide = scale.float().repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    return tensor.float().mul_(wide.repeat_interleave(FP8_BLOCK, -1)[..., :columns])


def _gguf(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, int]]:
    from freetoken.loader.quant import decode_tensor  # needs the gguf package, which safetensors do not

    file = checkpoint.gguf
    assert file is not None
    for name, source in checkpoint.gguf_names.items():
        stored = file.tensors[source]
        tensor = decode_tensor(file, stored, torch.float32 if keeps_float32(name, checkpoint.model) else dtype)
        yield name, _rotary_halves(name, tensor, checkpoint.model), stored.nbytes


def _rotary_halves(name: str, tensor: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Llama GGUFs hold the rows of each q and k head as interleaved rotary pairs; give back the two halves."""
    if model.architecture != "LlamaForCausalLM":
        return tensor
    if ".q_proj." in name:
        heads = model.num_heads
    elif ".k_proj." in name:
        heads = model.num_kv_heads
    else:
        return tensor
    pairs = tensor.view(heads, model.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
