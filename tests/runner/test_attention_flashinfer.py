"""The wiring of the FlashInfer backend, against a module of the same calls that computes with the reference."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

from freetoken.errors import StartupError
from freetoken.kernels.attn_decode.reference import attn_decode_reference
from freetoken.kernels.attn_prefill.reference import attn_prefill_reference
from freetoken.runner import attention_flashinfer
from runner.attention_batches import Case, build, captured, make_case, relative_rms


class _Wrapper:
    """What both wrappers share: page lists as FlashInfer documents them, turned back into a table."""

    def _take_pages(self, indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, head_dim: int, page: int):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert indptr.device.type == last.device.type == "cpu"
        assert len(indptr) == len(last) + 1 and indptr[0] == 0 and indptr[-1] == len(indices)
        assert bool(((last >= 1) & (last <= page)).all())
        counts = indptr.diff()
        self.seq_lens = (counts - 1) * page + last
        self.table = torch.zeros(len(last), int(counts.max()), dtype=torch.int32)
        for i, count in enumerate(counts.tolist()):
            self.table[i, :count] = indices[indptr[i] : indptr[i + 1]]
        self.shape = (heads, kv_heads, head_dim, page)

    def _check(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, head_dim, page = self.shape
        assert q.is_contiguous() and q.shape[1:] == (heads, head_dim)
        assert isinstance(cache, tuple) and all(t.shape[1:] == (kv_heads, page, head_dim) for t in cache)
        return torch.arange(len(self.seq_lens))


class FakeDecode(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.graph, self.tensor_cores = use_cuda_graph, use_tensor_cores
        assert all((b is not None) == use_cuda_graph for b in self.buffers)

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, sm_scale, q_data_type, kv_data_type):  # fmt: skip
        if self.graph:
            assert len(self.buffers[0]) == len(indptr) and len(self.buffers[2]) == len(last_page_len)
            assert len(indices) <= len(self.buffers[1])
        self._take_pages(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size)
        self.scale, self.dtypes = sm_scale, (q_data_type, kv_data_type)

    def run(self, q, paged_kv_cache, *, out):
        rows = self._check(q, paged_kv_cache)
        out.copy_(attn_decode_reference(q, *paged_kv_cache, self.table, rows, self.seq_lens, self.scale))


class FakePrefill(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND"

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, *, causal, sm_scale, q_data_type, kv_data_type):  # fmt: skip
        assert causal and qo_indptr.dtype == torch.int32
        self._take_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size)  # fmt: skip
        self.starts, self.scale = qo_indptr, sm_scale

    def run(self, q, paged_kv_cache, *, out):
        rows = self._check(q, paged_kv_cache)
        got = attn_prefill_reference(q, *paged_kv_cache, self.table, rows, self.seq_lens, self.starts, self.scale)
        out.copy_(got)


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.__version__ = "0"
    module.BatchDecodeWithPagedKVCacheWrapper = FakeDecode
    module.BatchPrefillWithPagedKVCacheWrapper = FakePrefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(attention_flashinfer, "WORKSPACE_BYTES", 1024)


def check(case: Case, backend: Any) -> None:
    assert relative_rms(backend.forward(0, case.q, case.fb), case.expected()) < 1e-5


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize(
    ("decodes", "prefills"),
    [((1, 16, 17, 40), []), ((), [(0, 5), (16, 1), (17, 20)]), ((33, 1), [(31, 18), (0, 16)])],
)
def test_eager(decodes: tuple[int, ...], prefills: list[tuple[int, int]]) -> None:
    case = dataclasses.replace(make_case(decodes, prefills, heads=8, kv_heads=2), scale=0.4)
    backend = build(case, "flashinfer", scale=0.4)
    backend.plan(case.fb)
    check(case, backend)
    assert backend.info()["tensor_core_decode"] is True


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize("host_lens", [True, False])
def test_captured_batch_is_planned_again(host_lens: bool) -> None:
    case = captured(make_case((20, 9, 1), max_pages=4))
    backend = build(case, "flashinfer")
    backend.plan(case.fb)
    check(case, backend)
    wrapper = backend._captured[3]
    later = captured(make_case((64, 33, 1), max_pages=4, seed=1))
    backend.kv = later.kv
    fb = dataclasses.replace(later.fb, seq_lens_host=(64, 33) if host_lens else ())
    backend.replan(fb)
    check(later, backend)
    assert backend._captured[3] is wrapper and wrapper.graph and backend.needs_replan


@pytest.mark.usefixtures("_fake")
def test_captured_prefill_is_refused() -> None:
    case = captured(make_case((), [(0, 3)]))
    with pytest.raises(ValueError, match="decodes only"):
        build(case, "flashinfer").plan(case.fb)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match="install flashinfer-python"):
        build(make_case((3,)), "flashinfer")
