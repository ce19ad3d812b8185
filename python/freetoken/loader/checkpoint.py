"""What a model path holds: the one description of a checkpoint that server and runner share (torch-free)."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile, GGUFTensor, shown_name
from freetoken.loader.gguf_config import hf_config_from_gguf, mtp_blocks
from freetoken.loader.gguf_names import HEAD, ROPE_FACTORS, SHARED_GATE, gguf_tensors, is_gguf_mtp
from freetoken.loader.gguf_qwen4_exp import check_constants
from freetoken.loader.gguf_split import models_among, open_gguf, set_name
from freetoken.loader.hadamard import Hadamard, read_hadamard
from freetoken.loader.names import (
    DECODABLE_TYPES,
    MTP,
    PACKABLE_TYPES,
    SCALE_SUFFIX,
    STACKED_DOWN,
    STACKED_GATE_UP,
    expected_tensors,
    is_ignorable,
    is_scale,
    scale_name,
    scale_shape,
    set_aside,
    stored_name,
)
from freetoken.loader.packing import packing_from_config, plan_packing
from freetoken.loader.ple_table import GGUF_TABLE, TableSource, belongs_to_table, find_gguf_table, find_tables
from freetoken.loader.safetensors import FLOAT_DTYPES, FP8_DTYPE, StoredTensor, index_folder, read_json
from freetoken.models.config import ModelConfig
from freetoken.models.parse import flatten_text_config, parse_hf_config

# A newer spelling that would hide an older one given as an override.
_RENAMED = {"torch_dtype": "dtype", "dtype": "torch_dtype"}


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """Where the tokenizer of a checkpoint is: exactly one of a folder and a GGUF file."""

    folder: Path | None = None
    gguf: GGUFFile | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened and checked checkpoint.

    ``kind`` is ``safetensors`` or ``gguf``. ``path`` is the folder or the file, of a split one the first part. ``hf_config`` is the configuration
    dictionary after overrides, with the keys of a ``text_config`` at the top (for a GGUF: made from its metadata). The weights to read, in stored order, are ``stored``
    (canonical name to place in a safetensors file) or ``gguf_names`` (name of a tensor or of a part of one, see :mod:`freetoken.loader.gguf_names`, to name in the GGUF), both empty for
    the load format ``dummy``; ``total_bytes`` is their stored size. ``aside`` holds tensors of parts that are not served (vision
    tower, multi-token prediction) by the name of the part; they are not read. ``hadamard`` is the rotation of a GGUF's weights.
    ``scales`` are block scales by canonical name that are needed only to dequantise tensors that the model does not hold in FP8.
    ``tables`` says where the n-gram tables lie, one for each layer that has one; ``None`` for a model without or the load format ``dummy``.
    """

    kind: str
    path: Path
    name: str
    model: ModelConfig
    total_bytes: int
    hf_config: dict[str, Any]
    gguf: GGUFFile | None
    stored: dict[str, StoredTensor]
    gguf_names: dict[str, str]
    aside: dict[str, list[StoredTensor | GGUFTensor]] = field(default_factory=dict)
    hadamard: Hadamard | None = None
    scales: dict[str, StoredTensor] = field(default_factory=dict)
    tables: list[TableSource] | None = None

    def tokenizer(self) -> TokenizerFiles:
        """Where the tokenizer is."""
        return TokenizerFiles(gguf=self.gguf) if self.gguf is not None else TokenizerFiles(folder=self.path)


def open_checkpoint(path: str | Path, load_format: str = "auto", overrides: dict[str, Any] | None = None) -> Checkpoint:
    """Find out what ``path`` holds and check everything that can be checked without reading weights.

    ``load_format`` is ``auto``, ``safetensors``, ``gguf`` or ``dummy`` (weights are not looked at; a ``config.json``
    alone will do). ``overrides`` are laid over the configuration dictionary; ``None`` as a value removes a key. Raises
    :class:`StartupError` in one sentence.
    """
    path = Path(path).expanduser()
    try:
        source = _find_source(path, load_format)
    except OSError as error:
        raise StartupError(f"model path {path} cannot be read: {error.strerror or error}") from None
    weights = load_format != "dummy"
    if source.is_file():
        return _open_gguf(source, overrides or {}, weights)
    return _open_folder(source, overrides or {}, weights)


def _find_source(path: Path, load_format: str) -> Path:
    """The GGUF file (of a split one any part) or the folder of safetensors that ``path`` means."""
    if not path.exists():
        raise StartupError(f"model path {path} does not exist; give a local folder or .gguf file")
    if path.is_file():
        if path.suffix.lower() != ".gguf" or load_format == "safetensors":
            wanted = "a folder of safetensors" if load_format == "safetensors" else "a folder or a .gguf file"
            raise StartupError(f"model path {path} is a file, not {wanted}")
        return path
    entries = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == ".gguf" and entry.is_file())
    files = models_among(entries)
    has_config = (path / "config.json").exists()
    if load_format == "gguf" or (load_format != "safetensors" and not has_config and files):
        if len(files) != 1:
            found = "no .gguf file" if not files else f"{len(files)} models in .gguf files; name one of them"
            raise StartupError(f"{path} holds {found}")
        return files[0]
    if not has_config:
        raise StartupError(f"{path} has no config.json")
    if load_format == "auto" and len(files) == 1 and not any(path.glob("*.safetensors*")):
        return files[0]
    return path


def _lay_over(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in config.items() if _RENAMED.get(key) not in overrides}
    rope = merged.get("rope_parameters")
    if isinstance(rope, dict) and "rope_parameters" not in overrides:
        if "rope_scaling" in overrides:
            del merged["rope_parameters"]
            if rope.get("rope_theta") is not None:
                merged["rope_theta"] = rope["rope_theta"]
        elif "rope_theta" in overrides:
            merged["rope_parameters"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    merged.update(overrides)
    return {key: value for key, value in merged.items() if value is not None}


def _open_folder(folder: Path, overrides: dict[str, Any], weights: bool) -> Checkpoint:
    config = _lay_over(flatten_text_config(read_json(folder / "config.json")), overrides)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else None
    name = folder.resolve().name
    source = str(folder / "config.json")
    model = parse_hf_config(config, generation, name, source=source)
    model = dataclasses.replace(model, packed=packing_from_config(config, model, source))
    if model.packed is not None and weights:
        raise StartupError(
            f"{folder}: 2-bit weights are read from .gguf files; a folder can only ask for --load-format dummy"
        )
    found, aside = _name_stored(index_folder(folder), model) if weights else ({}, {})
    tables = None
    if weights and model.ple is not None:
        tables = find_tables(found, model.ple)
        found = {name: tensor for name, tensor in found.items() if not belongs_to_table(name)}
    stored, scales = _select_stored(folder, found, model) if weights else ({}, {})
    return Checkpoint(
        kind="safetensors",
        path=folder,
        name=name,
        model=model,
        total_bytes=sum(tensor.nbytes for tensor in stored.values()),
        hf_config=config,
        gguf=None,
        stored=stored,
        gguf_names={},
        aside=aside,
        scales=scales,
        tables=tables,
    )


def _name_stored(
    found: dict[str, StoredTensor], model: ModelConfig
) -> tuple[dict[str, StoredTensor], dict[str, list[StoredTensor | GGUFTensor]]]:
    """Tensors by their canonical names, and those of parts that are not served by the name of the part."""
    named: dict[str, StoredTensor] = {}
    aside: dict[str, list[StoredTensor | GGUFTensor]] = {}
    for name, tensor in found.items():
        part = set_aside(name, model)
        if part is not None:
            aside.setdefault(part, []).append(tensor)
            continue
        canonical = stored_name(name) if model.layer_types else name
        if canonical in named:
            raise StartupError(f"{tensor.path}: tensors {named[canonical].name!r} and {name!r} are the same one")
        named[canonical] = tensor
    return named, aside


def _select_stored(
    folder: Path, found: dict[str, StoredTensor], model: ModelConfig
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The expected tensors among ``found``, in stored order, and the scales of those that are dequantised at load."""
    stacked = any(name.endswith((STACKED_GATE_UP, STACKED_DOWN)) for name in found)
    expected = expected_tensors(model, stacked=stacked)
    scales: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        if name in expected:
            _check_dtype(tensor, name, expected, found)
            _check_shape(tensor.path, tensor.name, tensor.shape, expected[name])
            continue
        owner = found.get(name.removesuffix(SCALE_SUFFIX)) if is_scale(name) else None
        if owner is not None and owner.dtype == FP8_DTYPE and name.removesuffix(SCALE_SUFFIX) in expected:
            _check_float(tensor)
            _check_matrix(owner)
            _check_shape(tensor.path, tensor.name, tensor.shape, scale_shape(owner.shape))
            scales[name] = tensor
        elif not is_ignorable(name, model):
            raise StartupError(
                f"{tensor.path}: tensor {tensor.name!r} is not part of a {model.architecture} with this config.json"
            )
    _check_complete(folder, expected, found)
    return {name: tensor for name, tensor in found.items() if name in expected}, scales


def _check_dtype(
    tensor: StoredTensor, name: str, expected: dict[str, tuple[int, ...]], found: dict[str, StoredTensor]
) -> None:
    """A tensor is FP8 with its scale where the configuration says so; a float, or FP8 to be dequantised, elsewhere."""
    scale = scale_name(name)
    if scale in expected and tensor.dtype != FP8_DTYPE:
        raise StartupError(
            f"{tensor.path}: tensor {tensor.name!r} has dtype {tensor.dtype}, but quantization_config asks for {FP8_DTYPE} (and does not "
            "except its module)"
        )
    if tensor.dtype != FP8_DTYPE or is_scale(name):
        _check_float(tensor)
    elif scale not in found:
        raise StartupError(
            f"{tensor.path}: tensor {tensor.name!r} is {FP8_DTYPE}, but the checkpoint has no {scale_name(tensor.name)!r}"
        )
    else:
        _check_matrix(tensor)


def _check_matrix(tensor: StoredTensor) -> None:
    if len(tensor.shape) < 2:
        raise StartupError(f"{tensor.path}: tensor {tensor.name!r} is {FP8_DTYPE}, which is served for matrices only")


def _check_float(tensor: StoredTensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise StartupError(
            f"{tensor.path}: tensor {tensor.name!r} has dtype {tensor.dtype}, which is not served; {', '.join(FLOAT_DTYPES)} are"
        )


def _open_gguf(path: Path, overrides: dict[str, Any], weights: bool) -> Checkpoint:
    file = open_gguf(path)
    hadamard = read_hadamard(file)
    config = _lay_over(hf_config_from_gguf(file), overrides)
    if config.get("quantization_config") is not None:
        raise StartupError(
            f"{path}: quantization_config cannot be laid over a GGUF file, whose tensors say what they are"
        )
    model = parse_hf_config(config, None, set_name(path), source=str(file.path))
    # Converters store the norm weights of hybrid models as they are used.
    model = dataclasses.replace(model, zero_centred_norm=False)
    if model.ple is not None:
        check_constants(file, model.ple)
    names: dict[str, str] = {}
    aside: dict[str, list[StoredTensor | GGUFTensor]] = {}
    if weights or any(tensor.type_name in PACKABLE_TYPES for tensor in file.tensors.values()):
        names, aside = _select_gguf(file, model)
        model = dataclasses.replace(model, packed=plan_packing(file, names, model, hadamard))
    if not weights:
        names, aside = {}, {}
    return Checkpoint(
        kind="gguf",
        path=file.path,
        name=set_name(path),
        model=model,
        total_bytes=sum(file.tensors[source].nbytes for source in names.values()),
        hf_config=config,
        gguf=file,
        stored={},
        gguf_names=names,
        aside=aside,
        hadamard=hadamard,
        tables=[find_gguf_table(file, model.ple)] if weights and model.ple is not None else None,
    )


def _select_gguf(
    file: GGUFFile, model: ModelConfig
) -> tuple[dict[str, str], dict[str, list[StoredTensor | GGUFTensor]]]:
    """Name of the part to GGUF name of the expected tensors, in file order, and tensors of parts that are not served."""
    expected = gguf_tensors(model, file.tensors)
    blocks = model.num_layers + mtp_blocks(file)
    names: dict[str, str] = {}
    aside: dict[str, list[StoredTensor | GGUFTensor]] = {}
    for source, tensor in file.tensors.items():
        if source == ROPE_FACTORS or (source == GGUF_TABLE and model.ple is not None):
            continue
        if model.layer_types and is_gguf_mtp(source, model, blocks):
            aside.setdefault(MTP, []).append(tensor)
            continue
        if source not in expected:
            if source == HEAD and model.tie_word_embeddings:
                continue
            raise StartupError(
                f"{file.path_of(tensor)}: tensor {shown_name(source)} is not part of a {model.architecture} with these metadata"
            )
        if tensor.type_name not in DECODABLE_TYPES and tensor.type_name not in PACKABLE_TYPES:
            raise StartupError(
                f"{file.path_of(tensor)}: tensor {source!r} has type {tensor.type_name}, which is not served"
            )
        name, shape = expected[source]
        # Some writers drop the axis of its one row.
        flat = name.endswith(SHARED_GATE) and len(tensor.shape) == 1
        _check_shape(file.path_of(tensor), source, tensor.shape, shape[1:] if flat else shape)
        names[name] = source
    _check_complete(file.path, expected, file.tensors)
    return names, aside


def _check_shape(path: Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise StartupError(f"{path}: tensor {name!r} has shape {list(shape)}, but the config asks for {list(expected)}")


def _check_complete(path: Path, expected: Iterable[str], found: Container[str]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(f"{path} lacks tensor {missing[0]!r}{more}")
