"""The ``prism.hadamard.*`` keys of a GGUF file: which weights are stored rotated on their input axis, and how (torch-free).

Let ``s`` be the signs of an input width and H the normalised Sylvester Walsh-Hadamard matrix of ``block_size``, applied to each
block of a row. A weight in ``weight_names`` is stored as ``W diag(s) H``, so its input takes the signs, then H. A looked-up row z of
the table in ``inverse_weight_names`` means ``s * (H z)``. Version 2 is a table that is both the embedding and the head.

Whatever of this is absent, contradicts itself or is not known is refused with the key or tensor: such a file would load and
talk nonsense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile, shown_name

PREFIX = "prism.hadamard."
TRANSFORM, AXIS = "normalized-sylvester-walsh-hadamard", "input-last-dimension"
SIGN_MODES = ("identity", "explicit")
VERSIONS = (1, 2)
# Those in which every use of a rotated weight is known to be preceded by the rotation of its input.
ARCHITECTURES = ("llama", "qwen3", "qwen35")
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_FOLDABLE = re.compile(
    r"blk\.\d{1,6}\.(attn_(q|k|v|qkv|gate|output)|ssm_out|ffn_(gate|up|down)(_exps|_shexp)?|ffn_gate_up_exps)\.weight"
)
_KEYS = (
    "version",
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "weight_names",
    "inverse_weight_names",
    "sign_widths",
    "sign_values",
    "gdn_v_grouped",
    "tied_output",
)


@dataclass(frozen=True)
class Hadamard:
    """The rotation of a file. ``rotated`` names its rotated weights and ``inverse`` says that the embedding is, too.

    ``signs`` holds one int8 of 1 or -1 for each column of a width; widths without any have none. ``gdn_v_grouped`` says that the
    columns of ``ssm_out`` are in the order of grouped value heads.
    """

    block: int
    rotated: frozenset[str]
    inverse: bool
    tied: bool
    gdn_v_grouped: bool
    signs: dict[int, bytes]


def read_hadamard(file: GGUFFile) -> Hadamard | None:
    """The rotation that the keys of ``file`` describe, ``None`` without any; :class:`StartupError` for one that is not served."""
    if not any(key.startswith(PREFIX) for key in file.metadata):
        return None
    keys = _Keys(file)
    unknown = [key for key in file.metadata if key.startswith(PREFIX) and key.removeprefix(PREFIX) not in _KEYS]
    if unknown:
        raise StartupError(
            f"{file.path}: metadata key {shown_name(unknown[0])} is not known, so the rotation is not either"
        )
    tied = _check_version(keys)
    block = keys.integer("block_size")
    if block < 1 or block & (block - 1):
        keys.fail("block_size", f"must be a power of two, not {block}")
    for key, wanted in (("transform", (TRANSFORM,)), ("axis", (AXIS,)), ("sign_mode", SIGN_MODES)):
        if keys.string(key) not in wanted:
            keys.fail(key, f"is {keys.string(key)[:60]!r}; {' and '.join(wanted)} are served")
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise StartupError(f"{file.path}: metadata key 'general.architecture' is missing")
    if architecture not in ARCHITECTURES:
        keys.fail("version", f"is there, but rotated weights of architecture {architecture[:40]!r} are not served")
    rotated = _rotated(keys)
    inverse = _inverse(keys, tied, HEAD in file.tensors)
    signs = _signs(keys, block)
    for name in [*rotated, *([EMBEDDING] if inverse else [])]:
        width = file.tensors[name].shape[-1]
        if width % block:
            keys.fail("block_size", f"{block} does not divide the {width} columns of tensor {name!r}")
        if signs is not None and width not in signs:
            keys.fail("sign_widths", f"holds no signs for the {width} columns of tensor {name!r}")
    return Hadamard(block, frozenset(rotated), inverse, tied, keys.boolean("gdn_v_grouped", False), signs or {})


class _Keys:
    """Typed reads of the keys; every fault names the whole key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def fail(self, key: str, problem: str) -> NoReturn:
        raise StartupError(f"{self.file.path}: metadata key '{PREFIX}{key}' {problem}")

    def get(self, key: str) -> Any:
        value = self.file.metadata.get(PREFIX + key)
        if value is None:
            self.fail(key, f"is missing beside others of {PREFIX}*")
        return value

    def integer(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, f"must be an integer, not {type(value).__name__}")
        return value

    def string(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {type(value).__name__}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be a boolean, not {type(value).__name__}")
        return value

    def names(self, key: str) -> list[str]:
        value = self.get(key)
        if isinstance(value, np.ndarray) and not value.size:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self.fail(key, "must be a list of strings")
        seen: set[str] = set()
        for name in value:
            if name in seen:
                self.fail(key, f"names {name[:80]!r} twice")
            seen.add(name)
        return value

    def integers(self, key: str) -> np.ndarray:
        value = self.get(key)
        if isinstance(value, list) and not value:
            return np.empty(0, dtype=np.int64)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            self.fail(key, "must be a list of integers")
        return value.astype(np.int64)


def _check_version(keys: _Keys) -> bool:
    """Whether the output is tied, which is what version 2 means."""
    version, tied = keys.integer("version"), keys.boolean("tied_output", False)
    if version not in VERSIONS:
        keys.fail("version", f"is {version}; 1 and 2 are served")
    if (version == 2) != tied:
        keys.fail("tied_output", f"is {str(tied).lower()}, which contradicts version {version}")
    return tied


def _rotated(keys: _Keys) -> list[str]:
    names = keys.names("weight_names")
    if not names:
        keys.fail("weight_names", "is empty")
    for name in names:
        if name not in keys.file.tensors:
            keys.fail("weight_names", f"names {name[:80]!r}, which is no tensor of the file")
        if name != HEAD and _FOLDABLE.fullmatch(name) is None:
            keys.fail("weight_names", f"names {name[:80]!r}, whose input cannot be rotated")
        if len(keys.file.tensors[name].shape) < 2:
            keys.fail("weight_names", f"names {name[:80]!r}, which is no matrix")
    return names


def _inverse(keys: _Keys, tied: bool, has_head: bool) -> bool:
    """Whether the embedding is stored rotated."""
    names = keys.names("inverse_weight_names") if PREFIX + "inverse_weight_names" in keys.file.metadata else []
    for name in names:
        if name != EMBEDDING:
            keys.fail("inverse_weight_names", f"names {name[:80]!r}; only {EMBEDDING!r} can be looked up")
        if name not in keys.file.tensors:
            keys.fail("inverse_weight_names", f"names {name!r}, which is no tensor of the file")
    if tied and has_head:
        keys.fail("tied_output", f"is true, but there is a tensor {HEAD!r}")
    if tied and not names:
        keys.fail("tied_output", f"is true, but {EMBEDDING!r} is not among {PREFIX}inverse_weight_names")
    if names and not tied and not has_head:
        keys.fail(
            "inverse_weight_names", f"names {EMBEDDING!r}, but there is no {HEAD!r} and version 1 ties none to it"
        )
    return bool(names)


def _signs(keys: _Keys, block: int) -> dict[int, bytes] | None:
    """Signs by width, ``None`` where the mode is that there are none."""
    present = [key for key in ("sign_widths", "sign_values") if PREFIX + key in keys.file.metadata]
    if keys.string("sign_mode") == "identity":
        if any(keys.integers(key).size for key in present):
            keys.fail("sign_mode", f"is identity, but there are {PREFIX}{present[0]}")
        return None
    widths, values = keys.integers("sign_widths"), keys.integers("sign_values")
    if not widths.size:
        keys.fail("sign_widths", "is empty, but sign_mode is explicit")
    for width in widths.tolist():
        if width <= 0 or width % block:
            keys.fail("sign_widths", f"holds {width}, not a multiple of block_size {block}")
    if len(np.unique(widths)) != len(widths):
        keys.fail("sign_widths", "holds a width twice")
    total = sum(widths.tolist())
    if total != values.size:
        keys.fail("sign_values", f"holds {values.size} values, but sign_widths add up to {total}")
    if not np.isin(values, (-1, 1)).all():
        keys.fail("sign_values", "holds a value other than 1 and -1")
    ends = np.cumsum(widths)[:-1]
    return {int(w): part.astype(np.int8).tobytes() for w, part in zip(widths, np.split(values, ends), strict=True)}
