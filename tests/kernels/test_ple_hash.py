"""Row ids of hashed n-grams: worked examples and scalar Python for all three implementations, the index, dispatch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import ple_oracle as oracle
import pytest
import torch
from poison import DEVICE, choice

from freetoken.kernels import ple_hash
from freetoken.kernels.checking import KernelCheckError
from freetoken.kernels.ple_hash import PleHash, TokenIndexMemo, index, ple_row_ids, reference, row_ids_reference
from freetoken.kernels.ple_hash.host import HostHash
from freetoken.models.ple_config import HashConstants
from ple_geometry import PRODUCTION as BIG
from ple_geometry import SMALL as TINY

triton = pytest.importorskip("freetoken.kernels.ple_hash.triton", exc_type=ImportError)

FLAG = "FREETOKEN_PLE_FUSED_HASH"
SENTINEL = -(2**40)
SMALL = TINY.constants(0)
PRODUCTION = BIG.constants(0)

Hash = Callable[..., torch.Tensor]


def device_constants(constants: HashConstants) -> list[torch.Tensor]:
    parts = (constants.multipliers, constants.vocab_sizes, constants.offsets)
    return [torch.tensor(part, dtype=torch.int64, device=DEVICE) for part in parts]


def names(constants: HashConstants, eos: int) -> dict[str, int]:
    heads = len(constants.vocab_sizes) // (len(constants.multipliers) - 1)
    return {"eos_token_id": eos, "heads_per_ngram": heads}


def by_kernel(
    tokens: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], constants: HashConstants, eos: int
) -> torch.Tensor:
    """The kernel into an output that starts as a sentinel."""
    return _on_device(triton.row_ids, tokens, contexts, constants, eos, poisoned=True)


def by_reference(
    tokens: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], constants: HashConstants, eos: int
) -> torch.Tensor:
    return _on_device(row_ids_reference, tokens, contexts, constants, eos, poisoned=True)


def _on_device(
    call: Hash,
    tokens: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]],
    constants: HashConstants,
    eos: int,
    *,
    poisoned: bool,
) -> torch.Tensor:
    flat = torch.tensor([t for part in tokens for t in part], dtype=torch.int64, device=DEVICE)
    context = torch.tensor(contexts, dtype=torch.int64, device=DEVICE)
    where = TokenIndexMemo().get([len(part) for part in tokens], DEVICE)
    out = torch.full((len(flat), len(constants.vocab_sizes)), SENTINEL, device=DEVICE) if poisoned else None
    arguments = (flat, context, where.request, where.local, *device_constants(constants))
    return call(*arguments, **names(constants, eos), out=out).cpu()


def by_host(
    tokens: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], constants: HashConstants, eos: int
) -> torch.Tensor:
    host = HostHash.of(constants.multipliers, constants.vocab_sizes, constants.offsets, **names(constants, eos))
    flat = np.array([t for part in tokens for t in part], dtype=np.int64)
    return torch.from_numpy(host.row_ids(flat, np.array(contexts), [len(part) for part in tokens]))


def by_scalar(
    tokens: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], constants: HashConstants, eos: int
) -> torch.Tensor:
    rows = []
    for part, context in zip(tokens, contexts, strict=True):
        history = list(context)
        for token in part:
            history.append(token)
            rows.append(oracle.scalar_rows(history, constants, eos))
    return torch.tensor(rows)


ALL = pytest.mark.parametrize("hashed", [by_kernel, by_reference, by_host, by_scalar])


# --- worked examples -------------------------------------------------------------------------------------------------


@ALL
def test_goldens_of_the_production_constants(hashed: Hash) -> None:
    for tokens, expected in oracle.GOLDENS:
        rows = hashed([tokens], [[oracle.E] * 2], PRODUCTION, oracle.E)
        for position, heads in expected.items():
            assert tuple(rows[position][[0, 1, 8, 9]].tolist()) == heads
    assert hashed([oracle.FRESH], [[oracle.E] * 2], PRODUCTION, oracle.E)[0].tolist() == oracle.FIRST_TOKEN


@ALL
def test_goldens_of_the_small_model(hashed: Hash) -> None:
    rows = hashed(oracle.SMALL_TOKENS, oracle.SMALL_CONTEXTS, SMALL, 7)
    assert rows.tolist() == oracle.SMALL_ROWS


@ALL
def test_products_wrap_and_remainders_are_floored(hashed: Hash) -> None:
    for context, token, expected in oracle.OVERFLOW_CASES:
        assert hashed([[token]], [context], oracle.OVERFLOW, 7).tolist() == [expected]


@ALL
@pytest.mark.parametrize("length", [1, 2])
def test_pieces_shorter_than_the_window_look_into_the_context(hashed: Hash, length: int) -> None:
    tokens = [11, 12, 13, 14, 7, 15]
    whole = by_scalar([tokens], [[7, 7]], SMALL, 7)
    for start in range(len(tokens) - length + 1):
        context = [7] * max(0, 2 - start) + tokens[max(0, start - 2) : start]
        piece = hashed([tokens[start : start + length]], [context], SMALL, 7)
        assert torch.equal(piece, whole[start : start + length])


@ALL
def test_the_boundary_as_current_token_cuts_only_what_follows(hashed: Hash) -> None:
    rows = hashed([[5, 7, 6], [9, 7, 6]], [[7, 7], [7, 7]], SMALL, 7)
    assert not torch.equal(rows[1], rows[4]), "the boundary's own window reaches to its left"
    assert torch.equal(rows[2], rows[5]), "nothing after it does"


@ALL
def test_ids_beyond_the_vocabulary_are_hashed_alike(hashed: Hash) -> None:
    """Ids that stand for an image, or lie in an unused lane: products overflow, no implementation may differ."""
    tokens = [[1_000_000, 248_056, 2**31 + 5], [-1, 2**40, -(2**62)]]
    contexts = [[1_234_567, 3], [2**62 + 1, -9]]
    expected = by_scalar(tokens, contexts, PRODUCTION, oracle.E)
    assert torch.equal(hashed(tokens, contexts, PRODUCTION, oracle.E), expected)


@pytest.mark.parametrize(("n", "heads_per_ngram"), [(2, 1), (2, 5), (3, 2), (4, 3), (5, 1)])
def test_random_requests_of_any_geometry_against_scalar_python(n: int, heads_per_ngram: int) -> None:
    draw = random.Random(100 * n + heads_per_ngram)
    heads = (n - 1) * heads_per_ngram
    sizes = tuple(draw.randrange(1, 2000) for _ in range(heads))
    constants = HashConstants(
        tuple(draw.randrange(-(2**63), 2**63) for _ in range(n)),
        sizes,
        tuple(sum(sizes[:head]) for head in range(heads)),
    )
    tokens = [[draw.randrange(6) for _ in range(draw.choice((0, 1, 2, 7)))] for _ in range(5)]
    tokens[draw.randrange(5)] = [draw.randrange(10**6) for _ in range(9)]
    contexts = [[draw.randrange(6) for _ in range(n - 1)] for _ in tokens]
    expected = by_scalar(tokens, contexts, constants, 2)
    for hashed in (by_kernel, by_reference, by_host):
        assert torch.equal(hashed(tokens, contexts, constants, 2), expected), hashed.__name__


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_decode_needs_no_index(dtype: torch.dtype) -> None:
    tokens = [[3], [7], [511], [0], [12]]
    contexts = [[7, 7], [1, 2], [5, 7], [7, 5], [500, 400]]
    expected = by_scalar(tokens, contexts, SMALL, 7)
    ids = torch.tensor([part[0] for part in tokens], dtype=dtype, device=DEVICE)
    context = torch.tensor(contexts, device=DEVICE)
    for call in (triton.row_ids, row_ids_reference):
        rows = call(ids, context, None, None, *device_constants(SMALL), **names(SMALL, 7))
        assert torch.equal(rows.cpu(), expected)


# --- the eleven of the contract --------------------------------------------------------------------------------------


def test_token_index_addresses_the_same_window_as_the_packed_build() -> None:
    lengths, width, longest = [3, 0, 1, 5], 2, 5
    tokens = [torch.arange(100 * i, 100 * i + length) for i, length in enumerate(lengths)]
    packed = torch.full((len(lengths), width + longest), -1)
    for row, part in enumerate(tokens):
        packed[row, width : width + len(part)] = part
    where = TokenIndexMemo().get(lengths, "cpu")
    assert where.request is not None and where.local is not None and where.max_len == longest
    assert where.request.dtype == where.local.dtype == torch.int32
    flat = torch.cat(tokens)
    assert torch.equal(packed[where.request.long(), width + where.local.long()], flat)
    for shift in (1, 2):
        inside = torch.nonzero(where.local >= shift)[:, 0]
        column = width + where.local[inside].long() - shift
        assert torch.equal(packed[where.request[inside].long(), column], flat[inside - shift])


def test_token_index_cache_is_keyed_by_shape() -> None:
    memo = TokenIndexMemo()
    first, again, other = memo.get([3, 2], "cpu"), memo.get([3, 2], "cpu"), memo.get([2, 3], "cpu")
    assert first.request is again.request and first.local is again.local
    assert other.request is not first.request and len(memo) == 2


def test_token_index_does_not_confuse_a_decode_with_a_one_request_prefill() -> None:
    memo = TokenIndexMemo()
    prefill, decode = memo.get([4], "cpu"), memo.get([1] * 4, "cpu", is_decode=True)
    assert prefill.local is not None and prefill.local.tolist() == [0, 1, 2, 3]
    assert decode.request is None and decode.local is None and decode.max_len == 1
    one_each = memo.get([1] * 4, "cpu")
    assert one_each.request is not None and one_each.request.tolist() == [0, 1, 2, 3]
    assert memo.get([4], "cpu") is prefill and memo.get([1] * 4, "cpu", is_decode=True) is decode
    ids = torch.tensor([3, 4, 5, 6])
    context = torch.full((4, 2), 7)
    as_decode = ple_row_ids(
        ids, context, decode.request, decode.local, *(p.cpu() for p in device_constants(SMALL)), **names(SMALL, 7)
    )
    as_prefill = ple_row_ids(
        ids, context[:1], prefill.request, prefill.local, *(p.cpu() for p in device_constants(SMALL)), **names(SMALL, 7)
    )
    assert torch.equal(as_decode[0], as_prefill[0]) and not torch.equal(as_decode[1:], as_prefill[1:])


def test_token_index_cache_is_bounded() -> None:
    memo = TokenIndexMemo()
    kept = memo.get([999], "cpu")
    for length in range(1, 3 * index.CAPACITY):
        memo.get([length], "cpu")
        assert memo.get([999], "cpu") is kept, "what is used stays"
        assert len(memo) <= index.CAPACITY
    assert memo.get([1], "cpu").max_len == 1 and len(memo) == index.CAPACITY


def test_fused_hash_is_off_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "row_ids", lambda *_, **__: pytest.fail("the kernel ran"))
    for value in ("1", "check", "0"):
        monkeypatch.setenv(FLAG, value)
        rows = _on_cpu(oracle.SMALL_TOKENS, oracle.SMALL_CONTEXTS)
        assert rows.tolist() == oracle.SMALL_ROWS


def _on_cpu(tokens: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], **more: torch.Tensor) -> torch.Tensor:
    where = TokenIndexMemo().get([len(part) for part in tokens], "cpu")
    constants = [part.cpu() for part in device_constants(SMALL)]
    flat = torch.tensor([t for part in tokens for t in part], dtype=torch.int64)
    return ple_row_ids(flat, torch.tensor(contexts), where.request, where.local, *constants, **names(SMALL, 7), **more)


def _random_step(decode: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Ids, context and lengths with the production vocabulary; one id in four is the boundary."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [1] * 6 if decode else [37, 1, 2, 130]
    shapes = ((sum(lengths),), (len(lengths), 2))
    ids, context = (torch.randint(0, BIG.vocab_size, shape, generator=draw) for shape in shapes)
    for part in (ids, context):
        part[torch.rand(part.shape, generator=draw) < 0.25] = oracle.E
    return ids.to("cuda"), context.to("cuda"), lengths


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_fused_hash_matches_the_torch_reference(kind: str) -> None:
    for seed in range(20):
        ids, context, lengths = _random_step(kind == "decode", seed)
        where = TokenIndexMemo().get(lengths, "cuda", is_decode=kind == "decode")
        arguments = (ids, context, where.request, where.local, *device_constants(PRODUCTION))
        out = torch.full((len(ids), 16), SENTINEL, device="cuda")
        assert ple_row_ids(*arguments, **names(PRODUCTION, oracle.E), out=out) is out
        assert torch.equal(out, row_ids_reference(*arguments, **names(PRODUCTION, oracle.E)))


@pytest.mark.gpu
def test_fused_hash_captures_and_replays_in_a_cuda_graph() -> None:
    """Prefill and decode in one graph; between replays the memo has dropped every entry it held at capture."""
    memo = TokenIndexMemo(capacity=1)
    ids, context, lengths = _random_step(False, 0)
    one, one_context, singles = _random_step(True, 0)
    constants = device_constants(PRODUCTION)
    outs = [torch.full((len(part), 16), SENTINEL, device="cuda") for part in (ids, one)]

    def step() -> None:
        where = memo.get(lengths, "cuda")
        last = memo.get(singles, "cuda", is_decode=True)
        ple_row_ids(ids, context, where.request, where.local, *constants, **names(PRODUCTION, oracle.E), out=outs[0])
        ple_row_ids(one, one_context, last.request, last.local, *constants, **names(PRODUCTION, oracle.E), out=outs[1])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (1, 2, 3):
        for length in range(1, 50):
            memo.get([length, seed], "cuda").local.fill_(1)
        for fresh, held in (
            (_random_step(False, seed), (ids, context)),
            (_random_step(True, seed), (one, one_context)),
        ):
            held[0].copy_(fresh[0])
            held[1].copy_(fresh[1])
        for out in outs:
            out.fill_(SENTINEL)
        graph.replay()
        where = TokenIndexMemo().get(lengths, "cuda")
        arguments = (*constants,)
        expected = row_ids_reference(
            ids, context, where.request, where.local, *arguments, **names(PRODUCTION, oracle.E)
        )
        assert torch.equal(outs[0], expected)
        expected = row_ids_reference(one, one_context, None, None, *arguments, **names(PRODUCTION, oracle.E))
        assert torch.equal(outs[1], expected)


@pytest.mark.gpu
def test_fused_hash_env_switch_restores_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at each call: no model is built anew in between."""
    calls: list[str] = []
    fused, plain = triton.row_ids, reference.row_ids_reference
    monkeypatch.setattr(triton, "row_ids", lambda *a, **k: (calls.append("fused"), fused(*a, **k))[1])
    monkeypatch.setattr(ple_hash, "row_ids_reference", lambda *a, **k: (calls.append("torch"), plain(*a, **k))[1])
    ids, context, _ = _random_step(True, 4)
    arguments = (ids, context, None, None, *device_constants(PRODUCTION))
    rows = []
    for value in ("1", "0", "false", "False", "1"):
        monkeypatch.setenv(FLAG, value)
        rows.append(ple_row_ids(*arguments, **names(PRODUCTION, oracle.E)))
    assert calls == ["fused", "torch", "torch", "torch", "fused"]
    assert all(torch.equal(rows[0], other) for other in rows)


@pytest.mark.parametrize("wrong", ["ctx", "heads"])
def test_the_fused_hash_refuses_a_geometry_it_cannot_address(wrong: str) -> None:
    ids, context = torch.tensor([3, 4], device=DEVICE), torch.full((2, 2), 7, device=DEVICE)
    constants = device_constants(SMALL)
    if wrong == "ctx":
        context = context[:, :1].contiguous()
    else:
        constants[1:] = [part[:3] for part in constants[1:]]
    for call in (ple_row_ids, PleHash(choice("ple_hash", "triton"))):
        with pytest.raises(ValueError, match="context" if wrong == "ctx" else "3 head sizes"):
            call(ids, context, None, None, *constants, **{**names(SMALL, 7), "heads_per_ngram": 2})


# --- what else the contract says -------------------------------------------------------------------------------------


def test_more_geometries_that_are_refused() -> None:
    ids, context = torch.tensor([3, 4, 5]), torch.full((3, 2), 7)
    good = [part.cpu() for part in device_constants(SMALL)]
    one = torch.zeros(3, dtype=torch.int32)
    out = torch.zeros(3, 4, dtype=torch.int64)

    def refused(match: str, *arguments: torch.Tensor | None, **more: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            ple_row_ids(*arguments, **names(SMALL, 7), **more)

    refused("contiguous", ids, torch.full((2, 3), 7).t(), None, None, *good)
    refused("as many contexts", ids, context[:2], None, None, *good)
    refused("together", ids, context, one, None, *good)
    refused("3 entries", ids, context, one[:2], one[:2], *good)
    refused("one-dimensional", ids[:, None], context, None, None, *good)
    refused("offsets", ids, context, None, None, good[0], good[1], good[2][:3])
    refused("at least 2", ids, context, None, None, good[0][:1], good[1], good[2])
    for bad in (out[:2], out.int(), torch.zeros(4, 3, dtype=torch.int64).t()):
        refused("out must be", ids, context, None, None, *good, out=bad)
    with pytest.raises(ValueError, match="orders"):
        HostHash.of([1, 3, 5], [10, 11, 12], [0, 10, 21], eos_token_id=1, heads_per_ngram=2)
    host = HostHash.of([1, 3], [10], [0], eos_token_id=1, heads_per_ngram=1)
    for tokens, before, lengths in (([1], [[1, 1]], [1]), ([1, 2], [[1]], [1]), ([1], [[1], [1]], [2, -1])):
        with pytest.raises(ValueError, match="requests of"):
            host.row_ids(np.array(tokens), np.array(before), lengths)
    for lengths in ([3, -1], [2]):
        with pytest.raises(ValueError, match="lengths"):
            TokenIndexMemo().get(lengths, "cpu", is_decode=lengths == [2])


def test_out_is_filled_and_returned() -> None:
    held = torch.full((15, 4), SENTINEL)
    assert _on_cpu(oracle.SMALL_TOKENS, oracle.SMALL_CONTEXTS, out=held[1:14]) is not None
    assert held[1:14].tolist() == oracle.SMALL_ROWS
    assert bool((held[[0, 14]] == SENTINEL).all())
    part = held[1:14]
    assert _on_cpu(oracle.SMALL_TOKENS, oracle.SMALL_CONTEXTS, out=part) is part


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_no_tokens_no_launch(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "row_ids_kernel", None)
    out = torch.zeros(0, 4, dtype=torch.int64, device=DEVICE)
    ids, context = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    call = triton.row_ids if impl == "triton" else row_ids_reference
    for given in (out, None):
        rows = call(ids, context, None, None, *device_constants(SMALL), **names(SMALL, 7), out=given)
        assert rows.shape == (0, 4) and (given is None or rows is out)
    host = HostHash.of(SMALL.multipliers, SMALL.vocab_sizes, SMALL.offsets, **names(SMALL, 7))
    assert host.row_ids(np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64), []).shape == (0, 4)


def test_mixed_devices_are_not_for_the_kernel() -> None:
    """Only tensors that are all on the CUDA device of the ids, and contiguous, go to the kernel."""
    cpu, elsewhere = torch.zeros(2, 2), torch.zeros(2, 2, device="meta")
    assert not ple_hash.can_fuse(cpu, cpu)
    assert not ple_hash.can_fuse(elsewhere, elsewhere)
    if DEVICE == "cuda":
        there = cpu.cuda()
        assert ple_hash.can_fuse(there, there) and not ple_hash.can_fuse(there, cpu)
        assert not ple_hash.can_fuse(there, there.t())


@pytest.mark.gpu
def test_constants_left_on_the_host_take_the_reference() -> None:
    ids, context, lengths = _random_step(False, 8)
    where = TokenIndexMemo().get(lengths, "cuda")
    on_device = (ids, context, where.request, where.local, *device_constants(PRODUCTION))
    mixed = (*on_device[:4], *(part.cpu() for part in on_device[4:]))
    rows = [ple_row_ids(*arguments, **names(PRODUCTION, oracle.E)) for arguments in (on_device, mixed)]
    assert rows[1].is_cuda and torch.equal(*rows)


def test_the_memo_is_neither_read_nor_filled_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    memo = TokenIndexMemo()
    eager = memo.get([3, 0, 2], "cpu")
    monkeypatch.setattr(index, "capturing", lambda: True)
    captured, again = memo.get([3, 0, 2], "cpu"), memo.get([3, 0, 2], "cpu")
    assert captured.request is not None and captured.local is not None and captured.request.dtype == torch.int32
    assert captured.request is not eager.request and captured.request is not again.request
    assert torch.equal(captured.request, eager.request) and torch.equal(captured.local, eager.local)
    assert captured.max_len == eager.max_len == 3
    memo.get([9], "cpu")
    assert len(memo) == 1
    assert memo.get([1, 1], "cpu", is_decode=True).request is None
    assert memo.get([], "cpu").max_len == 0


def test_check_mode_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op = PleHash(choice("ple_hash", "check"))
    monkeypatch.setattr(ple_hash, "can_fuse", lambda *_: True)
    ids, context = torch.tensor([3, 4], device=DEVICE), torch.full((2, 2), 7, device=DEVICE)
    arguments = (ids, context, None, None, *device_constants(SMALL))
    out = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    assert op(*arguments, **names(SMALL, 7), out=out) is out
    assert torch.equal(out, row_ids_reference(*arguments, **names(SMALL, 7)))
    monkeypatch.setattr(ple_hash, "row_ids_reference", lambda *a, **k: row_ids_reference(*a, **k) + 1)
    with pytest.raises(KernelCheckError, match="8 of 8 row ids"):
        op(*arguments, **names(SMALL, 7))


def test_the_host_reads_a_bounded_tail_of_a_request() -> None:
    host = HostHash.of(SMALL.multipliers, SMALL.vocab_sizes, SMALL.offsets, **names(SMALL, 7))
    ids = list(range(100, 200))
    assert host.context(ids, 0) == [7, 7] and host.context(ids, 1) == [7, 100]
    assert host.context(ids, 50) == [148, 149]

    class Counted(list):
        read = 0

        def __getitem__(self, key: slice) -> list:
            self.read += key.stop - key.start
            return list.__getitem__(self, key)

    counted = Counted(ids)
    host.context(counted, 90)
    assert counted.read == 2
