"""Clients of a server say what they lack; experiments without a server do not need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from freetoken import environ


@pytest.mark.parametrize("module", ["serving", "hard_knocks"])
def test_without_aiohttp_a_sentence_names_the_extra(module: str, tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text('raise ModuleNotFoundError("No module named aiohttp", name="aiohttp")\n')
    path = {"PYTHONPATH": f"{tmp_path}:{Path(environ.__file__).parents[1]}"}
    result = subprocess.run(
        [sys.executable, "-m", f"freetoken.bench.{module}"],
        env=environ.for_child(path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.strip() == "error: clients of a server need aiohttp: pip install 'freetoken-runtime[bench]'"


def test_experiments_load_no_client() -> None:
    code = "import sys, freetoken.bench.ab_arm, freetoken.bench.ab; sys.exit('aiohttp' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
