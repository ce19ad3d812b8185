"""Tuning of the decode step of Gated DeltaNet: every setting is checked, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from freetoken.bench import gdn_tune
from freetoken.bench.op_cases import SMALL
from freetoken.errors import StartupError


def test_every_setting_is_checked_and_named() -> None:
    torch.manual_seed(0)
    args = gdn_tune.parser().parse_args(["--requests", "1", "2", "--rows", "8", "16", "32", "--warps", "1", "2"])
    found = gdn_tune.tune("cpu", args, SMALL, 1e9)
    assert [row["requests"] for row in found] == sorted(row["requests"] for row in found)
    settings = {(row["rows"], row["warps"]) for row in found}
    assert len(found) == 2 * len(settings) and settings
    assert all(row["relative_rms"] < 1e-4 for row in found)
    with pytest.raises(StartupError, match="no setting has"):
        gdn_tune.tune("cpu", gdn_tune.parser().parse_args(["--rows", "3"]), SMALL, 1e9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "GPU"), (["--requests", "0"], "--requests"), (["--warps", "-1"], "--warps")):
        assert gdn_tune.main(arguments) == 1
        assert message in capsys.readouterr().err
