"""GGUF models of one file or of several parts, as llama.cpp splits them (torch-free).

Part ``i`` of ``n``, counted from 1, is ``NAME-0000i-of-0000n.gguf`` and says so: ``split.no`` is ``i - 1``, ``split.count`` is ``n``, and
``split.tensors.count`` is the number of tensors in all parts together. The first part has the metadata of the model. Each part is a GGUF
file with its own tensor table and data section, mapped by itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from freetoken.errors import StartupError
from freetoken.loader.gguf import GGUFFile, GGUFTensor, shown_name

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def open_gguf(path: str | Path) -> GGUFFile:
    """The model that the file at ``path`` is, or is any part of; :class:`StartupError` names the file that is wrong."""
    file = GGUFFile.open(path)
    count = file.metadata.get(_COUNT)
    if not isinstance(count, int) or count <= 1:
        return file
    paths = _paths(file, count)
    parts = [file if part == file.path else _open_part(part, number, count) for number, part in enumerate(paths)]
    for number, part in enumerate(parts):
        _check_part(part, number, parts[0])
    return _join(parts)


def set_name(path: Path) -> str:
    """The name of the model in the file ``path``: its stem, of a part without the numbers."""
    match = _PART.fullmatch(path.name)
    return match[1] if match else path.stem


def models_among(files: list[Path]) -> list[Path]:
    """One path for each model among ``files`` of one folder, given in order: parts that belong together count once, and beside other files
    those of vision towers (``mmproj`` in their names, as llama.cpp finds them) do not count."""
    found: dict[tuple[str, str], Path] = {}
    towers = [file for file in files if "mmproj" in file.name.lower()]
    for file in files if len(towers) == len(files) else [file for file in files if file not in towers]:
        match = _PART.fullmatch(file.name)
        found.setdefault((match[1], match[3]) if match else (file.name, ""), file)
    return list(found.values())


def _fail(path: Path, problem: str) -> NoReturn:
    raise StartupError(f"{path}: {problem}")


def _paths(file: GGUFFile, count: int) -> list[Path]:
    """Where all the parts are, of which ``file`` is one."""
    match = _PART.fullmatch(file.path.name)
    if match is None:
        _fail(
            file.path,
            f"one of {count} parts, which are found by names that end in '-00001-of-{count:05d}.gguf'; its own does not",
        )
    if int(match[3]) != count:
        _fail(file.path, f"metadata key {_COUNT!r} is {count}, but by its name it is one of {int(match[3])} parts")
    if not 1 <= int(match[2]) <= count:
        _fail(file.path, f"its name says part {int(match[2])} of {count}, which cannot be")
    return [file.path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}{match[4]}") for number in range(1, count + 1)]


def _open_part(path: Path, number: int, count: int) -> GGUFFile:
    if not path.exists():
        _fail(path, f"part {number + 1} of {count} of this model is missing")
    return GGUFFile.open(path)


def _check_part(part: GGUFFile, number: int, first: GGUFFile) -> None:
    """Its keys must say what its name does, and the same of the whole as the first part."""
    wanted = {_NUMBER: number, _COUNT: first.metadata.get(_COUNT), _TENSORS: first.metadata.get(_TENSORS)}
    for key, value in wanted.items():
        found = part.metadata.get(key)
        if not isinstance(found, int) or isinstance(found, bool):
            _fail(part.path, f"metadata key {key!r} of a part must be an integer")
        if found != value:
            reason = f"by its name it must be {value}" if key == _NUMBER else f"the first part says {value!r:.40}"
            _fail(part.path, f"metadata key {key!r} is {found}, but {reason}")


def _join(parts: list[GGUFFile]) -> GGUFFile:
    first = parts[0]
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        for name, tensor in part.tensors.items():
            if name in tensors:
                _fail(part.path, f"tensor {shown_name(name)} is in {parts[tensors[name].part].path.name} as well")
            tensors[name] = replace(tensor, part=number)
    total = first.metadata[_TENSORS]
    if len(tensors) != total:
        _fail(
            first.path, f"metadata key {_TENSORS!r} is {total}, but the {len(parts)} parts hold {len(tensors)} tensors"
        )
    return first.with_parts(parts, tensors)
