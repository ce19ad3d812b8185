"""A runner without a model: its next token is a hash of the KV that can be read through the request's pages.

It keeps a store of what every KV slot holds, so a page given away too early, a wrong position, a wrong input id or a
missing piece of a prompt changes the text, or fails at once where the fault can be named. A step is carried out only
when it is collected, from what was known at its launch: the latest moment a device may do so.

With ``state_blocks`` it is a model with recurrent state: every row has a running hash of the tokens fed to it, which the
next token depends on. Nothing clears a row; only a piece that starts at position 0 ignores what is there.
"""

from __future__ import annotations

import dataclasses
import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from freetoken.grammar.compiler import GrammarCompiler
from freetoken.hardware import Facts
from freetoken.messages import AddRequest, RequestOutput, TokenLogprob
from freetoken.models.config import ModelConfig
from freetoken.resolve import resolve
from freetoken.sampling_params import SamplingParams
from freetoken.scheduler.grammar import Grammars
from freetoken.scheduler.request import Req, ScheduleBatch, StepResult
from freetoken.scheduler.scheduler import Scheduler
from freetoken.server_args import Config, ServerArgs

VOCAB = 50
EOS = 7
TEXT = 'abcdefg\0hijklmnopqrstuvwxyz0123456789{}[]":,. -+_~'
"""One character an id, to be read by grammars; that of ``EOS`` is no text."""


class CharTokenizer:
    """Ids as the characters of :data:`TEXT`."""

    special_ids = frozenset({EOS})

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [TEXT.find(character) for character in text]

    def token_bytes(self, token: int) -> bytes:
        return b"<end>" if token == EOS else TEXT[token].encode()


def make_compiler(eos: tuple[int, ...] = (EOS,)) -> GrammarCompiler:
    return GrammarCompiler(CharTokenizer, VOCAB, eos)


COMPILER = make_compiler()


def make_config(*, overlap: bool = True, eos: tuple[int, ...] = (EOS,), context: int = 4096, **flags: Any) -> Config:
    """A resolved configuration; ``overlap`` is set past the rule that turns it off on the CPU."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        name="fake",
        vocab_size=VOCAB,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_ids=eos,
    )
    args = ServerArgs(**{"device": "cpu", "page_size": 4, **flags})
    config = resolve(args, Facts(0, False, 2, 2**30), model, model_path="fake", seed=11)
    return dataclasses.replace(config, overlap=overlap)


def next_token(
    sequence: array[int],
    seed: int,
    out_index: int,
    banned: frozenset[int],
    state: int = 0,
    allowed: list[int] | None = None,
) -> int:
    """The token after ``sequence``, as a sampler with a per-request seed would draw it; with ``allowed`` one of those."""
    value = zlib.crc32(sequence.tobytes(), seed & 0xFFFFFFFF) ^ state
    value = zlib.crc32(out_index.to_bytes(4, "little"), value)
    if allowed is not None:
        return allowed[value % len(allowed)]
    while value % VOCAB in banned:
        value = zlib.crc32(b"again", value)
    return value % VOCAB


def advance(state: tuple[int, int], ids: list[int]) -> tuple[int, int]:
    """``(tokens, hash)`` of a row after ``ids``."""
    return state[0] + len(ids), zlib.crc32(array("i", ids).tobytes(), state[1])


FRESH = (0, 12345)


def alone(
    prompt: list[int], sampling: SamplingParams, seed: int, config: Config, pool_tokens: int, stateful: bool
) -> tuple[list[int], str, int | None]:
    """``(ids, kind, matched)`` of a request served by nobody else, straight from the definitions."""
    limit = min(config.context_length, pool_tokens) - len(prompt)
    if sampling.max_new_tokens is not None:
        limit = min(limit, sampling.max_new_tokens)
    eos = set(config.model.eos_token_ids)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos)
    ids: list[int] = []
    if sampling.grammar is not None:
        return _alone_in_grammar(prompt, sampling, seed, limit, stops, eos, stateful)
    for index in range(limit):
        banned = frozenset(stops) if index < sampling.min_new_tokens else frozenset()
        state = advance(FRESH, prompt + ids)[1] if stateful else 0
        allowed = _forced(sampling, ids)
        ids.append(next_token(array("i", prompt + ids), seed, index, banned, state, allowed))
        if ids[-1] in stops and index >= sampling.min_new_tokens:
            return ids, "stop", ids[-1]
    return ids, "length", None


def _forced(sampling: SamplingParams, ids: list[int]) -> list[int] | None:
    budget = sampling.thinking_budget
    if budget is None or len(ids) + 1 != budget.tokens or budget.end in ids:
        return None
    return [budget.end]


def open_ids(mask: Any) -> list[int]:
    """The ids of the vocabulary whose bits are set in a mask of int32 words."""
    words = [int(word) & 0xFFFFFFFF for word in mask]
    return [token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1]


def _alone_in_grammar(
    prompt: list[int], sampling: SamplingParams, seed: int, limit: int, stops: set[int], eos: set[int], stateful: bool
) -> tuple[list[int], str, int | None]:
    grammar = sampling.grammar
    assert grammar is not None
    matcher, free = COMPILER.compile(grammar).deep_copy(), grammar.after is not None
    ids: list[int] = []
    for index in range(limit):
        state = advance(FRESH, prompt + ids)[1] if stateful else 0
        allowed = list(range(VOCAB)) if free else open_ids(memoryview(matcher.compute_bitmask()).cast("i"))
        late = (stops if free or index < sampling.min_new_tokens else set()) | (
            eos if free or sampling.ignore_eos or index < sampling.min_new_tokens else set()
        )
        allowed = [token for token in allowed if token not in late] or allowed
        allowed = _forced(sampling, ids) or allowed
        token = next_token(array("i", prompt + ids), seed, index, frozenset(), state, allowed)
        ids.append(token)
        if token in stops | eos:
            return ids, "stop", token
        if free:
            free = token != grammar.after
        else:
            assert matcher.consume_token(token)
            if matcher.is_stopped():
                return ids, "stop", None
    return ids, "length", None


@dataclass
class _Work:
    """A slice as it was at launch."""

    arrival: int
    rid: str
    row: int
    pages: tuple[int, ...]
    start: int
    input_ids: list[int] | None
    length: int
    sample: bool
    out_index: int
    seed: int
    banned: frozenset[int]
    logprobs: bool
    prompt_logprobs: list[TokenLogprob]
    masked: bool
    allowed: list[int] | None = None


@dataclass
class _Step:
    """A launched step. The copies are ``(row, block)``."""

    number: int
    works: list[_Work]
    restores: list[tuple[int, int]]
    snapshots: list[tuple[int, int]]
    drawn: bool = True


@dataclass
class _Row:
    arrival: int
    tokens: list[int] = field(default_factory=list)
    scheduled: int = 0


class FakeRunner:
    """The runner protocol over a store of ``position * VOCAB + token`` per KV slot, and ``(tokens, hash)`` per row."""

    def __init__(self, config: Config, num_pages: int, max_rows: int, state_blocks: int | None = None) -> None:
        self.config = config
        self.num_pages = num_pages
        self.max_rows = max_rows
        self.size = config.page_size
        self.store = array("i", [-1]) * (num_pages * self.size)
        self.rows: dict[int, _Row] = {}
        self.flights: deque[_Step] = deque()
        self.has_state = state_blocks is not None
        self.state_blocks = state_blocks or 0
        self.states: dict[int, tuple[int, int]] = {}
        self.blocks: dict[int, tuple[int, int]] = {}
        self.restored: list[tuple[str, int]] = []
        self.snapshots: list[tuple[str, int]] = []
        """``(rid, position)`` of every copy that was launched."""
        self.last_step = -1
        self.prefill_tokens = 0
        self.batches: list[tuple[int, int]] = []

    def launch(self, batch: ScheduleBatch) -> int:
        assert len(self.flights) <= int(self.config.overlap), "too many steps in flight"
        assert batch.step > self.last_step, "steps go backwards"
        self.last_step = batch.step
        for req in batch.new_rows:
            assert all(work.row != req.row for step in self.flights for work in step.works), (
                "a row in use is reassigned"
            )
            self.rows[req.row] = _Row(req.arrival)
        assert all(s.decode for s in batch.decodes) and not any(s.decode for s in batch.prefills)
        self._check_budget(batch)
        works = [self._prepare(piece.req, piece) for piece in batch.slices]
        assert len({work.row for work in works}) == len(works), "a row is in the step twice"
        self._check_writes(works)
        assert all(step.drawn for step in self.flights), "a step is launched before the one before has been drawn"
        self.flights.append(self._prepare_copies(batch, works))
        self.flights[-1].drawn = not batch.masked
        self.prefill_tokens += sum(piece.length for piece in batch.prefills)
        self.batches.append((len(batch.decodes), batch.num_tokens))
        return batch.step

    def draw(self, handle: int, masks: Any) -> None:
        step = self.flights[-1]
        assert len(self.flights) == 1, "masks are made while a step before is not drained"
        assert step.number == handle and not step.drawn
        masked = [work for work in step.works if work.sample and work.masked]
        assert masks.shape == (len(masked), COMPILER.mask_words)
        for work, mask in zip(masked, masks):
            work.allowed = open_ids(mask)
            assert work.allowed, f"{work.rid}: nothing may be drawn"
        masks.fill(0)  # nobody may look at it again
        step.drawn = True

    def collect(self, handle: int) -> StepResult:
        step = self.flights.popleft()
        assert step.drawn, "a step is collected that was not drawn"
        assert step.number == handle, "steps are collected out of order"
        result = StepResult([], [])
        for row, block in step.restores:
            self.states[row] = self.blocks[block]
        for work in step.works:
            self._execute(work, result)
        for row, block in step.snapshots:
            self.blocks[block] = self.states[row]
        return result

    def pages_in_use(self) -> set[int]:
        return {page for step in self.flights for work in step.works for page in work.pages}

    def _prepare_copies(self, batch: ScheduleBatch, works: list[_Work]) -> _Step:
        starts = {work.arrival: work.start for work in works}
        ends = {work.arrival: work.start + work.length for work in works}
        resumed = [req for req in batch.new_rows if starts[req.arrival] > 0]
        assert [req for req, _ in batch.restores] == (resumed if self.has_state else []), (
            "state and KV do not go together"
        )
        read, written = [block for _, block in batch.restores], [block for _, block in batch.snapshots]
        assert len({*read, *written}) == len(set(read)) + len(written), "a block is in the step twice"
        blocks = read + written
        assert all(0 <= block < self.state_blocks for block in blocks)
        for step in self.flights:
            busy = {block for _, block in step.snapshots}
            assert busy.isdisjoint(blocks), "a block that a running step writes is used"
        for req, _ in batch.snapshots:
            assert ends[req.arrival] % self.size == 0, "state is kept inside a page"
        self.restored += [(req.rid, starts[req.arrival]) for req, _ in batch.restores]
        self.snapshots += [(req.rid, ends[req.arrival]) for req, _ in batch.snapshots]
        restores = [(req.row, block) for req, block in batch.restores]
        return _Step(batch.step, works, restores, [(req.row, block) for req, block in batch.snapshots])

    def _check_budget(self, batch: ScheduleBatch) -> None:
        decodes = len(batch.decodes)
        assert batch.num_tokens > 0
        if not decodes:
            assert batch.num_tokens <= self.config.max_prefill_tokens
        elif batch.prefills:
            assert batch.num_tokens <= max(self.config.chunked_prefill_size, decodes + 1)

    def _prepare(self, req: Req, piece: Any) -> _Work:
        row = self.rows[req.row]
        assert row.arrival == req.arrival, "a row belongs to another request"
        assert all(0 < page < self.num_pages for page in req.pages) and len(set(req.pages)) == len(req.pages)
        end = piece.start + piece.length
        assert piece.length > 0 and end <= len(req.pages) * self.size, "no page for a position"
        assert piece.start >= req.shared_pages * self.size, "a step writes into the prefix cache"
        ids = None
        if piece.decode:
            assert piece.length == 1 and piece.sample
            assert row.scheduled == piece.start, "a decode does not continue its row"
        else:
            ids = req.ids[piece.start : end]
            assert len(ids) == piece.length
            row.tokens = list(req.ids[:end])
            assert piece.sample == (end == len(req.ids))
        row.scheduled = end
        ban = piece.out_index < req.sampling.min_new_tokens
        scored = range(piece.start + 1, min(end + 1, req.prompt_len)) if piece.prompt_logprobs else ()
        entries = [TokenLogprob(req.ids[p], -float(p)) for p in scored]
        return _Work(
            req.arrival,
            req.rid,
            req.row,
            tuple(req.pages),
            piece.start,
            ids,
            piece.length,
            piece.sample,
            piece.out_index,
            req.seed,
            req.stop_ids if ban and req.constraint is None else frozenset(),
            req.sampling.logprobs is not None,
            entries,
            req.constraint is not None or piece.spends_budget,
        )

    def _written(self, work: _Work) -> tuple[int, ...]:
        return work.pages[work.start // self.size : (work.start + work.length - 1) // self.size + 1]

    def _check_writes(self, works: list[_Work]) -> None:
        others = [work for step in self.flights for work in step.works] + works
        for work in works:
            written = set(self._written(work))
            for other in others:
                if other.arrival != work.arrival:
                    assert written.isdisjoint(other.pages), "a page of another request's step is written"

    def _execute(self, work: _Work, result: StepResult) -> None:
        row = self.rows.get(work.row)
        tokens = row.tokens if row is not None and row.arrival == work.arrival else []
        end = work.start + work.length
        input_ids = work.input_ids
        if input_ids is None:
            assert len(tokens) == end, "a decode has no sampled id to start from"
            input_ids = [tokens[work.start]]
        for position, token in enumerate(input_ids, work.start):
            page = work.pages[position // self.size]
            self.store[page * self.size + position % self.size] = position * VOCAB + token
        content = array("i")
        for page in work.pages[: -(-end // self.size)]:
            content.extend(self.store[page * self.size : (page + 1) * self.size])
        sequence = array("i", [])
        for position, value in enumerate(content[:end]):
            assert value // VOCAB == position, f"{work.rid}: slot of position {position} holds {value // VOCAB}"
            sequence.append(value % VOCAB)
        # A later piece of the same prompt may have been launched already, so only the beginning is compared.
        assert sequence.tolist() == tokens[:end], f"{work.rid}: the KV read is not that of the sequence"
        state = self._advance_row(work, input_ids, sequence) if self.has_state else 0
        if work.prompt_logprobs:
            result.prompt_logprobs[work.rid] = work.prompt_logprobs
        if not work.sample:
            return
        drawn = next_token(sequence, work.seed, work.out_index, work.banned, state, work.allowed)
        tokens.append(drawn)
        result.ids.append(drawn)
        assert result.logprobs is not None
        result.logprobs.append(TokenLogprob(drawn, -1.0) if work.logprobs else None)

    def _advance_row(self, work: _Work, input_ids: list[int], sequence: array[int]) -> int:
        before = self.states[work.row] if work.start else FRESH
        assert before[0] == work.start, f"{work.rid}: a piece at {work.start} with the state after {before[0]} tokens"
        after = self.states[work.row] = advance(before, input_ids)
        assert after == advance(FRESH, sequence.tolist()), f"{work.rid}: the state is that of another text"
        return after[1]


class Harness:
    """A scheduler over a :class:`FakeRunner`, and every output by request."""

    def __init__(
        self,
        config: Config,
        num_pages: int = 64,
        max_rows: int = 8,
        clock: Any = None,
        state_blocks: int | None = None,
    ) -> None:
        self.config = config
        self.runner = FakeRunner(config, num_pages, max_rows, state_blocks)
        self.ticks = 0
        clock = clock or self._tick
        self.scheduler = Scheduler(
            config, self.runner, grammars=Grammars(COMPILER, clock), clock=clock, check_invariants=True
        )
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.requests: dict[str, AddRequest] = {}
        free = self.scheduler.pages.free

        def checked_free(pages: Any) -> None:
            pages = list(pages)
            assert self.runner.pages_in_use().isdisjoint(pages), "a page is freed under a running step"
            free(pages)

        self.scheduler.pages.free = checked_free  # type: ignore[method-assign]

    def _tick(self) -> float:
        self.ticks += 1
        return self.ticks * 0.001

    @property
    def pool_tokens(self) -> int:
        return (self.runner.num_pages - 1) * self.config.page_size

    def add(self, rid: str, ids: list[int], priority: int = 0, **sampling: Any) -> None:
        request = AddRequest(rid, ids, SamplingParams(**{"seed": 3, **sampling}), priority)
        self.requests[rid] = request
        self.scheduler.add(request)

    def step(self) -> list[RequestOutput]:
        outputs = self.scheduler.step()
        for output in outputs:
            self.outputs.setdefault(output.rid, []).append(output)
        return outputs

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def ids(self, rid: str) -> list[int]:
        return [token for output in self.outputs[rid] for token in output.ids]

    def finish(self, rid: str) -> Any:
        """The reason a request ended; checks that there is exactly one and that it comes last."""
        ends = [output.finish for output in self.outputs[rid] if output.finish is not None]
        assert len(ends) == 1 and self.outputs[rid][-1].finish is not None
        assert self.outputs[rid][-1].completion_tokens == len(self.ids(rid))
        return ends[0]

    def check_text(self, rid: str) -> None:
        """The text is that of the request alone; a prefix of it when it was aborted."""
        request, finish = self.requests[rid], self.finish(rid)
        seed = request.sampling.seed
        assert seed is not None
        ids, kind, matched = alone(
            request.ids, request.sampling, seed, self.config, self.pool_tokens, self.runner.has_state
        )
        if finish.kind == "abort":
            assert self.ids(rid) == ids[: len(self.ids(rid))]
        else:
            assert (self.ids(rid), finish.kind, finish.matched) == (ids, kind, matched)
