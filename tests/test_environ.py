"""The table of environment names: typed values, refusals, and no reader of the environment beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from freetoken import environ
from freetoken.environ import EnvironmentValueError

PACKAGE = Path(environ.__file__).parent
KERNEL_NAMES = [row.name for row in environ.TABLE if row.kind == "kernel"]


def test_defaults_parse_and_are_typed() -> None:
    values = environ.validate({})
    assert list(values) == [row.name for row in environ.TABLE]
    types = {"kernel": str, "bool": bool, "int": int, "float": float, "str": str}
    for row in environ.TABLE:
        assert type(values[row.name]) is types[row.kind], row.name
        assert row.help.endswith(".") and row.name.startswith("FREETOKEN_")


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize(
    ("text", "mode"),
    [("1", "on"), ("true", "on"), ("TRUE", "on"), ("0", "off"), ("false", "off"), ("check", "check"), (" 0 ", "off")],
)
def test_kernel_flags(name: str, text: str, mode: str) -> None:
    assert environ.kernel_mode(name, {name: text}) == mode
    assert environ.get(name, {name: text}) == mode


def test_a_text_of_few_values() -> None:
    assert environ.get("FREETOKEN_PQ2_GEMM_FORM", {"FREETOKEN_PQ2_GEMM_FORM": "dense"}) == "dense"
    with pytest.raises(EnvironmentValueError, match="FREETOKEN_PQ2_GEMM_FORM='fp8': one of auto, int8, float, dense"):
        environ.validate({"FREETOKEN_PQ2_GEMM_FORM": "fp8"})


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize("text", ["2", "yes", "on", "-1", "1.0", "Check!"])
def test_a_value_outside_the_set_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(EnvironmentValueError, match=name):
        environ.validate({name: text})


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_value_is_the_default(text: str) -> None:
    for row in environ.TABLE:
        assert environ.get(row.name, {row.name: text}) == environ.get(row.name, {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FREETOKEN_LAUNCH_TIMEOUT", "soon"),
        ("FREETOKEN_CHECK_INVARIANTS", "2"),
        ("FREETOKEN_NUM_THREADS", "two"),
        ("FREETOKEN_NUM_THREADS", "1.5"),
        ("FREETOKEN_NUM_THREADS", "-1"),
        ("FREETOKEN_LAUNCH_TIMEOUT", "nan"),
        ("FREETOKEN_PQ2_ACTIVATION_GROUP", "33"),
        ("FREETOKEN_LAUNCH_TIMEOUT", "-3"),
    ],
)
def test_a_value_of_the_wrong_type_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(EnvironmentValueError, match=name):
        environ.get(name, {name: text})


def test_typed_values() -> None:
    source = {"FREETOKEN_LAUNCH_TIMEOUT": "2.5", "FREETOKEN_CHECK_INVARIANTS": "True", "FREETOKEN_NUM_THREADS": "3"}
    values = environ.validate(source)
    assert values["FREETOKEN_LAUNCH_TIMEOUT"] == 2.5
    assert values["FREETOKEN_CHECK_INVARIANTS"] is True
    assert values["FREETOKEN_NUM_THREADS"] == 3


def test_an_unknown_name_stops_the_start() -> None:
    with pytest.raises(EnvironmentValueError, match="FREETOKEN_FUSED_NROM"):
        environ.validate({"FREETOKEN_FUSED_NROM": "1", "OTHER": "x"})


def test_reading_a_name_that_is_not_in_the_table_is_our_bug() -> None:
    with pytest.raises(KeyError):
        environ.raw("FREETOKEN_NOTHING", {})


def _environment_reads(source: str) -> list[int]:
    """Lines that touch ``os.environ``, ``os.getenv`` or ``os.putenv``, or import them from ``os``."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        attribute = (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        )
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
        if attribute or imported:
            lines.append(node.lineno)
    return sorted(lines)


def test_only_the_table_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "environ.py" and (lines := _environment_reads(path.read_text()))
    }
    assert readers == {}


def test_the_reader_search_finds_every_spelling() -> None:
    source = "import os\nos.environ['A']\nos.getenv('B')\nfrom os import environ as e\nself.environ\n"
    assert _environment_reads(source) == [2, 3, 4]
