"""The documentation: generated pages are fresh, links lead somewhere, no figure is typed by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from freetoken import environ
from freetoken.bench import figures
from freetoken.server_args import ServerArgs

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPECTED = ("quickstart", "formats", "server", "flags", "env", "architecture", "kernels", "metrics", "benchmarks")


@pytest.fixture(scope="module")
def gen_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh(gen_docs: ModuleType) -> None:
    assert gen_docs.stale() == []


def test_every_flag_and_name_is_on_its_page(gen_docs: ModuleType) -> None:
    flags, env = gen_docs.flags_page(), gen_docs.env_page()
    for field in dataclasses.fields(ServerArgs):
        assert f"--{field.name.replace('_', '-')}`" in flags
    for row in environ.TABLE:
        assert f"`{row.name}`" in env


@pytest.mark.parametrize("name", EXPECTED)
def test_pages_exist(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_flags_and_names_that_pages_mention_exist(page: Path) -> None:
    text = page.read_text()
    known = {row.name for row in environ.TABLE}
    mentioned = set(re.findall(r"FREETOKEN_[A-Z0-9_]*[A-Z0-9]", text))
    assert mentioned <= known
    for command in re.findall(r"(?:launch_server|serve\.sh)((?: +--[a-z-]+(?: +[^\s-][^\s`]*)*)+)", text):
        flags = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(ServerArgs)} | {"--model", "--tp"}
        assert set(re.findall(r"--[a-z-]+", command)) <= flags


def test_nobody_is_told_to_install_the_other_project() -> None:
    for page in PAGES:
        assert not re.search(r"pip3? install (-U )?freetoken(?!-runtime)\b", page.read_text()), page.name


def test_committed_figures_have_their_context() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl")):
        for figure in figures.read(path):
            assert {"card", "model", "time", "commit", "versions", "what"} <= set(figure), path
            assert path.parent.name == figures.folder_name(figure["card"]), path


def test_a_changed_page_is_stale(gen_docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    readme = "# x\n<!-- figures -->\nold\n<!-- /figures -->\nend\n"
    (tmp_path / "README.md").write_text(readme)
    assert sorted(gen_docs.stale(tmp_path)) == ["README.md", "docs/benchmarks.md", "docs/env.md", "docs/flags.md"]
    for path, text in gen_docs.pages(tmp_path).items():
        (tmp_path / path).write_text(text)
    assert gen_docs.stale(tmp_path) == []
    assert (tmp_path / "README.md").read_text().endswith("<!-- /figures -->\nend\n")
    (tmp_path / "docs" / "env.md").write_text("hand-made")
    assert gen_docs.stale(tmp_path) == ["docs/env.md"]


def test_whole_checks_become_a_table(gen_docs: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "amd-epyc"
    folder.mkdir()
    figures.write_check(folder / "gpu-check.json", [], groups=["tests", "ops"], failed=["ops"], seconds=1234)
    figures.write_check(folder / "gpu-check-ab.json", [], groups=["ab"], failed=[])
    page = gen_docs.benchmarks_page([], gen_docs.load_checks(tmp_path))
    rows = [line for line in page.splitlines() if figures.commit() in line]
    assert len(rows) == 2 and "| tests ops | 1,234 s | ops |" in rows[1] and "| ab | - | nothing |" in rows[0]
    assert "Runs of" not in gen_docs.benchmarks_page([], [])


def test_figures_become_rows(gen_docs: ModuleType, tmp_path: Path) -> None:
    figure = figures.figure(
        "decode one_batch",
        model="tiny",
        device="cpu",
        requests=4,
        depth=1024,
        ms=2.0,
        tok_s=2000.0,
        roof=9.0,
        share=0.5,
    )
    figures.append(tmp_path / "card" / "a.jsonl", [figure])
    found = gen_docs.load_figures(tmp_path)
    assert found == [figure]
    page = gen_docs.benchmarks_page(found, [])
    assert "| decode one_batch | requests 4, depth 1,024 | ms 2, tok_s 2,000 | 9 | 50.0% |" in page
    assert "| 4 | 1,024 deep | 2,000 | 50% |" in gen_docs.readme_block(found)


def test_markers_are_needed(gen_docs: ModuleType) -> None:
    with pytest.raises(SystemExit, match="figures"):
        gen_docs.with_block("nothing", "x", "README.md")
