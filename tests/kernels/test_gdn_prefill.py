"""The gated delta rule over prompts: scalar loop, token by token, in chunks, fused, and transformers."""

from __future__ import annotations

import math

import pytest
import torch
from gdn_prefill_inputs import Inputs, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import relative_rms
from freetoken.kernels.gdn_prefill import CHECK_BOUNDS, GdnPrefill, reference
from freetoken.kernels.gdn_prefill.config import PrefillConfig, block_of, candidates, pick_config
from freetoken.kernels.gdn_prefill.plan import make_plan

triton = pytest.importorskip("freetoken.kernels.gdn_prefill.triton", exc_type=ImportError)

RAGGED = [64, 0, 65, 1, 63, 5]


def by_tokens(**arguments) -> torch.Tensor:
    return reference.gdn_prefill(**arguments, chunked=False)


def scalar_rule(x: Inputs) -> tuple[list, list]:
    """One piece from zero with Python's own numbers: outputs by token, head and column, and the last state."""
    tokens, heads, dv = x.v.shape
    key_heads, dk = x.k.shape[1:]
    state = [[[0.0] * dk for _ in range(dv)] for _ in range(heads)]
    out = []
    for t in range(tokens):
        row = []
        for h in range(heads):
            q, k = (y[t, h // (heads // key_heads)].tolist() for y in (x.q, x.k))
            q, k = ([n / math.sqrt(sum(m * m for m in y) + 1e-6) for n in y] for y in (q, k))
            step = float(x.a[t, h]) + float(x.dt_bias[h])
            decay = math.exp(-math.exp(float(x.A_log[h])) * math.log1p(math.exp(step)))
            beta = 1 / (1 + math.exp(-float(x.b[t, h])))
            values = []
            for j in range(dv):
                kept = [decay * s for s in state[h][j]]
                delta = beta * (float(x.v[t, h, j]) - sum(s * n for s, n in zip(kept, k)))
                state[h][j] = [s + delta * n for s, n in zip(kept, k)]
                values.append(sum(s * n for s, n in zip(state[h][j], q)) * dk**-0.5)
            row.append(values)
        out.append(row)
    return out, state


def require_agreement(x: Inputs, found: tuple[torch.Tensor, torch.Tensor], bound: float) -> None:
    """``found`` against the reference token by token; slots that no piece leaves a state in hold what they held, bit for bit."""
    expected, states = x.call(by_tokens)
    out, state = found
    assert relative_rms(out, expected) < bound
    lengths = torch.tensor(x.plan.lengths, device=x.slots.device)
    written = x.slots[(lengths > 0) & (x.slots >= 0)]
    assert relative_rms(state[written], states[written]) < bound
    kept = torch.ones(len(state), dtype=torch.bool)
    kept[written.cpu()] = False
    for slot in kept.nonzero().flatten().tolist():
        torch.testing.assert_close(state[slot], x.rec_state[slot], rtol=0, atol=0, equal_nan=True)


def test_reference_is_the_scalar_rule() -> None:
    x = make_inputs([7], group=2, dk=3, dv=4, device="cpu")
    values, last = scalar_rule(x)
    out, state = x.call(by_tokens)
    assert relative_rms(out, torch.tensor(values)) < 1e-6
    assert relative_rms(state[x.slots[0]], torch.tensor(last)) < 1e-6


@pytest.mark.parametrize(("key_heads", "group", "dk", "dv"), [(2, 1, 16, 16), (1, 3, 20, 7), (2, 2, 5, 32)])
def test_chunks_are_the_tokens(key_heads: int, group: int, dk: int, dv: int) -> None:
    x = make_inputs([*RAGGED, 200], key_heads=key_heads, group=group, dk=dk, dv=dv, device="cpu")
    x.slots[2] = -1
    require_agreement(x, x.call(reference.gdn_prefill), 1e-5)
    wide = {name: value.double() for name, value in vars(x).items() if name in ("q", "k", "v", "a", "b", "rec_state")}
    x = Inputs(**{**vars(x), **wide})
    require_agreement(x, x.call(reference.gdn_prefill), 1e-12)


def test_transformers_has_the_same_rule() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    x = make_inputs([97], key_heads=2, group=3, dk=16, dv=24, device="cpu")
    g = -x.A_log.exp() * torch.nn.functional.softplus(x.a + x.dt_bias)
    q, k = (y.repeat_interleave(3, 1)[None] for y in (x.q, x.k))
    expected, last = modeling.torch_recurrent_gated_delta_rule(
        q, k, x.v[None], g[None], x.b.sigmoid()[None], None, True, use_qk_l2norm_in_kernel=True
    )
    out, state = x.call(reference.gdn_prefill)
    assert relative_rms(out, expected[0]) < 1e-5
    assert relative_rms(state[x.slots[0]], last[0].transpose(1, 2)) < 1e-5


CASES = [
    pytest.param({"key_heads": 2, "group": 1, "dk": 16, "dv": 16}, PrefillConfig(1, 4, 16, 4, 1), id="equal heads"),
    pytest.param({"key_heads": 1, "group": 3, "dk": 20, "dv": 24}, PrefillConfig(3, 4, 16, 4, 1), id="odd widths"),
    pytest.param({"key_heads": 1, "group": 2, "dk": 32, "dv": 40}, PrefillConfig(1, 4, 64, 8, 1), id="wide values"),
    pytest.param({"key_heads": 1, "group": 2, "dk": 5, "dv": 16}, None, id="own settings"),
]


@pytest.mark.parametrize(("shape", "config"), CASES)
def test_fused_is_the_reference(shape: dict, config: PrefillConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(RAGGED, **shape)
    with poisoned_outputs(monkeypatch):
        found = x.call(triton.gdn_prefill, config=config)
    require_agreement(x, found, 1e-5 if DEVICE == "cpu" else CHECK_BOUNDS[torch.float32])


def test_fused_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs([130, 40], dk=32, dv=32, dtype=torch.float16)
    with poisoned_outputs(monkeypatch):
        require_agreement(x, x.call(triton.gdn_prefill), 2e-3)


@pytest.mark.parametrize("rule", [reference.gdn_prefill, triton.gdn_prefill], ids=["reference", "triton"])
def test_a_piece_without_a_slot_leaves_no_state(rule) -> None:
    x = make_inputs([3, 66, 2])
    x.slots[1] = -1
    require_agreement(x, x.call(rule), CHECK_BOUNDS[torch.float32])
    x.slots[:] = -1
    _, state = x.call(rule)
    torch.testing.assert_close(state, x.rec_state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", [reference.gdn_prefill, triton.gdn_prefill], ids=["reference", "triton"])
def test_nothing_to_do(rule) -> None:
    x = make_inputs([0, 0])
    out, state = x.call(rule)
    assert out.shape == (0, 2, 16)
    torch.testing.assert_close(state, x.rec_state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", [reference.gdn_prefill, triton.gdn_prefill], ids=["reference", "triton"])
@pytest.mark.parametrize("kind", ["forgetting", "remembering", "one key", "zeros"])
def test_extreme_gates_and_keys(kind: str, rule) -> None:
    """Tokens that forget all before tokens that forget little, next to no decay, the same key 130 times at beta 1 (the worst case of the triangular system), zeros."""
    x = make_inputs([130], likeness=1.0)
    if kind == "forgetting":
        x.a[:20] = x.a[90:] = 150.0
        x.a[20:90] -= 5.0
    elif kind == "remembering":
        x.a[:] = -30.0
    elif kind == "one key":
        x.a[:], x.b[:], x.k[:] = -30.0, 30.0, x.k[:1].clone()
    else:
        x.q[:], x.k[:] = 0.0, 0.0
    require_agreement(x, x.call(rule), CHECK_BOUNDS[torch.float32])


@settings(max_examples=25, deadline=None)
@given(splits=st.lists(st.integers(0, 200), max_size=5), seed=st.integers(0, 1000))
def test_however_a_prompt_is_split(splits: list[int], seed: int) -> None:
    x = make_inputs([200], seed=seed, device="cpu")
    expected, whole = x.call(reference.gdn_prefill)
    state, outs = x.rec_state.clone(), []
    ends = [*sorted(splits), 200]
    for first, last in zip([0, *ends[:-1]], ends):
        outs.append(reference.gdn_prefill(**vars(x.piece(first, last, state))))
    assert relative_rms(state[x.slots[0]], whole[x.slots[0]]) < 1e-5
    assert relative_rms(torch.cat(outs), expected) < 1e-5


@pytest.mark.parametrize("splits", [[1, 65, 66], [63, 127], [64]])
def test_however_the_kernel_is_given_it(splits: list[int]) -> None:
    x = make_inputs([140], dk=16, dv=32)
    _, whole = x.call(by_tokens)
    state, ends = x.rec_state.clone(), [*splits, 140]
    for first, last in zip([0, *ends[:-1]], ends):
        triton.gdn_prefill(**vars(x.piece(first, last, state)))
    assert relative_rms(state[x.slots[0]], whole[x.slots[0]]) < (1e-5 if DEVICE == "cpu" else 1e-4)


def test_check_mode_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs([70, 0, 3])
    op = GdnPrefill(choice("gdn_prefill", "check"))
    require_agreement(x, x.call(op), CHECK_BOUNDS[torch.float32])

    def wrong_state(*args, **kwargs) -> torch.Tensor:
        out = triton.gdn_prefill(*args, **kwargs)
        args[7][args[8][0]] *= 1.01
        return out

    op._rule = wrong_state
    with pytest.raises(checking.KernelCheckError, match="the state"):
        x.call(op)
    op._rule = lambda *args, **kwargs: triton.gdn_prefill(*args, **kwargs) * 1.01
    with pytest.raises(checking.KernelCheckError, match="the output"):
        x.call(op)


def test_settings() -> None:
    assert [block_of(width) for width in (1, 16, 17, 128, 129)] == [16, 16, 32, 128, 256]
    for capability in ((8, 0), (9, 0), (12, 0)):
        for dtype in (torch.bfloat16, torch.float32):
            config = pick_config(128, 128, dtype, capability)
            assert 128 % config.block_v == 0
    variants = candidates(128, 3)
    assert pick_config(128, 128, torch.bfloat16, (9, 0)) in variants and len(set(variants)) == len(variants)


@pytest.mark.gpu
@pytest.mark.parametrize("likeness", [0.0, 0.3])
@pytest.mark.parametrize("lengths", [[1024], [0, 1, 63, 64, 65, 700]])
def test_in_bfloat16_at_full_width(lengths: list[int], likeness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(lengths, key_heads=16, group=3, dk=128, dv=128, dtype=torch.bfloat16, likeness=likeness)
    require_agreement(x, x.call(triton.gdn_prefill), CHECK_BOUNDS[torch.bfloat16])


@pytest.mark.gpu
def test_nothing_is_read_back() -> None:
    x = make_inputs([100, 7])
    op = GdnPrefill(choice("gdn_prefill", "triton"))
    x.call(op)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = op.plan([100, 7], "cuda")
        arguments = {**vars(x), "plan": plan}
        op(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_plan_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="-2 tokens"):
        make_plan([3, -2], "cpu")
