"""Tuning of one-query attention: every candidate gives the default's output, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from freetoken.bench import attn_tune
from freetoken.bench.attn_tune import Decodes, candidates, parser
from freetoken.kernels.attn_decode.config import decode_config
from freetoken.kernels.checking import relative_rms


def test_the_default_comes_first_and_nothing_twice() -> None:
    default = decode_config(256, 6, 1, 32768, 132, num_kv_heads=4)
    for depth in (128, 8192):
        found = candidates(default, depth)
        assert found[0] == default and len(set(found)) == len(found) > 15
        assert len({one.splits for one in found}) > (3 if depth > default.whole else 0)


def test_candidates_agree() -> None:
    torch.manual_seed(0)
    sizes = ["--heads", "3", "--kv-heads", "1", "--head-dim", "16"]
    decodes = Decodes(parser().parse_args(sizes), 2, 70, "cpu")
    default, *others = candidates(decodes.default, 70)
    expected = decodes.call(default)()
    assert torch.isfinite(expected).all()
    for other in others[:: max(1, len(others) // 5)]:
        assert relative_rms(decodes.call(other)(), expected) <= attn_tune.BOUND


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "GPU"), (["--kv-heads", "5"], "--kv-heads"), (["--depths", "0"], "--depths")):
        assert attn_tune.main(arguments) == 1
        assert message in capsys.readouterr().err
