"""Slots of per-request state, and their copies in host memory."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.errors import StartupError
from freetoken.hardware import probe
from freetoken.models.config import LinearAttentionConfig, ModelConfig
from freetoken.models.state import StateSpec, linear_attention_states
from freetoken.runner.memory import GIB, STAGED_STATES, plan_states, state_slot_bytes
from freetoken.runner.state_pool import StatePool

DEVICE = "cuda" if probe().usable_gpu else "cpu"
SPECS = (
    StateSpec(name="conv", layers=3, shape=(4, 5)),
    StateSpec(name="rec", layers=2, shape=(2, 3, 3), dtype="float32"),
)


def make_pool(rows: int = 6, blocks: int = 4, dtype: torch.dtype = torch.bfloat16) -> StatePool:
    pool = StatePool(SPECS, rows=rows, blocks=blocks, dtype=dtype, device=DEVICE)
    for slot in range(rows + 1):
        write(pool, slot, -1 - slot)
    return pool


def write(pool: StatePool, slot: int, value: float) -> None:
    for spec in SPECS:
        for layer in range(spec.layers):
            pool.layer(spec.name, layer)[slot] = value + layer / 8


def holds(pool: StatePool, slot: int, value: float) -> bool:
    """Whether every element of every layer of the slot is that of :func:`write`."""
    return all(
        bool((pool.layer(spec.name, layer)[slot] == value + layer / 8).all())
        for spec in SPECS
        for layer in range(spec.layers)
    )


def test_shapes_and_layout() -> None:
    pool = make_pool()
    conv, rec = pool.layer("conv", 2), pool.layer("rec", 1)
    assert (conv.shape, conv.dtype, rec.shape, rec.dtype) == ((7, 4, 5), torch.bfloat16, (7, 2, 3, 3), torch.float32)
    assert conv[3].is_contiguous() and conv.stride(0) == 3 * 20 and rec.stride(0) == 2 * 18
    assert pool.slots == 7
    info = pool.info()
    assert info["slot_bytes"] == state_slot_bytes(SPECS, "bfloat16") == 3 * 20 * 2 + 2 * 18 * 4
    assert info["bytes"] == 7 * info["slot_bytes"] and info["host_bytes"] == 4 * info["slot_bytes"]
    assert [kind["dtype"] for kind in info["kinds"]] == ["bfloat16", "float32"]


def test_a_snapshot_is_of_the_moment_and_touches_one_block() -> None:
    pool = make_pool()
    write(pool, 2, 5)
    pool.snapshot([(2, 1)])
    write(pool, 2, 6)
    pool.restore([(4, 1)])
    assert holds(pool, 4, 5) and holds(pool, 2, 6)
    assert all(holds(pool, slot, -1 - slot) for slot in (0, 1, 3, 5, 6))


def test_one_block_goes_to_several_slots() -> None:
    pool = make_pool()
    pool.snapshot([(0, 3)])
    pool.restore([(slot, 3) for slot in (1, 5)])
    assert holds(pool, 1, -1) and holds(pool, 5, -1) and holds(pool, 0, -1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 5))
def test_blocks_are_used_again_at_once(seed: int, blocks: int) -> None:
    """Any order of writes, snapshots (more at once than staging holds) and restores, against a dictionary."""
    draw = random.Random(seed)
    pool = make_pool(blocks=blocks)
    slots = {slot: -1.0 - slot for slot in range(6)}
    kept: dict[int, float] = {}
    for value in range(40):
        slot = draw.randrange(6)
        write(pool, slot, value)
        slots[slot] = value
        pairs = [(draw.randrange(6), draw.randrange(blocks)) for _ in range(draw.randrange(2 * STAGED_STATES))]
        pool.snapshot(pairs)
        kept |= {block: slots[slot] for slot, block in pairs}
        restored = {draw.randrange(6): block for block in draw.sample(sorted(kept), min(len(kept), 2))}
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        pool.restore(list(restored.items()))
        slots |= {slot: kept[block] for slot, block in restored.items()}
        assert all(holds(pool, slot, value) for slot, value in slots.items())


def test_no_blocks() -> None:
    pool = make_pool(blocks=0)
    pool.snapshot([])
    pool.restore([])
    assert pool.info()["host_bytes"] == 0


@pytest.mark.gpu
def test_copies_do_not_hold_up_the_host_and_keep_their_order() -> None:
    """Snapshot, change, snapshot and restore behind a long kernel: all enqueued before it ends."""
    pool = make_pool(dtype=torch.float32)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for value in range(10):
        write(pool, 1, value)
        pool.snapshot([(1, value % 2)])
    assert not torch.cuda.current_stream().query(), "a call waited for the device"
    torch.cuda.synchronize()
    pool.restore([(2, 0), (3, 1)])
    assert holds(pool, 2, 8) and holds(pool, 3, 9)


@pytest.mark.gpu
def test_pools_made_and_dropped_give_their_page_locks_back() -> None:
    for _ in range(20):
        make_pool(blocks=4096)


# --- how many fit ----------------------------------------------------------------------------------------------------


def plan(rows: int = 256, gigabytes: float = 40, staged: bool = True, specs: tuple[StateSpec, ...] = ()):  # type: ignore[no-untyped-def]
    big = specs or (StateSpec(name="rec", layers=48, shape=(48, 128, 128), dtype="float32"),)
    free = int(gigabytes * GIB)
    return plan_states(
        big, dtype="bfloat16", rows=rows, staged=staged, total_bytes=free, free_bytes=free, fraction=1.0, step_bytes=0
    )


def test_a_model_without_state_costs_nothing() -> None:
    none = plan_states(
        (), dtype="bfloat16", rows=9, staged=True, total_bytes=0, free_bytes=0, fraction=0.5, step_bytes=1
    )
    assert (none.rows, none.device_bytes, none.limited, none.blocks(GIB, 100)) == (9, 0, False, 0)


def test_all_rows_where_they_fit() -> None:
    """144 MiB a request: 64 rows, a padding slot and those in staging."""
    found = plan(rows=64)
    assert (found.rows, found.limited) == (64, False)
    assert found.device_bytes == (64 + 1 + STAGED_STATES) * 144 * 2**20
    assert plan(rows=64, staged=False).device_bytes == 65 * 144 * 2**20


def test_fewer_rows_leave_half_for_kv_and_say_why() -> None:
    found = plan(rows=256)
    assert found.limited and found.rows == 20 * 1024 // 144 - 1 - STAGED_STATES
    assert "0.14 GiB of state a request" in found.reason and "50%" in found.reason


def test_one_request_may_take_more_than_half() -> None:
    assert plan(gigabytes=0.43).rows == 1


def test_not_even_one_names_the_flags() -> None:
    with pytest.raises(StartupError, match=r"one request: 0\.42 GiB .*--mem-fraction-static.*--max-prefill-tokens"):
        plan(gigabytes=0.3)


@given(rows=st.integers(1, 300), megabytes=st.integers(0, 10**5), staged=st.booleans())
def test_never_plans_more_than_there_is(rows: int, megabytes: int, staged: bool) -> None:
    try:
        found = plan(rows, megabytes / 1024, staged)
    except StartupError:
        assert megabytes < 3 * 144
        return
    assert 1 <= found.rows <= rows and found.device_bytes <= megabytes * 2**20
    assert found.rows == 1 or found.device_bytes <= megabytes * 2**19
    assert found.limited == (found.rows < rows)
    if found.limited and found.rows > STAGED_STATES:
        assert found.device_bytes + 144 * 2**20 > megabytes * 2**19, "one more would have fitted"


def test_blocks_are_bounded_by_memory_and_by_pages() -> None:
    found = plan()
    assert found.blocks(10 * 144 * 2**20 + 5, 10**6) == 10
    assert found.blocks(10 * 144 * 2**20, 5) == 4
    assert found.blocks(0, 100) == 0


def test_states_of_linear_attention() -> None:
    linear = LinearAttentionConfig(num_key_heads=2, num_value_heads=6, key_head_dim=3, value_head_dim=5, conv_width=3)
    model = ModelConfig(
        architecture="Qwen3_5ForCausalLM",
        name="m",
        vocab_size=9,
        hidden_size=8,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        linear_attention=linear,
    )
    conv, rec = linear_attention_states(model)
    assert (conv.layers, conv.shape, conv.dtype) == (2, (3, 42), None)
    assert (rec.layers, rec.shape, rec.dtype) == (2, (6, 5, 3), "float32")
    assert state_slot_bytes((conv, rec), "float16") == 2 * (3 * 42 * 2 + 6 * 5 * 3 * 4)
    assert model.kv_bytes_per_token(2) == 2 * 1 * 4 * 2
