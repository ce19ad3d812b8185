"""The convolution of Gated DeltaNet and its state ring: worked examples, a scalar loop, kernels against reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.gdn_conv import ConvConfig, GdnConv, candidates, pack_weight, reference

triton = pytest.importorskip("freetoken.kernels.gdn_conv.triton", exc_type=ImportError)

SENTINEL = -77.0
IMPLS = ["reference", "triton"]


@dataclass
class Inputs:
    """Arguments of one prefill; rows of ``x`` are wider than its channels."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    ring: torch.Tensor
    q_starts: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    longest: int

    def run(self, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and ring after the op, run on a copy of the ring."""
        ring = self.ring.clone()
        arguments = (self.q_starts, self.slots, self.starts, self.longest)
        return GdnConv(choice("gdn_conv", impl)).prefill(self.x, self.weight, self.bias, ring, *arguments), ring

    @property
    def live(self) -> torch.Tensor:
        """Which rows belong to a piece with a slot."""
        return torch.repeat_interleave(self.slots >= 0, self.q_starts.diff().long())


def make(
    lengths: list[int],
    starts: list[int],
    channels: int = 40,
    width: int = 4,
    *,
    skipped: tuple[int, ...] = (),
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Random inputs; slots in random order, two of them nobody's; the rings of fresh pieces hold NaN."""
    pieces, tokens = len(lengths), sum(lengths)
    slots = torch.randperm(pieces + 2)[:pieces]
    ring = torch.randn(pieces + 2, width, channels)
    for slot, start in zip(slots.tolist(), starts, strict=True):
        for back in range(start + 1, width + 1):
            ring[slot, (start - back) % width] = math.nan
    slots[list(skipped)] = -1
    return Inputs(
        torch.randn(tokens, channels + 8).to(DEVICE, dtype)[:, :channels],
        torch.randn(channels, width).to(DEVICE, dtype),
        torch.randn(channels).to(DEVICE, dtype) if bias else None,
        ring.to(DEVICE, dtype),
        torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32),
        slots.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        max(lengths, default=0),
    )


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("start", "x", "sums", "kept"),
    [
        (3, [1, 2, 3], [144, 91, 50], [1, 2, 3]),
        (3, [1, 2], [144, 91], [30, 1, 2]),
        (3, [1], [144], [20, 30, 1]),
        (0, [1, 2], [4, 11], [None, 1, 2]),
    ],
)
def test_worked_examples(impl: str, start: int, x: list[int], sums: list[int], kept: list[int | None]) -> None:
    """Weights 1, 2, 3, 4; the rows before hold 10, 20, 30. ``kept`` are the last three positions; None for before the first."""
    ring = torch.tensor([[[10.0], [20.0], [30.0], [SENTINEL]]], device=DEVICE)
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=DEVICE)
    rows = torch.tensor(x, dtype=torch.float32, device=DEVICE)[:, None]
    q_starts = torch.tensor([0, len(x)], dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    starts = torch.tensor([start], dtype=torch.int32, device=DEVICE)
    y = GdnConv(choice("gdn_conv", impl)).prefill(rows, weight, None, ring, q_starts, slots, starts, len(x))
    assert y[:, 0].tolist() == pytest.approx([silu(value) for value in sums], rel=1e-6)
    end = start + len(x)
    for back, value in zip((3, 2, 1), kept, strict=True):
        assert value is None or float(ring[0, (end - back) % 4, 0]) == value


def scalar_conv(inputs: Inputs) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Python's own numbers, one position after the other; the ring entry of each position is overwritten as it comes."""
    ring, weight, x = inputs.ring.tolist(), inputs.weight.tolist(), inputs.x.tolist()
    bias = [0.0] * len(weight) if inputs.bias is None else inputs.bias.tolist()
    width, bounds = len(weight[0]), inputs.q_starts.tolist()
    out = []
    for piece, (slot, start) in enumerate(zip(inputs.slots.tolist(), inputs.starts.tolist(), strict=True)):
        for row in range(bounds[piece], bounds[piece + 1]):
            position = start + row - bounds[piece]
            values = []
            for c, taps in enumerate(weight):
                total = bias[c] + taps[-1] * x[row][c]
                for back in range(1, min(width - 1, position) + 1):
                    total += taps[-1 - back] * ring[slot][(position - back) % width][c]
                values.append(silu(total))
            out.append(values)
            ring[slot][position % width] = x[row]
    return out, ring


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_against_a_scalar_loop(impl: str, width: int) -> None:
    inputs = make([1, 6, 2, 3], [9, 0, 1, 2], 3, width, bias=True)
    expected, ring = scalar_conv(inputs)
    y, after = inputs.run(impl)
    torch.testing.assert_close(y.cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(after.cpu().nan_to_num(SENTINEL), torch.tensor(ring).nan_to_num(SENTINEL))


def require_equal_rings(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours.float().nan_to_num(SENTINEL), theirs.float().nan_to_num(SENTINEL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "starts", "channels", "width", "skipped"),
    [
        ([21, 0, 1, 2, 16], [0, 4, 1, 7, 3], 40, 4, ()),
        ([3, 17, 5], [5, 0, 2], 33, 3, (1,)),
        ([1] * 9, list(range(9)), 7, 4, (0, 8)),
        ([0, 0, 33, 0], [0, 3, 1, 2], 600, 2, ()),
        ([4, 5], [1, 0], 16, 4, (0, 1)),
        ([0, 0], [0, 2], 16, 4, ()),
        ([], [], 16, 4, ()),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_equals_reference(
    lengths: list[int],
    starts: list[int],
    channels: int,
    width: int,
    skipped: tuple[int, ...],
    bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = make(lengths, starts, channels, width, skipped=skipped, bias=bias, dtype=dtype)
    kept = inputs.x.clone()
    expected, expected_ring = inputs.run("reference")
    with poisoned_outputs(monkeypatch):
        y, ring = inputs.run("triton")
    assert y.shape == inputs.x.shape and y.is_contiguous()
    assert relative_rms(y[inputs.live], expected[inputs.live]) <= checking.RELATIVE_RMS[dtype] / 2
    assert bool(y[~inputs.live].isnan().all()), "rows of a skipped piece were written"
    require_equal_rings(ring, expected_ring)
    touched = torch.zeros(ring.shape[0], dtype=torch.bool, device=DEVICE)
    touched[inputs.slots[inputs.slots >= 0]] = True
    require_equal_rings(ring[~touched], inputs.ring[~touched])
    assert torch.equal(inputs.x, kept)


@pytest.mark.parametrize("config", [ConvConfig(4, 32, 1), ConvConfig(8, 64, 1), ConvConfig(32, 128, 2)])
def test_settings_do_not_change_a_bit(config: ConvConfig) -> None:
    inputs = make([19, 1, 40], [0, 6, 3], 100)
    expected, expected_ring = inputs.run("triton")
    ring = inputs.ring.clone()
    arguments = (inputs.q_starts, inputs.slots, inputs.starts, inputs.longest)
    y = triton.prefill(inputs.x, inputs.weight, None, ring, *arguments, config)
    assert torch.equal(y, expected)
    require_equal_rings(ring, expected_ring)


@pytest.mark.parametrize("longest", [1, 7, 10_000])
def test_a_wrong_longest_piece_costs_time_only(longest: int) -> None:
    inputs = make([37, 2], [0, 5])
    expected, expected_ring = inputs.run("triton")
    y, ring = replace(inputs, longest=longest).run("triton")
    assert torch.equal(y, expected)
    require_equal_rings(ring, expected_ring)


def test_more_pieces_than_one_step_of_the_search() -> None:
    lengths = [int(n) for n in torch.randint(0, 3, (150,))]
    inputs = make(lengths, [int(n) for n in torch.randint(0, 6, (150,))], 8)
    assert len(lengths) > 2 * triton.SEARCH
    expected, expected_ring = inputs.run("reference")
    y, ring = inputs.run("triton")
    assert relative_rms(y, expected) < 1e-6
    require_equal_rings(ring, expected_ring)


def test_no_cut_of_the_tokens_needs_more_tiles_than_the_grid_has() -> None:
    """The kernel gives piece i the tiles from ``q_starts[i] // block + i`` on, of ``tokens // block + pieces`` in all."""
    for _ in range(300):
        lengths = torch.randint(0, 70, (int(torch.randint(1, 12, ())),)).tolist()
        block = int(torch.randint(1, 33, ()))
        used, begin = 0, 0
        for piece, length in enumerate(lengths):
            first = begin // block + piece
            assert first >= used
            used, begin = first + -(-length // block), begin + length
        assert used <= begin // block + len(lengths)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_splits_give_the_same_outputs_and_ring(impl: str, data: st.DataObject) -> None:
    """A sequence in pieces, some of them decode steps, as in one piece: rings bit for bit, and the kernels' outputs too.

    Torch's own elementwise functions round differently in vectors and in what is left over.
    """
    width = data.draw(st.integers(2, 4), label="width")
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5), label="lengths")
    total = sum(lengths)
    torch.manual_seed(total)
    whole = make([total], [0], 24, width)
    expected, expected_ring = whole.run(impl)
    op, ring, begin, found = GdnConv(choice("gdn_conv", impl)), whole.ring.clone(), 0, []
    for length in lengths:
        rows = whole.x[begin : begin + length]
        if length == 1:
            positions = torch.tensor([begin], device=DEVICE)
            found.append(op.decode(rows, whole.weight, None, ring, whole.slots, positions))
        else:
            q_starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
            starts = torch.tensor([begin], dtype=torch.int32, device=DEVICE)
            found.append(op.prefill(rows, whole.weight, None, ring, q_starts, whole.slots, starts, length))
        begin += length
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-6)
    assert impl == "reference" or torch.equal(torch.cat(found), expected)
    require_equal_rings(ring, expected_ring)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("channels", "width"), [(40, 4), (33, 3), (300, 2)])
def test_decode_equals_prefill_and_reference(
    channels: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [0, 1, 2, 3, 7, 4]
    inputs = make([1] * 6, starts, channels, width, skipped=(4,), bias=True, dtype=dtype)
    found = []
    with poisoned_outputs(monkeypatch):
        for impl in IMPLS:
            ring = inputs.ring.clone()
            arguments = (inputs.slots, inputs.starts.long())
            op = GdnConv(choice("gdn_conv", impl))
            found.append((op.decode(inputs.x, inputs.weight, inputs.bias, ring, *arguments), ring))
    y, ring = inputs.run("triton")
    live = inputs.live
    assert torch.equal(found[1][0][live], y[live]) and bool(found[1][0][4].isnan().all())
    assert relative_rms(y[live], found[0][0][live]) <= checking.RELATIVE_RMS[dtype] / 2
    for other in (found[0][1], found[1][1]):
        require_equal_rings(ring, other)


def test_packed_weights_are_the_same_weights() -> None:
    inputs = make([9], [2])
    packed = pack_weight(inputs.weight)
    assert packed.stride() == (1, 40) and torch.equal(packed, inputs.weight)
    assert torch.equal(replace(inputs, weight=packed).run("triton")[0], inputs.run("triton")[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_pool_that_holds_other_things_between_slots(impl: str) -> None:
    inputs = make([6, 1], [0, 4])
    expected, expected_ring = inputs.run(impl)
    pool = torch.full((4, 3, 4, 40), SENTINEL, device=DEVICE)
    pool[:, 1] = inputs.ring
    arguments = (inputs.q_starts, inputs.slots, inputs.starts, 6)
    y = GdnConv(choice("gdn_conv", impl)).prefill(inputs.x, inputs.weight, None, pool[:, 1], *arguments)
    assert torch.equal(y, expected)
    require_equal_rings(pool[:, 1], expected_ring)
    assert bool((pool[:, [0, 2]] == SENTINEL).all())


def test_addresses_beyond_two_to_the_31_elements() -> None:
    """Neither tensor is touched but at its end, so the system does not back them with memory."""
    stride = 2**29
    storage = torch.empty(5 * stride, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((5, 16), (stride, 1))
    x.copy_(torch.randn(5, 16))
    pool = torch.empty(6, 2**29, dtype=torch.float16, device=DEVICE).as_strided((6, 4, 16), (stride, 16, 1))
    pool[5] = torch.randn(4, 16).half().to(DEVICE)
    ring = pool[5:].clone()
    weight = torch.randn(16, 4).half().to(DEVICE)
    slots, starts = torch.tensor([5], device=DEVICE), torch.tensor([6], dtype=torch.int32, device=DEVICE)
    q_starts = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    y = triton.prefill(x, weight, None, pool, q_starts, slots, starts, 5)
    expected = reference.prefill(x, weight, None, ring, q_starts, slots - 5, starts, 5)
    assert relative_rms(y, expected) < 1e-3 and torch.equal(pool[5], ring[0])


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make([5, 1, 3], [0, 3, 2], skipped=(2,))
    checked = inputs.run("check")
    require_equal_rings(checked[1], inputs.run("reference")[1])
    fused = triton.prefill
    monkeypatch.setattr(triton, "prefill", lambda *arguments: fused(*arguments) * 1.01)
    with pytest.raises(KernelCheckError, match="gdn_conv: the output differs"):
        inputs.run("check")

    def forgets_the_state(x: torch.Tensor, weight: torch.Tensor, bias: None, ring: torch.Tensor, *rest: object):
        return fused(x, weight, bias, ring.clone(), *rest)

    monkeypatch.setattr(triton, "prefill", forgets_the_state)
    with pytest.raises(KernelCheckError, match="the state differs from the reference"):
        inputs.run("check")


def test_the_table_says_why_sgl_kernel_does_not_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FREETOKEN_GDN_FUSED_CONV", raising=False)
    found = choose_op("gdn_conv", "cuda")
    assert found.impl == "triton" and "ring" in found.why


def test_candidates_start_with_the_default() -> None:
    found = candidates(10240, 8192)
    assert found[0] == triton.pick_prefill(10240, 8192) and len(found) == len(set(found)) > 8
    assert all(config.block_t % 4 == 0 for config in found)


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_read_back_and_replays_equal_eager() -> None:
    inputs = make([700, 1, 0, 2, 333], [0, 5, 7, 1, 64], 10240, dtype=torch.bfloat16)
    op, ring = GdnConv(choice("gdn_conv", "triton")), inputs.ring.clone()
    arguments = (inputs.q_starts, inputs.slots, inputs.starts, inputs.longest)
    decode = (inputs.x[:5], inputs.weight, None, ring, inputs.slots, inputs.starts.long())

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return op.prefill(inputs.x, inputs.weight, None, ring, *arguments), op.decode(*decode)

    both()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        inputs.x.normal_()
        ring.copy_(inputs.ring)
        eager, after = both(), ring.clone()
        ring.copy_(inputs.ring)
        graph.replay()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, eager, strict=True))
        require_equal_rings(ring, after)
    expected, expected_ring = inputs.run("reference")
    y, ring = inputs.run("triton")
    assert relative_rms(y, expected) < checking.RELATIVE_RMS[torch.bfloat16]
    require_equal_rings(ring, expected_ring)
