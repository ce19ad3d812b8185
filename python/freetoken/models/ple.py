"""Per-layer embeddings of hashed n-grams (PLE): rows of a large table, gated into every residual stream.

A token looks up one row a head, by hashes of the n-grams that end at it. The rows side by side are projected to one value and to a
key for each residual stream; the stream's own content decides by that key how much of the value it takes. A dilated causal
convolution over the gated values is added. Weights and order of operations are those of ``qwen4_exp`` in transformers.

One forward: :meth:`PerLayerEmbeddings.begin` before the first layer, :meth:`PerLayerEmbeddings.forward` at the entry of each
layer that has one. State of the requests is read at the beginning and written back once, after the last of these layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from freetoken.errors import StartupError
from freetoken.kernels.dispatch import choose_op
from freetoken.kernels.ple_hash import PleHash, TokenIndexMemo
from freetoken.kernels.ple_mix import PleMix
from freetoken.kernels.small_gemm import SmallGemm
from freetoken.models.layers import ColumnLinear, Placement, Slot, Weighted
from freetoken.models.ple_config import BLOCK_TOKENS, PleConfig
from freetoken.models.state import PLE_CONTEXT, PLE_HISTORY

if TYPE_CHECKING:
    from freetoken.runner.forward_batch import ForwardBatch
    from freetoken.runner.state_pool import StatePool


class RowTable(Protocol):
    """What a layer needs of its table, wherever its rows lie.

    ``host_side`` says that the rows of a step come from the host, ahead of it: then they are taken from :meth:`staged` instead of
    being asked for by ids. What :meth:`prefetch` was given is, as the same object, what :meth:`lookup` is given next.
    """

    host_side: bool

    def staged(self, tokens: int, captured: bool) -> torch.Tensor:
        """What the host fetched for this step's ``tokens`` tokens, to be passed to :meth:`lookup`."""

    def prefetch(self, row_ids: torch.Tensor) -> None:
        """A hint that these rows will be looked up in this step."""

    def lookup(self, row_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, H * width]`` of ``row_ids [T, H]`` int64: rows side by side, decoded; ``out`` itself where given."""


@dataclass
class PleStep:
    """What the layers of one forward share. Tokens are decodes first, then those of the prompt pieces.

    ``context [B, n - 1]`` int64 holds the ids before each request's first token of this step. Of prompt pieces, ``request`` and
    ``local [T - decodes]`` say whose token it is and which of its tokens in this step; both are ``None`` without pieces.
    ``rows`` are, for each layer, ids or what the host staged.
    """

    fb: ForwardBatch
    states: StatePool
    context: torch.Tensor
    request: torch.Tensor | None
    local: torch.Tensor | None
    rows: list[torch.Tensor]


class PleLayer:
    """The weights of one layer, and its arithmetic on tokens; ``index`` counts the layers that have one. ``zero_centred`` norm weights
    are stored less 1."""

    def __init__(
        self,
        config: PleConfig,
        gemm: SmallGemm,
        place: Placement,
        name: str,
        index: int,
        eps: float,
        zero_centred: bool,
    ) -> None:
        if place.tp_size != 1:
            raise StartupError(f"{name}: n-gram embeddings are not split over tensor-parallel ranks")
        self.config = config
        self.index = index
        self.eps = eps
        channels, width = config.channels, config.conv_width
        parts = {f"{name}.key_proj": channels, f"{name}.value_proj": config.hidden_size}
        self.projection = ColumnLinear(gemm, place, parts, config.embed_dim)
        self.conv = place.empty(width, channels)
        norms = ("norm_key", "norm_query", "norm_conv")
        self.norm_key, self.norm_query, self.norm_conv = (
            place.empty(config.streams, config.hidden_size, dtype=torch.float32) for _ in norms
        )
        held = zip(norms, (self.norm_key, self.norm_query, self.norm_conv))
        shift = float(zero_centred)
        self.slots = {f"{name}.{norm}.weight": Slot(weight, (channels,), shift=shift) for norm, weight in held}
        self.slots[f"{name}.conv1d.weight"] = Slot(self.conv.t().unsqueeze(1), (channels, 1, width))

    def modules(self) -> Iterator[Weighted]:
        yield from (self.projection, self)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.conv, self.norm_key, self.norm_query, self.norm_conv)

    def randomise(self, generator: torch.Generator) -> None:
        self.conv.normal_(0.0, self.config.conv_width**-0.5, generator=generator)
        for norm in (self.norm_key, self.norm_query, self.norm_conv):
            norm.fill_(1.0)

    def gate(self, mix: PleMix, embeddings: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(U, x)``, both ``[T, C]``, of the looked-up rows ``embeddings [T, embed_dim]`` and the streams before the layer."""
        norms = (self.norm_key, self.norm_query, self.norm_conv)
        return mix.gate(self.projection(embeddings), residual, *norms, self.eps)

    def taps(self, rows: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
        """SiLU of the convolution, ``[N, C]`` float32; ``index[k] [N]`` says which of ``rows`` tap k takes, oldest first."""
        total = torch.zeros((index[0].shape[0], rows.shape[1]), dtype=torch.float32, device=rows.device)
        for weight, taken in zip(self.conv, index):
            total.addcmul_(weight.float(), rows[taken].float())
        return torch.nn.functional.silu(total)


class PerLayerEmbeddings:
    """All such layers of a model: ``forward(layer, residual, step)`` for the decoder layers in ``config.layers``.

    Weights are named ``<prefix of the decoder layer>.ple.*``. :meth:`attach` gives each layer its table before the first step.
    """

    def __init__(
        self, config: PleConfig, gemm: SmallGemm, place: Placement, *, eps: float, zero_centred: bool = True
    ) -> None:
        self.config = config
        self.hash = PleHash(choose_op("ple_hash", place.device.type))
        self.mix = PleMix(choose_op("ple_mix", place.device.type))
        self.choices = [self.hash.choice, self.mix.choice]
        self.memo = TokenIndexMemo()
        self.layers = {
            layer: PleLayer(config, gemm, place, f"model.layers.{layer}.ple", index, eps, zero_centred)
            for index, layer in enumerate(config.layers)
        }
        self.constants = []
        for index in range(len(config.layers)):
            found = config.constants(index)
            parts = (found.multipliers, found.vocab_sizes, found.offsets)
            self.constants.append([torch.tensor(part, dtype=torch.int64, device=place.device) for part in parts])
        self.tables: list[RowTable] = []

    def attach(self, tables: Sequence[RowTable]) -> None:
        """One table for each of ``config.layers``."""
        if len(tables) != len(self.layers):
            raise StartupError(f"{len(tables)} n-gram tables for {len(self.layers)} layers")
        self.tables = list(tables)

    def modules(self) -> Iterator[Weighted]:
        for layer in self.layers.values():
            yield from layer.modules()

    # --- a forward ---------------------------------------------------------------------------------------------------

    def begin(self, fb: ForwardBatch, states: StatePool) -> PleStep:
        """Read the requests' last ids, hash, and have the rows on their way before the first layer runs."""
        decodes, first = fb.num_decodes, fb.num_decodes
        context = states.layer(PLE_CONTEXT, 0)[fb.rows].long()
        begins = torch.cat([fb.positions[:decodes], fb.starts.long()])
        # A slot holds what its last request left there.
        context.masked_fill_((begins == 0)[:, None], self.config.boundary_id)
        request = local = None
        if fb.num_prefills:
            where = self.memo.get(fb.q_lens_host[first:], fb.rows.device)
            request, local = where.request, where.local
        step = PleStep(fb, states, context, request, local, [])
        for table, constants in zip(self.tables, self.constants, strict=True):
            if table.host_side:
                step.rows.append(table.staged(fb.num_tokens, fb.captured))
                continue
            rows = self._row_ids(step, constants)
            table.prefetch(rows)
            step.rows.append(rows)
        return step

    def _row_ids(self, step: PleStep, constants: list[torch.Tensor]) -> torch.Tensor:
        """``[T, H]``: one launch for the decodes and one for the pieces, into the same tensor."""
        fb, c = step.fb, self.config
        decodes = fb.num_decodes
        rows = torch.empty((fb.num_tokens, c.heads), dtype=torch.int64, device=fb.input_ids.device)
        parts = [(slice(0, decodes), slice(0, decodes), None, None)] if decodes else []
        if fb.num_prefills:
            parts.append((slice(decodes, None), slice(decodes, None), step.request, step.local))
        for tokens, requests, request, local in parts:
            self.hash(
                fb.input_ids[tokens],
                step.context[requests],
                request,
                local,
                *constants,
                eos_token_id=c.boundary_id,
                heads_per_ngram=c.heads_per_ngram,
                max_len=fb.max_q_len if request is not None else 1,
                out=rows[tokens],
            )
        return rows

    def forward(self, layer: int, residual: torch.Tensor, step: PleStep) -> torch.Tensor:
        """``residual [T, C]`` with the embeddings of decoder layer ``layer`` added; it may be overwritten.

        After the last such layer the requests' ids and histories are up to date.
        """
        this = self.layers[layer]
        embeddings = self.tables[this.index].lookup(step.rows[this.index])
        gated, normed = this.gate(self.mix, embeddings, residual)
        history = step.states.layer(PLE_HISTORY, this.index)
        fb, decodes = step.fb, step.fb.num_decodes
        if decodes:
            rows = (part[:decodes] for part in (residual, gated, normed))
            where = (fb.rows[:decodes], fb.positions[:decodes])
            self.mix.decode(*rows, this.conv, history, *where, self.config.dilation)
        if fb.num_prefills:
            self._convolve_pieces(this, normed[decodes:], gated[decodes:], residual[decodes:], history, step)
        if this.index == len(self.layers) - 1:
            self._commit(step)
        return residual

    def _convolve_pieces(
        self,
        layer: PleLayer,
        x: torch.Tensor,
        gated: torch.Tensor,
        residual: torch.Tensor,
        history: torch.Tensor,
        step: PleStep,
    ) -> None:
        """Add to ``residual``, all ``[tokens of pieces, C]``, and leave the last rows of each piece in its ring."""
        c, fb = self.config, step.fb
        assert step.request is not None and step.local is not None
        slots, starts = fb.rows[fb.num_decodes :], fb.starts.long()
        request, local = step.request.long(), step.local.long()
        position = starts[request] + local
        # One matrix of rows to take from: the rings, the rows of this step, and a row of zeros.
        count, tokens = slots.shape[0] * c.history, x.shape[0]
        rows = torch.cat([history[slots].flatten(0, 1), x, x.new_zeros(1, x.shape[1])])
        token = torch.arange(tokens, device=x.device)
        for begin in range(0, tokens, BLOCK_TOKENS):
            part = slice(begin, begin + BLOCK_TOKENS)
            index = []
            for back in range(c.conv_width - 1, -1, -1):
                distance = back * c.dilation
                ring = request[part] * c.history + (position[part] - distance) % c.history
                here = count + token[part] - distance
                taken = torch.where(local[part] >= distance, here, ring)
                index.append(torch.where(position[part] >= distance, taken, count + tokens))
            residual[part] += (gated[part] + layer.taps(rows, index)).to(residual.dtype)
        self._keep_history(x, history, slots, starts, fb.q_starts.long())

    def _keep_history(
        self, x: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, bounds: torch.Tensor
    ) -> None:
        """Write the last rows of each piece, at most as many as a ring has; what is short of that goes to the padding slot."""
        size = self.config.history
        back = torch.arange(1, size + 1, device=x.device)
        begin, end = bounds[:-1, None], bounds[1:, None]
        source = end - back
        entry = (starts[:, None] + (end - begin) - back) % size
        target = torch.where(source >= begin, slots[:, None], history.shape[0] - 1)
        history[target, entry] = x[source.clamp_min(0)]

    def _commit(self, step: PleStep) -> None:
        """The last n - 1 ids of each request, of what was there and what this step added."""
        fb = step.fb
        decodes, width = fb.num_decodes, step.context.shape[1]
        context = torch.cat([step.context[:decodes, 1:], fb.input_ids[:decodes, None]], 1)
        if fb.num_prefills:
            ids, bounds = fb.input_ids[decodes:], fb.q_starts.long()
            length = bounds.diff()[:, None]
            column = torch.arange(width, device=ids.device)
            back = width - column
            earlier = step.context[decodes:].gather(1, (column + length).clamp_max(width - 1))
            fresh = ids[(bounds[1:, None] - back).clamp_min(0)]
            context = torch.cat([context, torch.where(length >= back, fresh, earlier)])
        held = step.states.layer(PLE_CONTEXT, 0)
        held[fb.rows] = context.to(held.dtype)
