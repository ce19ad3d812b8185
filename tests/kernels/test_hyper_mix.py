"""Hyper-connections: the reference against scalar Python, and the kernels against the reference."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.hyper_mix import HyperMix, reference
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.hyper import HyperConnection
from freetoken.models.layers import Placement

triton = pytest.importorskip("freetoken.kernels.hyper_mix.triton", exc_type=ImportError)

EPS = 1e-6
SHAPES = [(3, 4, 40), (1, 2, 1), (2, 3, 257), (5, 2, 64), (0, 4, 8)]


def inputs(tokens: int, streams: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Output and weights of the write-back as views into wider matrices."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(DEVICE, dtype)

    return {
        "residual": 2 * draw(tokens, streams * hidden),
        "pending": (draw(tokens, hidden + 3)[:, :hidden], 4 * draw(tokens, streams + 5)[:, 2 : 2 + streams]),
        "weight": (torch.rand(streams, hidden) + 0.5).to(DEVICE),
        "gate": draw(tokens, streams * hidden),
        "low": 3 * draw(tokens, hidden + 2)[:, :hidden],
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_reference_is_the_scalar_rule() -> None:
    given = inputs(2, 3, 5, torch.float32)
    y, inject = given["pending"]
    added = given["residual"].clone()
    reference.add(added, y, inject)
    normed = reference.norm(added, given["weight"], EPS)
    mixed, squashed = reference.mix(normed, given["gate"], 3), reference.squash(given["low"], 3)
    for t in range(2):
        total = [0.0] * 5
        for s in range(3):
            row = [
                float(given["residual"][t, 5 * s + j]) + 2 * sigmoid(float(inject[t, s]) / 3) * float(y[t, j])
                for j in range(5)
            ]
            root = math.sqrt(sum(x * x for x in row) / 5 + EPS)
            for j in range(5):
                assert float(added[t, 5 * s + j]) == pytest.approx(row[j], rel=1e-5, abs=1e-6)
                normal = row[j] / root * float(given["weight"][s, j])
                assert float(normed[t, 5 * s + j]) == pytest.approx(normal, rel=1e-5, abs=1e-6)
                total[j] += sigmoid(float(given["gate"][t, 5 * s + j])) * normal / 3
        assert mixed[t].tolist() == pytest.approx(total, rel=1e-5, abs=1e-6)
        low = [float(x) / 3 for x in given["low"][t]]
        assert squashed[t].tolist() == pytest.approx([x * sigmoid(x) for x in low], rel=1e-5, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_on_a_gpu_in_the_published_size(tokens: int) -> None:
    op = HyperMix(choice("hyper_mix", "check"))
    given = inputs(tokens, 4, 2560, torch.bfloat16)
    normed = op.norm(given["residual"], given["pending"], given["weight"], EPS)
    op.add(given["residual"], given["pending"])
    op.mix(normed, given["gate"], 4)
    op.squash(given["low"][:, :320], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "streams", "hidden"), SHAPES)
def test_kernels(tokens: int, streams: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(tokens, streams, hidden, dtype)
    results = []
    for impl in ("triton", "reference"):
        op = HyperMix(choice("hyper_mix", impl))
        alone, residual = given["residual"].clone(), given["residual"].clone()
        with poisoned_outputs(monkeypatch):
            first = op.norm(residual, None, given["weight"], EPS)
            assert torch.equal(residual, given["residual"])
            normed = op.norm(residual, given["pending"], given["weight"], EPS)
            op.add(alone, given["pending"])
            mixed, squashed = op.mix(first, given["gate"], streams), op.squash(given["low"], streams)
        assert torch.equal(alone, residual)
        results.append((first, residual, normed, mixed, squashed))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == dtype and actual.shape == expected.shape and actual.is_contiguous()
        assert relative_rms(actual, expected) <= checking.RELATIVE_RMS[dtype]


def gated_inputs(tokens: int, streams: int, hidden: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Normed streams, low-rank gates as a view into a wider matrix, and the weight of the gates."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(DEVICE, dtype)

    low = draw(tokens, rank + 16)[:, :rank]
    return draw(tokens, streams * hidden), low, 2 * rank**-0.5 * draw(streams * hidden, rank)


GATED = [(1, 4, 48, 64), (8, 2, 16, 32), (9, 4, 32, 96), (16, 1, 16, 160), (3, 8, 16, 32)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "streams", "hidden", "rank"), GATED)
def test_gates_and_mix_as_one_kernel(
    tokens: int, streams: int, hidden: int, rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    normed, low, weight = gated_inputs(tokens, streams, hidden, rank, dtype)
    op = HyperMix(choice("hyper_mix", "triton"))
    assert op.gates(normed, weight, streams)
    with poisoned_outputs(monkeypatch):
        actual = op.gated_mix(normed, low, weight, streams)
    expected = reference.gated_mix(normed, low, weight, streams)
    assert actual.dtype == dtype and actual.shape == (tokens, hidden) and actual.is_contiguous()
    assert relative_rms(actual, expected) <= checking.RELATIVE_RMS[dtype]


def test_gated_mix_of_the_reference_is_the_scalar_rule() -> None:
    normed, low, weight = (x.cpu() for x in gated_inputs(2, 2, 3, 4, torch.float32))
    mixed = reference.gated_mix(normed, low, weight, 2)
    for t in range(2):
        for j in range(3):
            wanted = 0.0
            for line in (j, 3 + j):
                gate = sum(float(a) * float(b) for a, b in zip(low[t], weight[line], strict=True))
                wanted += sigmoid(gate) * float(normed[t, line]) / 2
            assert float(mixed[t, j]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("tokens", "streams", "hidden", "rank", "dtype"),
    [
        (17, 4, 16, 32, torch.float16),
        (0, 4, 16, 32, torch.float16),
        (2, 4, 16, 32, torch.float32),
        (2, 4, 24, 32, torch.float16),
        (2, 3, 16, 32, torch.float16),
        (2, 2, 16, 40, torch.float16),
        (2, 2, 16, 544, torch.float16),
    ],
)
def test_other_mixes_take_the_reference(tokens: int, streams: int, hidden: int, rank: int, dtype: torch.dtype) -> None:
    normed, low, weight = gated_inputs(tokens, streams, hidden, rank, dtype)
    for impl in ("triton", "reference"):
        op = HyperMix(choice("hyper_mix", impl))
        assert not op.gates(normed, weight, streams)
        mixed = op.gated_mix(normed, low, weight, streams)
        assert torch.equal(mixed, reference.gated_mix(normed, low, weight, streams))


def make_connection(impl: str, dtype: torch.dtype, seed: int) -> HyperConnection:
    """One of 4 streams of 32 channels and rank 64, with random weights; the same ones for a seed."""
    config = SimpleNamespace(
        hyper=SimpleNamespace(streams=4, rank=64), hidden_size=32, rms_norm_eps=EPS, zero_centred_norm=False
    )
    op = HyperMix(choice("hyper_mix", impl))
    gemm = SmallGemm(choice("small_gemm", impl), SiluMul(choice("silu_mul", "reference")))
    made = HyperConnection(config, op, gemm, Placement(dtype, torch.device(DEVICE)), "hc")
    generator = torch.Generator().manual_seed(seed)
    for weight in (made.down.weight[:68], made.up.weight):
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    made.norm.copy_(torch.rand(made.norm.shape, generator=generator) + 0.5)
    return made


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.float16), (5, torch.float16), (17, torch.float16), (3, torch.float32)]
)
def test_a_read_is_the_same_either_way(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens in three kernels, others with separate products: streams, input of the block, weights of its write-back."""
    seed = int(torch.randint(1 << 30, ()))
    given = inputs(tokens, 4, 32, dtype)
    seen: list[str] = []
    for name in ("squash", "gated_mix"):
        real = getattr(triton, name)
        monkeypatch.setattr(triton, name, lambda *a, real=real, name=name: (seen.append(name), real(*a))[1])
    results = []
    for impl in ("triton", "reference"):
        made, residual = make_connection(impl, dtype, seed), given["residual"].clone()
        with poisoned_outputs(monkeypatch):
            results.append((*made.read(residual, given["pending"]), residual))
    assert seen == (["gated_mix"] if tokens <= 16 and dtype == torch.float16 else ["squash"])
    for actual, expected in zip(*results, strict=True):
        assert relative_rms(actual, expected) <= 2 * checking.RELATIVE_RMS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 16])
def test_replayed_reads_in_the_published_size(tokens: int) -> None:
    """Two reads behind one another in a graph, launched early, against the same calls and against the reference."""
    ops = [HyperMix(choice("hyper_mix", impl)) for impl in ("triton", "reference")]
    gemms = [
        SmallGemm(choice("small_gemm", impl), SiluMul(choice("silu_mul", impl))) for impl in ("triton", "reference")
    ]
    down = [(torch.randn(336, 10240, device="cuda") * 10240**-0.5).bfloat16() for _ in range(2)]
    up = [(torch.randn(10240, 320, device="cuda") * 320**-0.5).bfloat16() for _ in range(2)]
    norm = torch.rand(4, 2560, device="cuda") + 0.5
    gemms[0].reserve(down[0], silu=False)
    given = {key: torch.empty(tokens, width, device="cuda").bfloat16() for key, width in (("x", 10240), ("y", 2560))}

    def reads(which: int) -> list[torch.Tensor]:
        op, gemm = ops[which], gemms[which]
        streams, pending, found = given["x"].clone(), None, []
        for layer in range(2):
            normed = op.norm(streams, pending, norm, EPS)
            low = gemm.linear_squashed(normed, down[layer], 320, 4)
            found.append(op.gated_mix(normed, low[:, :320], up[layer], 4))
            pending = given["y"], low[:, 320:324]
        op.add(streams, pending)
        return [*found, streams]

    def refill() -> None:
        for tensor in given.values():
            tensor.normal_()

    refill()
    assert gemms[0].squashes(given["x"], down[0]) and ops[0].gates(given["x"], up[0], 4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        reads(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = reads(0)
    for _ in range(3):
        refill()
        graph.replay()
        for ours, eager, plain in zip(replayed, reads(0), reads(1), strict=True):
            assert torch.equal(ours, eager)
            assert relative_rms(ours, plain) <= 2 * checking.RELATIVE_RMS[torch.bfloat16]


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op = HyperMix(choice("hyper_mix", "check"))
    given = inputs(2, 2, 8, torch.float32)
    gated = gated_inputs(2, 2, 16, 32, torch.float16)
    calls = {
        "add": lambda: op.add(given["residual"].clone(), given["pending"]),
        "norm": lambda: op.norm(given["residual"].clone(), given["pending"], given["weight"], EPS),
        "mix": lambda: op.mix(given["residual"], given["gate"], 2),
        "squash": lambda: op.squash(given["low"], 2),
        "gated_mix": lambda: op.gated_mix(*gated, 2),
    }
    wrong = {
        "add": lambda x, *_: x.add_(5),
        "norm": lambda x, *_: x + 5,
        "mix": lambda x, *_: x[:, :8] + 5,
        "squash": lambda x, *_: x + 5,
        "gated_mix": lambda x, *_: x[:, :16] + 5,
    }
    for name, call in calls.items():
        call()
        with monkeypatch.context() as patch:
            patch.setattr(reference, name, wrong[name])
            with pytest.raises(KernelCheckError):
                call()
