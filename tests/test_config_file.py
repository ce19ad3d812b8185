"""``--config``: flags from a YAML file, under the command line; every fault is one sentence that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.errors import StartupError
from freetoken.server_args import ServerArgs, parse


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def test_values_come_from_the_file_and_the_command_line_wins(file: Path) -> None:
    file.write_text(
        "port: 8000\nmax-running-requests: 7\ndisable_radix_cache: true\nenable-metrics: false\nmodel: some/folder\n"
        "cuda-graph-bs: [1, 2]\nmem-fraction-static: 0.5\ncors-allow-origins:\n  - https://a.example\nlog-level: error\n"
    )
    args = parse(["--config", str(file), "--port", "9000", "--enable-metrics"])
    assert (args.port, args.max_running_requests, args.disable_radix_cache, args.enable_metrics) == (
        9000,
        7,
        True,
        True,
    )
    assert (args.model_path, args.cuda_graph_bs, args.mem_fraction_static) == ("some/folder", [1, 2], 0.5)
    assert args.cors_allow_origins == ["https://a.example"] and args.log_level == "error"
    assert parse(["--config", str(file)]).port == 8000
    assert args.page_size == ServerArgs().page_size
    engine = ServerArgs.from_dict({"config": str(file), "max_running_requests": 3})
    assert (engine.port, engine.max_running_requests) == (8000, 3)


def test_an_empty_file_changes_nothing(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert parse(["--config", str(file)]) == ServerArgs(config=str(file))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 8000", "'prot' is not a flag"),
        ("config: other.yaml", "'config' is not a flag"),
        ("1: 2", "'1' is not a flag"),
        ("port: many", "'port' must be a whole number, not text"),
        ("port: true", "'port' must be a whole number, not true or false"),
        ("port:", "'port' must be a whole number, not empty"),
        ("max-total-tokens: many", "'max_total_tokens' must be a whole number, not text"),
        ("mem-fraction-static: [1]", "'mem_fraction_static' must be a number, not a list"),
        ("model-path: {a: 1}", "'model_path' must be text, not a mapping"),
        ("model-path: 2026-01-01", "'model_path' must be text, not date"),
        ("cors-allow-origins: '*'", "must be a list of texts, not text"),
        ("cuda-graph-bs: [1, x]", "must be a list of whole numbers, not a list"),
        ("disable-radix-cache: 'yes'", "must be true or false, not text"),
        ("max-running-requests: 1\nmax_running_requests: 2", "twice"),
        ("model: a\nmodel-path: b", "twice"),
        ("- port", "must hold a mapping"),
        ("port: [", "not valid YAML"),
        ("port: !!python/object/apply:os.getpid []", "not valid YAML"),
        ("\xff\xfe", None),
    ],
)
def test_faults_are_one_sentence(file: Path, text: str, says: str | None) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(StartupError) as caught:
        parse(["--config", str(file)])
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    assert says is None or says in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"none\.yaml cannot be read: No such file"):
        parse(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(StartupError, match="cannot be read: Is a directory"):
        parse(["--config", str(tmp_path)])
