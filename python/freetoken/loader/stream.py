"""Weights as a stream of (canonical name, CPU tensor), one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from freetoken.loader.checkpoint import Checkpoint
from freetoken.loader.names import keeps_float32
from freetoken.loader.safetensors import StoredTensor
from freetoken.models.config import ModelConfig

_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stream_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``checkpoint`` under its Hugging Face name, as a new CPU tensor of ``dtype``.

    Those that a model keeps in float32 are yielded in it. A tied ``lm_head.weight`` is not yielded. Files are mapped and only one tensor is held here at a time. After each
    tensor ``progress`` gets the stored bytes read so far and ``checkpoint.total_bytes``.
    """
    done = 0
    for name, tensor, nbytes in _gguf(checkpoint, dtype) if checkpoint.gguf else _safetensors(checkpoint, dtype):
        yield name, tensor
        del tensor
        done += nbytes
        if progress is not None:
            progress(done, checkpoint.total_bytes)


def _safetensors(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, int]]:
    mapped: tuple[object, np.memmap | None] = (None, None)
    for name, stored in checkpoint.stored.items():
        if mapped[0] != stored.path:
            # Copy-on-write, so that torch gets a writable buffer; nothing is ever written to it.
            mapped = (stored.path, np.memmap(stored.path, dtype=np.uint8, mode="c"))
        assert mapped[1] is not None
        kind = torch.float32 if keeps_float32(name, checkpoint.model) else dtype
        yield name, _copy_stored(mapped[1], stored, kind), stored.nbytes


def _copy_stored(data: np.memmap, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    source = torch.from_numpy(data[stored.offset : stored.offset + stored.nbytes])
    if stored.offset % 8:
        source = source.clone()
    return torch.empty(stored.shape, dtype=dtype).copy_(source.view(_TORCH_DTYPES[stored.dtype]).view(stored.shape))


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
