"""The decode step of Gated DeltaNet: scalar Python, the rule over a whole sequence, kernel against reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import KernelCheckError, relative_rms
from freetoken.kernels.gdn_conv import reference as conv_reference
from freetoken.kernels.gdn_decode import CHECK_BOUNDS, DecodeConfig, GdnDecode, candidates, pick_config
from freetoken.kernels.gdn_prefill import reference as prefill_reference
from freetoken.kernels.gdn_prefill.plan import make_plan

triton = pytest.importorskip("freetoken.kernels.gdn_decode.triton", exc_type=ImportError)

EPS, SENTINEL = 1e-6, -77.0
SPLIT, WHOLE = DecodeConfig(8, 1), None
IMPLS = ["reference", "triton"]


@dataclass
class Layer:
    """One layer's weights and states, and the geometry they follow from."""

    key_heads: int
    heads: int
    dk: int
    dv: int
    width: int
    dtype: torch.dtype
    slots: int

    def __post_init__(self) -> None:
        self.channels = 2 * self.key_heads * self.dk + self.heads * self.dv
        self.conv_weight = self.random(self.channels, self.width) * 0.5
        self.A_log = (torch.rand(self.heads) * 5 - 3).to(DEVICE)
        self.dt_bias = torch.randn(self.heads).to(DEVICE)
        self.norm_weight = self.random(self.dv)
        self.conv_state = self.random(self.slots, self.width, self.channels)
        self.rec_state = torch.randn(self.slots, self.heads, self.dv, self.dk).to(DEVICE)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(DEVICE, self.dtype)

    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        """``qkv, z, a, b`` as column ranges of one projection."""
        columns = [self.channels, self.heads * self.dv, self.heads, self.heads]
        return torch.split(self.random(count, sum(columns)), columns, 1)

    def step(
        self,
        inputs: tuple[torch.Tensor, ...],
        slots: torch.Tensor,
        positions: torch.Tensor,
        impl: str,
        config: DecodeConfig | None = None,
        states: tuple[torch.Tensor, torch.Tensor] | None = None,
        sigmoid: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and both states after a step on ``states``, by default copies of the layer's."""
        conv, rec = states or (self.conv_state.clone(), self.rec_state.clone())
        op = GdnDecode(choice("gdn_decode", impl), config)
        op.reserve(inputs[0].shape[0], rec)
        weights: tuple[Any, ...] = (self.conv_weight, self.A_log, self.dt_bias, self.norm_weight, EPS)
        settled = bool(slots.numel() % 2)
        return op(*inputs, *weights, conv, rec, slots, positions, settled=settled, sigmoid=sigmoid), conv, rec


def layer(
    key_heads: int, heads: int, dk: int, dv: int, width: int, dtype: torch.dtype = torch.float32, slots: int = 4
) -> Layer:
    return Layer(key_heads, heads, dk, dv, width, dtype, slots)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def scalar_step(
    this: Layer, inputs: tuple[torch.Tensor, ...], lane: int, slot: int, position: int
) -> tuple[list[float], list]:
    """One lane with Python's own numbers: its output, and its recurrent state afterwards."""
    qkv, z, a, b = (x[lane].tolist() for x in inputs)
    ring, weight = this.conv_state[slot].tolist(), this.conv_weight.tolist()
    mixed = []
    for c, taps in enumerate(weight):
        total = taps[-1] * qkv[c]
        for back in range(1, min(this.width - 1, position) + 1):
            total += taps[-1 - back] * ring[(position - back) % this.width][c]
        mixed.append(silu(total))
    out, states = [], []
    for h in range(this.heads):
        at = h // (this.heads // this.key_heads) * this.dk
        q, k = mixed[at : at + this.dk], mixed[this.key_heads * this.dk + at :][: this.dk]
        v = mixed[2 * this.key_heads * this.dk + h * this.dv :][: this.dv]
        q, k = ([n / math.sqrt(sum(m * m for m in x) + 1e-6) for n in x] for x in (q, k))
        decay = math.exp(-math.exp(float(this.A_log[h])) * math.log1p(math.exp(a[h] + float(this.dt_bias[h]))))
        beta = 1 / (1 + math.exp(-b[h]))
        old = this.rec_state[slot, h].tolist() if position > 0 else [[0.0] * this.dk for _ in range(this.dv)]
        rows, o = [], []
        for j in range(this.dv):
            kept = [decay * s for s in old[j]]
            delta = beta * (v[j] - sum(s * n for s, n in zip(kept, k, strict=True)))
            rows.append([s + delta * n for s, n in zip(kept, k, strict=True)])
            o.append(sum(s * n for s, n in zip(rows[j], q, strict=True)) * this.dk**-0.5)
        root = math.sqrt(sum(n * n for n in o) / this.dv + EPS)
        gate = z[h * this.dv : (h + 1) * this.dv]
        norm = this.norm_weight.tolist()
        out += [n / root * w * silu(g) for n, w, g in zip(o, norm, gate, strict=True)]
        states.append(rows)
    return out, states


@pytest.mark.parametrize(("impl", "config"), [("reference", None), ("triton", WHOLE), ("triton", DecodeConfig(2, 1))])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (2, 3), (3, 4)])
def test_against_scalar_python(impl: str, config: DecodeConfig | None, heads: int, width: int) -> None:
    this = layer(1, heads, 5, 3, width)
    inputs, slots, positions = this.tokens(3), ids(2, 0, 3), ids(6, 0, 1)
    out, conv, rec = this.step(inputs, slots, positions, impl, config)
    for lane, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        expected, state = scalar_step(this, inputs, lane, slot, position)
        torch.testing.assert_close(out[lane].cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rec[slot].cpu(), torch.tensor(state), rtol=1e-4, atol=1e-6)
        assert torch.equal(conv[slot, position % width], inputs[0][lane])
    changed = (conv != this.conv_state).any(-1).sum(1)
    assert changed.tolist() == [1, 0, 1, 1] and torch.equal(rec[1], this.rec_state[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("key_heads", "heads", "dk", "dv", "width", "config"),
    [
        (2, 2, 16, 16, 4, WHOLE),
        (2, 4, 16, 32, 3, SPLIT),
        (1, 3, 24, 20, 4, WHOLE),
        (1, 3, 24, 20, 4, SPLIT),
        (2, 10, 40, 8, 2, WHOLE),
        (1, 2, 7, 9, 4, DecodeConfig(4, 1)),
        (1, 1, 128, 128, 4, WHOLE),
        (1, 3, 128, 128, 4, DecodeConfig(32, 4)),
        (1, 1, 100, 130, 4, WHOLE),
    ],
)
def test_kernel_equals_reference(
    key_heads: int,
    heads: int,
    dk: int,
    dv: int,
    width: int,
    config: DecodeConfig | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    this = layer(key_heads, heads, dk, dv, width, dtype, slots=6)
    inputs, slots, positions = this.tokens(5), ids(4, -1, 1, 0, 5), ids(9, 3, 0, 2, 1)
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        for back in range(position + 1, width + 1):
            this.conv_state[slot, (position - back) % width] = math.nan
    this.rec_state[1] = math.nan
    kept = [x.clone() for x in inputs]
    live, used = slots >= 0, slots[slots >= 0]
    expected = this.step(inputs, slots, positions, "reference")
    with poisoned_outputs(monkeypatch):
        found = this.step(inputs, slots, positions, "triton", config)
    bound = CHECK_BOUNDS[dtype]
    assert found[0].shape == (5, heads * dv) and bool(found[0][1].isnan().all())
    assert relative_rms(found[0][live], expected[0][live]) < bound
    assert relative_rms(found[2][used], expected[2][used]) < bound
    assert torch.equal(found[1].float().nan_to_num(SENTINEL), expected[1].float().nan_to_num(SENTINEL))
    untouched = [slot for slot in range(6) if slot not in slots.tolist()]
    for after, before in ((found[1], this.conv_state), (found[2], this.rec_state)):
        assert torch.equal(after[untouched], before[untouched])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(inputs, kept, strict=True))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(
    ("impl", "config"), [("reference", None), ("triton", WHOLE), ("triton", SPLIT), ("check", None)]
)
def test_steps_equal_the_rule_over_the_whole_sequence(impl: str, config: DecodeConfig | None, sigmoid: bool) -> None:
    this, count = layer(1, 2, 16, 12, 4), 20
    qkv, z, a, b = this.tokens(count)
    slots, fresh = ids(2), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
    ring, rec = this.conv_state.clone(), this.rec_state.clone()
    mixed = conv_reference.prefill(qkv, this.conv_weight, None, ring, bounds, slots, fresh, count)
    q, k, v = torch.split(mixed, [16, 16, 24], 1)
    heads = (q.reshape(count, 1, 16), k.reshape(count, 1, 16), v.reshape(count, 2, 12))
    plan = make_plan([count], DEVICE)
    o = prefill_reference.gdn_prefill(*heads, a, b, this.A_log, this.dt_bias, rec, slots, fresh, plan, chunked=False)
    expected = prefill_reference.gated_norm(o, z, this.norm_weight, EPS, sigmoid)

    states = (this.conv_state.clone(), this.rec_state.clone())
    for position in range(count):
        token = tuple(x[position : position + 1] for x in (qkv, z, a, b))
        out, *_ = this.step(token, slots, ids(position), impl, config, states, sigmoid)
        assert relative_rms(out, expected[position : position + 1]) < CHECK_BOUNDS[torch.float32]
    assert relative_rms(states[1][2], rec[2]) < 1e-5
    assert torch.equal(states[0][2], ring[2])


def test_gates_at_their_ends() -> None:
    """Softplus far on both sides, where a plain logarithm loses the decay or overflows."""
    this = layer(1, 4, 16, 8, 4)
    this.dt_bias.zero_()
    this.A_log.copy_(torch.tensor([2.7, -2.0, 0.0, 1.0]))
    qkv, z, a, b = (x.clone() for x in this.tokens(1))
    a[0] = torch.tensor([-17.0, 90.0, -60.0, 20.0])
    b[0] = torch.tensor([-40.0, 40.0, 0.0, -100.0])
    found = this.step((qkv, z, a, b), ids(1), ids(3), "triton")
    expected = this.step((qkv, z, a, b), ids(1), ids(3), "reference")
    for ours, theirs in zip(found, expected, strict=True):
        assert bool(ours.isfinite().all()) and relative_rms(ours, theirs) < CHECK_BOUNDS[torch.float32]


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
def test_padded_lanes_leave_the_others_alone(config: DecodeConfig | None) -> None:
    """Lanes that share the padding slot may leave anything there, but the same outputs and states elsewhere."""
    this = layer(1, 2, 16, 16, 4)
    inputs = this.tokens(4)
    expected = this.step(tuple(x[:2] for x in inputs), ids(0, 2), ids(5, 0), "triton", config)
    found = this.step(inputs, ids(0, 2, 3, 3), ids(5, 0, 0, 0), "triton", config)
    assert torch.equal(found[0][:2], expected[0])
    assert all(torch.equal(ours[:3], theirs[:3]) for ours, theirs in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_pools_that_hold_other_things_between_slots(impl: str) -> None:
    this = layer(1, 2, 16, 12, 4)
    inputs, slots, positions = this.tokens(2), ids(3, 1), ids(4, 2)
    expected = this.step(inputs, slots, positions, impl)
    pools = [torch.full((4, 3, *x.shape[1:]), SENTINEL, device=DEVICE) for x in (this.conv_state, this.rec_state)]
    views = (pools[0][:, 1], pools[1][:, 1])
    views[0].copy_(this.conv_state)
    views[1].copy_(this.rec_state)
    found = this.step(inputs, slots, positions, impl, None, views)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert all(bool((pool[:, [0, 2]] == SENTINEL).all()) for pool in pools)


def test_states_beyond_two_to_the_31_elements() -> None:
    """The pools are touched only in two slots, so the system does not back them with memory."""
    this, far = layer(1, 1, 128, 128, 4, slots=2), 140_000
    inputs, positions = this.tokens(1), ids(3)
    expected = this.step(inputs, ids(1), positions, "triton")
    rec = torch.empty(far + 1, 1, 128, 128, device=DEVICE)
    conv = torch.empty(far + 1, 4, 2**13, device=DEVICE).as_strided((far + 1, 4, 384), (2**15, 384, 1))
    assert rec.numel() > 2**31 and conv.stride(0) * far > 2**31
    rec[far], conv[far] = this.rec_state[1], this.conv_state[1]
    out, conv, rec = this.step(inputs, ids(far), positions, "triton", None, (conv, rec))
    assert torch.equal(out, expected[0]) and torch.equal(conv[far], expected[1][1])
    assert torch.equal(rec[far], expected[2][1])


def test_no_lanes() -> None:
    this = layer(1, 2, 16, 16, 4)
    for impl in IMPLS:
        assert this.step(this.tokens(0), ids(), ids(), impl)[0].shape == (0, 32)


def test_split_heads_need_scratch_memory() -> None:
    this = layer(1, 2, 16, 16, 4)
    weights = (this.conv_weight, this.A_log, this.dt_bias, this.norm_weight, EPS, this.conv_state, this.rec_state)
    arguments = (*this.tokens(2), *weights, ids(0, 1), ids(1, 1))
    with pytest.raises(ValueError, match="need reserved scratch memory"):
        triton.gdn_decode(*arguments, config=SPLIT)
    scratch = triton.Scratch()
    scratch.reserve(1, 2, 16, DEVICE)
    with pytest.raises(ValueError, match="fewer than 2 sequences"):
        triton.gdn_decode(*arguments, config=SPLIT, scratch=scratch)


def test_settings() -> None:
    assert pick_config(128, 128) == DecodeConfig(128, 8)
    assert pick_config(256, 256) == DecodeConfig(64, 8)
    assert pick_config(128, 128, 48) == DecodeConfig(128, 8)
    assert pick_config(128, 128, 3 * 48) == DecodeConfig(64, 4)
    assert pick_config(128, 128, 8 * 48) == DecodeConfig(64, 4, prefetch=False)
    assert pick_config(256, 256, 200) == DecodeConfig(32, 4)
    assert pick_config(64, 64, 48) == DecodeConfig(64, 2)
    found = candidates(128, 128)
    assert found[0] == pick_config(128, 128) and len(found) == len(set(found)) > 10
    assert {config.splits(128) for config in found} >= {1, 2, 4}
    assert triton.prefetch_bytes(DecodeConfig(128, 8), 128, 128) == 256
    assert triton.prefetch_bytes(DecodeConfig(128, 8, prefetch=False), 128, 128) == 0
    assert triton.prefetch_bytes(DecodeConfig(64, 8), 96, 128) == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_memory_is_reserved_for_every_batch_up_to_the_largest(batch: int) -> None:
    """One request of 48 heads shares none, three do; a model reserves for its largest batch once."""
    op = GdnDecode(choice("gdn_decode", "triton"))
    op.reserve(batch, torch.empty(1, 48, 128, 128, device="meta"))
    assert (op._scratch.parts is None) == (batch < 3)
    if op._scratch.parts is not None:
        assert op._scratch.parts.numel() == batch * 48 * 128


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    this = layer(1, 2, 16, 12, 4)
    inputs, slots, positions = this.tokens(3), ids(3, -1, 1), ids(4, 9, 0)
    found, expected = (this.step(inputs, slots, positions, impl) for impl in ("check", "reference"))
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs)
    fused = triton.gdn_decode

    def forgets(which: int) -> Any:
        def call(*arguments: Any, **settings: Any) -> torch.Tensor:
            changed = list(arguments)
            changed[which] = changed[which].clone()
            return fused(*changed, **settings)

        return call

    monkeypatch.setattr(triton, "gdn_decode", lambda *arguments, **settings: fused(*arguments, **settings) * 1.01)
    with pytest.raises(KernelCheckError, match="gdn_decode: the output differs"):
        this.step(inputs, slots, positions, "check")
    for which, name in ((9, "the conv state"), (10, "the recurrent state")):
        monkeypatch.setattr(triton, "gdn_decode", forgets(which))
        with pytest.raises(KernelCheckError, match=f"gdn_decode: {name} differs"):
            this.step(inputs, slots, positions, "check")


@pytest.mark.gpu
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("config", [None, *candidates(128, 128)[1::5]])
def test_on_a_gpu_replays_equal_eager_and_states_follow(config: DecodeConfig | None, settled: bool) -> None:
    """Steps one after another on the same state, launched early, nothing read back; a kernel of torch between them where they may
    read their states ahead."""
    this = layer(16, 48, 128, 128, 4, torch.bfloat16, slots=9)
    this.rec_state *= 0.1
    inputs = tuple(x.contiguous() for x in this.tokens(8))
    slots, positions = torch.arange(8, device=DEVICE), torch.arange(8, device=DEVICE)
    op = GdnDecode(choice("gdn_decode", "triton"), config)
    op.reserve(8, this.rec_state)
    states = (this.conv_state.clone(), this.rec_state.clone())
    weights: tuple[Any, ...] = (this.conv_weight, this.A_log, this.dt_bias, this.norm_weight, EPS)

    between = torch.ones(1, device=DEVICE)

    def steps() -> list[torch.Tensor]:
        outs = []
        for _ in range(4):
            outs.append(op(*inputs, *weights, *states, slots, positions, settled=settled))
            if settled:
                between.zero_()
        return outs

    def restore() -> None:
        states[0].copy_(this.conv_state)
        states[1].copy_(this.rec_state)

    steps()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps()
    for _ in range(3):
        for x in inputs:
            x.normal_()
        restore()
        eager, after = steps(), [x.clone() for x in states]
        restore()
        graph.replay()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, eager, strict=True))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(states, after, strict=True))
    restore()
    bound = checking.RELATIVE_RMS[torch.bfloat16]
    for out in eager:
        expected, *_ = this.step(inputs, slots, positions, "reference", None, states)
        assert relative_rms(out, expected) < bound
    assert relative_rms(after[1][:8], states[1][:8]) < bound and torch.equal(after[0][:8], states[0][:8])
