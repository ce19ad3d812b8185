"""A crash dump says what was going on, holds no text of a client, and is never the cause of more trouble."""

from __future__ import annotations

import json
import resource
import threading
from pathlib import Path

import pytest

from freetoken import crash_dump
from freetoken.sampling_params import SamplingParams
from server.fakes import make_config


def test_a_dump_is_a_json_file(tmp_path: Path) -> None:
    config = make_config(crash_dump_folder=str(tmp_path / "new" / "folder"), api_key="secret")
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, name="waiting-thread")
    other.start()
    path = crash_dump.write(config, "scheduler", "it broke", [{"rid": "r"}] * 3000, last_steps=[{"step": 1}])
    stop.set()
    other.join()
    assert path is not None and Path(path).parent == tmp_path / "new" / "folder"
    assert [file.name for file in Path(path).parent.iterdir()] == [Path(path).name]
    found = json.loads(Path(path).read_text())
    assert found["reason"] == "it broke" and found["last_steps"] == [{"step": 1}]
    assert found["num_open_requests"] == 3000 and len(found["open_requests"]) == crash_dump.MAX_REQUESTS
    assert found["config"]["context_length"] == 4096 and found["config"]["api_key"] == "set"
    assert "secret" not in Path(path).read_text()
    (stack,) = [lines for name, lines in found["stacks"].items() if name.startswith("waiting-thread")]
    assert any("wait" in line for line in stack)
    assert "test_a_dump_is_a_json_file" in crash_dump.stacks_text()


def test_sampling_is_told_without_what_clients_wrote() -> None:
    sampling = SamplingParams(stop=("my secret",), temperature=0.5, seed=3, ignore_eos=True, logit_bias={5: 1.0})
    assert crash_dump.numbers_of(sampling) == {"temperature": 0.5, "seed": 3, "ignore_eos": True}


def test_without_a_folder_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert crash_dump.write(make_config(), "server", "why", []) is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    config = make_config(crash_dump_folder=str(tmp_path / "file" / "below"))
    assert crash_dump.write(config, "server", "why", []) is None
    assert len(caplog.records) == 1 and "could not be written" in caplog.text


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(crash_dump_folder=str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses to let a file grow beyond this, as it does on a disk without room.
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        assert crash_dump.write(config, "server", "why", []) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    assert "could not be written" in caplog.text


def test_values_that_are_not_json_do_no_harm(tmp_path: Path) -> None:
    config = make_config(crash_dump_folder=str(tmp_path))
    path = crash_dump.write(config, "server", "why", [], odd={"a": object(), "b": float("nan"), "c": {1, 2}})
    assert path is not None and json.loads(Path(path).read_text())["odd"]["a"].startswith("<object")
