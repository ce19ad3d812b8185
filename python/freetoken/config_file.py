"""The YAML file of ``--config`` (torch-free)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from freetoken.errors import StartupError


def read_config_file(path: str, known: Collection[str], spelled: Mapping[str, str]) -> dict[str, Any]:
    """Values of a YAML mapping, by flag name with underscores.

    A key is a flag's name without leading dashes, with dashes or underscores: one of ``known``, or another spelling that
    ``spelled`` maps to one. :class:`StartupError` for a file that cannot be read, and for a key that is unknown or stands
    twice.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except OSError as error:
        raise StartupError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise StartupError(f"--config {path} must hold a mapping of flag names to values")
    values: dict[str, Any] = {}
    for key, value in found.items():
        word = str(key).replace("-", "_")
        name = spelled.get(word, word)
        if name not in known:
            raise StartupError(
                f"--config {path}: {str(key)!r} is not a flag that a file can set; docs/flags.md lists them"
            )
        if name in values:
            raise StartupError(f"--config {path} sets {name.replace('_', '-')} twice")
        values[name] = value
    return values
