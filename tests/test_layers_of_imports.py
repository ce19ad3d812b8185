"""The torch-free half imports no torch, and imports go one way through the rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import freetoken

PACKAGE = Path(freetoken.__file__).parent

TORCH_FREE = (
    "__init__",
    "environ",
    "errors",
    "hardware",
    "config_file",
    "crash_dump",
    "logs",
    "messages",
    "sampling_params",
    "resolve",
    "server_args",
    "startup",
    "launch_server",
    "server",
    "scheduler",
    "grammar",
    "models/config",
    "models/ple_config",
    "models/parse",
    "models/parse_moe",
    "models/parse_qwen4_exp",
    "models/registry",
    "loader/gguf",
    "loader/hadamard",
    "loader/packing",
    "loader/tokenizer",
    "loader/checkpoint",
    "loader/ple_table",
    "loader/demo",
    "runner/memory",
    "runner/row_reader",
    "profiling/roles",
    "profiling/trace",
    "profiling/accounting",
    "profiling/traffic",
    "profiling/summary",
    "bench/figures",
    "bench/report",
    "bench/datasets",
    "bench/client",
    "bench/serving",
    "bench/roof",
    "bench/flame",
    "bench/cli",
    "bench/hard_knocks",
)
HEAVY = ("torch", "transformers", "triton", "safetensors.torch")

# Which rooms a room may import from. Rooms and files at the top that are not named here are leaves for everybody.
ROOMS = {
    "server": {"server", "loader", "models", "grammar"},
    "scheduler": {"scheduler", "runner", "grammar", "profiling"},
    "grammar": {"grammar"},
    "profiling": {"profiling", "runner", "loader", "scheduler"},
    "runner": {"runner", "models", "kernels", "loader", "scheduler"},
    "models": {"models", "kernels", "runner"},
    "loader": {"loader", "models", "kernels"},
    "kernels": {"kernels"},
}
# Finer than the rooms: the only files of the room on the right that the room on the left may use.
ONLY = {
    ("runner", "scheduler"): {"freetoken.scheduler.request"},
    ("profiling", "scheduler"): {"freetoken.scheduler.request"},
    ("scheduler", "profiling"): {"freetoken.profiling.session"},
    ("profiling", "runner"): {"freetoken.runner.memory"},
    ("profiling", "loader"): {"freetoken.loader.names"},
    # What a step looks like and where its KV lies: types that a model's forward takes.
    ("models", "runner"): {"freetoken.runner.forward_batch", "freetoken.runner.kv_pool", "freetoken.runner.attention"},
    # A weight that is decoded is turned back by the same reference that turns activations.
    ("loader", "kernels"): {"freetoken.kernels.hadamard.reference"},
    ("server", "loader"): {"freetoken.loader.tokenizer", "freetoken.loader.demo"},
    ("server", "models"): {"freetoken.models.config", "freetoken.models.registry"},
    ("loader", "models"): {
        "freetoken.models.config",
        "freetoken.models.parse",
        "freetoken.models.ple_config",
        "freetoken.models.registry",
    },
}
LEAVES = ("environ", "errors", "hardware", "sampling_params")


def _module(path: Path) -> str:
    parts = ("freetoken", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _files(entry: str) -> list[Path]:
    folder = PACKAGE / entry
    if folder.is_dir():
        return sorted(folder.rglob("*.py"))
    return [folder.with_suffix(".py")]


def _torch_free_modules() -> list[str]:
    found = [_module(path) for entry in TORCH_FREE for path in _files(entry) if path.exists()]
    return sorted(set(found))


def _imports(path: Path) -> set[str]:
    """Modules a file names in import statements, wherever they stand, type-checking blocks left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


BLOCKED = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "triton"):
            raise ImportError(f"{name} is imported by the torch-free half")

sys.meta_path.insert(0, Refuse())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print("\\n".join(failed))
sys.exit(bool(failed))
"""


def test_torch_free_modules_import_with_torch_blocked() -> None:
    modules = _torch_free_modules()
    assert "freetoken.messages" in modules
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *modules],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_block_is_felt() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "freetoken.runner.kv_pool"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert done.returncode == 1
    assert "torch" in done.stdout


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_go_one_way(room: str) -> None:
    wrong = []
    for path in _files(room):
        for name in sorted(_imports(path)):
            parts = name.split(".")
            if parts[0] != "freetoken" or len(parts) < 2 or parts[1] not in ROOMS or parts[1] == room:
                continue
            allowed = ONLY.get((room, parts[1]))
            too_fine = allowed is not None and not any(
                name == a or name.startswith(a + ".") or a.startswith(name + ".") for a in allowed
            )
            # "from freetoken.models import config" names the room itself too; its file is checked as well.
            if parts[1] not in ROOMS[room] or too_fine:
                wrong.append(f"{_module(path)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_import_no_room(leaf: str) -> None:
    rooms = {f"freetoken.{room}" for room in ROOMS}
    found = {name for name in _imports(PACKAGE / f"{leaf}.py") if ".".join(name.split(".")[:2]) in rooms}
    assert found == set()


def test_server_never_names_torch() -> None:
    wrong = [
        f"{_module(path)} imports {name}"
        for path in _files("server")
        for name in _imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert wrong == []
