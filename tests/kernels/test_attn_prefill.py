"""Prefill attention: the reference against scalar Python, the Triton kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from freetoken.kernels.attn_prefill.config import PrefillConfig, prefill_config, prefill_tiles
from freetoken.kernels.attn_prefill.triton import attn_prefill_triton
from runner.attention_batches import BOUND, DEVICE, Case, make_case, relative_rms

SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
WIDE = PrefillConfig(block_m=32, block_n=64, num_warps=4, num_stages=2)
TALL = PrefillConfig(block_m=64, block_n=16, num_warps=4, num_stages=2)


def launch(case: Case, config: PrefillConfig, q: torch.Tensor | None = None) -> torch.Tensor:
    """Run the kernel into a poisoned output; returns the prefill tokens' part."""
    q, fb = case.q if q is None else q, case.fb
    n = fb.num_decodes
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    tiles = prefill_tiles(fb.q_lens_host[n:], fb.seq_lens_host[n:], config.block_m)
    attn_prefill_triton(
        q,
        case.kv.k(0),
        case.kv.v(0),
        fb.page_table,
        fb.rows,
        fb.seq_lens,
        fb.q_starts,
        torch.tensor(tiles, dtype=torch.int32, device=q.device).view(-1, 2),
        out,
        case.scale,
        config,
        num_decodes=n,
    )
    assert out[:n].isnan().all()
    return out[n:].flatten(1)


def test_reference_against_scalar_python() -> None:
    case = make_case((), [(0, 3), (5, 4)], heads=4, kv_heads=2, head_dim=8, page_size=4)
    got, fb, token = case.expected().view(7, 4, 8), case.fb, 0
    for j, (prefix, q_len) in enumerate([(0, 3), (5, 4)]):
        for i in range(q_len):
            for head in range(4):
                keys, values = [], []
                for pos in range(prefix + i + 1):
                    page = int(fb.page_table[int(fb.rows[j]), pos // 4])
                    keys.append(case.kv.k(0)[page, head // 2, pos % 4].tolist())
                    values.append(case.kv.v(0)[page, head // 2, pos % 4].tolist())
                query = case.q[token, head].tolist()
                scores = [case.scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
                weights = [math.exp(s) for s in scores]
                want = [sum(w * v[d] for w, v in zip(weights, values, strict=True)) / sum(weights) for d in range(8)]
                assert got[token, head].tolist() == pytest.approx(want, rel=1e-4, abs=1e-6)
            token += 1


@pytest.mark.parametrize("config", [SMALL, WIDE, TALL], ids=["small", "wide", "tall"])
@pytest.mark.parametrize(
    "prefills",
    [[(0, 1)], [(0, 15), (0, 16), (0, 17)], [(16, 5), (0, 65), (15, 1)], [(129, 40), (1, 31)]],
)
def test_prefixes(config: PrefillConfig, prefills: list[tuple[int, int]]) -> None:
    case = make_case((), prefills, heads=4, kv_heads=2, seed=len(prefills), device=DEVICE)
    assert relative_rms(launch(case, config), case.expected()) < BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(3, 3, 64, 1), (9, 3, 64, 16), (8, 2, 80, 64), (7, 1, 128, 16), (8, 1, 16, 16), (2, 1, 256, 16)],
)
def test_shapes_after_decodes(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    case = make_case(
        (3, 20),
        [(31, 18), (0, 40)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=DEVICE,
        seed=head_dim,
    )
    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 0)
    got = launch(case, prefill_config(head_dim, dtype, capability))
    assert relative_rms(got, case.expected()[2:]) < BOUND[dtype]


def test_queries_inside_a_wider_row() -> None:
    case = make_case((5,), [(3, 20)], heads=4, kv_heads=2, device=DEVICE)
    fused = torch.full((21, 12, 16), float("nan"), device=DEVICE)
    fused[:, 2:6] = case.q
    assert relative_rms(launch(case, SMALL, fused[:, 2:6]), case.expected()[1:]) < BOUND[torch.float32]


@pytest.mark.parametrize(("q_lens", "seq_lens"), [((1,), (1,)), ((64, 65, 7), (64, 165, 1007)), ((300,), (301,))])
def test_tiles(q_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
    """Every query block once; what reads most tokens first."""
    tiles = prefill_tiles(q_lens, seq_lens, 64)
    assert sorted(tiles) == [(j, b) for j, n in enumerate(q_lens) for b in range(math.ceil(n / 64))]
    reach = [seq_lens[j] - q_lens[j] + min(q_lens[j], 64 * (b + 1)) for j, b in tiles]
    assert reach == sorted(reach, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "prefills"),
    [
        (32, 8, 128, [(0, 2048)] * 2),
        (32, 8, 128, [(4000, 100), (0, 1), (17, 700)]),
        (9, 3, 64, [(0, 1000), (333, 333)]),
        (16, 2, 256, [(100, 515)]),
    ],
)
def test_bf16_at_size(heads: int, kv_heads: int, head_dim: int, prefills: list[tuple[int, int]]) -> None:
    case = make_case(
        (), prefills, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, device="cuda"
    )
    config = prefill_config(head_dim, torch.bfloat16, torch.cuda.get_device_capability())
    assert relative_rms(launch(case, config), case.expected()) < BOUND[torch.bfloat16]
