"""Tuning of pieces behind an indexer: every setting gives the default's output, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freetoken.bench import ops, qsa_tune
from freetoken.bench.qwen4_exp_rows import Piece
from freetoken.errors import StartupError
from freetoken.kernels.qsa import plan


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three settings, and clocks that stand still."""
    first = plan.PieceConfig(8, 16, 16, 4, 1, 16, 16)
    settings = [first, plan.PieceConfig(5, 16, 32, 4, 2, 16, 16), plan.PieceConfig(1, 16, 16, 4, 2, 16, 16)]
    monkeypatch.setattr(plan, "piece_candidates", lambda *a: settings)
    monkeypatch.setattr(ops, "graph_microseconds", lambda call, calls: 1.0 + 0.0 * (call() is None))
    return settings


def test_settings_agree(small: list[Any]) -> None:
    torch.manual_seed(0)
    rows = qsa_tune.tune(Piece("cpu", torch.float32, 9, 31, False), 31, False)
    assert sum(row["default"] for row in rows) == len(qsa_tune.KERNELS)
    assert [row["queries"] for row in rows if row["what"] == "tune qsa piece attend"] == [8, 5, 1]
    # Of 40 tokens none sees more than the 16 of whole blocks and those of the open one; several see more than one alone.
    listed = {row["queries"]: row["listed"] for row in rows}
    assert listed[1] <= 20 < listed[5] <= 40 and 20 < listed[8] <= 40


def test_a_setting_that_differs_is_refused(small: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from freetoken.kernels.qsa import pieces

    right = pieces.attend

    def wrong(q: Any, pools: Any, tiles: Any, listed: Any, config: Any, scale: float, out: Any) -> None:
        right(q, pools, tiles, listed, config, scale, out)
        if config.queries == 5:
            out.mul_(1.1)

    monkeypatch.setattr(pieces, "attend", wrong)
    with pytest.raises(StartupError, match="queries=5"):
        qsa_tune.tune(Piece("cpu", torch.float32, 9, 31, False), 31, False)


def test_settings_of_the_published_geometry() -> None:
    found = plan.piece_candidates(256, 12, 128, torch.bfloat16, (9, 0))
    assert found[0] == plan.piece_config(256, 12, 128, torch.bfloat16, (9, 0)) and len(set(found)) == len(found) > 3
    assert {one.queries for one in found} == {5, 10}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "GPU"), (["--tokens", "0"], "--tokens"), (["--depths", "-1"], "--depths")):
        assert qsa_tune.main(arguments) == 1
        assert message in capsys.readouterr().err
