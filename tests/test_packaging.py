"""Packaging: names, versions and entry files say what they should."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

import freetoken

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_distribution_is_not_called_freetoken() -> None:
    names = re.findall(r'^name = "(.*)"$', PYPROJECT, re.MULTILINE)
    assert names == ["freetoken-runtime"]


def test_version_comes_from_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", freetoken.__version__)
    assert 'version = { attr = "freetoken.__version__" }' in PYPROJECT
    assert not re.search(r'^version = "', PYPROJECT, re.MULTILINE)


def test_python_floor_agrees_everywhere() -> None:
    assert 'requires-python = ">=3.10"' in PYPROJECT
    assert 'target-version = "py310"' in PYPROJECT
    assert 'python_version = "3.10"' in PYPROJECT


def test_licence() -> None:
    assert 'license = "Apache-2.0"' in PYPROJECT
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_package_folder_has_an_init_file() -> None:
    package = ROOT / "python" / "freetoken"
    folders = {path.parent for path in package.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_lazy_names_of_the_package() -> None:
    assert freetoken.SamplingParams.__name__ == "SamplingParams"
    with pytest.raises(AttributeError):
        _ = freetoken.Nothing


@pytest.mark.parametrize(
    "path", ["scripts/serve.sh", "scripts/test.sh", "scripts/typecheck.sh", "scripts/gpu_check.sh", ".ci/run"]
)
def test_scripts_are_executable_and_stop_on_errors(path: str) -> None:
    script = ROOT / path
    assert os.stat(script).st_mode & stat.S_IXUSR
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text or "set -uo pipefail" in text


def test_whatever_is_not_python_has_a_packaging_rule() -> None:
    package = ROOT / "python" / "freetoken"
    (rule,) = re.findall(r"^\[tool\.setuptools\.package-data\]\nfreetoken = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    shipped = {path for pattern in re.findall(r'"(.*?)"', rule) for path in package.glob(pattern)}
    others = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert others == shipped and package / "server" / "page.html" in shipped
