"""Decode attention: the reference against scalar Python, the Triton kernels against the reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from freetoken.kernels.attn_decode.config import DecodeConfig, decode_config, join_config, tile_bytes
from freetoken.kernels.attn_decode.reference import attn_decode_reference
from freetoken.kernels.attn_decode.triton import attn_decode_triton, workspace_size
from freetoken.kernels.integers import next_power_of_two
from runner.attention_batches import BOUND, DEVICE, Case, make_case, relative_rms


def scalar_decode(case: Case, i: int, head: int) -> list[float]:
    """One head of one decode, in Python floats."""
    fb, page_size = case.fb, case.kv.page_size
    kv_head = head // (case.num_heads // case.kv.num_kv_heads)
    keys, values = [], []
    for pos in range(int(fb.seq_lens[i])):
        page = int(fb.page_table[int(fb.rows[i]), pos // page_size])
        keys.append(case.kv.k(0)[page, kv_head, pos % page_size].tolist())
        values.append(case.kv.v(0)[page, kv_head, pos % page_size].tolist())
    query = case.q[i, head].tolist()
    weights = [math.exp(case.scale * sum(a * b for a, b in zip(query, key, strict=True))) for key in keys]
    total = sum(weights)
    return [sum(w * v[d] for w, v in zip(weights, values, strict=True)) / total for d in range(len(query))]


def launch(
    case: Case, config: DecodeConfig, q: torch.Tensor | None = None, workspace: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the kernels into a poisoned output, by default with a poisoned workspace of exactly the size asked for."""
    q, fb = case.q if q is None else q, case.fb
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = torch.full((workspace_size(*q.shape, config.splits),), float("nan"), device=q.device)
    k, v = case.kv.k(0), case.kv.v(0)
    attn_decode_triton(q, k, v, fb.page_table, fb.rows, fb.seq_lens, out, case.scale, config, workspace)
    return out.flatten(1)


def test_reference_against_scalar_python() -> None:
    case = make_case((1, 5, 8), heads=4, kv_heads=2, head_dim=8, page_size=4)
    got = case.expected().view(3, 4, 8)
    for i in range(3):
        for head in range(4):
            assert got[i, head].tolist() == pytest.approx(scalar_decode(case, i, head), rel=1e-4, abs=1e-6)


ONE = DecodeConfig(block_n=32, whole=32, min_share=32, splits=1, num_warps=4, num_stages=2)
MANY = dataclasses.replace(ONE, splits=5)
COARSE = dataclasses.replace(ONE, block_n=16, whole=64, min_share=48, splits=3)
FINE = dataclasses.replace(ONE, whole=0, min_share=16, splits=40)


@pytest.mark.parametrize("config", [ONE, MANY, COARSE, FINE], ids=["one", "many", "coarse", "fine"])
@pytest.mark.parametrize("lens", [(1,), (15, 16, 17), (200, 1, 33, 64), (31, 32, 33, 159, 160, 161)])
def test_splits(config: DecodeConfig, lens: tuple[int, ...]) -> None:
    case = make_case(lens, heads=6, kv_heads=2, seed=len(lens), device=DEVICE)
    assert relative_rms(launch(case, config), case.expected()) < BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(3, 3, 64, 1), (9, 3, 64, 16), (8, 2, 80, 64), (14, 2, 128, 16), (8, 1, 16, 16), (20, 1, 96, 16), (2, 1, 256, 16)],
)
def test_shapes(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    case = make_case(
        (1, 130, page_size + 1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=DEVICE,
        seed=head_dim,
    )
    size = case.q.element_size()
    config = decode_config(head_dim, heads // kv_heads, 3, 4096, 132, num_kv_heads=kv_heads, element_size=size)
    config = dataclasses.replace(config, whole=16, min_share=48)
    assert config.splits > 2
    assert relative_rms(launch(case, config), case.expected()) < BOUND[dtype]


def test_many_parts_of_a_narrow_slice() -> None:
    """Slices that do not divide a head's output, one sequence whole; one workspace serves call after call."""
    config = dataclasses.replace(ONE, whole=16, min_share=16, splits=40)
    assert join_config(80, config.splits).width == 64
    case = make_case((528, 100, 16), heads=6, kv_heads=1, head_dim=80, dtype=torch.float16, device=DEVICE)
    workspace = torch.full((workspace_size(*case.q.shape, config.splits),), float("nan"), device=DEVICE)
    outs = [launch(case, config, workspace=workspace) for _ in range(2)]
    assert relative_rms(outs[0], case.expected()) < BOUND[torch.float16]
    assert torch.equal(*outs)


def test_parts_with_scores_far_apart() -> None:
    """The weights are those of a softmax over everything, without overflow. Such scores are known to fewer places."""
    case = make_case((64, 64), heads=4, kv_heads=2, device=DEVICE)
    case.q.mul_(60.0)
    keys = case.kv.k(0)
    keys[case.fb.page_table[case.fb.rows[0], :2].long()] *= 20.0
    assert relative_rms(launch(case, FINE), case.expected()) < 1e-3


def test_the_sequence_alone_decides_how_it_is_cut() -> None:
    """Same bits at another place of the batch, beside others."""
    case = make_case((70, 33, 129, 200), heads=4, kv_heads=2, device=DEVICE)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    fb = dataclasses.replace(case.fb, rows=case.fb.rows[order], seq_lens=case.fb.seq_lens[order])
    moved = dataclasses.replace(case, fb=fb, q=case.q[order])
    assert torch.equal(launch(case, FINE)[order], launch(moved, FINE))


def test_short_sequences_leave_no_partial_results() -> None:
    """Up to ``whole`` tokens one part writes the output itself."""
    case = make_case((64, 1, 63), heads=6, kv_heads=2, device=DEVICE)
    workspace = torch.full((workspace_size(3, 6, 16, COARSE.splits),), float("nan"), device=DEVICE)
    assert relative_rms(launch(case, COARSE, workspace=workspace), case.expected()) < BOUND[torch.float32]
    assert workspace.isnan().all()


def test_calls_in_a_row_share_a_workspace() -> None:
    """Kernels that start early neither read the partial results of the call before nor overwrite them too soon."""
    lens, size = (70, 20, 129), {"heads": 4, "kv_heads": 2, "head_dim": 16}
    if DEVICE == "cuda":
        lens, size = (8000, 100, 3000), {"heads": 24, "kv_heads": 4, "head_dim": 256}
    case = make_case(lens, device=DEVICE, dtype=torch.float16, **size)
    queries = [torch.randn_like(case.q) for _ in range(3 if DEVICE == "cpu" else 40)]
    splits = 9 if DEVICE == "cpu" else 66
    config = dataclasses.replace(ONE, splits=splits, num_warps=8, num_stages=3)
    alone = [launch(case, config, q) for q in queries]
    workspace = torch.full((workspace_size(*case.q.shape, splits),), float("nan"), device=DEVICE)
    fb, outs = case.fb, [torch.full_like(case.q, float("nan")) for _ in queries]
    for q, out in zip(queries, outs, strict=True):
        where = (case.kv.k(0), case.kv.v(0), fb.page_table, fb.rows, fb.seq_lens)
        attn_decode_triton(q, *where, out, case.scale, config, workspace)
    assert all(torch.equal(out.flatten(1), want) for out, want in zip(outs, alone, strict=True))


def test_queries_inside_a_wider_row() -> None:
    case = make_case((40, 7), heads=4, kv_heads=2, device=DEVICE)
    fused = torch.full((2, 12, 16), float("nan"), device=DEVICE)
    fused[:, 2:6] = case.q
    assert relative_rms(launch(case, MANY, fused[:, 2:6]), case.expected()) < BOUND[torch.float32]


def test_padding_changes_no_bit() -> None:
    """A batch padded with one-token lanes on page 0, as a graph's bucket is, gives the same bits."""
    case = make_case((70, 33, 129), heads=4, kv_heads=2, device=DEVICE)
    case.kv.storage[:, :, 0] = 1.0
    fb = case.fb
    spare = fb.page_table.shape[0] - 1
    fb.page_table[spare] = 0
    padded = dataclasses.replace(
        case,
        fb=dataclasses.replace(
            fb,
            num_decodes=4,
            rows=torch.cat([fb.rows, fb.rows.new_tensor([spare])]),
            seq_lens=torch.cat([fb.seq_lens, fb.seq_lens.new_tensor([1])]),
        ),
        q=torch.cat([case.q, case.q[:1]]),
    )
    configs = [decode_config(16, 2, batch, 4096, 16, num_kv_heads=2, element_size=4) for batch in (3, 4)]
    assert configs[0] == configs[1] and configs[0].splits > 1
    assert torch.equal(launch(case, configs[0]), launch(padded, configs[1])[:3])


def test_large_page_numbers() -> None:
    """Offsets past 2**31 elements are computed in 64 bits: the rest of the pool is never touched."""
    head_dim, page_size = 256, 64
    page = 2**31 // (head_dim * page_size) + 1
    pool = torch.empty((page + 1, 1, page_size, head_dim), dtype=torch.float16, device=DEVICE)
    assert page * pool.stride(0) > 2**31
    pool[page] = torch.randn(pool.shape[1:], device=DEVICE)
    q = torch.randn(1, 2, head_dim, dtype=pool.dtype, device=DEVICE)
    table = torch.tensor([[page]], dtype=torch.int32, device=DEVICE)
    rows, lens = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([50], dtype=torch.int32, device=DEVICE)
    want = attn_decode_reference(q, pool, pool, table, rows, lens, 0.1)
    out = torch.full_like(q, float("nan"))
    attn_decode_triton(q, pool, pool, table, rows, lens, out, 0.1, ONE, torch.empty(0, device=DEVICE))
    assert relative_rms(out, want) < BOUND[torch.float16]


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9, 64, 100, 256])
@pytest.mark.parametrize("max_seq_len", [16, 2048, 131072])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (4, 6), (1, 32)])
def test_config(batch: int, max_seq_len: int, head_dim: int, kv_heads: int, group: int) -> None:
    config = decode_config(head_dim, group, batch, max_seq_len, 132, num_kv_heads=kv_heads)
    assert 1 <= config.splits <= max(1, -(-max_seq_len // config.min_share))
    assert config.splits == 1 or max_seq_len > config.whole >= config.min_share
    # Programs of few sequences all fit the GPU at once; those of many are four a sequence at the most.
    programs, small = next_power_of_two(batch) * kv_heads, tile_bytes(config.block_n, group, 2 * head_dim)
    assert programs * config.splits <= (3 if small <= 72 << 10 else 2) * 132 or config.splits <= 4
    assert small * (config.num_stages - 1) // 2 <= 88 << 10
    join = join_config(head_dim, config.splits)
    assert join.parts >= config.splits and join.width <= head_dim
    assert join.parts * join.width <= 32 * 32 * join.num_warps or join.num_warps == 4


def test_few_but_deep_sequences_are_one_even_wave() -> None:
    """One request of Qwen3.5-27B and of Qwen3-8B on 132 multiprocessors, and what lies below leaves no second kernel to launch."""
    config = decode_config(256, 6, 1, 32768, 132, num_kv_heads=4)
    assert config.splits == 64 and join_config(256, 64).parts == 64 and join_config(256, 66).parts == 128
    assert decode_config(128, 4, 1, 32768, 132, num_kv_heads=8).splits == 49
    assert decode_config(256, 6, 1, config.whole, 132, num_kv_heads=4).splits == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "lens"),
    [
        (32, 8, 128, [1024] * 64),
        (32, 8, 128, [37]),
        (32, 8, 128, [30000]),
        (9, 3, 64, [1, 700, 15, 4096]),
        (16, 2, 256, [513, 2048, 1]),
        (24, 4, 256, [136]),
        (24, 4, 256, [8200]),
        (24, 4, 256, [136, 8200, 193, 1, 3000] * 6),
    ],
)
def test_bf16_at_size(heads: int, kv_heads: int, head_dim: int, lens: list[int]) -> None:
    case = make_case(lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
    config = decode_config(head_dim, heads // kv_heads, len(lens), case.max_pages * 16, 132, num_kv_heads=kv_heads)
    out = launch(case, config)
    assert relative_rms(out, case.expected()) < BOUND[torch.bfloat16]
    assert all(torch.equal(launch(case, config), out) for _ in range(20))
