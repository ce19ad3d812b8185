"""The committed table of what every kernel compiles to, ``python/freetoken/kernels/compiled.json``; compared, or written anew.

* ``python tests/kernels/compiled_table.py``: compile everything for every architecture and name what got worse;
* ``python tests/kernels/compiled_table.py --write [MODULE ...]``: write the rows of these case modules (default: all) anew.

No GPU is needed: about one to two seconds of one core a row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "python"))

from compile_tool import ARCHITECTURES, Compiled, KernelCase, compile_cases  # noqa: E402

from freetoken.kernels import compiled  # noqa: E402

REGISTER_MARGIN = 8
"""Registers a thread above the table's that are no regression: below it, compilers differ by patch release."""
EXCLUDED = ("broken_cases",)
EVERYWHERE = 90
"""The architecture that the tests compile every case for; of the others each case has one."""

Row = tuple[KernelCase, int]


def modules() -> list[str]:
    """The case modules of this folder."""
    return sorted(path.stem for path in HERE.glob("*_cases.py") if path.stem not in EXCLUDED)


def rows(module: str, *, more: bool = True) -> list[Row]:
    """Case and architecture of every row a module should have; ``more`` with what only the command compiles. ``ValueError`` for two
    cases of one name."""
    loaded = importlib.import_module(module)
    cases: list[KernelCase] = [*loaded.CASES, *(getattr(loaded, "MORE", ()) if more else ())]
    found: dict[tuple[str, int], Row] = {}
    for case in cases:
        for arch in ARCHITECTURES:
            if not case.first_arch <= arch <= case.last_arch:
                continue
            if found.setdefault((case.name, arch), (case, arch))[0] != case:
                raise ValueError(f"{module}: two different cases are called {case.name!r} on sm_{arch}")
    return list(found.values())


def sample(module: str) -> list[tuple[str, int]]:
    """The rows of ``CASES`` that the tests compile: all of a main case, else sm_90 and one other, the same one every time."""
    chosen: list[tuple[str, int]] = []
    by_name: dict[str, list[Row]] = {}
    for case, arch in rows(module, more=False):
        by_name.setdefault(case.name, []).append((case, arch))
    for name, own in by_name.items():
        others = [arch for _, arch in own if arch != EVERYWHERE]
        if own[0][0].main:
            kept = others
        else:
            kept = others and [others[zlib.crc32(name.encode()) % len(others)]]
        chosen += [(name, arch) for arch in (*kept, *(arch for _, arch in own if arch == EVERYWHERE))]
    return chosen


def worse(result: Compiled, row: Sequence[Any]) -> str | None:
    """What of ``result`` is worse than the table's ``row``: one clause, or ``None``."""
    registers, spills, shared, instructions = row
    where = f"{result.name} on sm_{result.arch}"
    if result.spill_bytes > spills:
        return f"{where} spills {result.spill_bytes} bytes, the table has {spills}"
    if result.registers > registers + REGISTER_MARGIN:
        return f"{where} takes {result.registers} registers, the table has {registers}"
    if result.shared_bytes > shared:
        return f"{where} takes {result.shared_bytes} bytes of shared memory, the table has {shared}"
    lost = sorted(set(instructions) - set(result.instructions))
    return f"{where} lost its {lost[0]} instructions" if lost else None


def regressions(module: str, results: Iterable[Compiled], table: dict[str, Any]) -> list[str]:
    """A clause for every result that is worse than its row of ``table`` or has none."""
    known = table["cases"].get(module, {})
    found = []
    for result in results:
        row = known.get(result.name, {}).get(str(result.arch))
        if row is None:
            found.append(f"{result.name} on sm_{result.arch} has no row: compiled_table.py --write {module}")
        elif clause := worse(result, row):
            found.append(clause)
    return found


def compile_all(module: str) -> list[Compiled]:
    """Every row of a module."""
    results = compile_cases(module)
    left = {(case.name, arch) for case, arch in rows(module)} - {(x.name, x.arch) for x in results}
    if left:
        results += compile_cases(module, "MORE", only=left)
    return results


def write_rows(table: dict[str, Any], module: str, results: Iterable[Compiled]) -> None:
    """Replace the rows of ``module`` in ``table``."""
    kernels = {case.name: case.kernel for case, _ in rows(module)}
    fresh: dict[str, dict[str, Any]] = {}
    for x in results:
        row = fresh.setdefault(x.name, {"kernel": kernels[x.name]})
        row[str(x.arch)] = [x.registers, x.spill_bytes, x.shared_bytes, x.instructions]
    table["cases"][module] = fresh


def save(table: dict[str, Any], path: Path = compiled.TABLE) -> None:
    """One line a case, so that a change reads as one."""
    parts = []
    for module, cases in sorted(table["cases"].items()):
        lines = ",\n".join(f"      {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(cases.items()))
        parts.append(f"    {json.dumps(module)}: {{\n{lines}\n    }}")
    text = ",\n".join(parts)
    path.write_text(f'{{\n  "triton": {json.dumps(table["triton"])},\n  "cases": {{\n{text}\n  }}\n}}\n', "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; 1 when something got worse."""
    parser = argparse.ArgumentParser(description="Compile every kernel and compare with the committed table.")
    parser.add_argument("module", nargs="*", help="Case modules; default: all.")
    parser.add_argument("--write", action="store_true", help="Write the rows instead of comparing.")
    args = parser.parse_args(argv)
    known = modules()
    if unknown := [name for name in args.module if name not in known]:
        print(f"error: no case module {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 1
    version = compiled.triton_version()
    table = compiled.read() if compiled.TABLE.exists() else {"triton": version, "cases": {}}
    bad: list[str] = []
    for module in args.module or known:
        results = compile_all(module)
        print(f"{module}: {len(results)} rows", flush=True)
        if args.write:
            if not args.module:
                table["triton"] = version
            write_rows(table, module, results)
            table["cases"] = {name: own for name, own in table["cases"].items() if name in known}
            save(table)
        else:
            bad += regressions(module, results, table)
    print(*bad, sep="\n", end="\n" if bad else "", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
