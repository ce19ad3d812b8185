"""Weights as a stream of (canonical name, CPU tensor), one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from freetoken.errors import StartupError
from freetoken.kernels.hadamard.reference import unrotate
from freetoken.loader.checkpoint import Checkpoint
from freetoken.loader.gguf import GGUFFile, GGUFTensor
from freetoken.loader.gguf_names import EXPERTS, SHARED_GATE
from freetoken.loader.names import FP8_BLOCK, keeps_float32, scale_name
from freetoken.loader.packing import Layout, layout
from freetoken.loader.safetensors import FP8_DTYPE, StoredTensor

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8_DTYPE: torch.float8_e4m3fn,
}


def stream_tensors(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``checkpoint`` under its Hugging Face name, as a new tensor of ``dtype``, on the CPU or on ``device``.

    Those that a model keeps in float32 are yielded in it, those that it holds in FP8 as they are stored. Matrices of a GGUF go to ``device`` in pieces. A packed matrix
    ``NAME.weight`` comes as two tensors, ``NAME.codes`` (uint8 ``[N, K/4]``) and ``NAME.scales`` (float16 ``[N, K/group]``). A tied
    ``lm_head.weight`` is not yielded. Of a GGUF experts come one by one, and the projection of an indexer in two parts. Files are mapped and only one tensor is held here at a time. After each tensor ``progress``
    gets the stored bytes read so far and ``checkpoint.total_bytes``.
    """
    done = 0
    source = _gguf(checkpoint, dtype, device) if checkpoint.gguf else _safetensors(checkpoint, dtype)
    for name, tensor, nbytes in source:
        yield name, tensor
        del tensor
        done += nbytes
        if progress is not None and nbytes:
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


def _gguf(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor, int]]:
    from freetoken.loader.quant import read_planes  # needs the gguf package, which safetensors do not

    file, model = checkpoint.gguf, checkpoint.model
    assert file is not None
    for name, source in checkpoint.gguf_names.items():
        stored = file.tensors[source]
        if EXPERTS in name:
            yield from _experts(file, name, stored, dtype, device)
            continue
        if model.packed is None or name not in model.packed.groups:
            kind = torch.float32 if keeps_float32(name, model) else dtype
            yield name, _decode(checkpoint, name, stored, kind, device), stored.nbytes
            continue
        place = layout(name, source, model, checkpoint.hadamard)
        group = model.packed.groups[name]
        codes, scales = read_planes(file, stored, group, device, rows=place.rows, columns=place.columns)
        prefix = name.removesuffix("weight")
        yield f"{prefix}codes", codes, 0
        yield f"{prefix}scales", scales, stored.nbytes


def _decode(
    checkpoint: Checkpoint, name: str, stored: GGUFTensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """The tensor as the checkpoint that was converted had it, turned back and in its order."""
    from freetoken.loader.quant import decode_tensor

    file, model, rotation = checkpoint.gguf, checkpoint.model, checkpoint.hadamard
    assert file is not None
    place = layout(name, stored.name, model, rotation)
    if name.endswith(".A_log"):
        return _log_decays(file.path_of(stored), stored.name, decode_tensor(file, stored, torch.float32), place).to(
            dtype
        )
    if len(stored.shape) == 1:
        vector = decode_tensor(file, stored, dtype)
        if name.endswith(SHARED_GATE):
            return vector.unsqueeze(0)
        return vector if place.rows is None else vector[torch.from_numpy(place.rows)]
    columns = None if place.columns is None else torch.from_numpy(place.columns).to(device)
    signs = None
    if place.rotated and rotation is not None and stored.shape[-1] in rotation.signs:
        signs = torch.frombuffer(bytearray(rotation.signs[stored.shape[-1]]), dtype=torch.int8).to(device)

    def convert(values: torch.Tensor) -> torch.Tensor:
        if place.rotated and rotation is not None:
            values = unrotate(values, signs, rotation.block)
        return values if columns is None else values[:, columns]

    plain = columns is None and not place.rotated
    change = None if plain else convert
    tensor = decode_tensor(file, stored, dtype, device=device, rows=place.rows, convert=change)
    return tensor.unsqueeze(1) if name.endswith(".conv1d.weight") else tensor


def _experts(
    file: GGUFFile, name: str, stored: GGUFTensor, dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """The experts of one stack, each as a checkpoint that stores them by themselves has it."""
    from freetoken.loader.quant import decode_tensor

    prefix, _, part = name.rpartition(".")
    for expert, entry in enumerate(stored.entries()):
        matrix, last = decode_tensor(file, entry, dtype, device=device), entry.nbytes
        if part == "gate_up_proj":
            gate, up = matrix.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate, 0
            yield f"{prefix}.{expert}.up_proj.weight", up, last
        else:
            yield f"{prefix}.{expert}.{part}.weight", matrix, last


def _log_decays(path: Path, name: str, stored: torch.Tensor, place: Layout) -> torch.Tensor:
    """``A_log`` from the stored ``-exp(A_log)``."""
    if not bool((stored <= 0).all()):
        raise StartupError(f"{path}: tensor {name!r} holds a decay rate that is not below 0")
    ordered = stored if place.rows is None else stored[torch.from_numpy(place.rows)]
    return (-ordered.double()).log().float()
