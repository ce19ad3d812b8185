"""Every kernel compiles for the GPU generations we name, and to no more registers, spills and shared memory than the table says.

The tests compile a part of the table (:func:`compiled_table.sample`); ``python tests/kernels/compiled_table.py`` compares all of it.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton", allow_module_level=True)

import compiled_table
from compile_tool import ARCHITECTURES, Compiled, compile_cases

from freetoken.kernels import compiled

# Shared memory a program may use, in bytes (CUDA C++ Programming Guide, technical specifications per capability).
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
MAY_SPILL = ("gdn chunk fp", "gdn scan fp")
"""Element types that no served model has for its linear attention."""
TABLE = compiled.read()

Row = tuple[str, int, int, int, int, list[str]]


def may_spill(name: str, spilled: int) -> bool:
    return not spilled or name.startswith(MAY_SPILL)


def tabled(module: str) -> list[Row]:
    """Name, architecture, registers, bytes spilled, shared bytes and instructions of each row."""
    return [
        (name, int(arch), *row[arch])
        for name, row in TABLE["cases"].get(module, {}).items()
        for arch in row
        if arch != "kernel"
    ]


@pytest.mark.parametrize("module", compiled_table.modules())
def test_the_table_has_a_row_for_every_case(module: str) -> None:
    wanted = sorted((case.name, arch) for case, arch in compiled_table.rows(module))
    assert sorted(row[:2] for row in tabled(module)) == wanted, f"compiled_table.py --write {module}"


def test_the_table_has_no_other_modules() -> None:
    assert sorted(TABLE["cases"]) == compiled_table.modules()


@pytest.mark.parametrize("module", compiled_table.modules())
def test_no_row_spills_or_asks_for_too_much_shared_memory(module: str) -> None:
    for name, arch, _, spills, shared, _ in tabled(module):
        assert may_spill(name, spills), (name, arch)
        assert shared <= SHARED_LIMIT[arch], (name, arch)


def test_attention_copies_past_the_registers_and_uses_the_tensor_cores() -> None:
    for name, arch, _, _, _, instructions in tabled("attn_cases"):
        if "bf16" in name and "join" not in name:
            assert "async16" in instructions, (name, arch)
            assert ("wgmma" in instructions) == (arch == 90 and "prefill" in name), (name, arch)


def test_pieces_behind_an_indexer_use_the_tensor_cores_and_leave_room_for_two_programs() -> None:
    for name, arch, _, _, shared, instructions in tabled("qwen4_exp_cases"):
        if name in ("qsa piece score bf16", "qsa piece attend 24/2 x 256 bf16"):
            assert {"async16", "wgmma" if arch == 90 else "mma"} <= set(instructions), (name, arch)
            assert arch != 90 or shared <= SHARED_LIMIT[arch] // 2, (name, arch)


def test_decode_steps_of_linear_attention_leave_room_for_two_programs() -> None:
    """More registers mean that the compiler spread the parts of a state row over the threads of a warp."""
    rows = tabled("gdn_step_cases")
    whole = [row for row in rows if row[0].startswith("gdn decode bf16 128/128 DecodeConfig(block_v=128")]
    assert len(whole) >= len(ARCHITECTURES) and all(row[2] <= 128 for row in whole)
    assert all(row[4] <= 48 << 10 for row in rows)


def test_n_gram_kernels_are_small() -> None:
    assert all(row[2] <= 128 for row in tabled("ple_cases"))


def test_two_bit_products_leave_room_for_others() -> None:
    """Defaults of all of them stay within the least shared memory that a served GPU gives a program."""
    assert all(row[2] <= 192 and row[4] <= 48 << 10 for row in tabled("pq2_cases"))
    assert all(row[4] <= 99 << 10 for module in ("pq2_gemm_cases", "hadamard_cases") for row in tabled(module))


@pytest.mark.slow
@pytest.mark.parametrize("module", compiled_table.modules())
def test_nothing_got_worse(module: str) -> None:
    wanted = compiled_table.sample(module)
    results = compile_cases(module, only=wanted)
    assert sorted((x.name, x.arch) for x in results) == sorted(wanted)
    for x in results:
        assert may_spill(x.name, x.spill_bytes), x
        assert x.shared_bytes <= SHARED_LIMIT[x.arch], x
    if compiled.triton_version().split(".")[:2] != TABLE["triton"].split(".")[:2]:
        pytest.skip(f"the table is of Triton {TABLE['triton']}; compiled, and within the limits")
    assert compiled_table.regressions(module, results, TABLE) == []


def test_every_case_is_sampled_and_main_ones_everywhere() -> None:
    for module in compiled_table.modules():
        rows, sampled = compiled_table.rows(module, more=False), set(compiled_table.sample(module))
        assert {name for name, _ in sampled} == {case.name for case, _ in rows}
        assert {(case.name, arch) for case, arch in rows if case.main} <= sampled


def make(**changes: Any) -> Compiled:
    return Compiled(**{"name": "k", "arch": 90, "registers": 40, "spill_bytes": 0, "shared_bytes": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"instructions": ["mma", "wgmma"]}, None),
        ({"registers": 48, "instructions": ["mma"]}, None),
        ({"registers": 49, "instructions": ["mma"]}, "49 registers, the table has 40"),
        ({"spill_bytes": 8, "instructions": ["mma"]}, "spills 8 bytes, the table has 0"),
        ({"shared_bytes": 65, "instructions": ["mma"]}, "65 bytes of shared memory, the table has 64"),
        ({}, "lost its mma instructions"),
    ],
)
def test_what_counts_as_worse(changes: dict[str, Any], said: str | None) -> None:
    clause = compiled_table.worse(make(**changes), [40, 0, 64, ["mma"]])
    assert clause is None if said is None else clause is not None and said in clause


def test_a_case_without_a_row_is_named() -> None:
    found = compiled_table.regressions("m_cases", [make()], {"triton": "3", "cases": {}})
    assert found == ["k on sm_90 has no row: compiled_table.py --write m_cases"]


def test_written_tables_are_read_back(tmp_path: Path) -> None:
    table: dict[str, Any] = {"triton": "3", "cases": {"a_cases": {}}}
    compiled_table.write_rows(table, "sample_cases", [make(name=compiled_table.rows("sample_cases")[0][0].name)])
    compiled_table.save(table, tmp_path / "t.json")
    assert compiled.read(tmp_path / "t.json") == json.loads(json.dumps(table))


def test_a_module_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled_table.main(["other_cases"]) == 1
    assert capsys.readouterr().err.startswith("error: no case module other_cases; there are attn_cases")


def test_a_kernel_that_does_not_compile_is_reported() -> None:
    with pytest.raises(RuntimeError, match="no type or value for"):
        compile_cases("broken_cases", architectures=(90,))
