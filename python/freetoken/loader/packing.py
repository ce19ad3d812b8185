"""Which matrices of a GGUF file stay packed, and in which order its rows and columns are (torch-free).

The order: converters to GGUF put the value heads of linear attention that share a key head apart (tiled: value head t uses key
head ``t % key heads``), where the checkpoint and this runtime have them side by side (grouped: ``g // (value / key heads)``). They
also put the two rotary halves of each query and key head of a llama as interleaved pairs. Rows are put back whole, packed or
not; so are columns where heads are whole groups of a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile, GGUFTensor
from freetoken.loader.hadamard import EMBEDDING, SIGN_MODES, Hadamard
from freetoken.loader.names import PACKABLE_TYPES, expected_tensors, merged_projections
from freetoken.models.config import PACKED_METHOD, ModelConfig, PackedWeights

PACKED_WIDTH = 128
"""Columns of a packed matrix are a multiple of this."""


@dataclass(frozen=True)
class Layout:
    """How tensor ``name`` is stored: element i of the served first axis is ``rows[i]`` of the file, likewise columns; ``None`` is
    the same order. ``rotated`` says that its columns are rotated and signed (in the order of the file)."""

    rows: np.ndarray | None
    columns: np.ndarray | None
    rotated: bool


def layout(name: str, source: str, model: ModelConfig, hadamard: Hadamard | None) -> Layout:
    """The layout of canonical tensor ``name``, which is ``source`` in the file."""
    rotated = hadamard is not None and (source in hadamard.rotated or (source == EMBEDDING and hadamard.inverse))
    grouped = hadamard is not None and rotated and hadamard.gdn_v_grouped
    return Layout(_row_order(name, model), None if grouped else _column_order(name, model), rotated)


def plan_packing(
    file: GGUFFile, names: dict[str, str], model: ModelConfig, hadamard: Hadamard | None
) -> PackedWeights | None:
    """What stays packed of the tensors ``names`` (canonical to GGUF name), ``None`` when nothing does, as in a model with experts.

    Matrices that a layer merges stay packed together or not at all. The rest is decoded and turned back at load.
    """
    if model.moe is not None:
        return None
    groups: dict[str, int] = {}
    rotated: set[str] = set()
    for merged in merged_projections(model):
        tensors = [file.tensors[names[name]] for name in merged]
        layouts = [layout(name, names[name], model, hadamard) for name in merged]
        group = _common_group(tensors, layouts, model)
        if group is not None:
            groups.update(dict.fromkeys(merged, group))
            if layouts[0].rotated:
                rotated.update(merged)
    if not groups:
        return None
    if hadamard is None or not rotated:
        return PackedWeights(groups=groups)
    widths = {file.tensors[names[name]].shape[-1] for name in rotated}
    signs = {width: values for width, values in hadamard.signs.items() if width in widths}
    return PackedWeights(groups=groups, rotated=frozenset(rotated), block=hadamard.block, signs=signs)


def packing_from_config(config: dict[str, Any], model: ModelConfig, source: str) -> PackedWeights | None:
    """What ``quantization_config`` asks of random weights: all matrices in 2 bits; ``None`` without one.

    Its keys beside ``quant_method``: ``group_size`` (128, or 64), ``hadamard_block`` (1024; 0 for weights that are not rotated)
    and ``sign_mode`` (``explicit``: random signs, or ``identity``). Raises :class:`StartupError` naming ``source`` and the key.
    """
    asked = config.get("quantization_config")
    if not isinstance(asked, dict) or asked.get("quant_method") != PACKED_METHOD:
        return None

    def fail(problem: str) -> NoReturn:
        raise StartupError(f"{source}: quantization_config {problem}")

    if model.moe is not None:
        fail("asks for 2 bits, which experts are not served in")
    unknown = sorted(set(asked) - {"quant_method", "group_size", "hadamard_block", "sign_mode"})
    if unknown:
        fail(f"has the unknown key {unknown[0]!r}")
    group, block = asked.get("group_size", 128), asked.get("hadamard_block", 1024)
    sign_mode = asked.get("sign_mode", "explicit")
    if group not in (64, 128):
        fail("group_size must be 64 or 128")
    if not isinstance(block, int) or isinstance(block, bool) or block < 0 or block & (block - 1):
        fail("hadamard_block must be 0 or a power of two")
    if sign_mode not in SIGN_MODES:
        fail(f"sign_mode must be one of {', '.join(SIGN_MODES)}")
    shapes = expected_tensors(model)
    names = [name for merged in merged_projections(model) for name in merged]
    widths = {shapes[name][1] for name in names}
    for width in sorted(widths):
        if width % PACKED_WIDTH or (block and width % block):
            fail(f"cannot hold for a matrix of {width} columns: they must be a multiple of {max(PACKED_WIDTH, block)}")
    groups = dict.fromkeys(names, int(group))
    if not block:
        return PackedWeights(groups=groups)
    signs = {width: _random_signs(width) for width in widths} if sign_mode == "explicit" else {}
    return PackedWeights(groups=groups, rotated=frozenset(names), block=block, signs=signs)


def _random_signs(width: int) -> bytes:
    drawn = np.random.default_rng(width).integers(0, 2, width, dtype=np.int8)
    return (2 * drawn - 1).tobytes()


def _common_group(tensors: list[GGUFTensor], layouts: list[Layout], model: ModelConfig) -> int | None:
    """Elements a scale of matrices that can be one packed matrix, ``None`` when they cannot."""
    kinds = [PACKABLE_TYPES.get(tensor.type_name) for tensor in tensors]
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds) or len({entry.rotated for entry in layouts}) > 1:
        return None
    if any(tensor.shape[-1] % PACKED_WIDTH for tensor in tensors):
        return None
    group = min(known)
    for entry in layouts:
        head = model.linear_attention.value_head_dim if model.linear_attention else 0
        if entry.columns is not None and (entry.rotated or head % group):
            return None
    return group


def _row_order(name: str, model: ModelConfig) -> np.ndarray | None:
    if model.architecture == "LlamaForCausalLM":
        heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}.get(name.split(".")[-2])
        return None if heads is None else _rotary_halves(heads, model.head_dim)
    linear = model.linear_attention
    if linear is None or ".linear_attn." not in name:
        return None
    part = name.split(".linear_attn.")[1]
    if part.startswith(("in_proj_a.", "in_proj_b.", "A_log", "dt_bias")):
        return _head_order(model, 1)
    if part.startswith("in_proj_z."):
        return _head_order(model, linear.value_head_dim)
    if part.startswith(("in_proj_qkv.", "conv1d.")):
        values = _head_order(model, linear.value_head_dim)
        first = 2 * linear.key_size
        return None if values is None else np.concatenate((np.arange(first), first + values))
    return None


def _column_order(name: str, model: ModelConfig) -> np.ndarray | None:
    linear = model.linear_attention
    if linear is None or not name.endswith(".linear_attn.out_proj.weight"):
        return None
    return _head_order(model, linear.value_head_dim)


def _head_order(model: ModelConfig, size: int) -> np.ndarray | None:
    """Places in the tiled order of value heads of ``size`` elements, listed in the grouped order."""
    linear = model.linear_attention
    assert linear is not None
    repeats = linear.num_value_heads // linear.num_key_heads
    if repeats == 1:
        return None
    grouped = np.arange(linear.num_value_heads)
    tiled = grouped % repeats * linear.num_key_heads + grouped // repeats
    places: np.ndarray = (tiled[:, None] * size + np.arange(size)).reshape(-1)
    return places


def _rotary_halves(heads: int, head_dim: int) -> np.ndarray:
    """Places of the rows of two rotary halves in interleaved pairs, head by head."""
    pairs = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    places: np.ndarray = pairs.transpose(0, 2, 1).reshape(-1)
    return places
