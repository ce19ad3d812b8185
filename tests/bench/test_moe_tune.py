"""Tuning of the products with experts: every candidate gives the default's output, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from freetoken.bench import moe_tune
from freetoken.bench.moe_tune import PRODUCTS, Products, chosen, parser
from freetoken.kernels.checking import relative_rms
from freetoken.kernels.moe_gemm.config import RouteConfig, TileConfig

SIZES = ["--experts", "3", "--top-k", "2", "--hidden", "32", "--width", "16"]


def test_the_default_and_some_others() -> None:
    assert chosen([9], 5, 0) == [9]
    some = chosen(range(50), 6, 1)
    assert some[0] == 0 and len(set(some)) == 6 and some == chosen(range(50), 6, 1) != chosen(range(50), 6, 2)


@pytest.mark.parametrize(("tokens", "kind"), [(1, RouteConfig), (3, TileConfig)])
@pytest.mark.parametrize("bits", [8, 16])
def test_candidates_agree(tokens: int, kind: type, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bfloat16", torch.float16)
    torch.manual_seed(0)
    products = Products(parser().parse_args(SIZES), bits, tokens, "cpu")
    for product in PRODUCTS:
        settings = chosen(products.candidates(product), 3, 0)
        assert {type(one) for one in settings} == {kind}
        # Fresh calls start with the first routing.
        default, *others = [products.call(product, one)() for one in settings]
        assert torch.isfinite(default).all()
        for other in others:
            assert relative_rms(other, default) <= moe_tune.BOUND


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "GPU"), (["--top-k", "600"], "--top-k"), (["--tokens", "0"], "--tokens")):
        assert moe_tune.main(arguments) == 1
        assert message in capsys.readouterr().err
