"""Around the delta rule of prompts: tables of chunks, the gated norm, and flash-linear-attention as a stand-in."""

from __future__ import annotations

import math
import sys
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from gdn_prefill_inputs import make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import DEVICE, choice, poisoned_outputs

from freetoken.kernels import checking
from freetoken.kernels.checking import relative_rms
from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.gdn_prefill import GdnPrefill, fla, reference
from freetoken.kernels.gdn_prefill.plan import make_plan

FLAG = "FREETOKEN_GDN_FUSED_PREFILL"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=6))
def test_tables_name_every_token_once(lengths: list[int]) -> None:
    plan = make_plan(lengths, "cpu", fla=True)
    assert plan.lengths == tuple(lengths) and plan.tokens == sum(lengths)
    chunks = plan.chunks.tolist()
    assert [token for first, count in chunks for token in range(first, first + count)] == list(range(sum(lengths)))
    assert all(1 <= count <= 64 for _, count in chunks)
    pieces = plan.pieces.tolist()
    assert sorted(piece for piece, *_ in pieces) == [i for i, length in enumerate(lengths) if length]
    assert [tokens for _, _, tokens, _ in pieces] == sorted((n for n in lengths if n), reverse=True)
    for piece, first, tokens, first_chunk in pieces:
        assert first == sum(lengths[:piece]) and tokens == lengths[piece] and chunks[first_chunk][0] == first
        assert sum(count for _, count in chunks[first_chunk : first_chunk + -(-tokens // 64)]) == tokens
    filled = [n for n in lengths if n]
    if not filled:
        assert plan.fla is None
        return
    assert (
        plan.fla.cu_seqlens.tolist()
        == plan.fla.cu_seqlens_cpu.tolist()
        == [sum(filled[:i]) for i in range(len(filled) + 1)]
    )
    assert plan.fla.chunk_indices.tolist() == [[i, c] for i, n in enumerate(filled) for c in range(-(-n // 64))]
    assert (plan.fla.pieces is None) == (len(filled) == len(lengths))


def norm_inputs(tokens: int, heads: int, width: int, dtype: torch.dtype, device: str = DEVICE) -> tuple[Any, ...]:
    o = torch.randn(tokens, heads, width, device=device).to(dtype)
    z = torch.randn(tokens, heads * width + 5, device=device).to(dtype)[:, 2 : heads * width + 2]
    return o, z, torch.randn(width, device=device).to(dtype), 1e-6


def test_gated_norm_is_the_scalar_rule() -> None:
    o, z, weight, eps = norm_inputs(2, 3, 5, torch.float32, "cpu")
    out = reference.gated_norm(o, z, weight, eps)
    for t in range(2):
        for h in range(3):
            row = o[t, h].tolist()
            scale = 1 / math.sqrt(sum(n * n for n in row) / 5 + eps)
            for j in range(5):
                gate = float(z[t, 5 * h + j])
                expected = float(weight[j]) * row[j] * scale * gate / (1 + math.exp(-gate))
                assert float(out[t, 5 * h + j]) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_sigmoid_gate() -> None:
    o, z, weight, eps = norm_inputs(5, 3, 16, torch.float32)
    plain = reference.gated_norm(o, torch.full_like(z, 30.0), weight, eps) / 30
    expected = plain * torch.sigmoid(z)
    assert relative_rms(reference.gated_norm(o, z, weight, eps, True), expected) < 1e-5
    for impl in ("triton", "check"):
        out = GdnPrefill(choice("gdn_prefill", impl)).norm(o, z, weight, eps, True)
        assert relative_rms(out, expected) < checking.RELATIVE_RMS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    o, z, weight, eps = norm_inputs(9, 4, 32, dtype, "cpu")
    module = modeling.Qwen3_5RMSNormGated(32, eps)
    module.weight.data = weight
    expected = module(o.reshape(-1, 32), z.reshape(-1, 32)).view(9, 128)
    assert relative_rms(reference.gated_norm(o, z, weight, eps), expected) < 1e-6


@pytest.mark.parametrize(("tokens", "heads", "width"), [(0, 2, 16), (1, 1, 7), (5, 3, 48), (70, 6, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_gated_norm(
    tokens: int, heads: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = norm_inputs(tokens, heads, width, dtype)
    op = GdnPrefill(choice("gdn_prefill", "triton"))
    with poisoned_outputs(monkeypatch):
        out = op.norm(*inputs)
    assert out.shape == (tokens, heads * width)
    assert relative_rms(out, reference.gated_norm(*inputs)) < checking.RELATIVE_RMS[dtype]


def test_check_mode_compares_the_gated_norm() -> None:
    op = GdnPrefill(choice("gdn_prefill", "check"))
    inputs = norm_inputs(3, 2, 16, torch.float32)
    op.norm(*inputs)
    op._norm = lambda *args: reference.gated_norm(*args) + 0.1
    with pytest.raises(checking.KernelCheckError, match="gated norm"):
        op.norm(*inputs)


@pytest.fixture
def fake_fla(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the package with the one function used: the same rule, sequence by sequence, from its own arguments."""
    module = types.ModuleType(fla.MODULE)
    module.calls = []

    def chunk_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert scale is None and output_final_state and state_v_first
        assert use_qk_l2norm_in_kernel and use_beta_sigmoid_in_kernel and kwargs["use_gate_in_kernel"]
        assert kwargs["chunk_size"] == 64 and cu_seqlens.dtype == chunk_indices.dtype == torch.int64
        assert all(x.is_contiguous() and x.shape[0] == 1 for x in (q, k, v, g, beta))
        module.calls.append(cu_seqlens_cpu.numpy().tolist())
        wide = reference.prepare(q[0], k[0], v[0], g[0], beta[0], kwargs["A_log"], kwargs["dt_bias"])
        out, states = torch.empty_like(v), torch.empty_like(initial_state)
        ends = module.calls[-1]
        for i, (first, last) in enumerate(pairwise(ends)):
            o, states[i] = reference.delta_rule_tokens(*(x[:, first:last] for x in wide), initial_state[i])
            out[0, first:last] = o.transpose(0, 1)
        return out, states

    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fla.MODULE, module)
    monkeypatch.setattr(fla, "installed_version", lambda: "0.6.0")
    return module


@pytest.mark.parametrize("no_slot", [[], [1], [0, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("lengths", [[3, 70, 1, 5], [3, 0, 66, 5]])
def test_the_adapter_is_the_reference(
    lengths: list[int], no_slot: list[int], fake_fla: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_inputs(lengths, device="cpu", fla=True)
    x.slots[no_slot] = -1
    expected, states = x.call(reference.gdn_prefill, chunked=False)

    def read_back(*args: Any) -> None:
        raise AssertionError("the adapter reads a tensor on the host")

    op = GdnPrefill(choice("gdn_prefill", "fla"))
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "nonzero"):
            patch.setattr(torch.Tensor, name, read_back)
        out, state = x.call(op)
    assert relative_rms(out, expected) < 1e-6
    torch.testing.assert_close(state, states, equal_nan=True)
    filled = [n for n in lengths if n]
    assert fake_fla.calls == [[sum(filled[:i]) for i in range(len(filled) + 1)]]


def test_the_adapter_with_nothing_to_do(fake_fla: types.ModuleType) -> None:
    op = GdnPrefill(choice("gdn_prefill", "fla"))
    x = make_inputs([0], device="cpu")
    x.plan = op.plan([0], "cpu")
    out, _ = x.call(op)
    assert out.shape == (0, 2, 16) and fake_fla.calls == []


def test_flag_off_selects_it_on_cuda(fake_fla: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAG, "0")
    chosen = choose_op("gdn_prefill", "cuda")
    assert (chosen.impl, chosen.why) == ("fla", f"{FLAG}=0; fla-core is installed")
    assert choose_op("gdn_prefill", "cpu").impl == "reference"
    monkeypatch.setenv(FLAG, "1")
    assert choose_op("gdn_prefill", "cuda").impl == "triton"
    monkeypatch.setenv(FLAG, "check")
    assert choose_op("gdn_prefill", "cuda").impl == "check"


def test_why_it_cannot_be_used(fake_fla: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAG, "0")
    fake_fla.chunk_gated_delta_rule = lambda q, k, v, g, beta, cu_seqlens=None: None
    assert choose_op("gdn_prefill", "cuda").why == f"{FLAG}=0; fla-core 0.6.0 lacks cu_seqlens_cpu"
    monkeypatch.setitem(sys.modules, fla.MODULE, None)
    chosen = choose_op("gdn_prefill", "cuda")
    assert chosen.impl == "reference" and "fla-core 0.6.0 does not load" in chosen.why
    monkeypatch.setattr(fla, "installed_version", lambda: None)
    assert choose_op("gdn_prefill", "cuda").why == f"{FLAG}=0; fla-core is not installed"
