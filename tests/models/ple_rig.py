"""Per-layer embeddings driven step by step on a state pool, as a runner would, and what they must give for a whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.layers import Placement
from freetoken.models.ple import PerLayerEmbeddings, PleStep
from freetoken.models.ple_config import PleConfig
from freetoken.models.state import StateSpec
from freetoken.runner.forward_batch import ForwardBatch
from freetoken.runner.ple_table import ResidentTable, random_table
from freetoken.runner.state_pool import StatePool
from ple_geometry import SMALL

TINY = replace(SMALL, layers=(0, 2), streams=3, hidden_size=5, embed_dim=12, vocab_size=40, vocab_base=20)
EPS = 1e-6


def state_specs(config: PleConfig) -> tuple[StateSpec, ...]:
    return (
        StateSpec(name="ple_context", layers=1, shape=(config.ngram_size - 1,), dtype="int32"),
        StateSpec(name="ple_history", layers=len(config.layers), shape=(config.history, config.channels)),
    )


def make_embeddings(
    config: PleConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PerLayerEmbeddings:
    """With random weights, norms included, and random tables."""
    gemm = SmallGemm(choose_op("small_gemm", device), SiluMul(choose_op("silu_mul", device)))
    place = Placement(dtype, torch.device(device))
    found = PerLayerEmbeddings(config, gemm, place, eps=EPS)
    generator = torch.Generator(device).manual_seed(seed)
    for module in found.modules():
        module.randomise(generator)
    for layer in found.layers.values():
        for norm in (layer.norm_key, layer.norm_query, layer.norm_conv):
            norm.uniform_(0.5, 1.5, generator=generator)
    found.attach(
        [
            random_table(
                "f32", "gpu", config.table_rows(i), config.row_width, dtype=dtype, device=place.device, seed=seed + i
            )
            for i in range(len(config.layers))
        ]
    )
    return found


class Recorder:
    """A table that remembers the ids it was asked for."""

    host_side = False

    def __init__(self, table: ResidentTable) -> None:
        self.table = table
        self.asked: list[torch.Tensor] = []

    def staged(self, tokens: int, captured: bool) -> torch.Tensor:
        return self.table.staged(tokens, captured)

    def prefetch(self, row_ids: torch.Tensor) -> None:
        self.asked.append(row_ids.clone())

    def lookup(self, row_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.table.lookup(row_ids, out)


@dataclass
class Piece:
    """Tokens ``[start, start + len(ids))`` of a request in ``slot``; a decode where ``decode``."""

    slot: int
    ids: list[int]
    start: int
    decode: bool = False


@dataclass
class Result:
    """Of one piece: rows of every layer ``[layers, T, H]``, and the residual after each layer ``[layers, T, C]``."""

    rows: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


def batch(pieces: Sequence[Piece], pool: StatePool) -> ForwardBatch:
    """Decodes must come first."""
    decodes = [p for p in pieces if p.decode]
    prefills = [p for p in pieces if not p.decode]
    assert [*decodes, *prefills] == list(pieces) and all(len(p.ids) == 1 for p in decodes)
    lengths = [len(p.ids) for p in pieces]
    starts = torch.tensor([0] + [len(p.ids) for p in prefills]).cumsum(0).to(torch.int32)
    empty = torch.zeros(0, dtype=torch.int64)
    fb = ForwardBatch(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        input_ids=torch.tensor([t for p in pieces for t in p.ids], dtype=torch.int64),
        positions=torch.tensor([p.start + i for p in pieces for i in range(len(p.ids))], dtype=torch.int64),
        out_slots=empty,
        rows=torch.tensor([p.slot for p in pieces], dtype=torch.int64),
        seq_lens=torch.tensor([p.start + len(p.ids) for p in pieces], dtype=torch.int32),
        q_starts=starts,
        starts=torch.tensor([p.start for p in prefills], dtype=torch.int32),
        sample_index=empty,
        page_table=torch.zeros((pool.slots, 1), dtype=torch.int32),
        max_q_len=max((len(p.ids) for p in prefills), default=0),
        q_lens_host=tuple(lengths),
    )
    device = pool.device
    for name in ("input_ids", "positions", "rows", "seq_lens", "q_starts", "starts"):
        setattr(fb, name, getattr(fb, name).to(device))
    return fb


def content(config: PleConfig, text: int, positions: range, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The residual streams of text number ``text`` before its layers, ``[T, C]``: a function of the position."""
    generator = torch.Generator().manual_seed(text)
    return torch.randn(64, config.channels, generator=generator)[positions.start : positions.stop].to(dtype)


def run(embeddings: PerLayerEmbeddings, pool: StatePool, pieces: Sequence[Piece], texts: Sequence[int]) -> list[Result]:
    """One step over ``pieces``, those of the texts numbered ``texts``; a layer's output is the next one's input."""
    config = embeddings.config
    fb = batch(pieces, pool)
    tables = embeddings.tables
    recorders = [Recorder(table) for table in tables]  # type: ignore[arg-type]
    embeddings.attach(recorders)
    residual = torch.cat(
        [content(config, t, range(p.start, p.start + len(p.ids))) for p, t in zip(pieces, texts, strict=True)]
    ).to(pool.device)
    step: PleStep = embeddings.begin(fb, pool)
    found = [Result() for _ in pieces]
    lengths = [len(p.ids) for p in pieces]
    for index, layer in enumerate(config.layers):
        residual = embeddings.forward(layer, residual, step)
        for result, rows, output in zip(found, recorders[index].asked[0].split(lengths), residual.split(lengths)):
            result.rows.append(rows)
            result.outputs.append(output.clone())
    embeddings.attach(tables)
    return found
