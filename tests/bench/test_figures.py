"""The writer of figures: context of every line, safe reading of commits, refusal of broken files."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from freetoken.bench import cli, figures, summary


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_context_of_a_figure() -> None:
    figure = figures.figure("decode", model="m", device="cpu", requests=3, tok_s=1.5)
    assert list(figure)[:6] == list(figures.CONTEXT)
    assert figure["card"] == figures.cpu_name()
    assert figure["versions"]["python"].startswith("3.")
    assert (figure["requests"], figure["tok_s"]) == (3, 1.5)
    assert figures.figure("x", model="m", device="NVIDIA H200")["card"] == "NVIDIA H200"


def test_append_then_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.jsonl"
    figures.append(path, [{"a": 1}])
    figures.append(path, [{"b": "é"}, {"c": None}])
    assert figures.read(path) == [{"a": 1}, {"b": "é"}, {"c": None}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == figures.read(path)


def test_numbers_are_cut_to_what_they_mean(tmp_path: Path) -> None:
    figures.append(tmp_path / "x.jsonl", [{"a": 1.23456789, "b": {"c": 1234567.89}, "d": 123456789, "e": True}])
    assert figures.read(tmp_path / "x.jsonl") == [{"a": 1.23457, "b": {"c": 1234570.0}, "d": 123456789, "e": True}]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version: gcc 12.3.0\n", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("nothing of the kind 1.2", None),
    ],
)
def test_version_of_the_driver(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert figures.driver_version(str(tmp_path / "version")) == version
    assert figures.driver_version(str(tmp_path / "missing")) is None


def test_one_file_of_a_whole_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, check = tmp_path / "x.jsonl", tmp_path / "check.json"
    figures.append(lines, [figures.figure("op x", model="m", device="cpu", us=1.23456789)])
    words = ["--json", str(check), "--groups", "tests", "ops"]
    assert summary.main([str(lines), *words, "--seconds", "417", "--failed", "server start, 2 bits"]) == 0
    found = json.loads(check.read_text())
    assert (found["groups"], found["failed"]) == (["tests", "ops"], ["server start, 2 bits"]) and found[
        "seconds"
    ] == 417
    assert found["figures"] == figures.read(lines) and {"card", "driver", "versions", "commit", "time"} <= set(found)
    assert "op x: us 1.235" in capsys.readouterr().out
    assert summary.main([*words, "--failed"]) == 0 and json.loads(check.read_text())["figures"] == []
    assert summary.main([str(tmp_path / "missing"), *words]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["check.json", "x.jsonl"]


@pytest.mark.parametrize("line", ["{", "[1]", "3"])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:3"):
        figures.read(path)


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert figures.commit(tmp_path) == "unknown"
    git(tmp_path, "init")
    assert figures.commit(tmp_path) == "unknown"
    (tmp_path / "f").write_text("1")
    git(tmp_path, "add", "f")
    git(tmp_path, "commit", "-m", "x")
    clean = figures.commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "untracked").write_text("1")
    assert figures.commit(tmp_path) == clean
    (tmp_path / "f").write_text("2")
    assert figures.commit(tmp_path) == clean + "+"
    monkeypatch.setenv("FREETOKEN_COMMIT", "abc")
    assert figures.commit(tmp_path) == "abc"


def test_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert figures.commit(tmp_path) == "unknown"


@pytest.mark.parametrize(
    ("name", "folder"), [("NVIDIA H200", "nvidia-h200"), ("A  (R) b@2.0GHz", "a-r-b-2-0ghz"), ("§", "unknown")]
)
def test_folder_names(name: str, folder: str) -> None:
    assert figures.folder_name(name) == folder


def test_a_benchmark_that_is_stopped_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    assert cli.entry(argparse.Namespace(output=str(tmp_path / "o.jsonl")), run) == 130
    assert capsys.readouterr().err == "stopped: no figure is written\n" and not list(tmp_path.iterdir())
