"""Tuning of the products of many tokens: wrong settings are passed over, the fastest right ones are kept."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from freetoken import hardware
from freetoken.bench import tune_pq2_gemm as tuning
from freetoken.kernels.pq2_gemm import GemmConfig, config, triton

DEVICE = "cuda" if hardware.probe().usable_gpu else "cpu"
GOOD, WRONG, FAILING = GemmConfig(64, 32, num_stages=2), GemmConfig(64, 64, num_stages=2), GemmConfig(128, 64)


def test_the_fastest_right_settings_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = triton.int8_linear

    def linear(activation, weight, out, chosen):  # type: ignore[no-untyped-def]
        if chosen == FAILING:
            raise RuntimeError("out of resource")
        plain(activation, weight, out, GOOD)
        return out.mul_(1.1) if chosen == WRONG else out

    monkeypatch.setattr(triton, "int8_linear", linear)
    better = GemmConfig(64, 32, num_stages=3)
    monkeypatch.setattr(
        "freetoken.kernels.pq2_gemm.candidates", lambda *shape: [FAILING, WRONG, GOOD, better, GemmConfig(64, 32, 8)]
    )
    times = itertools.cycle((3.0, 2.0, 5.0))
    table, timings = tuning.tune({(70, 256): 1}, [17], ["int8"], DEVICE, lambda call: next(times), 60.0, torch.float16)
    assert timings == {("int8", 70, 256, 17): tuning.Timing(2.0, better)}
    assert table.settings == {("int8", 70, 256, 32): better} and table.dense_from == tuning.NEVER
    printed = capsys.readouterr().out
    assert f"{FAILING} does not run: RuntimeError" in printed and f"{WRONG} is wrong" in printed
    config.write_table(tmp_path / "t.json", "card", table)
    assert config.read_table(tmp_path / "t.json") == table


def test_all_forms_and_the_time_box(capsys: pytest.CaptureFixture[str]) -> None:
    times = itertools.count(1.0)
    shapes = {(70, 256): 1}
    table, timings = tuning.tune(
        shapes, [17], ["dense", "float", "int8"], DEVICE, lambda call: next(times), -1.0, torch.float16
    )
    assert table == config.Table(tuning.NEVER, {}) and timings == {}
    assert "out of time" in capsys.readouterr().out


def test_dense_from() -> None:
    shapes = {(1, 2): 3, (4, 5): 1}
    times = {}
    for tokens, dense, int8 in ((32, 9.0, 1.0), (256, 4.0, 5.0), (1024, 6.0, 7.0)):
        for n, k in shapes:
            times["dense", n, k, tokens], times["int8", n, k, tokens] = dense, int8
    assert tuning.dense_from(times, shapes) == 256
    assert tuning.dense_from({**times, ("int8", 1, 2, 1024): 1.0}, shapes) == tuning.NEVER
    assert tuning.dense_from({**times, ("dense", 1, 2, 32): 0.1, ("dense", 4, 5, 32): 0.1}, shapes) == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning.main([]) == 1
    assert "GPU" in capsys.readouterr().err
