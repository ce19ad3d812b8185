"""The layer of per-layer embeddings: scalar Python, transformers, and the same text in any pieces."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ple_rig import EPS, TINY, Piece, batch, content, make_embeddings, run, state_specs

from freetoken.errors import StartupError
from freetoken.kernels.ple_mix.reference import grouped_norm
from freetoken.models.config import LINEAR_ATTENTION, ModelConfig
from freetoken.models.layers import load
from freetoken.models.ple import PerLayerEmbeddings, PleLayer
from freetoken.models.ple_config import PleConfig
from freetoken.models.state import ple_states
from freetoken.runner.memory import state_slot_bytes
from freetoken.runner.state_pool import StatePool
from ple_geometry import SMALL

ROWS = 4


def make_pool(config: PleConfig, *, blocks: int = 4, dirty: bool = True) -> StatePool:
    """Slots that hold what an earlier request left: nothing in them may be trusted."""
    pool = StatePool(state_specs(config), rows=ROWS, blocks=blocks, dtype=torch.float32, device="cpu")
    if dirty:
        spoil(pool, config, range(ROWS + 1))
    return pool


def spoil(pool: StatePool, config: PleConfig, slots: range) -> None:
    for slot in slots:
        pool.layer("ple_context", 0)[slot] = 3
        for layer in range(len(config.layers)):
            pool.layer("ple_history", layer)[slot] = float("nan")


# --- scalar Python ---------------------------------------------------------------------------------------------------


def scalar_layer(layer: PleLayer, embeddings: torch.Tensor, residual: torch.Tensor) -> list[list[float]]:
    """All tokens of one text through one layer, with Python's own numbers."""
    c = layer.config
    weight = layer.projection.weight.tolist()
    gated, normed, out = [], [], []

    def norm(x: list[float], scale: list[float]) -> list[float]:
        root = math.sqrt(sum(v * v for v in x) / len(x) + EPS)
        return [v / root * s for v, s in zip(x, scale, strict=True)]

    for e, r in zip(embeddings.tolist(), residual.tolist(), strict=True):
        projected = [sum(a * b for a, b in zip(row, e, strict=True)) for row in weight]
        value = projected[c.channels :]
        us, xs = [], []
        for stream in range(c.streams):
            part = slice(stream * c.hidden_size, (stream + 1) * c.hidden_size)
            key = norm(projected[: c.channels][part], layer.norm_key[stream].tolist())
            query = norm(r[part], layer.norm_query[stream].tolist())
            u = sum(a * b for a, b in zip(key, query, strict=True)) / math.sqrt(c.hidden_size)
            root = math.copysign(math.sqrt(max(abs(u), 1e-6)), u) if u else 0.0
            opening = 1 / (1 + math.exp(-root))
            us += [opening * v for v in value]
            xs += norm([opening * v for v in value], layer.norm_conv[stream].tolist())
        gated.append(us)
        normed.append(xs)
        mixed = []
        for channel in range(c.channels):
            total = 0.0
            for tap in range(c.conv_width):
                at = len(normed) - 1 - (c.conv_width - 1 - tap) * c.dilation
                total += layer.conv[tap, channel].item() * normed[at][channel] if at >= 0 else 0.0
            mixed.append(total / (1 + math.exp(-total)))
        out.append([a + b + m for a, b, m in zip(r, us, mixed, strict=True)])
    return out


def test_a_text_against_scalar_python() -> None:
    """Long enough for every tap, the boundary among the ids."""
    embeddings = make_embeddings(TINY, seed=3)
    ids = [5, 9, 7, 11, 12, 3, 7, 7, 20, 21, 22, 23, 24]
    (found,) = run(embeddings, make_pool(TINY), [Piece(1, ids, 0)], [6])
    residual = content(TINY, 6, range(len(ids)))
    for index, layer in enumerate(embeddings.layers.values()):
        rows = embeddings.tables[index].lookup(found.rows[index])
        expected = torch.tensor(scalar_layer(layer, rows, residual))
        torch.testing.assert_close(found.outputs[index], expected, rtol=1e-4, atol=1e-5)
        residual = found.outputs[index]


@pytest.mark.parametrize(("u", "expected"), [(4.0, 0.8808), (-4.0, 0.1192), (0.0, 0.5), (1e-8, 0.50025)])
def test_the_gate_at_the_published_points(u: float, expected: float) -> None:
    """One stream of one channel: its norms give a sign each, so the product is that of the weights."""
    config = replace(TINY, layers=(0,), streams=1, hidden_size=1, embed_dim=4)
    embeddings = make_embeddings(config)
    layer = embeddings.layers[0]
    layer.projection.weight.fill_(0.25)
    layer.norm_key.fill_(u)
    layer.norm_query.fill_(1.0)
    gated, _ = layer.gate(embeddings.mix, torch.ones(1, 4), torch.full((1, 1), 3.0))
    assert gated.item() == pytest.approx(expected, abs=5e-5)


def test_the_convolution_at_the_published_values() -> None:
    """Weights 1 to 4 oldest first, history 1 to 9, inputs 10 and 11: 70 and 80 before SiLU, and history 3 to 11."""
    config = replace(TINY, layers=(0,), streams=1, hidden_size=1, embed_dim=4)
    embeddings, pool = make_embeddings(config), make_pool(config)
    layer, history = embeddings.layers[0], pool.layer("ple_history", 0)
    layer.conv[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer.gate = lambda m, e, r: (torch.zeros_like(r), x[: len(r)])  # type: ignore[method-assign]
    for start, pieces in ((9, [[10.0, 11.0]]), (18, [[10.0], [11.0]]), (9, [[10.0], [11.0]])):
        for entry in range(9):
            history[2, (start - 9 + entry) % 9] = entry + 1.0
        out = []
        decode = len(pieces) == 2 and start == 9
        for piece in pieces:
            x = torch.tensor(piece)[:, None]
            at = start + len(out)
            (found,) = run(embeddings, pool, [Piece(2, [5] * len(piece), at, decode)], [0])
            out += (found.outputs[0] - content(config, 0, range(at, at + len(piece))))[:, 0].tolist()
        assert out == pytest.approx([70.0, 80.0], rel=1e-5)
        assert [history[2, (start + 2 + entry) % 9].item() for entry in range(9)] == list(range(3, 12))


def test_grouped_norm_is_each_groups_own() -> None:
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    out = grouped_norm(x, torch.tensor([[1.0, 2.0], [1.0, 1.0]]), 0.0 + 1e-12)
    torch.testing.assert_close(out[0, 0], torch.tensor([3.0, 8.0]) / math.sqrt(12.5))
    assert not out[0, 1].any()


# --- transformers ----------------------------------------------------------------------------------------------------


def hf_config(config: PleConfig, boundary: int) -> Any:
    transformers = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    return transformers.Qwen4ExpTextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        hc_count=config.streams,
        ple_layer_ids=[layer + 1 for layer in config.layers],
        ple_embed_dim=config.embed_dim,
        ple_conv_kernel_size=config.conv_width,
        ngram_size=config.ngram_size,
        heads_per_ngram=config.heads_per_ngram,
        ngram_vocab_size_base=config.vocab_base,
        make_ngram_vocab_size_divisible_by=config.divisible_by,
        seed=config.seed,
        eos_token_id=boundary,
        num_experts=4,
        num_experts_per_tok=2,
    )


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, layers=(0, 1)),
        replace(SMALL, layers=(2,), streams=2, hidden_size=24, ngram_size=2, conv_width=3, embed_dim=32, seed=99),
        replace(SMALL, layers=(0, 2), streams=3, hidden_size=20, ngram_size=4, heads_per_ngram=3, embed_dim=45),
    ],
    ids=["small", "bigrams", "four-grams"],
)
def test_every_layer_against_transformers(config: PleConfig) -> None:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    torch.manual_seed(len(config.layers))
    ours = make_embeddings(config)
    hf = hf_config(config, config.boundary_id)
    ids = torch.randint(0, config.vocab_size, (1, 40))
    ids[0, torch.rand(40) < 0.15] = config.boundary_id
    pool = make_pool(config)
    for index, layer in enumerate(config.layers):
        theirs = modeling.Qwen4ExpTextPLELayer(hf, layer, index)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        state = {f"model.layers.{layer}.ple.{name}": value for name, value in theirs.state_dict().items()}
        table = state.pop(f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.weight")
        found = config.constants(index)
        for name, part in (
            ("layer_multipliers", found.multipliers),
            ("ngram_heads_vocab_sizes", found.vocab_sizes),
            ("ngram_heads_offsets", found.offsets),
        ):
            assert tuple(state.pop(f"model.layers.{layer}.ple.ple_embedding.{name}").tolist()) == part
        with torch.inference_mode():
            load({n: s for m in ours.layers[layer].modules() for n, s in m.slots.items()}, frozenset(), state.items())
            ours.tables[index].stored.copy_(table.detach().view(torch.uint8))  # type: ignore[attr-defined]
            residual = torch.randn(1, 40, config.channels)
            expected = residual + theirs(residual, ids, None)
        only = replace(config, layers=(layer,))
        with torch.inference_mode():
            alone = _alone(ours, index, only)
            alone.constants = [ours.constants[index]]
            step = alone.begin(_one_piece(ids[0].tolist(), pool), pool)
            actual = alone.forward(layer, residual[0].clone(), step)
        torch.testing.assert_close(actual, expected[0], rtol=1e-4, atol=1e-4)


def _alone(ours: PerLayerEmbeddings, index: int, config: PleConfig) -> PerLayerEmbeddings:
    """One layer of ``ours``, whose ordinal stays what it was."""
    alone = make_embeddings(config)
    layer = ours.layers[config.layers[0]]
    kept, layer.index = layer.index, 0
    assert kept == index
    alone.layers = {config.layers[0]: layer}
    alone.attach([ours.tables[index]])
    return alone


def _one_piece(ids: list[int], pool: StatePool) -> Any:

    return batch([Piece(0, ids, 0)], pool)


# --- state -----------------------------------------------------------------------------------------------------------


def whole(embeddings: PerLayerEmbeddings, ids: list[int], text: int) -> Any:
    """The text in one piece, on a pool of its own."""
    return run(embeddings, make_pool(embeddings.config), [Piece(0, ids, 0)], [text])[0]


def expect(found: Any, expected: Any, start: int, what: str) -> None:
    """A piece's rows to the integer, its outputs up to rounding."""
    part = slice(start, start + len(found.rows[0]))
    for index, rows in enumerate(found.rows):
        assert torch.equal(rows, expected.rows[index][part]), f"{what}: rows of layer {index}"
        torch.testing.assert_close(found.outputs[index], expected.outputs[index][part], rtol=2e-4, atol=2e-5, msg=what)


@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_any_way_to_cut_a_text_gives_the_same(data: st.DataObject) -> None:
    """Three texts with a common beginning, served in slots that change hands: pieces, decodes, checkpoints, restores of them
    into other slots and for other texts, retractions and aborts, unused lanes beside the decodes."""
    embeddings, config = make_embeddings(TINY, seed=1), TINY
    draw = data.draw
    common = draw(st.lists(st.sampled_from([4, 5, 7, 30]), min_size=6, max_size=6))
    tails = [draw(st.lists(st.sampled_from([4, 7, 8, 31]), min_size=14, max_size=14)) for _ in range(3)]
    texts = [common + tail for tail in tails]
    with torch.inference_mode():
        expected = [whole(embeddings, ids, 0) for ids in texts]
        pool = make_pool(config)
        slot_of: dict[int, int] = {}
        done: dict[int, int] = {}
        kept: dict[int, tuple[int, int]] = {}
        for _ in range(draw(st.integers(6, 14))):
            for text in range(3):
                if text in slot_of:
                    if draw(st.integers(0, 7)) == 0:  # retracted, or aborted and sent again
                        slot = slot_of.pop(text)
                        if draw(st.booleans()):
                            spoil(pool, config, range(slot, slot + 1))
                    continue
                free = [slot for slot in range(ROWS) if slot not in slot_of.values()]
                slot_of[text] = draw(st.sampled_from(free))
                usable = [b for b, (owner, at) in kept.items() if texts[owner][:at] == texts[text][:at]]
                done[text] = 0
                if usable and draw(st.booleans()):
                    block = draw(st.sampled_from(usable))
                    pool.restore([(slot_of[text], block)])
                    done[text] = kept[block][1]
            pieces, owners = [], []
            for decode in (True, False):
                for text, slot in slot_of.items():
                    left = len(texts[text]) - done[text]
                    if text in owners or left == 0 or draw(st.integers(0, 3)) == 0:
                        continue
                    if decode and (done[text] == 0 or draw(st.booleans())):
                        continue
                    length = 1 if decode else draw(st.integers(1, min(left, 7)))
                    pieces.append(Piece(slot, texts[text][done[text] :][:length], done[text], decode))
                    owners.append(text)
                if decode and draw(st.booleans()):
                    pieces += [Piece(pool.slots - 1, [0], 0, True)] * 2
                    owners += [-1, -1]
            if not pieces:
                continue
            for piece, text, found in zip(
                pieces, owners, run(embeddings, pool, pieces, [0] * len(pieces)), strict=True
            ):
                if text < 0:
                    assert all(output.isfinite().all() for output in found.outputs)
                    continue
                expect(found, expected[text], piece.start, f"text {text} at {piece.start}")
                done[text] += len(piece.ids)
                check_state(pool, piece.slot, texts[text][: done[text]], embeddings, expected[text])
                if draw(st.booleans()):
                    block = draw(st.integers(0, pool.blocks - 1))
                    pool.snapshot([(piece.slot, block)])
                    kept[block] = (text, done[text])


def check_state(pool: StatePool, slot: int, ids: list[int], embeddings: PerLayerEmbeddings, expected: Any) -> None:
    """The slot holds the last ids, and the history that a text ending here leaves."""
    config = embeddings.config
    padded = [config.boundary_id] * 2 + ids
    assert pool.layer("ple_context", 0)[slot].tolist() == padded[-2:]
    residual = content(config, 0, range(len(ids)))
    for index, layer in enumerate(embeddings.layers.values()):
        rows = embeddings.tables[index].lookup(expected.rows[index][: len(ids)])
        _, normed = layer.gate(embeddings.mix, rows, residual)
        residual = expected.outputs[index][: len(ids)]
        ring = pool.layer("ple_history", index)[slot]
        for position in range(max(0, len(ids) - config.history), len(ids)):
            torch.testing.assert_close(ring[position % config.history], normed[position], rtol=2e-4, atol=2e-5)


def test_context_is_written_after_the_last_layer_alone() -> None:
    embeddings, pool = make_embeddings(TINY), make_pool(TINY)
    held = pool.layer("ple_context", 0)
    before = held.clone()
    fb = _one_piece([5, 6, 8], pool)
    step = embeddings.begin(fb, pool)
    residual = embeddings.forward(TINY.layers[0], content(TINY, 0, range(3)), step)
    assert torch.equal(held, before)
    embeddings.forward(TINY.layers[1], residual, step)
    assert held[0].tolist() == [6, 8] and torch.equal(held[1:], before[1:])


def test_a_step_touches_no_other_slot() -> None:
    embeddings, pool = make_embeddings(TINY), make_pool(TINY)
    before = [pool.layer(name, 0).clone() for name in ("ple_context", "ple_history")]
    run(embeddings, pool, [Piece(1, [4], 5, True), Piece(3, [5, 6], 2)], [0, 1])
    for name, kept in zip(("ple_context", "ple_history"), before, strict=True):
        now = pool.layer(name, 0)
        same = torch.equal(now[[0, 2]].nan_to_num(9), kept[[0, 2]].nan_to_num(9))
        assert same, name


@pytest.mark.gpu
def test_decodes_in_a_cuda_graph_are_those_of_eager_steps() -> None:
    """Hash, rows, gates, convolution and both states, over replays with fresh ids, rows and positions."""
    config = replace(SMALL, layers=(0, 2))
    embeddings = make_embeddings(config, device="cuda")
    pools = [StatePool(state_specs(config), rows=ROWS, blocks=0, dtype=torch.float32, device="cuda") for _ in range(2)]
    static = batch([Piece(slot, [3], 1, True) for slot in (0, 1, ROWS, ROWS)], pools[0])
    static.captured = True
    content_rows = torch.randn(4, config.channels, device="cuda")

    def step(fb: Any, pool: StatePool, residual: torch.Tensor) -> torch.Tensor:
        begun = embeddings.begin(fb, pool)
        for layer in config.layers:
            residual = embeddings.forward(layer, residual, begun)
        return residual

    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step(static, pools[0], content_rows.clone())
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(static, pools[0], content_rows.clone())
        for pool in pools:
            spoil(pool, config, range(ROWS + 1))
        for position in range(30):
            fresh = batch([Piece(slot, [(5 * position + slot) % 11], position, True) for slot in (2, 0, 3)], pools[1])
            for name in ("input_ids", "positions", "rows"):
                getattr(static, name)[:3] = getattr(fresh, name)
            static.rows[3], static.positions[3] = ROWS, 0
            graph.replay()
            eager = step(fresh, pools[1], content_rows[:3].clone())
            torch.testing.assert_close(captured[:3], eager, rtol=1e-4, atol=1e-5)
            for name in ("ple_context", "ple_history"):
                ours, theirs = (pool.layer(name, 0)[[0, 2, 3]] for pool in pools)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_states_are_declared_with_their_size() -> None:
    config = ModelConfig(
        architecture="x",
        name="m",
        vocab_size=248_320,
        hidden_size=2560,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        rms_norm_eps=EPS,
        rope_theta=1e4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        layer_types=(LINEAR_ATTENTION,) * 3,
        ple=PleConfig(
            layers=(1,), streams=4, hidden_size=2560, vocab_size=248_320, boundary_id=248_044, embed_dim=2560
        ),
    )
    specs = ple_states(config)
    assert [(s.name, s.layers, s.shape, s.dtype) for s in specs] == [
        ("ple_context", 1, (2,), "int32"),
        ("ple_history", 1, (9, 10_240), None),
    ]
    assert state_slot_bytes(specs, "bfloat16") == 184_320 + 8
    assert ple_states(replace(config, ple=None)) == ()
    assert specs == state_specs(config.ple)


def test_what_does_not_fit_is_refused() -> None:
    embeddings = make_embeddings(TINY)
    with pytest.raises(StartupError, match="1 n-gram tables for 2 layers"):
        embeddings.attach(embeddings.tables[:1])
